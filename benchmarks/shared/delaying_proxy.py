"""A proxy that adds time to every request, limits the bytes per second of all answers, and counts requests and bytes.

It has a process of its own. It knows no more of HTTP than how a request begins: a client that has several under way has
as many connections.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_METHODS = (b"GET ", b"PUT ", b"POST", b"HEAD", b"DELE")
_REQUESTS, _BYTES = b"REQUESTS", b"BYTES"
_CHUNK = 1 << 16
_BURST = 0.02  # seconds that the limit may be behind, as this process is when it wakes late


@contextmanager
def delaying(port: int, seconds: float, bandwidth: float = math.inf) -> Iterator[str]:
    """The URL of a proxy to that port on this machine. `bandwidth`: bytes per second, of all answers together."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    proxy = context.Process(target=_main, args=(port, seconds, bandwidth, there), daemon=True)
    proxy.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        proxy.terminate()
        proxy.join()


def requests_of(url: str) -> int:
    """How many requests it has passed on so far."""
    return _count(url, _REQUESTS)


def bytes_of(url: str) -> int:
    """How many bytes of answers it has passed on so far."""
    return _count(url, _BYTES)


def _count(url: str, what: bytes) -> int:
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        connection.sendall(what)
        return int(connection.recv(_CHUNK))


def _main(port: int, seconds: float, bandwidth: float, ready: Any) -> None:
    asyncio.run(_serve(port, seconds, bandwidth, ready))


async def _serve(port: int, seconds: float, bandwidth: float, ready: Any) -> None:
    counts = {_REQUESTS: 0, _BYTES: 0}
    free_at = 0.0  # when the next bytes may be passed on, over whatever connection

    async def pass_on(answers: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal free_at
        while data := await answers.read(_CHUNK):
            now = time.monotonic()
            free_at = max(free_at, now - _BURST) + len(data) / bandwidth
            if free_at > now:
                await asyncio.sleep(free_at - now)
            counts[_BYTES] += len(data)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, server = await asyncio.open_connection("127.0.0.1", port)
        back = asyncio.ensure_future(pass_on(answers, writer))
        try:
            while data := await reader.read(_CHUNK):
                if data in counts:
                    writer.write(str(counts[data]).encode())
                    continue
                if data[:4] in _METHODS:
                    counts[_REQUESTS] += 1
                    await asyncio.sleep(seconds)
                server.write(data)
                await server.drain()
        except OSError:
            pass
        server.close()
        await asyncio.gather(back, return_exceptions=True)

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    ready.send(listening.sockets[0].getsockname()[1])
    await listening.serve_forever()

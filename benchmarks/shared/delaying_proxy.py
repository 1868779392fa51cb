"""A proxy that adds time to every request, and counts them, in a process of its own.

It knows no more of HTTP than how a request begins: a client that has several under way has as many connections.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_METHODS = (b"GET ", b"PUT ", b"POST", b"HEAD", b"DELE")
_COUNT = b"COUNT"
_CHUNK = 1 << 16


@contextmanager
def delaying(port: int, seconds: float) -> Iterator[str]:
    """The URL of a proxy to that port on this machine."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    proxy = context.Process(target=_main, args=(port, seconds, there), daemon=True)
    proxy.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        proxy.terminate()
        proxy.join()


def requests_of(url: str) -> int:
    """How many requests it has passed on so far."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        connection.sendall(_COUNT)
        return int(connection.recv(_CHUNK))


def _main(port: int, seconds: float, ready: Any) -> None:
    asyncio.run(_serve(port, seconds, ready))


async def _serve(port: int, seconds: float, ready: Any) -> None:
    requests = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        answers, server = await asyncio.open_connection("127.0.0.1", port)
        back = asyncio.ensure_future(_pass_on(answers, writer))
        try:
            while data := await reader.read(_CHUNK):
                if data == _COUNT:
                    writer.write(str(requests).encode())
                    continue
                if data[:4] in _METHODS:
                    requests += 1
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


async def _pass_on(answers: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await answers.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    writer.close()

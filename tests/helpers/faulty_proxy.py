"""A proxy in front of a store over HTTP that does to requests whatever networks and servers do."""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

FAULTS = ("error", "slow down", "reset", "answer lost", "stall", "truncated", "cut", "altered", "repeated")
_REFUSALS = {
    "error": (500, "InternalError"),
    "slow down": (503, "SlowDown"),
    "denied": (403, "AccessDenied"),
    "no bucket": (404, "NoSuchBucket"),
    "no key": (404, "NoSuchKey"),
    "not implemented": (501, "NotImplemented"),
}
_XML = [("Content-Type", "application/xml")]
_STALL = 20.0  # seconds: longer than anybody here waits
_NOT_PASSED_ON = {"expect", "connection", "transfer-encoding", "content-length"}

NOT_DELETED = "not deleted"  # a bulk delete goes well, but for the objects

Plan = Callable[[str, str], str | None]  # from a method and a path to what goes wrong with that request


def peaceful(method: str, path: str) -> None:
    """Nothing goes wrong."""


def random_faults(seed: int, share: float) -> Plan:
    """Something goes wrong with a share of all requests."""
    dice = random.Random(seed)
    return lambda method, path: dice.choice(FAULTS) if dice.random() < share else None


class FaultyProxy:
    """Listens on a port of its own until its context is left. `plan` may be set at any time."""

    def __init__(self, port: int, plan: Plan = peaceful) -> None:
        self.upstream = port
        self.plan = plan
        self.done: Counter[str] = Counter()  # what has gone wrong so far
        self.asked: list[tuple[str, dict[str, str]]] = []  # the methods of all requests, and their headers
        self.says_continue = True  # to a request that waits for 100 Continue before it sends its body
        self.ending = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.proxy = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ending.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class EachOnce:
    """The plan that every request goes wrong when it is made for the first time."""

    def __init__(self, proxy: FaultyProxy, fault: str) -> None:
        self._proxy = proxy
        self._fault = fault
        self.met: list[str] = []

    def __call__(self, method: str, path: str) -> str | None:
        request = f"{method} {path} {self._proxy.asked[-1][1].get('content-range', '')}"
        if request in self.met:
            return None
        self.met.append(request)
        return self._fault


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 0

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            self.close_connection = True  # the client has gone, or was sent away

    def handle_expect_100(self) -> bool:
        proxy: FaultyProxy = self.server.proxy  # type: ignore[attr-defined]
        return super().handle_expect_100() if proxy.says_continue else True

    def _serve(self) -> None:
        proxy: FaultyProxy = self.server.proxy  # type: ignore[attr-defined]
        proxy.asked.append((self.command, {name.lower(): value for name, value in self.headers.items()}))
        fault = proxy.plan(self.command, self.path)
        proxy.done[fault or "none"] += 1
        size = int(self.headers.get("Content-Length", 0))
        if fault == "reset":
            self.rfile.read(size // 2)
            return self._reset()
        body = self.rfile.read(size)
        if fault == "stall":
            proxy.ending.wait(_STALL)
            return self._reset()
        if fault in _REFUSALS:
            return self._refuse(*_REFUSALS[fault])
        if fault == NOT_DELETED:
            left = "<Error><Key>one</Key><Code>InternalError</Code><Message>later</Message></Error>"
            return self._answer(200, _XML, f"<?xml version='1.0'?><DeleteResult>{left}</DeleteResult>".encode())
        if fault == "altered" and size:
            body = _altered(body)
        status, headers, answer = self._pass_on(proxy, body)
        if fault == "repeated":  # sent twice, and the second answer is the one that comes back
            status, headers, answer = self._pass_on(proxy, body)
        if fault == "answer lost":
            return self._reset()
        if fault == "altered" and not size and self.command == "GET":
            answer = _altered(answer)
        self._answer(status, headers, answer, cut=fault if fault in ("truncated", "cut") else "")
        return None

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

    def _pass_on(self, proxy: FaultyProxy, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", proxy.upstream, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _NOT_PASSED_ON:
                    upstream.putheader(name, value)
            upstream.putheader("Content-Length", str(len(body)))
            upstream.endheaders(body)
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, cut: str = "") -> None:
        """Send an answer, or half of it. The connection then ends as with a server that has ended: reset, or closed."""
        if cut == "cut" and (self.command == "HEAD" or not body):  # no body to cut
            self.wfile.write(f"HTTP/1.1 {status} Some\r\nContent-Le".encode())
            return self._close()
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _NOT_PASSED_ON or (self.command == "HEAD" and name.lower() == "content-length"):
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self._reset() if cut == "truncated" else self._close()
        return None

    def _refuse(self, status: int, code: str) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>later</Message></Error>".encode()
        self._answer(status, _XML, b"" if self.command == "HEAD" else body)

    def _close(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


def _altered(body: bytes) -> bytes:
    """With one bit flipped in the middle."""
    if not body:
        return body
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]

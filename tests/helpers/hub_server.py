"""A stand-in for the Hub over HTTP, on loopback, for the real `huggingface_hub` client.

It keeps blobs and commits for real (`hub_store`), remembers what was sent, and can be told to fail. Large files
come to it as LFS has it, whole or in parts, or by Xet (`XetFolder`), for which it only says where to go.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.helpers.faulty_proxy import FaultyProxy
from tests.helpers.hostile_bucket import Reply, send
from tests.helpers.hub_routes import Answer, respond
from tests.helpers.hub_store import HubStore


@dataclass
class Fault:
    """What goes wrong with requests that match: a status, or a connection that is cut before or after the work."""

    pattern: str
    status: int = 0
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    cut: str = ""  # "before" or "after"


@dataclass(frozen=True)
class Request:
    """A request that came in."""

    method: str
    path: str
    authorization: str
    size: int


class HubServer:
    """The stand-in: what it keeps, what it was sent, and what shall go wrong."""

    def __init__(self, folder: Path) -> None:
        self.store = HubStore(folder)
        self.requests: list[Request] = []
        self.pull_requests: list[dict[str, Any]] = []
        self.accepted: list[str] = []  # large files that were taken in, each time
        self.faults: list[Fault] = []
        self.connections: set[socket.socket] = set()
        self.token: str | None = None  # asked for, if set
        self.front = ""  # the URL of a proxy, if its clients reach it by one
        self.page = 1000
        self.part_size = 0  # bytes of a part, where large files come in parts
        self.bend: Callable[[str, str, Reply], Reply] = lambda method, path, reply: reply  # what it answers instead
        self.gate: Callable[[str, str], None] = lambda method, path: None  # called before each answer
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def url(self) -> str:
        return self.front or f"http://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        """Stop, and leave no connection open that a client could go on with."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def fail(self, pattern: str, status: int = 0, *, times: int = 1, cut: str = "", **headers: str) -> None:
        """Let the next requests whose `METHOD /path` matches fail."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.faults.append(Fault(pattern, status, times, named, cut))

    def fault(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.pattern, f"{method} {path}"):
                fault.times -= 1
                return fault
        return None

    def head(self, repo: str, revision: str = "main") -> str:
        return self.store.resolve(repo, revision)

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """Every file of a repository as it is now."""
        found = self.store.files(self.head(repo, revision))
        return {path: self.store.content(blob) for path, blob in found.items()}

    def commits(self, repo: str, revision: str = "main") -> list[str]:
        """The titles of all commits, the newest first, without the one that made the repository."""
        return [str(commit["title"]) for commit in self.store.history(self.head(repo, revision))][:-1]

    def sent(self, pattern: str) -> list[Request]:
        return [request for request in self.requests if re.search(pattern, f"{request.method} {request.path}")]

    def answer(self, method: str, target: str, body: bytes, headers: Any) -> Answer:
        path = urlsplit(target).path
        if self.token and headers.get("Authorization") != f"Bearer {self.token}" and not path.startswith("/lfs/"):
            return Answer.error(401, "Invalid username or password.")
        return respond(self, method, target, body, dict(headers))


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            hub.connections.add(self.connection)

        def finish(self) -> None:
            hub.connections.discard(self.connection)
            super().finish()

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _serve(self) -> None:
            body = self._body()
            if body is None:
                return None
            authorization = self.headers.get("Authorization", "")
            hub.requests.append(Request(self.command, self.path, authorization, len(body)))
            hub.gate(self.command, self.path)
            fault = hub.fault(self.command, self.path)
            if fault and fault.cut == "before":
                return self._cut()
            if fault and fault.status:
                answer = Answer.error(fault.status, "told to fail")
                answer.headers |= fault.headers
            else:
                answer = hub.answer(self.command, self.path, body, self.headers)
            return self._cut() if fault and fault.cut == "after" else self._send(answer)

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

        def _body(self) -> bytes | None:
            """What was sent; none if the connection ended in the middle."""
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                return self._chunks()
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size)
            return body if len(body) == size else None

        def _chunks(self) -> bytes | None:
            pieces = []
            while (line := self.rfile.readline().strip()) and (size := int(line, 16)):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            if not line:
                return None
            self.rfile.readline()
            return b"".join(pieces)

        def _send(self, answer: Answer) -> None:
            bent = hub.bend(self.command, self.path, Reply(answer.status, answer.body, dict(answer.headers)))
            with suppress(OSError):  # the client has had enough
                send(self, bent)

        def _cut(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    return Handler


def connect(url: str, home: str, token: str = "", **others: str) -> None:
    """Make this process one of the server's clients. The client reads the environment when it is imported: the server
    that tests are forked from has imported it already, so it is imported anew."""
    known = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": home, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    os.environ.update({**known, "HF_TOKEN": token, **others})
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]


@contextmanager
def serving(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, xet: bool = False, proxy: FaultyProxy | None = None
) -> Iterator[HubServer]:
    """A server, and this process and its children as its clients: no other Hub can be reached by mistake."""
    from huggingface_hub import constants

    server = HubServer(folder / "hub")
    if proxy is not None:
        proxy.upstream, server.front = server.port, proxy.url
    cache = folder / "hf-cache"
    known = {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(cache), "HF_XET_CACHE": str(folder / "xet-cache")}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", not xet)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
    try:
        yield server
    finally:
        server.close()

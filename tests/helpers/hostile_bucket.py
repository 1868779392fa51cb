"""An S3 server on loopback that answers what a test wants: other names, sizes and bytes than it has, and redirects."""

from __future__ import annotations

import hashlib
import re
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "hostile"
TOKEN = "a-session-token-that-must-not-be-shown"
MOST = 3 << 30  # bytes of an answer without an end


def _folded() -> bytes:
    """A gigabyte of spaces as gzip sends it, in a megabyte: one block is packed, and repeated."""
    packed = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    block = packed.compress(b" " * (1 << 20)) + packed.flush(zlib.Z_FULL_FLUSH)
    checksum_and_size = struct.pack("<II", 0x9AC47FA6, 1 << 30)  # crc32 of all, which takes half a second
    return b"\x1f\x8b\x08" + bytes(7) + block * (1 << 10) + packed.flush() + checksum_and_size


FOLDED = _folded()


@dataclass
class Reply:
    """An answer. `announced`: its Content-Length, if that is another than it has; `endless`: its body is repeated."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    announced: int | None = None
    endless: bool = False


@dataclass(frozen=True)
class Asked:
    """A request: its method, the key below the bucket, and its query and headers."""

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]

    @property
    def is_list(self) -> bool:
        return "list-type" in self.query


Bend = Callable[[Asked, Reply], Reply]


class Server:
    """Records requests, and answers each with `answer`, until its context is left."""

    def __init__(self) -> None:
        self.requests: list[Asked] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Any:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, asked: Asked, body: bytes) -> Reply:
        return Reply(404)


class HostileBucket(Server):
    """Objects in memory, as S3 has them; `bend` alters every answer."""

    def __init__(self, objects: dict[str, bytes], bend: Bend = lambda asked, reply: reply) -> None:
        super().__init__()
        self.objects = dict(objects)
        self.bend = bend
        self.listed: dict[str, int] = {}  # keys that are only listed, with sizes
        self.ignores: frozenset[str] = frozenset()  # conditions, by the headers that state them

    def answer(self, asked: Asked, body: bytes) -> Reply:
        return self.bend(asked, self._honest(asked, body))

    def _honest(self, asked: Asked, body: bytes) -> Reply:
        if asked.is_list:
            return self._list(asked.query.get("prefix", ""))
        if asked.method == "PUT":
            if self._is_unexpected(asked):
                return _error(412, "PreconditionFailed")
            source = unquote(asked.headers.get("x-amz-copy-source", "")).lstrip("/").removeprefix(f"{BUCKET}/")
            body = self.objects[asked.key] = self.objects[source] if source else body
            copied = f"<?xml version='1.0'?><CopyObjectResult><ETag>{_etag(body)}</ETag></CopyObjectResult>"
            return Reply(200, copied.encode() if source else b"", {"ETag": _etag(body)})
        if asked.method == "DELETE":
            self.objects.pop(asked.key, None)
            return Reply(204)
        if asked.method == "POST":
            for key in re.findall(rb"<Key>(.*?)</Key>", body):
                self.objects.pop(key.decode(), None)
            return Reply(body=b"<?xml version='1.0'?><DeleteResult></DeleteResult>")
        return self._object(asked)

    def _is_unexpected(self, asked: Asked) -> bool:
        """Whether a condition of a write does not hold, unless the server ignores it."""
        present, wanted = self.objects.get(asked.key), asked.headers.get("if-match")
        if "if-match" not in self.ignores and wanted is not None:
            return present is None or _etag(present) != wanted
        return "if-none-match" not in self.ignores and "if-none-match" in asked.headers and present is not None

    def _object(self, asked: Asked) -> Reply:
        data = self.objects.get(asked.key)
        if data is None:
            return _error(404, "NoSuchKey")
        reply = Reply(headers={"ETag": _etag(data)})
        if span := asked.headers.get("range"):
            start, _, last = span.removeprefix("bytes=").partition("-")
            stop = min(int(last) + 1 if last else len(data), len(data))
            if int(start) >= len(data):
                return _error(416, "InvalidRange")
            reply.status, reply.headers["Content-Range"] = 206, f"bytes {start}-{stop - 1}/{len(data)}"
            data = data[int(start) : stop]
        reply.body = data
        return reply

    def _list(self, prefix: str) -> Reply:
        sizes = {key: len(data) for key, data in self.objects.items() if key.startswith(prefix)} | self.listed
        return Reply(body=listing(sizes))


def listing(sizes: dict[str, int], more: str = "") -> bytes:
    """A page of keys; with `more`, one that continues."""
    found = "".join(
        f"<Contents><Key>{escape(quote(key))}</Key><Size>{size}</Size><ETag>x</ETag>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for key, size in sizes.items()
    )
    next_page = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
    return (
        f"<?xml version='1.0'?><ListBucketResult><EncodingType>url</EncodingType>{found}"
        f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{next_page}</ListBucketResult>"
    ).encode()


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _error(status: int, code: str) -> Reply:
    return Reply(status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode())


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            target = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(target.query, keep_blank_values=True).items()}
            key = unquote(target.path).removeprefix(f"/{BUCKET}").lstrip("/")
            headers = {name.lower(): value for name, value in self.headers.items()}
            asked = Asked(self.command, key, query, headers)
            server.requests.append(asked)
            with suppress(OSError):  # the client has had enough
                send(self, server.answer(asked, body))

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

    return Handler


def send(handler: BaseHTTPRequestHandler, reply: Reply) -> None:
    """Send an answer, with whatever length it announces, in chunks if it has no end."""
    handler.send_response(reply.status)
    for name, value in reply.headers.items():
        handler.send_header(name, value)
    if reply.endless and reply.announced is None:
        handler.send_header("Transfer-Encoding", "chunked")
    else:
        handler.send_header("Content-Length", str(len(reply.body) if reply.announced is None else reply.announced))
    handler.end_headers()
    if handler.command == "HEAD":
        return
    for chunk in _chunks(reply):
        handler.wfile.write(
            b"%x\r\n%s\r\n" % (len(chunk), chunk) if reply.announced is None and reply.endless else chunk
        )
    if reply.endless or (reply.announced is not None and reply.announced != len(reply.body)):
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)


def _chunks(reply: Reply) -> Iterator[bytes]:
    if not reply.endless:
        yield reply.body
        return
    piece = (reply.body or b" ") * (1 + (1 << 20) // max(1, len(reply.body)))
    for _ in range(MOST // len(piece)):
        yield piece


@contextmanager
def elsewhere() -> Iterator[Server]:
    """Another host, to which nobody should be sent."""
    with Server() as server:
        yield server


def options(url: str) -> dict[str, Any]:
    """Storage options for a hostile bucket: with a session token, and little patience."""
    return {
        "endpoint_url": url,
        "key": "test-key",
        "secret": "a-secret-that-must-not-be-shown",
        "token": TOKEN,
        "client_kwargs": {"region_name": "us-east-1"},
        "deadline": 1.0,
        "stall": 5.0,
    }

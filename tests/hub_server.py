"""A stand-in for the Hub over HTTP, on loopback, for the real `huggingface_hub` client.

It keeps blobs and commits for real (`tests.hub_store`), remembers what was sent, and can be told to fail. Large files
come to it as LFS has it, whole or in parts, or by Xet (`tests.hub_xet`), for which it only says where to go.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.hub_store import Fields, HubStore, MissingError, MovedError, StoredBlob

_LARGE = 1 << 20  # bytes: what is larger, or ends like weights, or is no text, is kept as a large file
_WEIGHTS = (".safetensors", ".bin")


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


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Answer:
        return cls(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    @classmethod
    def error(cls, status: int, message: str, code: str = "") -> Answer:
        answer = cls.json({"error": message}, status)
        answer.headers |= {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        return answer


class HubServer:
    """The stand-in: what it keeps, what it was sent, and what shall go wrong."""

    def __init__(self, folder: Path) -> None:
        self.store = HubStore(folder)
        self.requests: list[Request] = []
        self.accepted: list[str] = []  # large files that were taken in, each time
        self.faults: list[Fault] = []
        self.connections: set[socket.socket] = set()
        self.token: str | None = None  # asked for, if set
        self.page = 1000
        self.part_size = 0  # bytes of a part, where large files come in parts
        self.gate: Callable[[str, str], None] = lambda method, path: None  # called before each answer
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

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
        for one in self.faults:
            if one.times > 0 and re.search(one.pattern, f"{method} {path}"):
                one.times -= 1
                return one
        return None

    def head(self, repo: str, revision: str = "main") -> str:
        return self.store.resolve(repo, revision)

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """Every file of a repository as it is now."""
        found = self.store.files(self.head(repo, revision))
        return {path: self.store.content(blob) for path, blob in found.items()}

    def commits(self, repo: str, revision: str = "main") -> list[str]:
        """The titles of all commits, the newest first, without the one that made the repository."""
        return [str(one["title"]) for one in self.store.history(self.head(repo, revision))][:-1]

    def sent(self, pattern: str) -> list[Request]:
        return [one for one in self.requests if re.search(pattern, f"{one.method} {one.path}")]

    def answer(self, method: str, target: str, body: bytes, headers: Any) -> Answer:
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        if self.token and headers.get("Authorization") != f"Bearer {self.token}" and not path.startswith("/lfs/"):
            return Answer.error(401, "Invalid username or password.")
        for pattern, serve in _ROUTES:
            match = re.fullmatch(pattern, f"{method} {path}")
            if match:
                words = {key: unquote(value) for key, value in match.groupdict(default="").items()}
                try:
                    return serve(self, Call(words, query, body, dict(headers), path))
                except MissingError as error:
                    return Answer.error(404, str(error), str(error))
        return Answer.error(404, f"the stand-in does not know {method} {path}")


@dataclass(frozen=True)
class Call:
    words: dict[str, str]
    query: dict[str, list[str]]
    body: bytes
    headers: dict[str, str]
    path: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def _create(hub: HubServer, call: Call) -> Answer:
    asked = call.json
    repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
    new = hub.store.create(repo, private=asked.get("visibility") == "private")
    url = {"url": f"{hub.url}/{repo}", "name": repo}
    return Answer.json(url if new else {**url, "error": "You already created this model repo"}, 200 if new else 409)


def _info(hub: HubServer, call: Call) -> Answer:
    repo = call.words["repo"]
    commit = hub.head(repo, call.words["revision"] or "main")
    siblings = [{"rfilename": path} for path in hub.store.files(commit)]
    private = hub.store.repo(repo)["private"]
    return Answer.json({"id": repo, "modelId": repo, "sha": commit, "private": private, "siblings": siblings})


def _preupload(hub: HubServer, call: Call) -> Answer:
    known = hub.store.files(hub.head(call.words["repo"], call.words["revision"]))
    return Answer.json({"files": [_mode(one, known.get(one["path"])) for one in call.json["files"]]})


def _mode(file: Fields, known: StoredBlob | None) -> Fields:
    large = file["path"].endswith(_WEIGHTS) or file["size"] >= _LARGE or b"\0" in base64.b64decode(file["sample"])
    oid = {"oid": known.lfs or known.oid} if known else {}
    return {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, **oid}


def _batch(hub: HubServer, call: Call) -> Answer:
    hub.store.repo(call.words["repo"])
    return Answer.json({"transfer": "basic", "objects": [_upload(hub, one) for one in call.json["objects"]]})


def _upload(hub: HubServer, file: Fields) -> Fields:
    if hub.store.has_large(file["oid"]):
        return file
    href, header = f"{hub.url}/lfs/{file['oid']}", {}
    if hub.part_size and file["size"] > hub.part_size:
        count = -(-file["size"] // hub.part_size)
        header = {f"{number:05d}": f"{href}/{number:05d}" for number in range(1, count + 1)}
        header["chunk_size"] = str(hub.part_size)
    return {**file, "actions": {"upload": {"href": href, "header": header}, "verify": {"href": f"{href}/verify"}}}


def _take_large(hub: HubServer, call: Call) -> Answer:
    taken = hub.store.add_large(call.words["oid"], call.body)
    return _accepted(hub, call.words["oid"]) if taken else Answer.error(400, "the bytes are not what their hash says")


def _take_part(hub: HubServer, call: Call) -> Answer:
    hub.store.add_part(call.words["oid"], call.words["number"], call.body)
    return Answer(headers={"ETag": f'"{call.words["number"]}"'})


def _join_parts(hub: HubServer, call: Call) -> Answer:
    joined = hub.store.join_parts(call.words["oid"], [part["partNumber"] for part in call.json["parts"]])
    return _accepted(hub, call.words["oid"]) if joined else Answer.error(400, "the parts are not what their hash says")


def _accepted(hub: HubServer, oid: str) -> Answer:
    hub.accepted.append(oid)
    return Answer.json({})


def _verify(hub: HubServer, call: Call) -> Answer:
    there = hub.store.has_large(call.words["oid"])
    return Answer.json({}) if there else Answer.error(404, "no such large file")


def _commit(hub: HubServer, call: Call) -> Answer:
    header, *operations = (json.loads(line) for line in call.body.splitlines())
    for one in operations:
        if one["key"] == "file":
            one["value"]["content"] = base64.b64decode(one["value"]["content"])
    try:
        oid = hub.store.commit(call.words["repo"], call.words["revision"], header["value"], operations)
    except MovedError:
        return Answer.error(412, "A commit has happened since. Please refresh and try again.")
    return Answer.json({"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{call.words['repo']}/commit/{oid}"})


def _tree(hub: HubServer, call: Call) -> Answer:
    commit = hub.head(call.words["repo"], call.words["revision"])
    top = call.words["path"] and call.words["path"].rstrip("/") + "/"
    listed = [blob.to_json(path) for path, blob in sorted(hub.store.files(commit).items()) if path.startswith(top)]
    if top and not listed:
        raise MissingError("EntryNotFound")
    start = int(call.query.get("cursor", ["0"])[0])
    more = start + hub.page < len(listed)
    answer = Answer.json(listed[start : start + hub.page])
    if more:
        answer.headers["Link"] = f'<{hub.url}{call.path}?cursor={start + hub.page}>; rel="next"'
    return answer


def _paths(hub: HubServer, call: Call) -> Answer:
    files = hub.store.files(hub.head(call.words["repo"], call.words["revision"]))
    asked = parse_qs(call.body.decode()).get("paths", [])
    return Answer.json([files[path].to_json(path) for path in asked if path in files])


def _refs(hub: HubServer, call: Call) -> Answer:
    branches = hub.store.repo(call.words["repo"])["branches"]
    listed = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid} for name, oid in branches.items()]
    return Answer.json({"branches": listed, "converts": [], "tags": []})


def _branch(hub: HubServer, call: Call) -> Answer:
    new = hub.store.branch(call.words["repo"], call.words["name"], call.json.get("startingPoint", "main"))
    return Answer.json({}) if new else Answer.error(409, "Reference already exists")


def _commits(hub: HubServer, call: Call) -> Answer:
    return Answer.json(list(hub.store.history(hub.head(call.words["repo"], call.words["revision"]))))


def _resolve(hub: HubServer, call: Call) -> Answer:
    commit = hub.head(call.words["repo"], call.words["revision"])
    blob = hub.store.files(commit).get(call.words["path"])
    if blob is None:
        answer = Answer.error(404, "Entry not found", "EntryNotFound")
        answer.headers["X-Repo-Commit"] = commit
        return answer
    large = {"X-Linked-Etag": f'"{blob.lfs}"', "X-Linked-Size": str(blob.size)} if blob.lfs else {}
    headers = {"X-Repo-Commit": commit, "ETag": f'"{blob.lfs or blob.oid}"', "Accept-Ranges": "bytes", **large}
    if blob.xet:
        route = f"{hub.url}/api/models/{call.words['repo']}/xet-read-token/{commit}"
        headers |= {"X-Xet-Hash": blob.xet, "X-Xet-Refresh-Route": route}
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", next((v for k, v in call.headers.items() if k.lower() == "range"), ""))
    data = hub.store.content(blob)
    if not asked:
        return Answer(200, data, headers)
    first, last = int(asked[1]), min(int(asked[2] or blob.size - 1), blob.size - 1)
    if first > last:
        return Answer.error(416, "Requested range not satisfiable")
    headers["Content-Range"] = f"bytes {first}-{last}/{blob.size}"
    return Answer(206, data[first : last + 1], headers)


def _xet_token(hub: HubServer, call: Call) -> Answer:
    token = hub.store.xet.token()
    answer = Answer.json(token)
    names = {"X-Xet-Cas-Url": "casUrl", "X-Xet-Access-Token": "accessToken", "X-Xet-Token-Expiration": "exp"}
    answer.headers |= {name: str(token[key]) for name, key in names.items()}
    return answer


def _valid(hub: HubServer, call: Call) -> Answer:
    return Answer.json({"errors": [], "warnings": []})


_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_API = rf"/api/models/{_REPO}"
_REVISION = r"(?P<revision>[^/]+)"

_ROUTES: list[tuple[str, Callable[[HubServer, Call], Answer]]] = [
    (r"POST /api/repos/create", _create),
    (r"POST /api/validate-yaml", _valid),
    (rf"GET {_API}(?:/revision/{_REVISION})?", _info),
    (rf"POST {_API}/preupload/{_REVISION}", _preupload),
    (rf"POST {_API}/commit/{_REVISION}", _commit),
    (rf"GET {_API}/tree/{_REVISION}(?:/(?P<path>.*))?", _tree),
    (rf"POST {_API}/paths-info/{_REVISION}", _paths),
    (rf"GET {_API}/refs", _refs),
    (rf"GET {_API}/xet-(?:read|write)-token/{_REVISION}", _xet_token),
    (rf"POST {_API}/branch/(?P<name>[^/]+)", _branch),
    (rf"GET {_API}/commits/{_REVISION}", _commits),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", _batch),
    (r"PUT /lfs/(?P<oid>\w+)", _take_large),
    (r"PUT /lfs/(?P<oid>\w+)/(?P<number>\d+)", _take_part),
    (r"POST /lfs/(?P<oid>\w+)", _join_parts),
    (r"POST /lfs/(?P<oid>\w+)/verify", _verify),
    (rf"(?:GET|HEAD) /{_REPO}/resolve/{_REVISION}/(?P<path>.*)", _resolve),
]


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
            self.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        def _cut(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    return Handler


def connect(url: str, home: str, token: str = "") -> None:
    """Make this process, which has not imported the client yet, one of the server's."""
    known = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": home, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    os.environ.update(known)
    os.environ["HF_TOKEN"] = token


@contextmanager
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch, *, xet: bool = False) -> Iterator[HubServer]:
    """A server, and this process and its children as its clients: no other Hub can be reached by mistake."""
    from huggingface_hub import constants

    server = HubServer(folder / "hub")
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

"""What the stand-in for the Hub answers, path by path."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.helpers.hub_store import Fields, MissingError, MovedError, StoredBlob

if TYPE_CHECKING:
    from tests.helpers.hub_server import HubServer

_LARGE = 1 << 20  # bytes: what is larger, or ends like weights, or is no text, is kept as a large file
_WEIGHTS = (".safetensors", ".bin")


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


def _delete(hub: HubServer, call: Call) -> Answer:
    hub.store.delete(f"{call.json.get('organization') or 'me'}/{call.json['name']}")
    return Answer.json({})


def _info(hub: HubServer, call: Call) -> Answer:
    repo = call.words["repo"]
    commit = hub.head(repo, call.words["revision"] or "main")
    siblings = [{"rfilename": path} for path in hub.store.files(commit)]
    private = hub.store.repo(repo)["private"]
    return Answer.json({"id": repo, "modelId": repo, "sha": commit, "private": private, "siblings": siblings})


def _preupload(hub: HubServer, call: Call) -> Answer:
    known = hub.store.files(hub.head(call.words["repo"], call.words["revision"]))
    return Answer.json({"files": [_mode(file, known.get(file["path"])) for file in call.json["files"]]})


def _mode(file: Fields, known: StoredBlob | None) -> Fields:
    large = file["path"].endswith(_WEIGHTS) or file["size"] >= _LARGE or b"\0" in base64.b64decode(file["sample"])
    oid = {"oid": known.lfs or known.oid} if known else {}
    return {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, **oid}


def _batch(hub: HubServer, call: Call) -> Answer:
    hub.store.repo(call.words["repo"])
    return Answer.json({"transfer": "basic", "objects": [_upload(hub, blob) for blob in call.json["objects"]]})


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
    for operation in operations:
        if operation["key"] == "file":
            operation["value"]["content"] = base64.b64decode(operation["value"]["content"])
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


def _open_request(hub: HubServer, call: Call) -> Answer:
    repo, requests = call.words["repo"], hub.pull_requests
    number = len(requests) + 1
    requests.append({"repo": repo, "title": call.json["title"], "description": call.json["description"]})
    hub.store.branch(repo, f"refs/pr/{number}", "main")
    return Answer.json({"num": number})


def _request_fields(hub: HubServer, number: int) -> dict[str, Any]:
    found = hub.pull_requests[number - 1]
    comment = {"edited": False, "hidden": False, "latest": {"raw": found["description"]}}
    when = {"createdAt": "2026-01-01T00:00:00.000Z"}
    return {
        "title": found["title"],
        "num": number,
        "status": "draft",
        "isPullRequest": True,
        "repo": {"name": found["repo"], "type": "model"},
        "changes": {"base": "refs/heads/main"},
        "filesWithConflicts": [],
        "events": [{"id": "1", "type": "comment", "data": comment, **when}],
        **when,
    }


def _request(hub: HubServer, call: Call) -> Answer:
    return Answer.json(_request_fields(hub, int(call.words["number"])))


def _requests(hub: HubServer, call: Call) -> Answer:
    listed = [_request_fields(hub, number) for number in range(1, len(hub.pull_requests) + 1)]
    return Answer.json({"discussions": listed, "count": len(listed), "start": 0})


def _squash(hub: HubServer, call: Call) -> Answer:
    hub.store.squash(call.words["repo"], call.words["revision"], call.json["message"])
    return Answer.json({})


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
    known = "license: nonsense" not in call.json["content"]
    errors = [] if known else [{"message": '"license" must be one of [apache-2.0, mit, ...]'}]
    return Answer.json({"errors": errors, "warnings": []}, 200 if known else 400)


_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_API = rf"/api/models/{_REPO}"
_REVISION = r"(?P<revision>[^/]+)"

_ROUTES: list[tuple[str, Callable[[HubServer, Call], Answer]]] = [
    (r"POST /api/repos/create", _create),
    (r"DELETE /api/repos/delete", _delete),
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
    (rf"POST {_API}/discussions", _open_request),
    (rf"GET {_API}/discussions", _requests),
    (rf"GET {_API}/discussions/(?P<number>\d+)", _request),
    (rf"POST {_API}/super-squash/{_REVISION}", _squash),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", _batch),
    (r"PUT /lfs/(?P<oid>\w+)", _take_large),
    (r"PUT /lfs/(?P<oid>\w+)/(?P<number>\d+)", _take_part),
    (r"POST /lfs/(?P<oid>\w+)", _join_parts),
    (r"POST /lfs/(?P<oid>\w+)/verify", _verify),
    (rf"(?:GET|HEAD) /{_REPO}/resolve/{_REVISION}/(?P<path>.*)", _resolve),
]


def respond(hub: HubServer, method: str, target: str, body: bytes, headers: dict[str, str]) -> Answer:
    """The answer to a request."""
    path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
    for pattern, serve in _ROUTES:
        match = re.fullmatch(pattern, f"{method} {path}")
        if match:
            words = {key: unquote(value) for key, value in match.groupdict(default="").items()}
            try:
                return serve(hub, Call(words, query, body, headers, path))
            except MissingError as error:
                return Answer.error(404, str(error), str(error))
    return Answer.error(404, f"the stand-in does not know {method} {path}")

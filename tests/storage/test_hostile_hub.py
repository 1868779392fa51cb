"""A pull from a Hub that lies: one error, in bounded time and memory, and the token goes nowhere else."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.storage import HubStorage, LocalStorage, open_storage
from ckpt.storage.hub import repo as hub_repo
from tests.helpers import byte_checkpoints
from tests.helpers.hostile_bucket import FOLDED, Reply, Server, elsewhere
from tests.helpers.hub_server import HubServer

REPO = "hub://me/runs"
TOKEN = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"
_MEMORY = 512 << 10  # kB
_SECONDS = 60.0
_AGAIN = {"deadline": 0.5}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("impatient", "impatient_client")]
Bend = Callable[[str, str, Reply], Reply]


@pytest.fixture
def repo(hub: HubServer, tmp_path: Path) -> HubServer:
    """A repository with a checkpoint."""
    byte_checkpoints.save(LocalStorage(tmp_path / "made"), "step-1")
    storage = HubStorage("me/runs", interval=0)
    files = [path for path in sorted((tmp_path / "made").rglob("*")) if path.is_file() and path.name[0] != "."]
    for path in files:
        storage.write(path.relative_to(tmp_path / "made").as_posix(), [path.read_bytes()])
    return hub


@pytest.fixture
def other() -> Iterator[Server]:
    with elsewhere() as server:
        yield server


def refused(hub: HubServer, folder: Path, bend: Bend, match: str | None = None) -> str:
    """Pull with a token. Returns the error, after which nothing is in the target or beside the cache."""
    hub.bend = bend
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    there = _outside_of_cache(folder)
    with pytest.raises(ckpt.CkptError, match=match) as raised:
        ckpt.pull(REPO, folder / "work" / "out", token=TOKEN)
    assert time.monotonic() - began < _SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < _MEMORY
    assert _outside_of_cache(folder) == there
    assert TOKEN not in str(raised.value)
    return str(raised.value)


def _outside_of_cache(folder: Path) -> set[str]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {path for path in found if not path.startswith(("hf-cache/", "hub/"))}


def on(part: str, method: str = "GET", **changes: Any) -> Bend:
    """Answers requests otherwise whose path has a part."""
    return lambda asked, path, reply: (
        replace(reply, **changes) if asked == method and part in path and reply.status < 300 else reply
    )


def tree(change: Callable[[list[Any]], Any]) -> Bend:
    """Another list of files."""

    def bend(method: str, path: str, reply: Reply) -> Reply:
        if "/tree/" not in path or reply.status != 200:
            return reply
        return replace(reply, body=json.dumps(change(json.loads(reply.body))).encode())

    return bend


def test_what_the_hub_has_is_pulled_if_it_does_not_lie(repo: HubServer, tmp_path: Path) -> None:
    ckpt.pull(REPO, tmp_path / "out", token=TOKEN)
    assert ckpt.verify(tmp_path / "out") == {"step-1": []}


@pytest.mark.parametrize("path", ["../../../evil", "/tmp/evil", "a\0b", "a/../../../evil", "..\\evil", "\x1b[2J/../x"])
def test_a_path_that_leads_out_is_refused(repo: HubServer, tmp_path: Path, path: str) -> None:
    text = refused(repo, tmp_path, tree(lambda files: [*files, {**files[0], "path": path}]))
    assert "\x1b" not in text


@pytest.mark.parametrize("change", [
    lambda files: [{**file, "size": "many"} for file in files],
    lambda files: [{**file, "size": -1} for file in files],
    lambda files: [{**file, "size": None} for file in files],
    lambda files: [{**file, "oid": None} for file in files],
    lambda files: [{**file, "path": 5} for file in files],
    lambda files: [{"type": "file"}],
    lambda files: {"error": "x"},
    lambda files: "text",
    lambda files: 7,
    lambda files: [[]],
])  # fmt: skip
def test_a_list_of_other_things_than_files_is_refused(repo: HubServer, tmp_path: Path, change: Any) -> None:
    refused(repo, tmp_path, tree(change))


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"null"])
@pytest.mark.parametrize("part", ["/tree/", "/revision/"])
def test_an_answer_that_is_no_json_of_its_kind_is_refused(
    repo: HubServer, tmp_path: Path, body: bytes, part: str
) -> None:
    refused(repo, tmp_path, on(part, body=body))


@pytest.mark.parametrize("part", ["/tree/", "/revision/", "/resolve/"])
@pytest.mark.parametrize("changes", [{"endless": True}, {"endless": True, "announced": 1 << 40}, {"announced": 10**6}])
def test_an_answer_without_an_end_is_refused_in_bounded_memory(
    repo: HubServer, tmp_path: Path, part: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_repo, "LONGEST_LIST", 16 << 20)
    refused(repo, tmp_path, on(part, **changes))


@pytest.mark.parametrize("part", ["/preupload/", "/commit/", "/info/lfs/"])
@pytest.mark.parametrize("status", [200, 500])
def test_nor_is_the_answer_to_a_save_read_without_an_end(
    repo: HubServer, part: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_repo, "LONGEST_LIST", 16 << 20)
    asked: list[str] = []

    def bend(method: str, path: str, reply: Reply) -> Reply:
        if part not in path:
            return reply
        asked.append(method)
        return replace(reply, status=status, endless=True)

    repo.bend, before = bend, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ckpt.CkptError, match=r"more than 16,777,216 bytes when ckpt asked for POST"):
        open_storage(REPO, interval=0, **_AGAIN).write("large", [b"x" * (20 << 20)])
    assert "POST" in asked
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < _MEMORY


@pytest.mark.parametrize("part", ["/tree/", "/revision/", "/resolve/"])
def test_a_short_answer_that_unfolds_into_gigabytes_is_refused(repo: HubServer, tmp_path: Path, part: str) -> None:
    encoded = {"Content-Encoding": "gzip", "ETag": '"1"', "X-Repo-Commit": "1"}
    refused(repo, tmp_path, on(part, body=FOLDED, headers=encoded))


def test_pages_without_an_end_are_refused(repo: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_repo, "MOST_PAGES", 20)

    def bend(method: str, path: str, reply: Reply) -> Reply:
        following = f'<{repo.url}{path.partition("?")[0]}?cursor=0>; rel="next"'
        return replace(reply, body=b"[]", headers={**reply.headers, "Link": following}) if "/tree/" in path else reply

    refused(repo, tmp_path, bend, "more than 20 pages")


def test_a_page_on_another_host_is_not_asked_for(repo: HubServer, tmp_path: Path, other: Server) -> None:
    def bend(method: str, path: str, reply: Reply) -> Reply:
        link = {**reply.headers, "Link": f'<{other.url}/next>; rel="next"'}
        return replace(reply, headers=link) if "/tree/" in path else reply

    refused(repo, tmp_path, bend, "another host")
    assert other.requests == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("part", ["/resolve/", "/tree/", "/revision/"])
def test_a_redirect_to_another_host_takes_no_token_there(
    repo: HubServer, tmp_path: Path, other: Server, status: int, part: str
) -> None:
    def bend(method: str, path: str, reply: Reply) -> Reply:
        headers = {**reply.headers, "Location": f"{other.url}/elsewhere"}
        return replace(reply, status=status, headers=headers) if part in path else reply

    refused(repo, tmp_path, bend)
    assert not [asked for asked in other.requests if TOKEN in str(asked.headers)]


@pytest.mark.parametrize("name", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
@pytest.mark.parametrize("value", ["../../../../evil", "/tmp/evil", '"../../../../evil"', "a/b", "x" * 5000])
def test_a_header_that_would_become_a_path_is_refused(repo: HubServer, tmp_path: Path, name: str, value: str) -> None:
    def bend(method: str, path: str, reply: Reply) -> Reply:
        kept = {key: known for key, known in reply.headers.items() if key.lower() != name.lower()}
        return replace(reply, headers={**kept, name: value}) if "/resolve/" in path else reply

    refused(repo, tmp_path, bend, f"unexpected {name}")


@pytest.mark.parametrize("sha", ["../../../evil", "", None, 5, "x" * 500, "a/b"])
def test_a_commit_that_would_become_a_path_is_refused(repo: HubServer, tmp_path: Path, sha: Any) -> None:
    def bend(method: str, path: str, reply: Reply) -> Reply:
        if "/revision/" not in path or reply.status != 200:
            return reply
        return replace(reply, body=json.dumps({**json.loads(reply.body), "sha": sha}).encode())

    refused(repo, tmp_path, bend)


@pytest.mark.parametrize("body", [b"", b"short", b"x" * 100_000])
def test_a_file_of_other_bytes_than_its_hash_is_refused(repo: HubServer, tmp_path: Path, body: bytes) -> None:
    refused(repo, tmp_path, on("model.safetensors", body=body))


@pytest.mark.parametrize("changes", [{"body": b"x" * 50}, {"endless": True}, {"status": 200, "body": b"y" * 9000}])
def test_a_read_of_a_range_gets_that_range_or_an_error(repo: HubServer, changes: dict[str, Any]) -> None:
    storage = open_storage(REPO, **_AGAIN)
    storage.version("step-1/model.safetensors")
    repo.bend = on("/resolve/", **changes)
    with pytest.raises(ckpt.StorageError):
        storage.read("step-1/model.safetensors", 10, 30)


def test_an_error_that_echoes_the_token_does_not_show_it(repo: HubServer, tmp_path: Path) -> None:
    said = {"X-Error-Message": f"token {TOKEN} is bad", "X-Error-Code": TOKEN}

    def bend(method: str, path: str, reply: Reply) -> Reply:
        return replace(reply, status=400, headers={**reply.headers, **said}) if "/tree/" in path else reply

    refused(repo, tmp_path, bend)

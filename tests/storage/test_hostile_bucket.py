"""A pull from a bucket whose server lies: one error, in bounded time and memory, and nothing is written elsewhere."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.storage import LocalStorage, open_storage
from ckpt.storage.clouds import objects
from tests.helpers import byte_checkpoints
from tests.helpers.hostile_bucket import BUCKET, TOKEN, Asked, Bend, HostileBucket, Reply, elsewhere, listing, options

ROOT = f"s3://{BUCKET}/run"
PLAIN = {"run/a.txt": b"a" * 100, "run/b/c.txt": b"c" * 5000}
_MEMORY = 512 << 10  # kB
_SECONDS = 60.0
_PATIENT = {"deadline": 60.0, "stall": 60.0}

pytestmark = pytest.mark.slow


@pytest.fixture
def checkpoint(tmp_path: Path) -> dict[str, bytes]:
    """The objects of a root with one checkpoint."""
    byte_checkpoints.save(LocalStorage(tmp_path / "made"), "step-1")
    files = [path for path in (tmp_path / "made").rglob("*") if path.is_file() and path.name != ".lock"]
    found = {f"run/{path.relative_to(tmp_path / 'made').as_posix()}": path.read_bytes() for path in files}
    return {key: data for key, data in found.items() if "/." not in key}


def pull(bucket: HostileBucket, target: Path, **more: Any) -> None:
    ckpt.pull(ROOT, target, storage_options={**options(bucket.url), **more})


def refused(bucket: HostileBucket, folder: Path, match: str | None = None) -> str:
    """Pull into a folder beside another. Returns the error, after which nothing has changed."""
    beside = folder / "beside"
    beside.mkdir()
    (beside / "kept").write_text("kept")
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with bucket, pytest.raises(ckpt.CkptError, match=match) as raised:
        pull(bucket, folder / "work" / "out")
    assert time.monotonic() - began < _SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < _MEMORY
    assert [path.name for path in beside.iterdir()] == ["kept"]
    assert TOKEN not in str(raised.value)
    assert not any(path.is_file() and not path.name.startswith(".") for path in (folder / "work").rglob("*"))
    return str(raised.value)


def where(is_wanted: Callable[[Asked], bool], **changes: Any) -> Bend:
    """Answers some requests otherwise."""
    return lambda asked, reply: replace(reply, **changes) if is_wanted(asked) else reply


def is_read(asked: Asked) -> bool:
    return asked.method == "GET" and not asked.is_list


def is_list(asked: Asked) -> bool:
    return asked.is_list


def test_what_the_server_has_is_pulled_if_it_does_not_lie(tmp_path: Path, checkpoint: dict[str, bytes]) -> None:
    with HostileBucket(checkpoint) as bucket:
        pull(bucket, tmp_path / "out", **_PATIENT)
    assert ckpt.verify(tmp_path / "out") == {"step-1": []}
    with HostileBucket(PLAIN) as bucket:
        pull(bucket, tmp_path / "plain", **_PATIENT)
    assert (tmp_path / "plain/b/c.txt").read_bytes() == PLAIN["run/b/c.txt"]


@pytest.mark.parametrize(
    "key", ["run/../../beside/x", "run//abs", "run/a\0b", "run/a\\b", "run/./x", "run/" + "n" * 300]
)
def test_a_key_that_leads_out_of_the_folder_is_refused_and_nothing_is_written(tmp_path: Path, key: str) -> None:
    bucket = HostileBucket({**PLAIN, key: b"evil"})
    refused(bucket, tmp_path)


def test_a_key_with_escape_sequences_reaches_no_terminal(tmp_path: Path) -> None:
    text = refused(HostileBucket({**PLAIN, "run/../\x1b]0;x\x07": b"evil"}), tmp_path)
    assert "\x1b" not in text
    assert "\x07" not in text


def test_keys_of_another_prefix_are_refused(tmp_path: Path) -> None:
    bucket = HostileBucket(PLAIN)
    bucket.listed = {"other/secret": 3}
    refused(bucket, tmp_path, "a prefix that ckpt did not ask for")


@pytest.mark.parametrize("size", [101, 10**6, 10**15])
def test_an_object_that_is_shorter_than_listed_is_refused(tmp_path: Path, size: int) -> None:
    bucket = HostileBucket(PLAIN)
    bucket.listed = {"run/a.txt": size}
    refused(bucket, tmp_path)


@pytest.mark.parametrize("changes", [
    {"announced": 10**6}, {"announced": 10**15}, {"endless": True}, {"endless": True, "announced": 1 << 40},
    {"body": b"short"}, {"body": b"x" * 100_000}, {"status": 200, "body": b"y" * 100_000, "headers": {}},
])  # fmt: skip
def test_an_object_of_other_bytes_than_announced_is_refused(
    tmp_path: Path, changes: dict[str, Any], checkpoint: dict[str, bytes]
) -> None:
    refused(
        HostileBucket(checkpoint, where(lambda asked: is_read(asked) and "model" in asked.key, **changes)), tmp_path
    )


@pytest.mark.parametrize("changes", [
    {"body": b"{}"}, {"endless": True}, {"announced": 1 << 40}, {"body": b""}, {"status": 500}, {"status": 418},
])  # fmt: skip
def test_a_manifest_of_other_bytes_is_refused(
    tmp_path: Path, changes: dict[str, Any], checkpoint: dict[str, bytes]
) -> None:
    bend = where(
        lambda asked: is_read(asked) and asked.key.endswith(("manifest.json", "manifest.copy.json")), **changes
    )
    refused(HostileBucket(checkpoint, bend), tmp_path)


@pytest.mark.parametrize("body", [
    "", "<", "{}", "<x/>" * 3, "<ListBucketResult><Contents/></ListBucketResult>",
    "<ListBucketResult><Contents><Key>run/x</Key><Size>many</Size></Contents></ListBucketResult>",
    "<ListBucketResult><Contents><Key>run/x</Key><Size>-5</Size></Contents></ListBucketResult>",
    "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
    "<!DOCTYPE x [<!ENTITY a 'aaaaaaaaaa'><!ENTITY b '&a;&a;&a;&a;'>]><ListBucketResult>&b;</ListBucketResult>",
])  # fmt: skip
def test_a_list_that_is_none_is_refused(tmp_path: Path, body: str) -> None:
    refused(HostileBucket(PLAIN, where(is_list, body=f"<?xml version='1.0'?>{body}".encode())), tmp_path)


@pytest.mark.parametrize(
    "changes", [{"announced": 1 << 40}, {"endless": True}, {"endless": True, "announced": 1 << 40}]
)
def test_a_list_without_an_end_is_refused_in_bounded_memory(tmp_path: Path, changes: dict[str, Any]) -> None:
    refused(HostileBucket(PLAIN, where(is_list, **changes)), tmp_path)


def test_pages_without_an_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_MOST_PAGES", 30)
    pages = iter(range(10**9))

    def bend(asked: Asked, reply: Reply) -> Reply:
        page = next(pages)
        return replace(reply, body=listing({f"run/{page}": 1}, more=f"page-{page}")) if asked.is_list else reply

    refused(HostileBucket(PLAIN, bend), tmp_path, "sent an endless list")


def test_a_page_that_leads_to_itself_is_refused(tmp_path: Path) -> None:
    body = listing({"run/a": 1}, more="again")
    refused(HostileBucket(PLAIN, where(is_list, body=body)), tmp_path, "not where")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("which", [is_list, is_read], ids=["list", "read"])
def test_a_redirect_is_not_followed_and_the_token_goes_nowhere_else(
    tmp_path: Path, status: int, which: Callable[[Asked], bool]
) -> None:
    with elsewhere() as other:
        headers = {"Location": f"{other.url}/{BUCKET}/run/a.txt", "x-amz-bucket-region": "eu-evil-1"}
        refused(HostileBucket(PLAIN, where(which, status=status, body=b"", headers=headers)), tmp_path)
        assert other.requests == []


def test_a_server_that_echoes_the_token_does_not_bring_it_into_the_error(tmp_path: Path) -> None:
    body = f"<?xml version='1.0'?><Error><Code>{TOKEN}</Code><Message>{TOKEN}</Message></Error>".encode()
    refused(HostileBucket(PLAIN, where(is_list, status=400, body=body)), tmp_path)


@pytest.mark.parametrize("headers", [{}, {"ETag": "../../x"}, {"ETag": "\x1b[2J"}, {"Content-Range": "bytes 0-1/1"}])
def test_strange_headers_of_an_object_end_in_its_bytes_or_in_an_error(tmp_path: Path, headers: dict[str, str]) -> None:
    with HostileBucket(PLAIN, where(lambda asked: not asked.is_list, headers=headers)) as bucket:
        storage = open_storage(ROOT, **options(bucket.url))
        with suppress(ckpt.StorageError):
            assert storage.read("a.txt", 10, 20) == b"a" * 10
        with suppress(ckpt.StorageError):
            assert storage.version("a.txt") == headers["ETag"]

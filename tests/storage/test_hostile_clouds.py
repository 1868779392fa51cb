"""S3, GCS and Azure that lie: answers without an end, or that no such store gives, are errors of the storage."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import StorageError
from ckpt.storage import Storage, open_storage
from tests.fuzz import servers
from tests.helpers import hostile_bucket
from tests.helpers.hostile_bucket import Asked, Reply

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
DATA = b"0123456789" * 100
Bend = Callable[[Callable[[Asked, Reply], Reply]], None]


@pytest.fixture(params=["s3", "gs", "az"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cloud(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Storage, Bend]]:
    """A store with one object, and how to set what it answers instead."""
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "")  # set by `served`, and then as it was
    with servers.served(kind, tmp_path, {"run/object": DATA}) as (bend, url, options):
        bend(lambda asked, reply: reply)
        yield open_storage(url, **{**options, "deadline": 0.0, "stall": 20.0}), bend


def test_the_stand_ins_keep_what_is_written(cloud: tuple[Storage, Bend]) -> None:
    storage, _ = cloud
    storage.write("new", [b"first"], over=None)
    version = storage.version("new")
    with pytest.raises(StorageError):
        storage.write("new", [b"second"], over=None)
    storage.write("new", [b"second"], over=version)
    storage.link("new", "copy")
    assert storage.read("copy") == storage.read("new", 0, 100) == b"second"
    storage.delete(["new"])
    assert {entry.key: entry.size for entry in storage.list()} == {"object": len(DATA), "copy": 6}


@pytest.mark.parametrize("ask", ["list", "read", "part", "into"])
def test_an_answer_without_end_is_not_read_on(
    cloud: tuple[Storage, Bend], ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is asked for without an end, no more is read than a document may have."""
    storage, bend = cloud
    monkeypatch.setattr(hostile_bucket, "MOST", 400 << 20)  # whoever reads on finds it cut off
    asked: dict[str, Callable[[], Any]] = {
        "list": lambda: list(storage.list()),
        "read": lambda: storage.read("object"),
        "part": lambda: storage.read("object", 10, 20),
        "into": lambda: storage.read_into("object", 10, memoryview(bytearray(100))),
    }

    def endless(asked: Asked, reply: Reply) -> Reply:
        reply.endless = asked.method == "GET"
        return reply

    bend(endless)
    with pytest.raises(StorageError, match=r"sent more|longer than 64 MB|sent over 64 MB"):
        asked[ask]()


_ANSWERS: dict[str, Reply] = {
    "an empty one": Reply(),
    "one that is no document": Reply(200, b"\xff\xfe<"),
    "another document": Reply(200, b"<html><body>welcome</body></html>"),
    "a redirect to nowhere": Reply(302),
    "a redirect elsewhere": Reply(307, b"", {"Location": "http://127.0.0.1:9/x"}),
    "a status that nobody knows": Reply(418, b"x", {"x-ms-error-code": "\x1b[2J"}),
    "a range that is none": Reply(206, b"x", {"Content-Range": "bytes x-y/z", "ETag": '"1"'}),
    "another range": Reply(206, b"x" * 10, {"Content-Range": "bytes 0-9/1000", "ETag": '"1"'}),
    "names that are missing": Reply(200, b"<EnumerationResults><Blobs><Blob/></Blobs></EnumerationResults>"),
    "sizes that are none": Reply(200, b'{"items": [{"name": "run/x", "size": "x", "generation": "1"}]}'),
}


@pytest.mark.parametrize("answer", _ANSWERS)
@pytest.mark.parametrize("ask", ["list", "part", "version", "write"])
def test_an_answer_that_no_store_gives_is_an_error_of_ours_and_never_an_empty_root(
    cloud: tuple[Storage, Bend], ask: str, answer: str
) -> None:
    storage, bend = cloud
    asked: dict[str, Callable[[], Any]] = {
        "list": lambda: [entry.key for entry in storage.list()],
        "part": lambda: storage.read("object", 10, 20),
        "version": lambda: storage.version("object"),
        "write": lambda: storage.write("object", [b"new"], over="1"),
    }
    made = _ANSWERS[answer]
    bend(lambda asked, reply: Reply(made.status, made.body, dict(made.headers)))
    try:
        found = asked[ask]()
    except StorageError:
        return
    assert (ask, found) == ("version", '"1"')  # of S3, for which a range is one of the object


@pytest.mark.parametrize("status", [400, 403, 404, 409, 500])
def test_a_token_that_is_repeated_in_place_of_a_code_is_in_no_error(cloud: tuple[Storage, Bend], status: int) -> None:
    """Also one that ckpt was not given, as that of a profile: it may look like a code."""
    storage, bend = cloud
    token = "AToken9of0letters1and2digits"
    told = json.dumps({"error": {"errors": [{"reason": token}]}}).encode()
    xml = f"<Error><Code>{token}</Code><Message>{token}</Message></Error>".encode()
    failed = f"<DeleteResult><Error><Key>run/object</Key><Code>{token}</Code></Error></DeleteResult>".encode()

    def repeat(asked: Asked, reply: Reply) -> Reply:
        if "delete" in asked.query:
            return Reply(200, failed)
        return Reply(status, told if "/o" in asked.key else xml, {"x-ms-error-code": token})

    bend(repeat)
    said = ""
    for ask in (
        lambda: list(storage.list()),
        lambda: storage.read("object", 10, 20),
        lambda: storage.write("object", [b"new"], over=None),
        lambda: storage.delete(["object"]),
    ):
        try:
            ask()
        except StorageError as error:
            said += "".join(traceback.format_exception(error))
    assert "could not" in said
    assert token not in said

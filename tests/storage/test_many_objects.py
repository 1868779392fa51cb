"""More objects than a server lists or removes at once, and the order in which they go."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt.storage import ObjectStorage, open_storage
from ckpt.storage.clouds.s3 import S3Objects, parsed
from tests.helpers.seaweed import BUCKET, Server


@pytest.mark.slow
def test_more_objects_than_a_page_holds_are_all_listed_and_all_removed(server: Server, s3: str) -> None:
    import boto3

    client = boto3.client("s3")
    prefix, names = s3.removeprefix(f"s3://{BUCKET}/"), [f"{number:04}" for number in range(1010)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=b"x"), names))
    storage = open_storage(s3)
    assert sorted(entry.key for entry in storage.list()) == names
    storage.delete(names)
    assert list(storage.list()) == []


@pytest.mark.slow
def test_the_first_of_many_is_removed_before_all_others_and_the_last_after_them(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, left = S3Objects.remove, list[set[str]]()
    storage = open_storage(s3)
    assert isinstance(storage, ObjectStorage)
    names = ["manifest.json", "a", "b", "c", ".saving"]
    for name in names:
        storage.write(f"step/{name}", [b"x"])

    def watched(self: S3Objects, keys: list[str]) -> None:
        left.append({entry.key.removeprefix("step/") for entry in storage.list()})
        remove(self, keys)

    monkeypatch.setattr(S3Objects, "remove", watched)
    storage.delete([f"step/{name}" for name in names])
    assert list(storage.list()) == []
    assert left == [set(names), {"a", "b", "c", ".saving"}, {".saving"}]


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-17T12:00:00.123Z",
        "2026-11-17T12:00:00Z",
        "Tue, 17 Nov 2026 12:00:00 GMT",
        "2026-11-17T12:00:00.12345678Z",
        1,
    ],
)
def test_a_timestamp_is_what_botocore_says_it_is(text: object) -> None:
    from botocore.utils import parse_timestamp

    found, expected = parsed(text), parse_timestamp(text)
    assert found.utcoffset() == expected.utcoffset()
    assert found == expected


def test_a_session_of_the_storage_has_the_profile_that_was_asked_for_and_parses_timestamps_fast(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.write_text("[profile archive]\naws_access_key_id = one\naws_secret_access_key = two\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    session = S3Objects("bucket", "", {"profile": "archive"})._s3.fs.session
    assert session.profile == "archive"
    parser = session.get_component("response_parser_factory").create_parser("rest-xml")
    assert parser._timestamp_parser is parsed

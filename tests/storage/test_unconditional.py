"""A server that ignores the conditions of a write is refused, as two runs would destroy each other's saves there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import ckpt
from ckpt.errors import UnsupportedError
from ckpt.storage import open_storage
from tests.helpers.hostile_bucket import BUCKET, Asked, HostileBucket, Reply, options

CONDITIONS = frozenset({"if-none-match", "if-match"})


@pytest.fixture
def bucket() -> Iterator[HostileBucket]:
    with HostileBucket({}) as bucket:
        yield bucket


def manager(bucket: HostileBucket, **chosen: Any) -> ckpt.StateManager:
    given = {**options(bucket.url), "deadline": 30.0, **chosen}
    return ckpt.StateManager(f"s3://{BUCKET}/run", model=nn.Linear(2, 2), storage_options=given)


@pytest.mark.parametrize(
    ("ignored", "said"),
    [
        (CONDITIONS, "the server ignores If-None-Match and If-Match,"),
        ({"if-none-match"}, "the server ignores If-None-Match,"),
        ({"if-match"}, "the server ignores If-Match,"),
    ],
    ids=["both", "none", "match"],
)
def test_it_is_refused_at_the_start(bucket: HostileBucket, ignored: set[str], said: str) -> None:
    bucket.ignores = frozenset(ignored)
    with pytest.raises(UnsupportedError, match=said) as caught:
        manager(bucket)
    assert "allow_unconditional" in str(caught.value)
    assert not bucket.objects


def _knows_none(asked: Asked, reply: Reply) -> Reply:
    return Reply(400, b"<Error><Code>InvalidArgument</Code></Error>") if CONDITIONS & asked.headers.keys() else reply


def test_a_server_that_answers_conditions_with_400_is_refused_with_the_reason() -> None:
    with (
        HostileBucket({}, _knows_none) as bucket,
        pytest.raises(UnsupportedError, match="refuses conditional writes") as caught,
    ):
        manager(bucket)
    assert "Use another server, or a newer version. It said: " in str(caught.value)


def test_a_single_writer_may_use_it_and_is_warned(bucket: HostileBucket, caplog: pytest.LogCaptureFixture) -> None:
    bucket.ignores = CONDITIONS
    with manager(bucket, allow_unconditional=True) as run:
        run.save_state("a", wait=True)
    assert "nothing keeps a second run out of this root. Make sure that only one run writes there" in caplog.text
    assert any(key.endswith("/a/manifest.json") for key in bucket.objects)


def test_the_option_is_a_switch(bucket: HostileBucket) -> None:
    with pytest.raises(ckpt.ConfigError, match="must be True or False"):
        manager(bucket, allow_unconditional="yes")


def test_a_server_that_honours_them_has_nothing_left_of_the_trial(bucket: HostileBucket) -> None:
    manager(bucket).close()
    assert not bucket.objects


@pytest.mark.slow
def test_a_file_that_is_gone_before_the_manifest_is_written_is_noticed(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckpt.StateManager(s3, model=nn.Linear(2, 2)) as run:
        run.resume()
        run.save_state("a", wait=True)
        commit = run.session.saver.root.commit

        def removed_before(*given: Any) -> Any:
            open_storage(s3).delete(["b/model.safetensors"])
            return commit(*given)

        with monkeypatch.context() as patch:
            patch.setattr(run.session.saver.root, "commit", removed_before)
            with pytest.raises(ckpt.StorageError, match="b: 1 of its files have disappeared"):
                run.save_state("b", wait=True)
    assert [found.name for found in ckpt.list_checkpoints(s3) if found.committed] == ["a"]

"""A store that is away when a run ends: the end is bounded, and what comes late harms nobody."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from torch import nn

import ckpt
from ckpt.root import deletion
from ckpt.save import root_writer
from ckpt.storage import ObjectStorage, leases, open_storage
from ckpt.storage.leases import exclusive_path
from ckpt.util.threads import Worker
from tests.helpers.faulty_proxy import FaultyProxy
from tests.helpers.seaweed import Server

pytestmark = pytest.mark.slow


@pytest.fixture
def proxied(server: Server, s3: str) -> Iterator[FaultyProxy]:
    with FaultyProxy(server.port) as proxy:
        yield proxy


def test_a_lock_that_could_not_be_removed_in_time_is_not_removed_when_another_run_has_it(
    proxied: FaultyProxy, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "has_ended", lambda record: None)  # as if the two were on different machines
    monkeypatch.setattr(leases, "EXPIRY", 3.0)
    monkeypatch.setattr(leases, "_POLL", 0.1)
    first, second = open_storage(s3, endpoint_url=proxied.url), open_storage(s3)
    assert isinstance(second, ObjectStorage)
    held = first.lock(".lock", note="the first")
    held.__enter__()
    proxied.plan = lambda method, path: "slow down" if method != "GET" else None
    releasing = Worker("release", daemon=True).start(lambda: held.__exit__(None, None, None))
    with second.lock(".lock", note="the second"):
        proxied.plan = lambda method, path: None
        releasing.wait()
        for _ in range(5):  # a removal that was tried again would be done by then
            time.sleep(1)
            assert b"the second" in second._objects.get(exclusive_path(".lock"))


def test_a_root_that_is_away_at_the_end_is_waited_for_once(
    proxied: FaultyProxy, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the save. What follows it (its files, the history, the lock) took as long again, each."""
    monkeypatch.setattr(deletion, "_TO_CLEAN_UP", 1.0)
    monkeypatch.setattr(leases, "_TO_REMOVE", 1.0)
    monkeypatch.setattr(root_writer, "_TO_TELL", 1.0)
    options = {"endpoint_url": proxied.url, "deadline": 8.0}
    manager = ckpt.StateManager(s3, model=nn.Linear(2, 2), storage_options=options)
    manager.save_state("first", wait=True)
    proxied.plan = lambda method, path: "slow down"
    began = time.monotonic()
    manager.save_state("second")
    with pytest.raises(ckpt.TransientError, match="SlowDown"):
        manager.close()
    assert 7 < time.monotonic() - began < 15
    proxied.plan = lambda method, path: None
    assert ckpt.verify(s3) == {"first": []}

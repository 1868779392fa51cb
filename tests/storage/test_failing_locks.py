"""System calls on a lock that fail: no lock outlives them, and what was done under it stands."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import StorageError
from ckpt.storage import LocalStorage
from ckpt.storage.local.locks import HeldLock


def _fail(*_: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("key", [".lock", "step-00000001"])
def test_a_lock_that_could_not_be_looked_at_does_not_last_as_long_as_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(HeldLock, "is_in_place", _fail)
        with pytest.raises(StorageError, match="could not lock"), LocalStorage(tmp_path).lock(key, note="me"):
            pass
    with LocalStorage(tmp_path).lock(key, note="another"):
        pass


@pytest.mark.parametrize("call", ["ftruncate", "stat", "rmdir"])
@pytest.mark.parametrize("key", [".lock", "step-00000001"])
def test_a_release_that_meets_an_error_releases_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, call: str
) -> None:
    with monkeypatch.context() as patch, LocalStorage(tmp_path).lock(key, note="me"):
        patch.setattr(os, call, _fail)
    with LocalStorage(tmp_path).lock(key, note="another"):
        pass


def test_a_close_that_is_interrupted_is_no_failure_of_what_was_done_under_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = os.close

    def interrupted(descriptor: int) -> None:
        close(descriptor)
        raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

    with LocalStorage(tmp_path).lock(".lock", note="me"):
        monkeypatch.setattr(os, "close", interrupted)
    monkeypatch.undo()
    with LocalStorage(tmp_path).lock(".lock", note="another"):
        pass


def test_a_held_lock_that_cannot_be_looked_at_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    with storage.lock(".lock", note="me"):
        storage.write("a", [b"x"])
        monkeypatch.setattr(HeldLock, "is_in_place", _fail)
        with pytest.raises(StorageError, match=r"could not check .*\.lock"):
            storage.delete(["a"])
        monkeypatch.undo()
        assert storage.read("a") == b"x"
        storage.delete(["a"])

"""Locks where the place has none: who lives is waited for, who was taken for gone is in nobody's way."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt
from ckpt.storage import Storage, leases, open_storage
from ckpt.util.threads import process_identity
from tests.storage.test_leases import wait_until


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A place without locks of its own: fsspec's filesystem of local files."""
    return f"local://{tmp_path}/root"


def lease(url: str) -> Path:
    (found,) = Path(url.removeprefix("local://"), leases.FOLDER, "alone").iterdir()
    return found


@pytest.mark.slow
def test_a_holder_in_another_process_of_this_machine_is_known_to_live(url: str) -> None:
    open_storage(url).write("object", [b"x"])
    ready_read, ready_write = os.pipe()
    end_read, end_write = os.pipe()
    child = os.fork()
    if not child:
        os.close(end_write)
        with open_storage(url).lock(".lock", note="the child"):
            os.write(ready_write, b"x")
            os.read(end_read, 1)
            os._exit(0)  # without letting go
    os.close(end_read)
    os.read(ready_read, 1)
    try:
        with pytest.raises(ckpt.LockedError, match="the child"), open_storage(url).lock(".lock"):
            pass
    finally:
        os.close(end_write)
        os.waitpid(child, 0)
        os.close(ready_read)
        os.close(ready_write)
    with open_storage(url).lock(".lock"):  # it has ended
        pass


def signs(storage: Storage, url: str, count: int) -> Iterator[str]:
    """So many different signs of life of whoever holds the lock."""
    seen: list[str] = []
    end = time.monotonic() + 20
    while len(seen) < count and time.monotonic() < end:
        try:
            sign = json.loads(lease(url).read_text())["sign"]
        except (OSError, ValueError):  # just being written
            continue
        if sign not in seen:
            seen.append(sign)
            yield sign
        time.sleep(0.05)


def test_a_holder_gives_signs_of_life_as_long_as_it_holds(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEWAL", 0.2)
    storage = open_storage(url)
    with storage.lock(".lock", note="alive"):
        assert len(list(signs(storage, url, 4))) == 4
        with pytest.raises(ckpt.LockedError, match="alive"), open_storage(url).lock(".lock"):
            pass


def test_who_was_taken_for_gone_leaves_the_lease_of_who_took_over(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = open_storage(url), open_storage(url)
    with monkeypatch.context() as patch, second.lock("other"):
        lock = first.lock(".lock", note="the first")
        lock.__enter__()
        patch.setattr(leases, "has_ended", lambda record: True)
        with second.lock(".lock", note="the second"):
            patch.undo()
            patch.setattr(leases, "EXPIRY", 0.0)  # so long ago is its last sign of life
            lock.__exit__(None, None, None)
            patch.undo()
            sign = json.loads(next(file for file in lease_files(url) if file.name == ".lock").read_text())
            assert sign["note"] == "the second"
            assert sign["process"] == process_identity(os.getpid())
            with pytest.raises(ckpt.LockedError, match="the second"), open_storage(url).lock(".lock"):
                pass


def lease_files(url: str) -> list[Path]:
    return list(Path(url.removeprefix("local://"), leases.FOLDER, "alone").iterdir())


def test_a_reader_that_was_taken_for_gone_keeps_others_from_removing_what_it_reads_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEWAL", 0.1)
    reader = open_storage(url)
    folder = Path(url.removeprefix("local://"), leases.shared_folder("step"))
    with reader.lock("step", shared=True, note="a reader"):
        (sign,) = folder.iterdir()
        first = sign.read_text()
        wait_until(lambda: sign.read_text() != first)
        sign.unlink()
        wait_until(sign.exists)
        with pytest.raises(ckpt.LockedError, match="a reader"), open_storage(url).lock("step"):
            pass


def test_a_lock_that_was_dropped_without_being_left_is_free_at_once(url: str) -> None:
    dropped = open_storage(url).lock(".lock", note="dropped")
    dropped.__enter__()
    del dropped
    with open_storage(url).lock(".lock"):
        pass

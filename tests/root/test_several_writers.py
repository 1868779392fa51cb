"""Several who write at once: of two, one succeeds, the other is told, and nothing is lost."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt
from ckpt.storage import ANY, Buffer, LocalStorage, open_storage
from ckpt.storage.multipart import PART_SIZE
from tests.helpers.faulty_proxy import FaultyProxy
from tests.helpers.places import PassedOn, Place
from tests.helpers.processes import DEADLINE, start_alone
from tests.helpers.seaweed import Server

pytestmark = pytest.mark.on_disk  # a tmpfs may list no name for one that is being replaced


class _WithoutLocks(PassedOn):
    """A filesystem that has no locks: two runs may write to one root."""

    def lock(self, key: str, *, shared: bool = False, note: str = "") -> AbstractContextManager[None]:
        return nullcontext()


class _Overtaken(_WithoutLocks):
    """While the files of a checkpoint are written, somebody else commits one of the same name."""

    overtaking: bool = False

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        super().write(key, pieces, over=over)
        if self.overtaking and key.endswith(".safetensors"):
            self.overtaking = False
            save_as_another_run(self.url, "latest", 2.0)


def filled(value: float) -> nn.Linear:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    return model


def save_as_another_run(root: str, name: str, value: float) -> None:
    model = filled(0.0)
    with ckpt.StateManager(_WithoutLocks(root), model=model) as other:
        other.resume()
        nn.init.constant_(model.weight, value)
        other.save_state(name, wait=True)


def loaded(root: Place, name: str) -> float:
    model = filled(-1.0)
    with ckpt.StateManager(root, model=model) as manager:
        manager.load_state(name)
    assert torch.equal(model.weight, model.weight[0, 0].expand(2, 2))
    return float(model.weight[0, 0].detach())


@pytest.mark.parametrize("first", [True, False])
def test_who_commits_after_another_has_written_the_same_name_is_told_and_the_others_stays(
    root: Place, first: bool
) -> None:
    storage = _Overtaken(root)
    with ckpt.StateManager(storage, model=filled(1.0)) as manager:
        if not first:
            manager.save_state("latest", wait=True)
        storage.overtaking = True
        with pytest.raises(ckpt.ConflictError, match="latest"):
            manager.save_state("latest", wait=True)
    assert loaded(root, "latest") == 2.0
    assert ckpt.verify(root) == {"latest": []}


def test_a_name_that_another_run_has_replaced_since_is_not_replaced_again(root: Place) -> None:
    with ckpt.StateManager(_WithoutLocks(root), model=filled(1.0)) as manager:
        manager.save_state("latest", wait=True)
        save_as_another_run(str(root), "latest", 2.0)
        with pytest.raises(ckpt.ConflictError, match=r"another run has saved .*latest"):
            manager.save_state("latest", wait=True)
    assert loaded(root, "latest") == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("size", [5, PART_SIZE + 5])
def test_a_try_that_failed_does_not_take_what_another_has_written_meanwhile_for_its_own(
    server: Server, s3: str, size: int
) -> None:
    method, mine, theirs = ("PUT" if size < PART_SIZE else "POST"), b"m" * size, b"t" * size
    with FaultyProxy(server.port) as proxy:
        storage = open_storage(s3, endpoint_url=proxy.url, deadline=60.0, stall=30.0)
        left = ["error"]

        def overtaken(asked: str, path: str) -> str | None:
            """The first request that would commit the object fails, and another's comes before the second."""
            if asked != method or "uploads" in path or not left:
                return None
            open_storage(s3).write("object", [theirs], over=None)
            return left.pop()

        proxy.plan = overtaken
        with pytest.raises(ckpt.ConflictError):
            storage.write("object", [mine], over=None)
        assert not left
    assert open_storage(s3).read("object") == theirs


@pytest.mark.slow
def test_a_version_is_compared_and_replaced_only_by_the_process_that_has_the_roots_file_lock(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("object", [b"old"])
    old = storage.version("object")
    lost: list[ckpt.ConflictError] = []

    def write() -> None:
        try:
            storage.write("object", [b"second"], over=old)
        except ckpt.ConflictError as error:
            lost.append(error)

    with _locked_by_another_process(tmp_path / ".renames.ckpt-lock"):
        second = threading.Thread(target=write)
        second.start()
        second.join(1.0)
        assert second.is_alive(), "it did not wait for the process that was comparing and replacing"
        (tmp_path / "object").write_bytes(b"first")
    second.join(DEADLINE)
    assert len(lost) == 1
    assert storage.read("object") == b"first"


def test_new_files_wait_for_nobody_who_compares_and_replaces_nor_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.storage.local.locks._PATIENCE", 0.0)
    storage = LocalStorage(tmp_path)
    with storage._locks.renaming():
        LocalStorage(tmp_path).write("folder/object", [b"new"], over=None)
        with LocalStorage(tmp_path).grouped():
            LocalStorage(tmp_path).write("folder/other", [b"new"], over=None)
        with pytest.raises(ckpt.ConflictError, match="folder/object has changed"):
            storage.write("folder/object", [b"newer"], over=None)
    assert storage.read("folder/object") == b"new"
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["object", "other"]


@pytest.mark.parametrize("taken", [False, True])
def test_where_there_are_no_links_a_new_file_is_named_by_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("os.link", link)
    monkeypatch.setattr("ckpt.storage.local.locks._PATIENCE", 0.0)
    storage = LocalStorage(tmp_path)
    with storage._locks.renaming(), pytest.raises(ckpt.StorageError, match="needs that lock only to rename a file"):
        LocalStorage(tmp_path).write("object", [b"new"], over=None)
    if taken:
        (tmp_path / "object").write_bytes(b"theirs")
        with pytest.raises(ckpt.ConflictError):
            storage.write("object", [b"new"], over=None)
    else:
        storage.write("object", [b"new"], over=None)
    assert storage.read("object") == (b"theirs" if taken else b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["object"]


@contextmanager
def _locked_by_another_process(path: Path) -> Iterator[None]:
    """A forked process holds an flock on a file until the context is left."""
    held_read, held_write = os.pipe()
    end_read, end_write = os.pipe()
    child = os.fork()
    if not child:
        os.close(end_write)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(held_write, b"x")
        os.read(end_read, 1)
        os._exit(0)
    os.close(end_read)
    os.read(held_read, 1)
    try:
        yield
    finally:
        os.close(end_write)
        os.waitpid(child, 0)
        os.close(held_read)
        os.close(held_write)


def _count_up(rank: int, root: str, times: int) -> None:
    version = LocalStorage.version

    def slowly(self: LocalStorage, key: str) -> str | None:
        found = version(self, key)
        time.sleep(0.005)  # between comparing and replacing
        return found

    LocalStorage.version = slowly  # type: ignore[method-assign]
    storage = LocalStorage(root)
    for _ in range(times):
        while True:
            seen = storage.version("count")
            try:
                storage.write("count", [b"%d" % (int(storage.read("count")) + 1)], over=seen)
            except ckpt.ConflictError:
                continue
            break


@pytest.mark.slow
def test_processes_that_count_by_compare_and_replace_lose_no_count(tmp_path: Path) -> None:
    root = tmp_path / "root"
    LocalStorage(root).write("count", [b"0"])
    jobs = [start_alone(str(tmp_path), _count_up, str(root), 15) for _ in range(3)]
    for job in jobs:
        job.join(DEADLINE)
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    assert LocalStorage(root).read("count") == b"45"

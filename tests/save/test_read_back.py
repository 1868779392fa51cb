"""Checkpoints are read back from the disk after their commit: what differs is reported and written again."""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import platform
import signal
import subprocess
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.formats.native.manifest import FileRecord, Manifest
from ckpt.root.catalog import mark_removal
from ckpt.save import read_back
from ckpt.save.read_back import CommittedFiles
from ckpt.storage import ANY, Buffer, LocalStorage
from ckpt.storage.local.storage import _is_cached
from ckpt.util.threads import _IOPRIO_SET, _NICER
from tests.helpers.byte_checkpoints import MOMENT
from tests.helpers.places import Folder, PassedOn, Place
from tests.helpers.processes import run_alone, run_ranks
from tests.helpers.training import exact

pytestmark = [pytest.mark.on_disk, pytest.mark.not_on_s3("the page cache is that of a local disk")]

ALWAYS = ckpt.SaveOptions(read_back=True)
MODEL = "a/model.safetensors"
MANIFEST = "a/manifest.json"


class Disk(LocalStorage):
    """A local folder in which something can happen between the write of a file and the moment when it is read back."""

    def __init__(self, root: Place | str) -> None:
        super().__init__(os.fspath(root))
        self.meanwhile: dict[str, list[Callable[[Path], object]]] = {}  # by key, once each
        self.seen: list[str] = []  # what was read back
        self.gate = threading.Event()  # open while files may be read back
        self.gate.set()
        self.waits = threading.Event()  # set when one waits for that
        self.patience = 60.0
        self.before_write: dict[str, Callable[[], object]] = {}  # by key, from the second time that it is written
        self.written: list[str] = []

    def evict(self, key: str) -> None:
        self.seen.append(key)
        happen = self.meanwhile.get(key)
        if happen:
            happen.pop(0)(self._root / key)
        super().evict(key)

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        if again and threading.current_thread().name == "ckpt-read-back":
            self.waits.set()
            assert self.gate.wait(self.patience)
        super().read_into(key, start, *buffers, again=again)

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        if key in self.written and key in self.before_write:
            self.before_write[key]()
        super().write(key, pieces, over=over)
        self.written.append(key)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def fail_to_read(path: Path) -> None:
    try:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    except OSError as error:
        raise ckpt.TransientError(f"could not read {path}: Input/output error.") from error


def model(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(600, 600)


def adapted() -> nn.Module:
    """A frozen base of a megabyte and more, and a small part that is trained."""
    live = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 2))
    live[0].requires_grad_(False)
    return live


def finish(manager: ckpt.StateManager) -> None:
    """Wait until nothing is being read back."""
    manager.wait()
    manager.session.saver.read_back.wait()


def disk_after_a_save(root: Folder, file: str, happens: Callable[[Path], object]) -> Disk:
    """A disk to which a checkpoint was saved, where this happened to a file of it before it was read back."""
    disk = Disk(root)
    disk.meanwhile[file] = [happens]
    with ckpt.StateManager(disk, model=model(), saving=ALWAYS) as manager:
        manager.save_state("a")
        finish(manager)
    return disk


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ckpt-read-back"]


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def loaded(root: Place, name: str) -> str:
    other = model(2)
    with ckpt.StateManager(root, model=other) as manager:
        manager.load_state(name)
    return exact(other.state_dict())


def cached(path: Path) -> bool:
    with open(path, "rb") as file:
        return _is_cached(file.fileno(), 0, path.stat().st_size)


class TestAFileThatTheDiskDoesNotReturn:
    @pytest.mark.parametrize("happens", [flip, cut_short, Path.unlink, fail_to_read])
    def test_is_reported_and_written_again(
        self,
        root: Folder,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
        happens: Callable[[Path], object],
    ) -> None:
        monkeypatch.setattr(read_back, "_REMOVAL", 0.0)
        disk, live = Disk(root), model()
        disk.meanwhile[MODEL] = [happens]
        with ckpt.StateManager(disk, model=live, saving=ALWAYS) as manager:
            manager.save_state("a")
            finish(manager)
            assert not manager.session.saver.root.damaged
        reported, repaired = errors(caplog)
        assert reported.startswith(f"the disk does not return what ckpt wrote to {root}/a: ")
        assert "model.safetensors" in reported
        assert repaired == f"ckpt wrote {root}/{MODEL} again, and it is intact now. Check the disk."
        assert ckpt.verify(root) == {"a": []}
        assert loaded(root, "a") == exact(live.state_dict())

    @pytest.mark.parametrize("path", ["manifest.json", "state.json", "model.safetensors"])
    def test_may_be_any_file_of_the_checkpoint(self, root: Folder, caplog: pytest.LogCaptureFixture, path: str) -> None:
        disk = Disk(root)
        disk.meanwhile[f"a/{path}"] = [flip]
        with ckpt.StateManager(disk, model=model(), saving=ALWAYS) as manager:
            manager.save_state("a")
            finish(manager)
        assert f"ckpt wrote {root}/a/{path} again" in caplog.text
        assert ckpt.verify(root) == {"a": []}

    def test_that_is_no_longer_in_memory_is_reported_and_the_one_before_is_resumed(
        self, root: Folder, caplog: pytest.LogCaptureFixture
    ) -> None:
        disk, live = Disk(root), model()
        with ckpt.StateManager(disk, model=live, saving=ALWAYS) as manager:
            manager.save_state("before", wait=True)
            finish(manager)
            disk.meanwhile[MODEL] = [flip]
            manager.save_state("a", wait=True)  # of tensors on the CPU, without a copy
            finish(manager)
            assert manager.session.saver.root.damaged == {"a"}
        assert errors(caplog)[1] == (
            f"ckpt could not repair {root}/{MODEL}: its bytes are no longer in memory. A resume skips {root}/a and "
            "takes the newest intact checkpoint: save again, and check the disk."
        )
        assert list(ckpt.verify(root)["a"])
        with ckpt.StateManager(root, model=model(2)) as manager:
            restored = manager.resume()
            assert restored is not None
            assert restored.name == "before"

    def test_after_it_was_written_again_is_damaged(self, root: Folder, caplog: pytest.LogCaptureFixture) -> None:
        disk = Disk(root)
        disk.meanwhile[MODEL] = [flip, flip]
        with ckpt.StateManager(disk, model=model(), saving=ALWAYS) as manager:
            manager.save_state("a")
            finish(manager)
            assert manager.session.saver.root.damaged == {"a"}
        assert ": it was written again, and still model.safetensors was altered" in caplog.text

    def test_and_cannot_be_written_again_is_damaged(self, root: Folder, caplog: pytest.LogCaptureFixture) -> None:
        def full() -> None:
            raise ckpt.FullError("no space left.")

        disk = Disk(root)
        disk.meanwhile[MODEL], disk.before_write[MODEL] = [flip], full
        with ckpt.StateManager(disk, model=model(), saving=ALWAYS) as manager:
            manager.save_state("a")
            finish(manager)
        assert ": it could not be written again (no space left). No other checkpoint is known" in caplog.text
        assert list(ckpt.verify(root)["a"])

    def test_is_not_written_again_with_other_bytes(
        self, root: Folder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = Disk(root)
        with ckpt.StateManager(disk, model=model(), saving=ALWAYS) as manager:
            snapshots = manager.session.saver.snapshots
            take, taken = snapshots.take, list[Any]()

            def take_noted(*args: Any) -> Any:
                taken.append(take(*args))
                return taken[0]

            def flip_both(path: Path) -> None:
                flip(path)
                list(taken[0].files["model.safetensors"].pieces())[-1][-1] ^= 1

            monkeypatch.setattr(snapshots, "take", take_noted)
            disk.meanwhile[MODEL] = [flip_both]
            manager.save_state("a")
            finish(manager)
        assert ": what is in memory does not match its hashes either" in caplog.text
        assert disk.written.count(MODEL) == 1

    def test_for_an_io_error_is_not_taken_for_damaged(self, root: Folder, caplog: pytest.LogCaptureFixture) -> None:
        disk = Disk(root)
        disk.meanwhile[MODEL] = [fail_to_read, fail_to_read]
        with ckpt.StateManager(disk, model=model(), saving=ALWAYS) as manager:
            manager.save_state("a")
            finish(manager)
            assert not manager.session.saver.root.damaged
        assert f"A resume that reaches {root}/a stops as long as ckpt can't read it" in caplog.text

    def test_for_a_reason_that_is_not_the_disks_is_left_as_it_is(
        self, root: Folder, caplog: pytest.LogCaptureFixture
    ) -> None:
        def deny(path: Path) -> None:
            raise ckpt.DeniedError("too many open files.")

        disk = Disk(root)
        disk.meanwhile[MODEL] = [deny]
        with ckpt.StateManager(disk, model=model(), saving=ALWAYS) as manager:
            manager.save_state("a")
            finish(manager)
        assert errors(caplog) == [f"ckpt committed {root}/a, but could not read it back: too many open files."]
        assert disk.written.count(MODEL) == 1

    @pytest.mark.parametrize("repairable", [True, False])
    def test_is_linked_from_only_if_it_was_repaired(self, root: Folder, repairable: bool) -> None:
        disk, live, frozen = Disk(root), adapted(), "model+frozen.safetensors"
        disk.meanwhile[f"a/{frozen}"] = [flip]
        with ckpt.StateManager(disk, model=live, saving=ALWAYS) as manager:
            manager.save_state("a", wait=not repairable)
            finish(manager)
            manager.save_state("b", wait=not repairable)
            finish(manager)
        assert (f"b/{frozen}" in disk.written) == (not repairable)
        assert [bool(problems) for problems in ckpt.verify(root).values()] == [False, not repairable]

    def test_and_may_not_outlive_a_crash_is_not_damaged(self, root: Folder, caplog: pytest.LogCaptureFixture) -> None:
        class Unsynced(Disk):
            def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
                super().write(key, pieces, over=over)
                if self.written.count(MODEL) == 2:
                    raise ckpt.NotDurableError("could not sync the folder.")

        disk = Unsynced(root)
        disk.meanwhile[MODEL] = [flip]
        with ckpt.StateManager(disk, model=model(), saving=ALWAYS) as manager:
            manager.save_state("a")
            finish(manager)
            assert not manager.session.saver.root.damaged
            assert "model.safetensors" not in manager.session.saver.root.links.files
        assert "again, but has not read it back: could not sync the folder. Check the disk" in caplog.text
        assert ckpt.verify(root) == {"a": []}

    def test_for_any_error_of_the_repair_is_reported(self, root: Folder, caplog: pytest.LogCaptureFixture) -> None:
        def no_memory() -> None:
            raise MemoryError("none left")

        disk = Disk(root)
        disk.meanwhile[MODEL], disk.before_write[MODEL] = [flip], no_memory
        with ckpt.StateManager(disk, model=model(), saving=ALWAYS) as manager:
            manager.save_state("a")
            finish(manager)
            assert manager.session.saver.root.damaged == {"a"}
        assert ": it could not be written again (MemoryError: none left)" in caplog.text

    def test_that_older_checkpoints_share_is_damaged_there_too(
        self, root: Folder, caplog: pytest.LogCaptureFixture
    ) -> None:
        disk, live, frozen = Disk(root), adapted(), "model+frozen.safetensors"
        with ckpt.StateManager(disk, model=live, saving=ALWAYS) as manager:
            manager.session.saver.read_back._wanted = False
            manager.save_state("a", wait=True)
            manager.session.saver.read_back._wanted = True
            disk.meanwhile[f"b/{frozen}"] = [flip]
            manager.save_state("b")
            finish(manager)
        assert errors(caplog)[1] == (
            f"ckpt wrote {root}/b/{frozen} again, and it is intact now. Check the disk. Older checkpoints share the "
            f"file that the disk did not return, and are as damaged as before: run `ckpt verify {root}`."
        )
        assert [bool(problems) for problems in ckpt.verify(root).values()] == [False, True]

    def test_is_mirrored_once_it_is_repaired(self, root: Folder) -> None:
        disk = Disk(root)
        failed = threading.Event()

        class Mirror(LocalStorage):
            def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
                if key == MODEL:
                    flipped.wait(60)
                try:
                    super().write(key, pieces, over=over)
                except ckpt.DamagedError:
                    failed.set()
                    raise

        flipped = threading.Event()

        def flip_and_copy(path: Path) -> None:
            flip(path)
            flipped.set()
            assert failed.wait(60)

        disk.meanwhile[MODEL] = [flip_and_copy]
        mirror = root.parent / "mirror"
        with ckpt.StateManager(disk, model=model(), saving=ALWAYS, mirror=Mirror(str(mirror))) as manager:
            manager.save_state("a")
            finish(manager)
        assert ckpt.verify(mirror) == {"a": []}


class TestAManifestThatTheDiskDoesNotReturn:
    def test_for_an_io_error_is_written_again(self, root: Folder, caplog: pytest.LogCaptureFixture) -> None:
        class Failing(Disk):
            def check(self, key: str) -> None:
                if key == MANIFEST and self.written.count(key) == 1:
                    fail_to_read(self._root / key)

            def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
                self.check(key)
                return super().read(key, start, stop)

            def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
                self.check(key)
                super().read_into(key, start, *buffers, again=again)

        with ckpt.StateManager(Failing(root), model=model(), saving=ALWAYS) as manager:
            manager.save_state("a")
            finish(manager)
        assert f"{root}/{MANIFEST} again, and it is intact now" in caplog.text

    def test_for_it_is_missing_is_written_again(
        self, root: Folder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(read_back, "_REMOVAL", 0.0)
        disk = Disk(root)
        disk.meanwhile[MANIFEST] = [Path.unlink]
        with ckpt.StateManager(disk, model=model(), saving=ALWAYS) as manager:
            manager.save_state("a")
            finish(manager)
        assert f"{root}/{MANIFEST} again, and it is intact now" in caplog.text
        assert ckpt.verify(root) == {"a": []}

    @pytest.mark.parametrize("happens", ["removal begun", "its copy gone"])
    def test_is_no_false_alarm_where_its_checkpoint_is_removed(
        self, root: Folder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, happens: str
    ) -> None:
        def remove(path: Path) -> None:
            path.unlink()
            if happens == "removal begun":
                mark_removal(LocalStorage(root), "a", [], "", over=None)
            else:
                (path.parent / "manifest.copy.json").unlink()

        monkeypatch.setattr(read_back, "_REMOVAL", 0.0)
        disk = disk_after_a_save(root, MANIFEST, remove)
        assert not errors(caplog)
        assert disk.written.count(MANIFEST) == 1

    @pytest.mark.slow
    def test_may_have_several_blocks(self, root: Folder) -> None:
        block = FileRecord(name="x", path="x", size=1_000_000, blocks=("0" * 32,) * 1_000_000, block_size=1)
        manifest = Manifest(name="a", id="1", sequence=1, created=MOMENT, run="", files=(block,))
        storage = LocalStorage(root)
        storage.write(MANIFEST, [manifest.to_bytes()])
        files = CommittedFiles("a", "1", (), {}).with_manifest(manifest)
        (record,) = files.records
        assert len(record.blocks) == 2
        assert files.problem(storage, record, memoryview(bytearray(8 << 20)), lambda _: None) is None


def test_any_error_of_the_thread_is_one_warning(
    root: Folder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(read_back, "spare", fail)
    monkeypatch.setattr(read_back, "WORTH_IT", 0)
    with ckpt.StateManager(root, model=model()) as manager:
        manager.save_state("a")
        finish(manager)
    (warning,) = errors(caplog)
    assert warning.startswith(f"ckpt committed {root}/a, but could not read it back: OSError: ")


def evictable(root: Folder) -> None:
    """Skip where this test itself cannot have a file leave the page cache: then nobody can."""
    path = root / "evictable"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(path):
        pytest.skip("this filesystem keeps its files in memory, or this kernel does not say what is cached")
    path.unlink()


@pytest.mark.on_linux
def test_the_page_cache_has_the_checkpoint_afterwards(root: Folder) -> None:
    live = nn.Linear(3000, 3000)  # written in blocks, with direct I/O
    for name, read in (("cold", False), ("warm", None)):
        with ckpt.StateManager(root, model=live, saving=ckpt.SaveOptions(read_back=read)) as manager:
            manager.resume()
            manager.save_state(name)
            finish(manager)
    evictable(root)
    assert not cached(root / "cold" / "model.safetensors")
    assert cached(root / "warm" / "model.safetensors")


@pytest.mark.on_linux
def test_what_is_in_the_page_cache_already_is_read_from_the_disk(root: Folder) -> None:
    LocalStorage(root).write("x", [bytes(1 << 20)])
    (root / "x").read_bytes()
    evictable(root)
    assert cached(root / "x")
    LocalStorage(root).evict("x")
    assert not cached(root / "x")
    with pytest.raises(ckpt.AbsentError):
        LocalStorage(root).evict("y")


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_it_is_read_at_a_lower_priority_than_that_of_training(root: Folder) -> None:
    found: list[tuple[int, int]] = []
    disk = Disk(root)
    disk.meanwhile[MODEL] = [lambda _: found.append(priorities())]
    with ckpt.StateManager(disk, model=model(), saving=ALWAYS) as manager:
        before = priorities()
        manager.save_state("a")
        finish(manager)
        assert priorities() == before
    assert found[0][0] == min(before[0] + _NICER, 19)
    assert found[0][1] >> 13 == 3  # idle


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_a_repair_is_written_at_the_usual_priority(root: Folder) -> None:
    found: list[int] = []
    disk = Disk(root)
    disk.meanwhile[MODEL] = [flip]
    disk.before_write[MODEL] = lambda: found.append(priorities()[1] >> 13)
    disk.meanwhile[MANIFEST] = [lambda _: found.append(priorities()[1] >> 13)]
    with ckpt.StateManager(disk, model=model(), saving=ALWAYS) as manager:
        manager.save_state("a")
        finish(manager)
    assert found == [2, 3]  # best effort, and idle again


def priorities() -> tuple[int, int]:
    """How nice this thread is, and its I/O priority."""
    get = _IOPRIO_SET[platform.machine()] + 1
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    return nice, ctypes.CDLL(None).syscall(get, 1, 0)


def test_a_file_that_is_linked_was_read_back_when_it_was_written(root: Folder) -> None:
    disk = Disk(root)
    with ckpt.StateManager(disk, model=adapted(), saving=ALWAYS) as manager:
        for name in "abc":
            manager.save_state(name)
            finish(manager)
    assert [key for key in disk.seen if "frozen" in key] == ["a/model+frozen.safetensors"]
    assert [key for key in disk.seen if "model.s" in key] == [f"{name}/model.safetensors" for name in "abc"]


class TestWhen:
    def read(self, root: Any, wanted: bool | None) -> bool:
        with ckpt.StateManager(root, model=model(), saving=ckpt.SaveOptions(read_back=wanted)) as manager:
            manager.save_state("a")
            finish(manager)
        return MODEL in root.seen

    @pytest.mark.parametrize(("wanted", "happens"), [(None, False), (True, True), (False, False)])
    def test_what_is_small_is_read_back_only_if_it_is_asked_for(
        self, root: Folder, wanted: bool | None, happens: bool
    ) -> None:
        assert self.read(Disk(root), wanted) == happens

    @pytest.mark.parametrize(("free", "wanted", "happens"), [(1, None, True), (-2, None, False), (-2, True, True)])
    def test_memory_is_plentiful_if_what_was_written_can_be_spared(
        self, root: Folder, monkeypatch: pytest.MonkeyPatch, free: int, wanted: bool | None, happens: bool
    ) -> None:
        monkeypatch.setattr(read_back, "WORTH_IT", 0)
        monkeypatch.setattr(read_back, "spare", lambda: size(root) + free)
        assert self.read(Disk(root), wanted) == happens

    @pytest.mark.parametrize(("wanted", "happens"), [(None, False), (True, True)])
    def test_a_network_filesystem_is_read_back_only_if_it_is_asked_for(
        self, root: Folder, monkeypatch: pytest.MonkeyPatch, wanted: bool | None, happens: bool
    ) -> None:
        monkeypatch.setattr(read_back, "WORTH_IT", 0)
        monkeypatch.setattr(read_back, "is_on_network", lambda place: place == os.path.realpath(root))
        assert self.read(Disk(root), wanted) == happens

    def test_the_ranks_of_a_host_share_its_memory(self, root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(read_back, "WORTH_IT", 0)
        monkeypatch.setattr(read_back, "spare", lambda: size(root))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # the others have written nothing
        assert self.read(Disk(root), None)

    def test_a_storage_without_a_page_cache_is_not_read_back(self, root: Folder) -> None:
        live = model()
        with ckpt.StateManager(PassedOn(root), model=live, saving=ALWAYS) as manager:
            manager.save_state("a")
            finish(manager)
            assert not threads()
        assert loaded(root, "a") == exact(live.state_dict())


def size(root: Folder) -> int:
    """Bytes of the checkpoint's files, without its manifest."""
    return Manifest.from_bytes((root / MANIFEST).read_bytes(), MANIFEST).size


class TestStopping:
    """The gate is closed: what waited for the reading would wait for a minute, and fail."""

    def begin(self, disk: Disk, live: nn.Module) -> ckpt.StateManager:
        manager = ckpt.StateManager(disk, model=live, saving=ALWAYS)
        manager.save_state("before", wait=True)
        manager.session.saver.read_back.wait()
        disk.gate.clear()
        disk.waits.clear()
        manager.save_state("a", wait=True)
        assert disk.waits.wait(60)
        disk.seen.clear()
        return manager

    def ended(self, disk: Disk) -> bool:
        """Open the gate, and return whether the reading ends there."""
        (reading,) = read_back._under_way
        assert not disk.gate.is_set()
        disk.gate.set()
        assert reading.done.wait(60)
        return disk.seen == []

    @pytest.mark.parametrize(
        "call",
        [
            lambda manager: manager.save_state("b", wait=True),
            lambda manager: manager.load_state("before"),
            lambda manager: manager.close(),
        ],
        ids=["save", "load", "close"],
    )
    def test_a_save_a_load_and_close_stop_it_and_do_not_wait(
        self, root: Folder, caplog: pytest.LogCaptureFixture, call: Callable[[ckpt.StateManager], object]
    ) -> None:
        disk = Disk(root)
        manager = self.begin(disk, model())
        manager.session.saver.read_back._wanted = False  # for what the call may begin
        call(manager)
        assert self.ended(disk)
        manager.close()
        assert not errors(caplog)
        assert set(ckpt.verify(root)) >= {"before", "a"}

    def test_a_save_stops_it_before_the_copy_of_the_state_is_overwritten(
        self, root: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = Disk(root)
        with self.begin(disk, model()) as manager:
            snapshots = manager.session.saver.snapshots
            take, stopped = snapshots.take, list[bool]()

            def take_once_stopped(*args: Any) -> Any:
                stopped.append(self.ended(disk))
                return take(*args)

            monkeypatch.setattr(snapshots, "take", take_once_stopped)
            manager.save_state("b")
            manager.wait()
        assert stopped == [True]

    def test_wait_neither_waits_for_it_nor_stops_it(self, root: Folder) -> None:
        disk = Disk(root)
        with self.begin(disk, model()) as manager:
            manager.wait()
            assert not self.ended(disk)
            assert MANIFEST in disk.seen

    def test_a_manager_that_is_dropped_stops_it_and_releases_its_root(self, root: Folder) -> None:
        disk = Disk(root)
        manager = self.begin(disk, model())
        del manager
        gc.collect()
        with ckpt.StateManager(root, model=model()) as other:
            other.resume()  # locks the root
        assert self.ended(disk)

    def test_a_repair_is_finished_first(self, root: Folder, caplog: pytest.LogCaptureFixture) -> None:
        disk, begun, gate, order = Disk(root), threading.Event(), threading.Event(), []

        def write_slowly() -> None:
            begun.set()
            assert gate.wait(60)
            order.append("written")

        def stop() -> None:
            manager.session.saver.read_back.stop()
            order.append("stopped")

        disk.meanwhile[MODEL], disk.before_write[MODEL] = [flip], write_slowly
        with ckpt.StateManager(disk, model=model(), saving=ALWAYS) as manager:
            manager.save_state("a")
            manager.wait()
            assert begun.wait(60)
            stopping = threading.Thread(target=stop)
            stopping.start()
            stopping.join(0.2)
            gate.set()
            stopping.join()
            assert order == ["written", "stopped"]
            assert not manager.session.saver.root.damaged
            assert "model.safetensors" not in manager.session.saver.root.links.files
        assert errors(caplog)[1] == (
            f"ckpt wrote {root}/{MODEL} again, but has not read it back: a save, a load or close() has come before. "
            f"Check the disk, and run `ckpt verify {root}/a`."
        )
        assert ckpt.verify(root) == {"a": []}

    def test_what_is_found_too_late_is_reported_and_not_repaired(
        self, root: Folder, caplog: pytest.LogCaptureFixture
    ) -> None:
        disk, stopped, readings = Disk(root), threading.Event(), list[Any]()
        manager = ckpt.StateManager(disk, model=model(), saving=ALWAYS)

        def stop(path: Path) -> None:
            readings.append(manager.session.saver.read_back._reading)
            manager.session.saver.read_back.stop()
            path.unlink()
            stopped.set()

        disk.meanwhile[MODEL] = [stop]
        manager.save_state("a")
        assert stopped.wait(60)
        assert readings[0].done.wait(60)
        manager.close()
        assert ": a save, a load or close() has come before" in caplog.text
        assert disk.written.count(MODEL) == 1
        assert manager.session.saver.root.damaged == {"a"}
        assert "model.safetensors" not in manager.session.saver.root.links.files

    def test_it_frees_the_copy_of_the_state_on_the_thread_that_stops_it(self, root: Folder) -> None:
        """Freed by a daemon thread while the interpreter finalizes, a tensor would abort the process."""
        disk = Disk(root)
        disk.gate.clear()
        manager = ckpt.StateManager(disk, model=model(), saving=ALWAYS)
        manager.save_state("a")
        assert disk.waits.wait(60)
        (reading,) = read_back._under_way
        assert "model.safetensors" in reading._files.in_memory
        manager.close()
        assert not reading._files.in_memory
        assert not reading.done.is_set()
        disk.gate.set()
        assert reading.done.wait(60)


class TestAProgramThatEnds:
    def test_waits_until_the_thread_is_out_of_its_files(self, root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(read_back, "_PATIENCE", 60.0)
        disk = Disk(root)
        disk.gate.clear()
        with ckpt.StateManager(disk, model=model(), saving=ALWAYS) as manager:
            manager.save_state("a")
            assert disk.waits.wait(60)
            (reading,) = read_back._under_way
            ending = threading.Thread(target=read_back._stop_all)
            ending.start()
            ending.join(0.2)
            assert ending.is_alive()
            disk.gate.set()
            ending.join()
            assert reading.done.is_set()

    @pytest.mark.slow
    def test_after_its_manager_was_dropped_ends_properly(self, root: Folder) -> None:
        script = """
            import os, sys, ckpt
            from torch import nn
            def main(number):
                saving = ckpt.SaveOptions(read_back=True)
                manager = ckpt.StateManager(f"{sys.argv[1]}-{number}", model=nn.Linear(3000, 3000), saving=saving)
                manager.save_state("a")
                manager.wait()
            for number in range(3):
                if not os.fork():
                    main(number)
                    break
                assert os.wait()[1] == 0
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(root)], check=True, timeout=300)

    @pytest.mark.slow
    def test_does_not_wait_for_it(self, root: Folder) -> None:
        script = """
            import sys, ckpt
            from tests.save.test_read_back import ALWAYS, Disk, model
            disk = Disk(sys.argv[1])
            disk.gate.clear()
            disk.patience = 600
            manager = ckpt.StateManager(disk, model=model(), saving=ALWAYS)
            manager.save_state("a", wait=True)
            assert disk.waits.wait(60)
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(root)], check=True, timeout=300)
        assert ckpt.verify(root) == {"a": []}

    @pytest.mark.slow
    def test_finishes_its_save_and_reads_nothing_back(self, root: Folder) -> None:
        script = """
            import sys, ckpt
            from tests.save.test_read_back import ALWAYS, Disk, model
            class Slow(Disk):
                def write(self, *args, **options):
                    import threading
                    threading.main_thread().join()
                    super().write(*args, **options)
                def evict(self, key):
                    print("read back", key)
            ckpt.StateManager(Slow(sys.argv[1]), model=model(), saving=ALWAYS).save_state("a")
        """
        command = [sys.executable, "-c", textwrap.dedent(script), str(root)]
        done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
        assert "read back" not in done.stdout + done.stderr
        assert ckpt.verify(root) == {"a": []}


def _forks(rank: int, root: str) -> None:
    disk = Disk(root)
    disk.gate.clear()
    with ckpt.StateManager(disk, model=model(), saving=ALWAYS) as manager:
        manager.save_state("a", wait=True)
        assert disk.waits.wait(60)
        child = os.fork()
        if not child:
            signal.alarm(60)
            manager.session.saver.read_back.stop()
            manager.session.saver.read_back.wait()
            manager.close()
            read_back._stop_all()
            os._exit(0 if not threads() else 1)
        assert os.waitpid(child, 0)[1] == 0
        (reading,) = read_back._under_way
        disk.gate.set()
        assert reading.done.wait(60)
    assert MANIFEST in disk.seen  # the child has not stopped it


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_has_none(root: Folder) -> None:
    assert run_alone(_forks, str(root)) == 0


def remove_manifest_first(path: Path) -> None:
    """As retention does."""
    for name in ("manifest.json", "manifest.copy.json"):
        (path.parent / name).unlink()
    path.unlink()


def remove_manifest_last(path: Path) -> None:
    """As a person may."""
    path.unlink()
    manifests = [path.parent / name for name in ("manifest.json", "manifest.copy.json")]
    threading.Timer(0.05, lambda: deque(map(Path.unlink, manifests), 0)).start()


def replace_checkpoint(path: Path) -> None:
    there = path.parent / "manifest.json"
    manifest = Manifest.from_bytes(there.read_bytes(), "")
    there.write_bytes(replace(manifest, id="another").to_bytes())
    flip(path)


@pytest.mark.parametrize("happens", [remove_manifest_first, remove_manifest_last, replace_checkpoint])
def test_a_checkpoint_that_was_removed_or_replaced_is_no_false_alarm(
    root: Folder,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[Path], object],
) -> None:
    monkeypatch.setattr(read_back, "_REMOVAL", 60.0)
    disk = disk_after_a_save(root, MODEL, happens)
    assert not errors(caplog)
    assert disk.written.count(MODEL) == 1


def test_a_checkpoint_that_is_replaced_before_its_repair_is_not_repaired(
    root: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    class Replacing(Disk):
        @contextmanager
        def lock(self, key: str, *, shared: bool = False, note: str = "") -> Iterator[None]:
            if shared and threading.current_thread().name == "ckpt-read-back":
                replace_checkpoint(self._root / MODEL)
            with super().lock(key, shared=shared, note=note):
                yield

    disk = Replacing(root)
    disk.meanwhile[MODEL] = [flip]
    with ckpt.StateManager(disk, model=model(), saving=ALWAYS) as manager:
        manager.save_state("a")
        finish(manager)
    assert len(errors(caplog)) == 1  # what was found before
    assert disk.written.count(MODEL) == 1


COPY = "manifest.copy.json"  # a second manifest, which is not read back


def _each_its_own(rank: int, root: str) -> None:
    torch.manual_seed(1)
    live = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    disk = Disk(root)
    if rank == 1:
        disk.meanwhile["a/model-00001.safetensors"] = [flip]
    with ckpt.StateManager(disk, model=live, saving=ckpt.SaveOptions(layout="sharded", read_back=True)) as manager:
        manager.save_state("a")
        finish(manager)
        assert sorted(set(disk.seen)) == sorted(
            {key for key in disk.written if not key.startswith(".") and not key.endswith(("/.saving", COPY))}
        )
        (Path(root).parent / f"read-{rank}").write_text("\n".join(sorted(set(disk.seen))))


@pytest.mark.slow
def test_every_rank_reads_back_what_it_has_written(root: Folder) -> None:
    assert run_ranks(2, _each_its_own, str(root)) == [0, 0]
    first, second = ((root.parent / f"read-{rank}").read_text().split("\n") for rank in (0, 1))
    assert not set(first) & set(second)
    assert {*first, *second} == {f"a/{name}" for name in (root / "a").files() if name != COPY}
    assert ckpt.verify(root) == {"a": []}

"""A second user beside a run: who owns a folder in the root, or may only read it, gets nothing out and stops nobody."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import ckpt
from ckpt.errors import ConfigError, LockedError, StorageError
from ckpt.memory.keeper_process import require_keeper
from ckpt.memory.place import MemoryPlace, remove_expired
from ckpt.memory.slot_storage import hold_memory, slot_storage
from ckpt.storage import LocalStorage
from ckpt.storage.local import locks
from tests.helpers.byte_checkpoints import save
from tests.memory.deserted import no_keeper_left

NOBODY = 65534
TRIES = 200
RUNS = 20  # tries of a whole run
pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")]

# exchanges a folder of its own and a link that leads out, atomically, as fast as it can; prints whether it can
EXCHANGE = """
libc = ctypes.CDLL(None)
theirs, link = os.fsencode(sys.argv[1]), os.fsencode(sys.argv[2])
print(sum(libc.renameat2(-100, theirs, -100, link, 2) == 0 for _ in range(2)), flush=True)
while os.getppid() == parent:
    libc.renameat2(-100, theirs, -100, link, 2)
"""
LOCK = """
held = []
for path in sys.argv[1:]:
    try:
        held.append(os.open(path, os.O_RDONLY))
        fcntl.flock(held[-1], fcntl.LOCK_EX)
    except OSError:
        pass
print(len(held), flush=True)
time.sleep(600)
"""
# tries whatever one can do with a path, and prints how often it could
MEDDLE = """
done = 0
for path in sys.argv[1:]:
    for act in (
        lambda: os.open(path, os.O_RDONLY), lambda: os.open(path, os.O_RDWR), lambda: os.listdir(path),
        lambda: os.open(path + "/x.asked", os.O_CREAT | os.O_WRONLY), lambda: os.symlink("/x", path + "/x.asked"),
        lambda: os.link(path, path + ".x"), lambda: os.rename(path, path + ".x"), lambda: os.chmod(path, 0o777),
        lambda: os.unlink(path), lambda: os.rmdir(path), lambda: os.utime(path), lambda: os.truncate(path, 0),
    ):
        try:
            act()
            done += 1
        except OSError:
            pass
for process in sys.argv[1].split(","):
    try:
        os.kill(int(process), 0)
        done += 1
    except OSError:
        pass
print(done, flush=True)
"""


@contextmanager
def nobody(code: str, *arguments: object, first: str = "") -> Iterator[int]:
    """Another user's program, once it has printed how often it succeeded. `first` runs before it becomes his."""
    become = f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY}); parent = os.getppid()"
    program = "\n".join(("import ctypes, fcntl, os, sys, time", first, become, code))
    command = [sys.executable, "-I", "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline().strip() or 0)
        finally:
            process.kill()


@contextmanager
def exchanged(theirs: Path, link: Path) -> Iterator[None]:
    """While another user exchanges them. That he can is asked for: who cannot enter the folder races against nobody."""
    with nobody(EXCHANGE, theirs, link) as could:
        assert could == 2
        yield


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody may enter: pytest's own are closed to others, by any pytest of this machine."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def root(place: Path) -> Path:
    """A root to which others may add: `theirs` belongs to another user."""
    root, outside = place / "root", place / "outside"
    for folder in (root, root / "theirs", outside):
        folder.mkdir()
    for name in ("object", ".left.ckpt-tmp"):
        (outside / name).write_bytes(b"outside")
    (root / "ours").write_bytes(b"ours")
    (root / "link").symlink_to(outside)
    for path in (root / "theirs", root / "link"):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    root.chmod(0o1777)
    return root


def seen(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class TestAFolderThatIsExchangedForALink:
    """Nothing outside the root is read, written, linked, locked, listed or removed, however the race ends."""

    def race(self, root: Path, action: Callable[[LocalStorage], object], until: str = "done") -> set[str]:
        """What becomes of each try: done, or the kind of its error. A busy machine is given more tries, until one ends
        so."""
        outside, became, end = root.parent / "outside", set[str](), time.monotonic() + 30
        before, storage = seen(outside), LocalStorage(root)
        with exchanged(root / "theirs", root / "link"):
            for number in itertools.count():
                if number >= TRIES and (until in became or time.monotonic() > end):
                    break
                try:
                    action(storage)
                    became.add("done")
                except (StorageError, ConfigError) as error:
                    became.add(type(error).__name__)
                assert seen(outside) == before
        return became

    def test_is_not_written_through(self, root: Path) -> None:
        became = self.race(root, lambda storage: storage.write("theirs/new", [b"x"]), until="OutsideError")
        assert "OutsideError" in became

    def test_nor_in_a_group(self, root: Path) -> None:
        def write(storage: LocalStorage) -> None:
            with storage.grouped():
                for name in "abc":
                    storage.write(f"theirs/{name}", [b"x"])

        assert "done" in self.race(root, write)

    def test_nor_linked_into(self, root: Path) -> None:
        assert "done" in self.race(root, lambda storage: storage.link("ours", "theirs/object"))

    def test_nor_linked_from(self, root: Path) -> None:
        def link(storage: LocalStorage) -> None:
            storage.link("theirs/object", "copy")
            assert storage.read("copy") != b"outside"

        (root / "theirs" / "object").write_bytes(b"ours")
        assert "done" in self.race(root, link)

    def test_nor_read(self, root: Path) -> None:
        def read(storage: LocalStorage) -> None:
            buffer = bytearray(4)
            storage.read_into("theirs/object", 0, memoryview(buffer))
            assert storage.read("theirs/object") == bytes(buffer) == b"ours"

        (root / "theirs" / "object").write_bytes(b"ours")
        assert "done" in self.race(root, read)

    def test_nor_listed(self, root: Path) -> None:
        def look(storage: LocalStorage) -> None:
            assert not [entry.key for entry in storage.list() if "object" in entry.key]

        assert self.race(root, look) == {"done"}

    @pytest.mark.parametrize("shared", [False, True])
    def test_nor_locked(self, root: Path, shared: bool) -> None:
        def lock(storage: LocalStorage) -> None:
            with storage.lock("theirs/object", shared=shared):
                pass

        (root / "theirs" / "object").write_bytes(b"ours")
        assert "done" in self.race(root, lock)

    @pytest.mark.parametrize("remove", ["delete", "sweep"])
    def test_nor_emptied(self, root: Path, remove: str) -> None:
        def empty(storage: LocalStorage) -> None:
            with suppress(OSError):
                (root / "theirs" / "kept").write_bytes(b"")
            (root.parent / "outside" / "kept").unlink(missing_ok=True)
            storage.delete(["theirs/object"]) if remove == "delete" else storage.sweep("theirs")

        assert "done" in self.race(root, empty)


class TestACheckpointThatIsExchangedForALink:
    """Whoever owns one checkpoint's folder neither leads a run out of its root nor stops it, and what is named ends."""

    @pytest.fixture
    def run(self, place: Path) -> Path:
        """A root with two checkpoints, one of which is another user's; what his link leads to is like it."""
        self.save(place / "root", "ours", "theirs")
        root = place / "root"
        shutil.copytree(root / "theirs", place / "outside")
        (root / "link").symlink_to(place / "outside")
        for path in (root / "theirs", *(root / "theirs").rglob("*"), root / "link"):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        root.chmod(0o1777)
        return root

    def save(self, root: Path, *names: str, **options: Any) -> str | None:
        with ckpt.StateManager(root, model=nn.Linear(4, 4), **options) as manager:
            found = manager.resume()
            for name in names:
                manager.step()
                manager.save_state(name, wait=True)
        return found.name if found else None

    def race(self, root: Path, act: Callable[[int], object], *, to_an_error: bool = False) -> set[str]:
        """What becomes of each try; what is outside stays as it is, with the same inodes and times. With `to_an_error`,
        a busy machine is given more tries, until one fails."""
        outside, became, end = root.parent / "outside", set[str](), time.monotonic() + 30

        def facts() -> list[tuple[str, int, int, int]]:
            found = sorted((path.name, path.stat()) for path in outside.iterdir())
            return [(name, status.st_ino, status.st_nlink, status.st_mtime_ns) for name, status in found]

        before = facts(), seen(outside)
        with exchanged(root / "theirs", root / "link"):
            for number in itertools.count():
                if number >= RUNS and (not to_an_error or became - {"done"} or time.monotonic() > end):
                    break
                try:
                    act(number)
                    became.add("done")
                except ckpt.CkptError as error:
                    became.add(type(error).__name__)
                assert (facts(), seen(outside)) == before
        return became

    @pytest.mark.parametrize("options", [{"keep": ckpt.Keep(last=1)}, {"keep": ckpt.Keep(last=3)}], ids=["1", "3"])
    def test_saves_and_retention_go_on(self, run: Path, options: dict[str, Any]) -> None:
        assert self.race(run, lambda number: self.save(run, f"s{number}", **options)) == {"done"}

    def test_so_does_a_mirror(self, run: Path) -> None:
        mirror = run.parent / "mirror"
        assert self.race(run, lambda number: self.save(run, f"s{number}", mirror=mirror)) == {"done"}
        assert ckpt.verify(mirror)[f"s{RUNS - 1}"] == []

    @pytest.mark.parametrize("reader", ["resume", "verify", "list", "pull", "prune"])
    def test_what_looks_at_the_whole_root_takes_the_others(self, run: Path, reader: str) -> None:
        def pull(number: int) -> None:
            target = run.parent / f"pulled-{number}"
            with suppress(
                ckpt.DamagedError
            ):  # what was exchanged while it was copied is named once the others are there
                ckpt.pull(run, target)
            assert ckpt.verify(target)["ours"] == []

        readers: dict[str, Callable[[int], object]] = {
            "resume": lambda number: self.save(run),
            "verify": lambda number: ckpt.verify(run),
            "list": lambda number: ckpt.list_checkpoints(run),
            "pull": pull,
            "prune": lambda number: ckpt.prune(run, keep=ckpt.Keep(last=1)),
        }
        assert self.race(run, readers[reader]) == {"done"}

    @pytest.mark.parametrize("reader", ["load", "merge", "save"])
    def test_what_names_it_gets_it_or_one_error(self, run: Path, reader: str) -> None:
        readers: dict[str, Callable[[int], object]] = {
            "load": lambda number: ckpt.load_model(run / "theirs", nn.Linear(4, 4)),
            "merge": lambda number: ckpt.merge(run / "theirs", run.parent / f"{number}.safetensors"),
            "save": lambda number: self.save(run, "theirs"),
        }
        assert self.race(run, readers[reader], to_an_error=True) - {"done"}


class TestWhoMayOnlyRead:
    """A user who may read a root, and locks all that he can open there, stops neither saves nor loads."""

    def test_stops_nobody(self, place: Path) -> None:
        root = place / "root"
        storage = LocalStorage(root)
        save(storage, "step-1")
        root.chmod(0o755)
        with storage.lock(".lock", note="the run"), storage.lock("step-1", shared=True):
            files = [path for path in root.rglob("*") if path.name.startswith(".")]
            assert len(files) >= 2
            with nobody(LOCK, root, root / "step-1", *files) as opened:
                assert opened == 2 + len([path for path in files if path.stat().st_mode & 0o044])  # two folders
                assert not [path.name for path in files if path.name.endswith("lock") and path.stat().st_mode & 0o077]
                storage.write("step-2/object", [b"x"], over=None)
                with storage.lock("step-1", shared=True), storage.lock("step-2"):
                    pass
        with nobody(LOCK, root, root / "step-1", root / ".lock"), storage.lock(".lock", note="the next run"):
            assert ckpt.verify(str(root)) == {"step-1": []}

    def test_reads_without_a_lock_and_is_not_refused(self, place: Path) -> None:
        root = place / "root"
        save(LocalStorage(root), "step-1")
        root.chmod(0o755)
        code = "with LocalStorage(sys.argv[1]).lock('step-1', shared=True): print(1, flush=True)"
        with nobody(code, root, first="from ckpt.storage import LocalStorage") as read:
            assert read == 1

    def test_whoever_may_write_there_too_may_lock(self, place: Path) -> None:
        for mode, expected in ((0o755, 0o600), (0o775, 0o660), (0o777, 0o666), (0o1777, 0o600)):
            place.chmod(mode)
            with LocalStorage(place).lock(".lock"):
                assert stat.S_IMODE((place / ".lock").stat().st_mode) == expected

    def test_a_lock_that_somebody_keeps_is_waited_for_and_its_holder_named(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(locks, "_PATIENCE", 0.2)
        (place / "root").mkdir()
        (place / "root" / ".renames.ckpt-lock").touch(mode=0o644)  # as somebody may put it there
        (place / "root" / ".step.ckpt-lock").touch(mode=0o644)
        storage = LocalStorage(place / "root")
        storage.write("a", [b"old"])
        with nobody(LOCK, place / "root" / ".renames.ckpt-lock", place / "root" / ".step.ckpt-lock") as opened:
            assert opened == 2
            with pytest.raises(StorageError, match=r"by process \d+ of user nobody, running since 20") as caught:
                storage.write("a", [b"x"], over=storage.version("a"))
            assert not isinstance(caught.value, LockedError)  # nobody takes "a" to be in use
            with pytest.raises(LockedError, match="of user nobody"), storage.lock("step"):
                pass
        storage.write("a", [b"x"], over=storage.version("a"))
        assert storage.read("a") == b"x"


@pytest.fixture
def memory(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Shared memory as systems have it: everybody may add to it, and remove what is his own."""
    folder = place / "memory"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(folder))
    monkeypatch.setenv("CKPT_MEMORY_KEEPER", "on")
    with no_keeper_left(folder):
        yield folder


class TestSharedMemory:
    """Snapshots in memory, and the keeper that holds them, are out of another user's reach."""

    def test_nothing_of_a_run_or_its_keeper_can_be_read_written_locked_or_asked_for(self, memory: Path) -> None:
        run = MemoryPlace.create("/run", root_shown="/run")
        hold_memory(run)
        keeper = require_keeper(run)
        storage = slot_storage(run)
        storage.write("step-1/model", [b"x" * (8 << 20)])
        assert any("/proc/" in os.readlink(path) for path in run.path.rglob("*") if path.is_symlink())  # it holds it
        opened = [
            f"/proc/{process}/fd/{number}" for process in (keeper.process, os.getpid()) for number in range(3, 40)
        ]
        paths = [run.path, *run.path.rglob("*"), *opened, f"/proc/{keeper.process}/mem"]
        (memory.parent / "open").mkdir()
        (memory.parent / "open").chmod(0o777)
        for there, tries in ((paths, False), ([memory.parent / "open"], True)):
            with nobody(MEDDLE, f"{keeper.process},{os.getpid()}", *there) as done:
                assert bool(done) is tries
        assert storage.read("step-1/model") == b"x" * (8 << 20)
        run.remove()

    def test_a_folder_that_he_exchanges_for_a_link_to_a_deserted_run_is_neither_found_nor_emptied(
        self, memory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CKPT_MEMORY_LINGER", "0.001")
        elsewhere, theirs, link = memory.parent / "elsewhere", memory / f"ckpt-{'a' * 32}", memory / f"ckpt-{'b' * 32}"
        left = MemoryPlace.create("/run", root_shown="/run")
        left.release()
        left.path.rename(elsewhere)  # deserted, and out of the folder in which runs are looked for
        before = sorted(path.name for path in elsewhere.iterdir())
        theirs.mkdir(mode=0o700)
        link.symlink_to(elsewhere)
        for path in (theirs, link):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        with exchanged(theirs, link):
            for _ in range(TRIES):
                assert MemoryPlace.find("/run") is None
                assert remove_expired() == []
        assert sorted(path.name for path in elsewhere.iterdir()) == before
        for path in (theirs, link):  # whichever is which now
            path.unlink() if path.is_symlink() else path.rmdir()

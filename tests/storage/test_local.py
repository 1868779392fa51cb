from __future__ import annotations

import errno
import fcntl
import gc
import json
import math
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from ckpt.errors import ConfigError, ConflictError, FullError, LockedError, StorageError, TruncatedError
from ckpt.root.catalog import LOCK
from ckpt.storage import LocalStorage, Storage
from ckpt.storage.local.files import TEMPORARY, Tree, WriteGroup
from tests.helpers.storage_contract import StorageContract, sizes

NOBODY = 65534

pytestmark = pytest.mark.on_disk


def child(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A real process. It ends at the latest when its standard input is closed, so that none is ever left behind."""
    command = [sys.executable, "-c", f"import os, sys\nfrom ckpt.storage import LocalStorage\n{script}"]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    """The next line that a child prints. Empty if it has died."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def outcome(script: str, *arguments: object) -> list[str]:
    """Run a script that ends by itself; what it printed as JSON."""
    with child(script, *arguments) as process:
        printed, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    answer = json.loads(printed)
    assert isinstance(answer, list)
    return answer


def everything(root: Path) -> set[str]:
    """Every file below a directory, whether a storage lists it or not."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


ATTEMPT = """
import json
def attempt(action):
    try:
        action()
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]))
    else:
        print(json.dumps(["nothing", "was raised"]))
"""

# Permissions do not bind root: a child that is nobody stands for a user without rights.
AS_NOBODY = f"""
if os.getuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
"""


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "made" / "when" / "needed")

    def test_a_root_is_made_by_the_first_write_only(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path / "root")
        assert sizes(storage) == {}
        storage.delete(["absent"])
        storage.sweep()
        assert not (tmp_path / "root").exists()
        storage.write("object", [b"x"])
        assert everything(tmp_path) == {"root/object"}

    def test_a_relative_root_stays_where_it_was(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        storage = LocalStorage("runs")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        storage.write("object", [b"x"])
        assert everything(tmp_path) == {"runs/object"}
        assert storage.url == "runs"

    def test_a_root_that_is_a_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"mine")
        with pytest.raises(ConfigError, match=r"file is a file, .* Choose another"):
            LocalStorage(tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == b"mine"

    def test_a_root_below_a_file_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"mine")
        storage = LocalStorage(tmp_path / "file" / "root")
        assert sizes(storage) == {}
        with pytest.raises(StorageError, match=r"could not write .*Not a directory"):
            storage.write("object", [b"x"])

    def test_a_folder_that_others_remove_before_there_is_a_file_in_it_is_made_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage, made, removals = LocalStorage(tmp_path), Tree.made, 2.0

        def removed_at_once(tree: Tree, key: str) -> int:
            nonlocal removals
            folder = made(tree, key)
            if removals:
                removals -= 1
                (tmp_path / key).rmdir()
            return folder

        monkeypatch.setattr(Tree, "made", removed_at_once)
        storage.write("step/.saving", [b"marker"])
        assert storage.read("step/.saving") == b"marker"
        assert not removals
        removals = math.inf
        with pytest.raises(StorageError, match="another program keeps removing the file's folder"):
            storage.write("other/.saving", [b"marker"])

    def test_deleting_the_last_object_of_a_folder_removes_the_folder_but_not_the_root(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path / "root")
        for key in ("a/b/one", "a/two"):
            storage.write(key, [b"x"])
        storage.delete(["a/b/one"])
        assert [path.name for path in (tmp_path / "root" / "a").iterdir()] == ["two"]
        storage.delete(["a/two"])
        assert list((tmp_path / "root").iterdir()) == []


class TestLinks:
    """A symbolic link that leads out of the root is never followed."""

    @pytest.fixture
    def outside(self, tmp_path: Path) -> Path:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "object").write_bytes(b"mine")
        (outside / ".left.ckpt-tmp").write_bytes(b"mine too")
        return outside

    @pytest.fixture
    def storage(self, tmp_path: Path, outside: Path) -> LocalStorage:
        root = tmp_path / "root"
        root.mkdir()
        (root / "folder").symlink_to(outside)
        (root / "file").symlink_to(outside / "object")
        return LocalStorage(root)

    def test_a_folder_that_leads_out_is_refused(self, storage: LocalStorage, outside: Path) -> None:
        refused = pytest.raises(ConfigError, match="leads out of the root through a symbolic link")
        with refused:
            storage.write("folder/new", [b"x"])
        with refused:
            storage.read("folder/object")
        with refused:
            storage.delete(["folder/object"])
        with refused, storage.lock("folder"):
            pass
        assert list(storage.list("folder")) == []  # as in a list of the root
        storage.sweep("folder")
        assert everything(outside) == {"object", ".left.ckpt-tmp"}

    def test_a_file_that_leads_out_is_neither_read_nor_locked(self, storage: LocalStorage, outside: Path) -> None:
        refused = pytest.raises(ConfigError, match="leads out of the root through a symbolic link")
        with refused:
            storage.read("file")
        with refused:
            storage.read_into("file", 0, memoryview(bytearray(1)))
        with refused, storage.lock("file", note="not into somebody's file"):
            pass
        assert (outside / "object").read_bytes() == b"mine"

    def test_a_write_or_delete_takes_the_link_not_what_it_leads_to(self, storage: LocalStorage, outside: Path) -> None:
        storage.write("file", [b"ours"])
        assert storage.read("file") == b"ours"
        storage.delete(["file"])
        assert (outside / "object").read_bytes() == b"mine"

    def test_listing_and_sweeping_the_root_do_not_go_out(self, storage: LocalStorage, outside: Path) -> None:
        assert sizes(storage) == {"file": (outside.parent / "root" / "file").lstat().st_size}
        storage.sweep()
        assert everything(outside) == {"object", ".left.ckpt-tmp"}

    @pytest.mark.parametrize("remove", ["delete", "sweep"])
    def test_whoever_exchanges_a_folder_for_a_link_while_it_is_emptied_leads_nobody_out(
        self, storage: LocalStorage, outside: Path, tmp_path: Path, remove: str
    ) -> None:
        theirs, name = tmp_path / "root" / "theirs", "object" if remove == "delete" else ".left.ckpt-tmp"
        ended = threading.Event()

        def exchange() -> None:
            while not ended.is_set():
                theirs.rename(tmp_path / "aside")
                theirs.symlink_to(outside)
                theirs.unlink()
                (tmp_path / "aside").rename(theirs)

        theirs.mkdir()
        (theirs / "stays").write_bytes(b"")
        thread = threading.Thread(target=exchange)
        thread.start()
        try:
            for _ in range(300):
                with suppress(StorageError, ConfigError, OSError):
                    (theirs / name).write_bytes(b"ours")
                (outside / name).write_bytes(b"mine")
                with suppress(StorageError, ConfigError):
                    storage.delete(["theirs/object"]) if remove == "delete" else storage.sweep("theirs")
                assert (outside / name).is_file()
        finally:
            ended.set()
            thread.join()

    def test_a_root_that_is_a_link_itself_is_followed(self, tmp_path: Path, outside: Path) -> None:
        (tmp_path / "link").symlink_to(outside)
        storage = LocalStorage(tmp_path / "link")
        storage.write("folder/new", [b"x"])
        assert (outside / "folder" / "new").read_bytes() == b"x"
        assert set(sizes(storage)) == {"object", "folder/new"}


def test_an_error_is_gone_as_soon_as_it_is_handled(tmp_path: Path) -> None:
    """With it, since Python 3.12, all frames that called: a loop over batches would outlive its `break`."""
    gc.collect()
    gc.disable()
    try:
        with suppress(StorageError):
            LocalStorage(tmp_path).read("nothing")
        assert not [left for left in gc.get_objects() if isinstance(left, FileNotFoundError)]
    finally:
        gc.enable()


def test_where_there_are_no_hard_links_a_link_is_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: object, **folders: object) -> None:
        raise OSError(errno.EPERM, "not here")

    storage = LocalStorage(tmp_path)
    storage.write("a", [b"content"])
    monkeypatch.setattr(os, "link", refuse)
    storage.link("a", "b")
    assert storage.read("b") == b"content"
    assert (tmp_path / "a").stat().st_ino != (tmp_path / "b").stat().st_ino
    assert everything(tmp_path) == {"a", "b"}


class TestKills:
    def test_a_sweep_leaves_alone_what_the_run_of_a_root_inside_is_writing(self, tmp_path: Path) -> None:
        outer, inner = LocalStorage(tmp_path), LocalStorage(tmp_path / "runs" / "one")
        left = tmp_path / "step-1" / f".x.0123456789ab{TEMPORARY}"
        left.parent.mkdir()
        left.touch()

        def pieces() -> Iterator[bytes]:
            yield b"a"
            outer.sweep()  # in the middle of the other's write
            yield b"b"

        with inner.lock(LOCK):
            inner.write("step-1/file", pieces())
        assert inner.read("step-1/file") == b"ab"
        assert not left.parent.exists()

    @pytest.mark.slow
    def test_a_write_that_is_killed_leaves_nothing_listed_and_sweep_removes_the_rest(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        storage.write("folder/object", [b"the old one"])
        script = """
def pieces():
    yield b"x" * 1_000_000
    print("in the middle", flush=True)
    sys.stdin.read()
LocalStorage(sys.argv[1]).write(sys.argv[2], pieces())
"""
        for key in ("folder/object", "folder/new", "fresh/new"):
            with child(script, tmp_path, key) as writer:
                assert line(writer) == "in the middle"
                writer.send_signal(signal.SIGKILL)
                assert writer.wait(30) == -signal.SIGKILL
        assert len(everything(tmp_path)) == 4  # three unfinished files
        assert sizes(storage) == {"folder/object": 11}
        assert storage.read("folder/object") == b"the old one"
        left = {write.key: write.size for write in storage.unfinished()}
        assert sorted(key.partition("/")[0] for key in left) == ["folder", "folder", "fresh"]
        assert left == {key: (tmp_path / key).stat().st_size for key in left}
        storage.sweep(age=3600)
        assert len(everything(tmp_path)) == 4
        storage.sweep("folder")
        assert len(everything(tmp_path / "folder")) == 1
        assert len(everything(tmp_path / "fresh")) == 1
        storage.sweep()
        assert everything(tmp_path) == {"folder/object"}
        assert not (tmp_path / "fresh").exists()

    @pytest.mark.slow
    def test_a_killed_holder_lets_go_of_its_lock_though_a_forked_child_lives_on(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        script = """
with LocalStorage(sys.argv[1]).lock(".lock", note="the killed one"):
    if os.fork() == 0:
        print(os.getpid(), flush=True)  # not the parent: the child may begin later
        sys.stdin.read()
        os._exit(0)
    sys.stdin.read()
"""
        with child(script, tmp_path) as holder:
            forked = int(line(holder))
            with pytest.raises(LockedError, match="the killed one"), storage.lock(".lock"):
                pass
            holder.send_signal(signal.SIGKILL)
            holder.wait(30)
            os.kill(forked, 0)  # it lives on
            with storage.lock(".lock", note="the next one"):
                os.kill(forked, 0)

    @pytest.mark.slow
    def test_a_forked_child_may_leave_the_lock_that_its_parent_goes_on_to_hold(self, tmp_path: Path) -> None:
        script = f"""
{ATTEMPT}
storage = LocalStorage(sys.argv[1])
with storage.lock(".lock", note="the parent"):
    if (forked := os.fork()):
        assert os.waitpid(forked, 0)[1] == 0
        attempt(lambda: storage.lock(".lock").__enter__())
"""
        kind, message = outcome(script, tmp_path)
        assert kind == "LockedError"
        assert "the parent" in message


@pytest.mark.slow
class TestNoRoom:
    def test_a_file_size_limit_is_a_full_error_and_leaves_the_old_object(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        storage.write("object", [b"the old one"])
        script = f"""
{ATTEMPT}
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
attempt(lambda: LocalStorage(sys.argv[1]).write("object", [b"x" * 1_000_000]))
"""
        kind, message = outcome(script, tmp_path)
        assert kind == "FullError"
        assert "could not write" in message
        assert f"{tmp_path}/object" in message
        assert "Free some space" in message
        assert everything(tmp_path) == {"object"}
        assert storage.read("object") == b"the old one"

    @pytest.fixture
    def tiny(self, tmp_path: Path) -> Iterator[Path]:
        if os.geteuid() != 0:
            pytest.skip("only root may mount a filesystem of its own")
        tiny = tmp_path / "tiny"
        tiny.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tiny], capture_output=True, text=True, check=False
        )
        if mounted.returncode:
            pytest.skip(f"could not mount a tmpfs: {mounted.stderr.strip()}")
        yield tiny
        subprocess.run(["umount", tiny], check=True)

    def test_a_full_disk_is_a_full_error_and_leaves_the_old_object(self, tiny: Path) -> None:
        storage = LocalStorage(tiny)
        storage.write("folder/object", [b"the old one"])
        with pytest.raises(FullError, match=r"No space left on device.* GB is free there.*Free some space"):
            storage.write("folder/object", (b"x" * 4096 for _ in range(256)))
        assert everything(tiny) == {"folder/object"}
        assert storage.read("folder/object") == b"the old one"
        storage.write("folder/object", [b"there is room for less"])


@pytest.mark.slow
class TestPermissions:
    @pytest.fixture
    def root(self) -> Iterator[Path]:
        """A root that another user can reach: pytest's own directories are closed to others."""
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            LocalStorage(root).write("folder/object", [b"x"])
            root.chmod(0o555)
            (root / "folder").chmod(0o555)
            yield root
            root.chmod(0o755)
            (root / "folder").chmod(0o755)

    def refused(self, root: Path, action: str) -> str:
        script = f"{ATTEMPT}{AS_NOBODY}storage = LocalStorage(sys.argv[1])\nattempt(lambda: {action})"
        kind, message = outcome(script, root)
        assert kind == "DeniedError"
        return message

    @pytest.mark.parametrize("key", ["object", "folder/object", "new/object"])
    def test_a_directory_that_is_read_only_is_an_error_that_says_what_to_do(self, root: Path, key: str) -> None:
        message = self.refused(root, f'storage.write("{key}", [b"new"])')
        assert message.startswith(f"could not write {root}/{key}: Permission denied.")
        assert message.endswith(f"Make {root} writable for this user, or choose another root.")
        assert LocalStorage(root).read("folder/object") == b"x"

    def test_what_may_not_be_removed_or_locked_is_an_error(self, root: Path) -> None:
        assert "could not delete" in self.refused(root, 'storage.delete(["folder/object"])')
        assert "could not lock" in self.refused(root, 'storage.lock(".lock", note="me").__enter__()')

    def test_a_folder_that_may_not_be_looked_into_is_an_error_not_an_empty_one(self, root: Path) -> None:
        (root / "folder").chmod(0o000)
        message = self.refused(root, "list(storage.list())")
        assert "could not list" in message
        assert f"Make {root} readable" in message
        (root / "folder").chmod(0o600)
        assert f"Make {root} readable" in self.refused(root, 'storage.read("folder/object")')

    def test_a_root_that_may_not_be_reached_is_an_error_of_ours(self, root: Path) -> None:
        root.chmod(0o000)
        script = f'{ATTEMPT}{AS_NOBODY}attempt(lambda: list(LocalStorage(sys.argv[1] + "/folder/below").list()))'
        assert outcome(script, root)[0] == "DeniedError"


def test_a_write_is_durable_when_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, synced, root = os.fsync, [], tmp_path / "root"

    def recording(descriptor: int) -> None:
        real(descriptor)
        status = os.fstat(descriptor)
        synced.append((status.st_ino, stat.S_ISDIR(status.st_mode), (root / "a" / "object").exists(), status.st_size))

    monkeypatch.setattr(os, "fsync", recording)
    LocalStorage(root).write("a/object", [b"12", b"34"])

    def inode(path: Path) -> int:
        return path.stat().st_ino

    # the file with all its bytes, before it has its name
    assert (inode(root / "a" / "object"), False, False, 4) in synced
    # its folder, after it has its name
    assert any(entry[:3] == (inode(root / "a"), True, True) for entry in synced)
    # every folder in which a new folder was made
    assert {inode(tmp_path), inode(root)} <= {entry[0] for entry in synced}


class TestGroups:
    """What is written in `grouped` is durable when that is left."""

    def test_every_file_is_synced_before_any_has_its_name_and_the_folder_once_after_all_have(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage = LocalStorage(tmp_path / "root")
        storage.write("a/first", [b"0"])
        real, synced = os.fsync, []

        def recording(descriptor: int) -> None:
            real(descriptor)
            status = os.fstat(descriptor)
            named = [entry.key for entry in storage.list("a") if entry.key != "a/first"]
            synced.append((stat.S_ISDIR(status.st_mode), status.st_size, sorted(named)))

        monkeypatch.setattr(os, "fsync", recording)
        with storage.grouped():
            storage.write("a/x", [b"12", b"34"], over=None)
            storage.write("a/y", iter([b"123"]))
            storage.write("a/z", [b"12345"])
            assert not (tmp_path / "root/a/x").exists()
        assert sorted(entry[1:] for entry in synced if not entry[0]) == [(3, []), (4, []), (5, [])]
        assert [entry[2] for entry in synced if entry[0]] == [["a/x", "a/y", "a/z"]]
        assert storage.read("a/x") == b"1234"

    def test_more_files_than_a_group_holds_are_all_there(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        before = len(os.listdir("/proc/self/fd"))
        with storage.grouped():
            for number in range(200):
                storage.write(f"a/{number}", [str(number).encode()], over=None)
            assert len(os.listdir("/proc/self/fd")) < before + 70
        assert len(os.listdir("/proc/self/fd")) == before
        assert {entry.key: storage.read(entry.key) for entry in storage.list()} == {
            f"a/{number}": str(number).encode() for number in range(200)
        }

    def test_a_group_that_fails_leaves_nothing_behind(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        before = len(os.listdir("/proc/self/fd"))

        def broken() -> Iterator[bytes]:
            yield b"1"
            raise ZeroDivisionError

        def write_both() -> None:
            with storage.grouped():
                storage.write("a/x", [b"1"])
                storage.write("a/y", broken())

        with pytest.raises(ZeroDivisionError):
            write_both()
        assert os.listdir(tmp_path / "a") == []
        assert len(os.listdir("/proc/self/fd")) == before
        storage.write("a/x", [b"2"])  # alone, and at once
        assert storage.read("a/x") == b"2"

    def test_what_may_not_be_replaced_is_refused_when_the_group_is_left(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        storage.write("a/x", [b"theirs"])
        with pytest.raises(ConflictError), storage.grouped():
            storage.write("a/x", [b"ours"], over=None)
        assert os.listdir(tmp_path / "a") == ["x"]
        assert storage.read("a/x") == b"theirs"

    def test_links_of_a_group(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        storage.write("a/x", [b"bytes"])
        with storage.grouped():
            storage.link("a/x", "b/x")
            storage.link("a/x", "a/x")
        assert os.path.samefile(tmp_path / "a/x", tmp_path / "b/x")
        assert sorted(os.listdir(tmp_path / "a")) == ["x"]

    def test_a_file_that_is_open_when_an_interrupt_comes_is_closed(self, tmp_path: Path) -> None:
        group = WriteGroup()
        folder = group.folder("", lambda _: os.open(tmp_path, os.O_RDONLY))
        group.write(folder, "x", [b"1"])  # and is not noted in the group any more
        (descriptor,) = group._open.values()
        group.discard()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)

    def test_other_threads_write_at_once(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        with storage.grouped():
            other = threading.Thread(target=lambda: storage.write("a/x", [b"1"]))
            other.start()
            other.join()
            assert storage.read("a/x") == b"1"


def test_a_disk_that_takes_a_small_file_in_parts_gets_it_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, calls = os.pwritev, []

    def three_bytes(descriptor: int, pieces: list[memoryview], start: int) -> int:
        calls.append(start)
        return os.pwrite(descriptor, b"".join(pieces)[:3], start)

    monkeypatch.setattr(os, "pwritev", three_bytes)
    LocalStorage(tmp_path).write("x", [b"1", b"", b"2345", b"6", b"7890"])
    assert (tmp_path / "x").read_bytes() == b"1234567890"
    assert calls == [0, 3, 6, 9]
    monkeypatch.setattr(os, "pwritev", pwritev)
    LocalStorage(tmp_path).write("x", [b"12"] * 3000)  # more than one call takes
    assert (tmp_path / "x").read_bytes() == b"12" * 3000


def test_a_filesystem_without_locks_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    storage = LocalStorage(tmp_path)
    with storage.lock(".lock", note="me"), storage.lock(".lock", note="me too"):
        pass
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "has no locks" in caplog.text


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    storage = LocalStorage(tmp_path)
    storage.write("a/object", [b"x"])
    storage.read("a/object")
    with storage.lock("a", shared=True), pytest.raises(LockedError), storage.lock("a"):
        pass
    with storage.lock(".lock", note="me"):
        pass
    assert set(os.listdir("/proc/self/fd")) == before


class TestLocksOnNames:
    def test_a_lock_on_a_name_under_which_nothing_is_leaves_nothing(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        with storage.lock("step-1"):
            assert sizes(storage) == {}
        assert list(tmp_path.iterdir()) == []

    def test_the_last_of_its_holders_removes_the_file_of_a_lock(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        storage.write("step-1/object", [b"x"])
        with storage.lock("step-1", shared=True):
            with storage.lock("step-1", shared=True):
                pass
            assert len(list(tmp_path.iterdir())) == 2
        assert everything(tmp_path) == {"step-1/object"}

    def test_a_name_that_leaves_no_room_for_that_of_a_lock_is_locked_too(self, tmp_path: Path) -> None:
        storage, name = LocalStorage(tmp_path), "n" * 255
        with storage.lock(name), pytest.raises(LockedError), storage.lock(name):
            pass

    def test_such_a_lock_keeps_out_those_who_lock_the_folder_when_it_is_there(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        with storage.lock("step-1"):
            storage.write("step-1/object", [b"x"])
            with pytest.raises(LockedError), storage.lock("step-1", shared=True):
                pass
        assert storage.read("step-1/object") == b"x"
        with storage.lock("step-1", shared=True):
            pass

    @pytest.mark.parametrize("key", [".folder.ckpt-lock", ".lock"])
    def test_what_is_removed_while_it_is_being_locked_is_not_what_is_locked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
    ) -> None:
        storage, real, calls = LocalStorage(tmp_path), fcntl.flock, 0
        storage.write("folder/object", [b"x"])
        (tmp_path / key).touch()

        def flock(descriptor: int, operation: int) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:  # its holder removes it, lets go, and somebody makes it anew
                (tmp_path / key).rename(tmp_path / "gone")
                (tmp_path / key).touch()
            real(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", flock)
        locked = "folder" if "folder" in key else key
        with storage.lock(locked):
            assert calls == 2
            with pytest.raises(LockedError), storage.lock(locked):
                pass

    def test_a_lock_that_cannot_be_noted_is_not_held(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        storage = LocalStorage(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(FullError), storage.lock(".lock", note="me"):
                pass
        with storage.lock(".lock", note="me"):
            pass

    def test_an_object_is_never_written_to_by_whoever_locks_it(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path)
        storage.write("object", [b"content"])
        with storage.lock("object", note="me"):
            assert storage.read("object") == b"content"
        assert storage.read("object") == b"content"

    def test_nothing_is_written_once_the_lock_file_is_gone(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path / "root")
        with storage.lock(".lock", note="me"):
            storage.write("a", [b"x"])
            (tmp_path / "root" / ".lock").unlink()
            calls: list[Callable[[], None]] = [
                lambda: storage.write("b", [b"x"]),
                lambda: storage.link("a", "b"),
                lambda: storage.delete(["a"]),
                lambda: storage.sweep(),
            ]
            for call in calls:
                with pytest.raises(LockedError, match=r"somebody removed .*\.lock, or all of"):
                    call()
            assert everything(tmp_path) == {"root/a"}
        storage.write("b", [b"x"])

    @pytest.mark.parametrize("grouped", [False, True])
    def test_a_file_that_is_being_written_when_the_lock_file_goes_gets_no_name(
        self, tmp_path: Path, grouped: bool
    ) -> None:
        storage = LocalStorage(tmp_path / "root")

        def pieces() -> Iterator[bytes]:
            yield b"x"
            (tmp_path / "root" / ".lock").unlink()
            yield b"y"

        with storage.lock(".lock", note="me"):
            with (
                pytest.raises(LockedError, match=r"somebody removed .*\.lock, or all of"),
                storage.grouped() if grouped else nullcontext(),
            ):
                storage.write("object", pieces())
            assert everything(tmp_path) == set()


@pytest.mark.parametrize("content", [b"mine", b""])
def test_a_file_of_somebody_else_where_a_folder_belongs_is_kept(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "step").write_bytes(content)
    with pytest.raises(StorageError, match="step"):
        LocalStorage(tmp_path).write("step/object", [b"x"])
    assert (tmp_path / "step").read_bytes() == content


def test_a_file_of_holes_is_not_read_into_memory_that_it_does_not_take(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.write(b"data")
        file.truncate(1 << 40)
    with pytest.raises(TruncatedError, match="has 1099511627776 bytes, but almost all"):
        LocalStorage(tmp_path).read("sparse")
    assert LocalStorage(tmp_path).read("sparse", 0, 4) == b"data"

"""A folder in which others have put something else than files: nobody waits for it, nothing of theirs is written to."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.errors import AbsentError, ConfigError, LockedError, StorageError
from ckpt.storage import LocalStorage
from ckpt.storage.local.volatile import VolatileStorage
from tests.helpers.storage_contract import sizes

pytestmark = pytest.mark.timeout(60)  # where it would wait for the other end of a pipe


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


class TestNoFiles:
    """Whatever is neither a file nor a folder is no object, and nobody waits for it."""

    @pytest.fixture(params=["pipe", "socket", "loop"])
    def storage(self, tmp_path: Path, request: pytest.FixtureRequest) -> LocalStorage:
        path = tmp_path / "odd"
        if request.param == "pipe":
            os.mkfifo(path)
        elif request.param == "socket":
            os.mknod(path, stat.S_IFSOCK | 0o600)
        else:
            path.symlink_to("odd")
        return LocalStorage(tmp_path)

    def test_it_is_not_there_for_any_reader(self, storage: LocalStorage) -> None:
        readers: tuple[Callable[[], object], ...] = (
            lambda: storage.read("odd"),
            lambda: storage.read("odd", 0, 8),
            lambda: storage.read_into("odd", 0, memoryview(bytearray(1 << 20))),
            lambda: storage.evict("odd"),
            lambda: storage.link("odd", "other"),
        )
        for read in readers:
            with pytest.raises(AbsentError, match="odd is no object"):
                read()
        assert storage.version("odd") is None
        with pytest.raises(StorageError, match="odd"), storage.lock("odd", shared=True):
            pass

    def test_a_write_replaces_it(self, storage: LocalStorage) -> None:
        storage.write("odd", [b"x"], over=None)
        assert sizes(storage) == {"odd": 1}

    def test_a_delete_removes_it(self, storage: LocalStorage, tmp_path: Path) -> None:
        storage.delete(["odd"])
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "depth"), [pytest.param("d", 1100, marks=pytest.mark.slow), ("d" * 200, 30)]
)  # Python recurses less; a path is shorter
def test_folders_that_are_too_deep_are_listed_as_far_as_a_path_reaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, depth: int
) -> None:
    (tmp_path / "object").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    for _ in range(depth):
        os.mkdir(name)
        os.chdir(name)
    try:
        assert sizes(LocalStorage(tmp_path)) == {"object": 1}
    finally:
        for _ in range(depth):
            os.chdir("..")
            os.rmdir(name)


class TestLockFiles:
    """A lock file is written in place: it must be ckpt's own, and nothing that somebody has put there."""

    def test_a_file_with_another_name_is_locked_and_not_written_to(self, tmp_path: Path) -> None:
        (tmp_path / "mine").write_bytes(b"mine")
        (tmp_path / "root").mkdir()
        os.link(tmp_path / "mine", tmp_path / "root" / ".lock")
        storage = LocalStorage(tmp_path / "root")
        with storage.lock(".lock", note="somebody"):
            with pytest.raises(LockedError, match=f"by process {os.getpid()} of user") as raised, storage.lock(".lock"):
                pass
            assert "mine" not in str(raised.value)
            storage.write("object", [b"x"])
        assert (tmp_path / "mine").read_bytes() == b"mine"

    @pytest.mark.parametrize("target", ["object", "absent", ".lock"])
    def test_a_link_is_not_followed(self, tmp_path: Path, target: str) -> None:
        (tmp_path / "object").write_bytes(b"mine")
        (tmp_path / ".lock").symlink_to(target)
        refused = pytest.raises(StorageError, match=r"it is a symbolic link in place of a file.*Remove it")
        with refused, LocalStorage(tmp_path).lock(".lock", note="somebody"):
            pass
        assert names(tmp_path) == {"object", ".lock"}
        assert (tmp_path / "object").read_bytes() == b"mine"

    @pytest.mark.parametrize("outside", ["absent", "there"])
    def test_a_link_that_leads_out_makes_and_changes_nothing_there(self, tmp_path: Path, outside: str) -> None:
        (tmp_path / "there").write_bytes(b"mine")
        (tmp_path / "root").mkdir()
        (tmp_path / "root" / ".lock").symlink_to(tmp_path / outside)
        refused = pytest.raises(ConfigError, match="leads out of the root")
        with refused, LocalStorage(tmp_path / "root").lock(".lock", note="somebody"):
            pass
        assert (tmp_path / "there").read_bytes() == b"mine"
        assert not (tmp_path / "absent").exists()

    @pytest.mark.parametrize("shared", [False, True])
    def test_nobody_waits_for_a_named_pipe(self, tmp_path: Path, shared: bool) -> None:
        for name in (".lock", "checkpoint"):
            os.mkfifo(tmp_path / name)
            with pytest.raises(StorageError, match="named pipe"), LocalStorage(tmp_path).lock(name, shared=shared):
                pass


@pytest.mark.parametrize("kind", ["pipe", "link", "second name"])
def test_a_spare_of_a_tmpfs_that_is_none_is_not_written_to(tmp_path: Path, kind: str) -> None:
    (tmp_path / "mine").write_bytes(b"mine" * 1000)
    (tmp_path / "root").mkdir()
    spare = tmp_path / "root" / f".spare-2000000-{'0' * 12}.ckpt-tmp"
    make = {
        "pipe": lambda: os.mkfifo(spare),
        "link": lambda: spare.symlink_to(tmp_path / "mine"),
        "second name": lambda: os.link(tmp_path / "mine", spare),
    }
    make[kind]()
    storage = VolatileStorage(tmp_path / "root")
    storage.write("object", [b"x" * 2_000_000])
    assert sizes(storage) == {"object": 2_000_000}
    assert (tmp_path / "mine").read_bytes() == b"mine" * 1000
    assert names(tmp_path / "root") == {"object"}

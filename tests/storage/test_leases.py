"""Locks on fsspec's filesystems: the holder stays the holder, whatever uploads and lost answers come in between."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

import ckpt
from ckpt.storage import ANY, leases
from ckpt.storage.fsspec_stores import FilesystemObjects
from ckpt.storage.object_storage import ObjectStorage


class Unreliable(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A filesystem of fsspec where uploads wait to be let go, and answers get lost after what was asked for is done."""

    protocol = "unreliable"
    cachable = False
    go: threading.Event
    begun: threading.Event
    lose: Callable[[str], Exception | None]

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super().open(path, mode, **options)
        if "large" in path and "w" in mode:
            Unreliable.begun.set()
            assert Unreliable.go.wait(60)
        elif "w" in mode:
            commit = file.commit

            def losing() -> None:
                commit()
                self._answer(path)

            file.commit = losing
        return file

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        super().pipe_file(path, value, mode=mode, **options)
        self._answer(path)

    def rm_file(self, path: str) -> None:
        super().rm_file(path)
        self._answer(f"{path} removed")

    def _answer(self, path: str) -> None:
        error = Unreliable.lose(path)
        if error is not None:
            raise error


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fsspec.register_implementation("unreliable", Unreliable, clobber=True)
    Unreliable.go, Unreliable.begun = threading.Event(), threading.Event()
    Unreliable.lose = staticmethod(lambda path: None)
    monkeypatch.setattr(leases, "_POLL", 0.05)
    monkeypatch.setattr(leases, "RENEWAL", 0.2)
    yield
    Unreliable.go.set()


def storage(folder: Path) -> ObjectStorage:
    return ObjectStorage(FilesystemObjects("unreliable", str(folder), {"auto_mkdir": True}))


def sign(folder: Path) -> bytes:
    (path,) = (folder / ".locks" / "alone").iterdir()
    return path.read_bytes()


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("over", [None, ANY])
def test_a_second_run_does_not_take_the_root_while_the_first_is_in_a_long_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: str | None
) -> None:
    monkeypatch.setattr(leases, "has_ended", lambda record: None)  # as if the two were on different machines
    monkeypatch.setattr(leases, "EXPIRY", 20.0)
    first, second = storage(tmp_path), storage(tmp_path)
    with first.lock(".lock", note="the first run"):
        pieces = iter([b"large"])
        upload = threading.Thread(target=lambda: first.write("step/large", pieces, over=over))
        upload.start()
        assert Unreliable.begun.wait(60)
        before = sign(tmp_path)
        with pytest.raises(ckpt.LockedError, match="the first run"), second.lock(".lock"):
            pass
        wait_until(lambda: sign(tmp_path) != before)
        Unreliable.go.set()
        upload.join()
        first.write("step/manifest.json", [b"{}"], over=None)
    assert first.read("step/large") == b"large"


def once(error: Exception) -> Callable[[str], Exception | None]:
    """Lose the next answer about a lock."""
    left = [error]
    return staticmethod(lambda path: left.pop() if left and ".locks" in path else None)


LOST = [ConnectionError("reset"), FileExistsError("the client has tried it again"), TimeoutError("no answer")]


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
def test_a_lock_whose_answer_was_lost_does_not_lock_its_own_holder_out(tmp_path: Path, error: Exception) -> None:
    first = storage(tmp_path)
    Unreliable.lose = once(error)
    with first.lock(".lock", note="mine"):
        first.write("object", [b"mine"])
        with pytest.raises(ckpt.LockedError, match="mine"), storage(tmp_path).lock(".lock"):
            pass
    with storage(tmp_path).lock(".lock"):
        pass


def test_a_lock_that_could_not_be_taken_for_sure_can_be_tried_again(tmp_path: Path) -> None:
    def lose(path: str) -> Exception | None:
        return ConnectionError("reset") if ".locks" in path else None

    first = storage(tmp_path)
    Unreliable.lose = staticmethod(lose)
    get = FilesystemObjects.get
    try:
        FilesystemObjects.get = lambda *_: (_ for _ in ()).throw(ckpt.TransientError("away"))  # type: ignore[method-assign]
        with pytest.raises(ckpt.TransientError), first.lock(".lock"):
            pass
    finally:
        FilesystemObjects.get = get  # type: ignore[method-assign]
    Unreliable.lose = staticmethod(lambda path: None)
    with first.lock(".lock"):
        pass


def test_a_sign_of_life_whose_answer_was_lost_is_not_taken_for_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = storage(tmp_path)
    lost: list[str] = []

    def lose(path: str) -> Exception | None:
        if ".locks" in path and len(lost) < 2:
            lost.append(path)
            return ConnectionError("reset")
        return None

    with first.lock(".lock"):
        before = sign(tmp_path)
        Unreliable.lose = staticmethod(lose)
        wait_until(lambda: len(lost) == 2)
        after = sign(tmp_path)
        assert after != before
        wait_until(lambda: sign(tmp_path) != after)
        first.write("object", [b"still mine"])
    assert not list((tmp_path / ".locks" / "alone").iterdir())


def test_a_reader_whose_answer_was_lost_is_in_nobodys_way(tmp_path: Path) -> None:
    first = storage(tmp_path)
    Unreliable.lose = once(ConnectionError("reset"))
    with pytest.raises(ckpt.TransientError), first.lock("step", shared=True):
        pass
    with storage(tmp_path).lock("step"):  # at once: what the lost write has left says nothing about this process
        pass
    wait_until(lambda: not list((tmp_path / ".locks" / "shared").rglob("*/*")))


def test_what_a_dead_process_of_this_machine_held_is_free_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with storage(tmp_path).lock("step"):
        left = sign(tmp_path)
    (tmp_path / ".locks" / "alone" / "step").write_bytes(left)
    with storage(tmp_path).lock("step"):
        assert not caplog.records  # nor is it said that anybody is waited for


def test_nobody_gives_signs_of_life_of_what_is_let_go(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # of other tests, which may hold locks of their own

    def renewing() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "ckpt-lease" and thread not in before]

    first = storage(tmp_path)
    for _ in range(2):
        with first.lock("step"):
            assert renewing()
        wait_until(lambda: not renewing())


def test_a_removal_whose_answer_was_lost_leaves_the_lock_of_the_next_holder(tmp_path: Path) -> None:
    first, second = storage(tmp_path), storage(tmp_path)
    left = [ConnectionError("reset")]
    with first.lock(".lock", note="the first"):
        Unreliable.lose = staticmethod(lambda path: left.pop() if left and path.endswith("removed") else None)
    assert not left
    with second.lock(".lock", note="the second"):
        wait_until(lambda: not first._leases._to_remove)  # it has been tried again
        assert b"the second" in sign(tmp_path)
        second.write("object", [b"still held"])
    assert not list((tmp_path / ".locks" / "alone").iterdir())


def test_who_was_frozen_asks_whether_the_lock_is_still_its_own_before_it_writes(tmp_path: Path) -> None:
    first = storage(tmp_path)
    with first.lock(".lock"):
        (held,) = first._leases._held
        (tmp_path / held.path).write_bytes(
            json.dumps({**held.new_record(), "holder": "another", "note": "mine."}).encode()
        )
        held.renewed -= leases.EXPIRY
        with pytest.raises(ckpt.LockedError, match=r"another run took over .*mine\."):
            first.write("object", [b"late"])
    assert b"another" in sign(tmp_path)


def test_who_has_lost_the_lock_says_so_though_the_holder_cannot_be_read(tmp_path: Path) -> None:
    first = storage(tmp_path)
    with first.lock(".lock"):
        (held,) = first._leases._held
        held.lost = True

        def away(path: str) -> NoReturn:
            raise ckpt.TransientError("no answer.")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(first._leases, "_read", away)
            with pytest.raises(ckpt.LockedError, match="writes nothing more"):
                first.write("object", [b"late"])
        (tmp_path / held.path).unlink()
        with pytest.raises(ckpt.LockedError, match="writes nothing more"):
            first.write("object", [b"late"])


def test_a_sign_of_life_of_which_nothing_was_heard_is_not_taken_for_another_run(tmp_path: Path) -> None:
    first = storage(tmp_path)
    with first.lock(".lock"):
        (held,) = first._leases._held
        (tmp_path / held.path).write_bytes(json.dumps(held.new_record()).encode())  # has taken effect, unbeknownst
        held.renewed -= leases.EXPIRY
        first.write("object", [b"still mine"])
    assert first.read("object") == b"still mine"
    assert not list((tmp_path / ".locks" / "alone").iterdir())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    held = ExitStack()
    held.enter_context(storage(tmp_path).lock(".lock", note="the parent's."))
    child = os.fork()
    if not child:
        try:
            held.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(ckpt.LockedError, match="the parent's"), storage(tmp_path).lock(".lock"):
        pass
    held.close()


class Remembering(LocalFileSystem):  # type: ignore[misc]
    """Answers from memory what it was asked before, unless it is told to look."""

    protocol = "remembering"

    def info(self, path: str, refresh: bool = False, **_: object) -> Any:
        known = self.__dict__.setdefault("known", {})
        if refresh or path not in known:
            known[path] = super().info(path)
        return known[path]


def test_what_a_filesystem_remembers_of_an_object_is_not_taken_for_its_version(tmp_path: Path) -> None:
    fsspec.register_implementation("remembering", Remembering, clobber=True)
    objects = FilesystemObjects("remembering", str(tmp_path), {})
    (tmp_path / "object").write_bytes(b"1")
    before = objects.version("object")
    (tmp_path / "object").write_bytes(b"22")
    assert before != objects.version("object")

"""`prune`, `verify` and `pull` beside a run that saves: nothing of it is lost, no save fails, and no false alarm."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.root import catalog
from ckpt.root.catalog import MARKER
from ckpt.storage import ANY, Buffer, Storage
from tests.helpers.places import PassedOn, Place, at, committed, intact
from tests.helpers.processes import DEADLINE, start_alone

pytestmark = pytest.mark.on_disk  # a tmpfs may list no name for one that is being replaced

SAVES = 30


class Gate:
    """Where a storage stops, until it is told to go on."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.open.wait(DEADLINE)


class Stopping(PassedOn):
    """Stops in the middle of writing a file, or of a removal after the manifest has gone."""

    def __init__(self, root: Place, *, write: str = "", delete: str = "") -> None:
        super().__init__(root)
        self.gate = Gate()
        self._write, self._delete = write, delete

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        if self._write and self._write in key:
            pieces = self._stopped(pieces)
        super().write(key, pieces, over=over)

    def _stopped(self, pieces: Iterable[Buffer]) -> Iterator[Buffer]:
        first, *rest = pieces
        yield bytes(first)[:1]
        self._write = ""  # once
        self.gate.pass_through()
        yield bytes(first)[1:]
        yield from rest

    def delete(self, keys: Iterable[str]) -> None:
        first, rest = (all_keys := list(keys))[:1], all_keys[1:]
        super().delete(first)
        if self._delete and first[0] == f"{self._delete}/manifest.json":
            self.gate.pass_through()
        super().delete(rest)


@contextmanager
def beside(gate: Gate, do: Callable[[], object]) -> Iterator[list[Exception]]:
    """Begin something in another thread. The body runs while it stands at the gate; it is done when this is left."""
    failed: list[Exception] = []

    def work() -> None:
        try:
            do()
        except Exception as error:
            failed.append(error)
        finally:
            gate.reached.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert gate.reached.wait(DEADLINE)
        yield failed
    finally:
        gate.open.set()
        thread.join(DEADLINE)


@pytest.mark.also_on_s3
def test_prune_leaves_the_old_checkpoint_while_a_save_replaces_it(root: Place) -> None:
    storage = Stopping(root)
    with ckpt.StateManager(storage, model=nn.Linear(4, 4)) as manager:
        for name in ("latest", "other"):
            manager.save_state(name, wait=True)
        storage._write = "latest/model"
        with beside(storage.gate, lambda: manager.save_state("latest", wait=True)) as failed:
            done = ckpt.prune(root, keep=ckpt.Keep(last=1), grace=0, verify=False)
            assert "latest" in done.spared
            assert committed(root) == {"latest", "other"}
        assert failed == []
    assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(root)] == ["latest", "other"]
    assert intact(root)


@pytest.mark.also_on_s3
def test_a_save_begun_in_the_middle_of_a_removal_waits_for_it_and_is_committed(
    root: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    removing = Stopping(root, delete="latest")
    waits, wait = threading.Event(), catalog._wait_for_removal

    def noticed(storage: Storage, name: str) -> None:
        waits.set()
        wait(storage, name)

    monkeypatch.setattr(catalog, "_wait_for_removal", noticed)
    with ckpt.StateManager(root, model=nn.Linear(4, 4)) as manager:
        for name in ("latest", "other"):
            manager.save_state(name, wait=True)
        with beside(removing.gate, lambda: ckpt.prune(removing, keep=ckpt.Keep(last=1), verify=False)) as failed:
            manager.save_state("latest", wait=False)
            assert waits.wait(DEADLINE)
            mark = catalog.read_marker(removing, "latest")
            assert mark is not None
            assert mark.removing
            assert "latest" not in committed(root)
        manager.wait()
        assert failed == []
    assert committed(root) == {"latest", "other"}
    assert intact(root)


def test_a_save_does_not_wait_for_ever_for_a_removal(root: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_PATIENCE", 0.1)
    removing = Stopping(root, delete="latest")
    with ckpt.StateManager(root, model=nn.Linear(4, 4)) as manager:
        for name in ("latest", "other"):
            manager.save_state(name, wait=True)
        with (
            beside(removing.gate, lambda: ckpt.prune(removing, keep=ckpt.Keep(last=1), verify=False)) as failed,
            pytest.raises(ckpt.LockedError, match=r"another process is removing .*latest"),
        ):
            manager.save_state("latest", wait=True)
        assert failed == []


@pytest.mark.parametrize("file", [f"new/{MARKER}", "new/model", "new/manifest"])
def test_prune_without_grace_takes_nothing_from_a_save_under_way(root: Place, file: str) -> None:
    storage = Stopping(root)
    with ckpt.StateManager(storage, model=nn.Linear(4, 4)) as manager:
        manager.save_state("old", wait=True)
        storage._write = file
        with beside(storage.gate, lambda: manager.save_state("new", wait=True)) as failed:
            ckpt.prune(root, keep=ckpt.Keep(last=1), grace=0)
        assert failed == []
    assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(root)] == ["new", "old"]
    assert intact(root)


def test_a_run_that_starts_while_prune_holds_the_root_waits_for_it(root: Place) -> None:
    with ckpt.StateManager(root, model=nn.Linear(4, 4)) as manager:
        manager.save_state("old", wait=True)
    (root / "cut-off" / MARKER).write_bytes(b'{"files": ["x"], "replaces": []}')
    (root / "cut-off" / "x").write_bytes(b"left")
    sweeping = Stopping(root)
    listed = sweeping.sweep

    def sweep(prefix: str = "", *, age: float | None = None) -> None:
        if not prefix:
            sweeping.gate.pass_through()
        listed(prefix, age=age)

    sweeping.sweep = sweep  # type: ignore[method-assign]
    with beside(sweeping.gate, lambda: ckpt.prune(sweeping, grace=0)) as failed:
        threading.Timer(0.3, sweeping.gate.open.set).start()
        with ckpt.StateManager(root, model=nn.Linear(4, 4)) as manager:
            restored = manager.resume()
    assert failed == []
    assert restored is not None


def _until_told(enough: str) -> Iterator[int]:
    """Count the saves: as many as the test wants at least, and on until it has seen what it came for."""
    for number in itertools.count():
        if number >= SAVES and Path(enough).exists():
            return
        yield number


def _save_the_same_names(rank: int, root: str, enough: str) -> None:
    model = nn.Linear(50, 50)
    with ckpt.StateManager(root, model=model) as manager:
        manager.resume()
        for number in _until_told(enough):
            manager.save_state(("latest", "other")[number % 2], wait=True)
            time.sleep(0.02 if number < SAVES else 0.5)  # in the end prune must find one at rest


def _save_and_keep_two(rank: int, root: str, enough: str) -> None:
    model = nn.Linear(50, 50)
    with ckpt.StateManager(root, model=model, keep=ckpt.Keep(last=2), save_every=1) as manager:
        manager.resume()
        for _ in _until_told(enough):
            manager.step()
        manager.wait()


class Run(NamedTuple):
    alive: Callable[[], bool]
    enough: Callable[[], None]
    """The test has seen what it came for: the run may end."""


@contextmanager
def running(function: Callable[..., None], root: Place) -> Iterator[Run]:
    """A process that saves there until the test has seen enough; in the end it must have succeeded."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as told:
        enough = Path(told, "enough")
        process = start_alone(folder, function, str(root), str(enough))
        try:
            yield Run(process.is_alive, enough.touch)
            enough.touch()
            process.join(DEADLINE)
            assert process.exitcode == 0, [path.read_text() for path in Path(folder).iterdir()]
        finally:
            process.kill()
            process.join()


def _until_committed(root: Place, count: int, run: Run) -> None:
    while run.alive() and len(committed(root)) < count:
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.also_on_s3
def test_prune_in_a_loop_beside_a_run_that_saves_the_same_names_makes_no_save_fail(root: Place) -> None:
    with running(_save_the_same_names, root) as run:
        _until_committed(root, 2, run)
        while run.alive():
            if ckpt.prune(root, keep=ckpt.Keep(last=1), grace=0, verify=False).removed:
                run.enough()
    assert committed(root)
    assert intact(root)


def _lines(*arguments: object) -> tuple[int, str]:
    result: Any = CliRunner().invoke(main, [*map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.slow
@pytest.mark.also_on_s3(long=True)
def test_verify_beside_a_run_that_saves_and_lets_go_gives_no_false_alarm(root: Place) -> None:
    with running(_save_and_keep_two, root) as run:
        _until_committed(root, 1, run)
        while run.alive():
            faults = {name: wrong for name, wrong in ckpt.verify(root).items() if wrong}
            assert not faults
            code, text = _lines("verify", root)
            assert code == 0, text
            run.enough()
    assert intact(root)


@pytest.mark.slow
@pytest.mark.also_on_s3(long=True)
def test_pull_beside_a_run_that_saves_and_lets_go_is_not_aborted(root: Place, tmp_path: Path) -> None:
    pulls = 0
    with running(_save_and_keep_two, root) as run:
        _until_committed(root, 1, run)
        while run.alive():
            copy = tmp_path / f"copy-{pulls}"
            ckpt.pull(str(root), copy)
            assert committed(at(str(copy)))
            assert intact(copy)
            shutil.rmtree(copy)
            pulls += 1
            run.enough()


def test_a_checkpoint_that_a_live_process_is_writing_is_said_to_be_under_way(root: Place) -> None:
    storage = Stopping(root)
    with ckpt.StateManager(storage, model=nn.Linear(4, 4)) as manager:
        manager.save_state("old", wait=True)
        storage._write = "new/model"
        with beside(storage.gate, lambda: manager.save_state("new", wait=True)) as failed:
            code, text = _lines("verify", root)
            assert code == 0
            assert "new  under way  a process is saving or removing it right now" in text
            assert ckpt.verify(root) == {"old": []}
            assert _lines("verify", root / "new")[0] == 1  # that one was asked for, and is not there
        assert failed == []

"""A process that forks while it saves: the child neither hangs nor touches what is its parent's."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from tests.helpers.places import Place
from tests.helpers.processes import run_alone
from tests.save.test_failed_saves import Gated

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")]


@contextmanager
def saving(root: str) -> Iterator[tuple[ckpt.StateManager, Gated]]:
    """A manager with a save under way in the background, until the gate is opened."""
    storage = Gated(root)
    with ckpt.StateManager(storage, model=nn.Linear(2, 2)) as manager:
        manager.save_state("first", wait=True)
        storage.gate.clear()
        manager.save_state("second")
        assert storage.waits.wait(60)
        try:
            yield manager, storage
        finally:
            storage.gate.set()


def forked(work: Callable[[], None]) -> None:
    """Do something in a forked child, which must end by itself within a minute, and must not fail."""
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def _refused(rank: int, root: str) -> None:
    with saving(root) as (manager, storage):
        parent = os.getpid()

        def work() -> None:
            calls: list[Callable[[], object]] = [
                lambda: manager.save_state("third"),
                lambda: manager.save_state("third", wait=True),
                lambda: manager.load_state("first"),
                lambda: manager.resume(),
                lambda: manager.step(),
                lambda: manager.wait(),
                lambda: next(iter(manager.epochs(2))),
            ]
            for call in calls:
                with pytest.raises(ckpt.ConfigError, match=rf"belongs to process {parent}.*with its own root"):
                    call()
            manager.close()
            assert not (Path(root) / "third").exists()

        forked(work)
        storage.gate.set()
        manager.wait()
        manager.save_state("third", wait=True)
    assert ckpt.verify(root) == {"third": [], "second": [], "first": []}


@pytest.mark.not_on_s3("a fork shares the sockets of its parent")
def test_a_forked_child_that_saves_is_refused_and_its_parent_goes_on(root: Place) -> None:
    assert run_alone(_refused, str(root)) == 0


def _reads(rank: int, root: str) -> None:
    loader = DataLoader(TensorDataset(torch.arange(6)), 2)
    with ckpt.StateManager(root, model=nn.Linear(2, 2), dataloader=loader, save_every=1) as manager:
        manager.resume()
        for _ in loader:
            manager.step()  # to be saved when the loader is read again: here, and not in the child
            break

        def work() -> None:
            assert len(list(loader)) == 3

        forked(work)
        assert ckpt.list_checkpoints(root) == []
    assert [found.step for found in ckpt.list_checkpoints(root)] == [1]


@pytest.mark.not_on_s3("a fork shares the sockets of its parent")
def test_a_forked_child_reads_the_loader_as_any_other(root: Place) -> None:
    assert run_alone(_reads, str(root)) == 0


def _left(rank: int, root: str) -> None:
    with saving(root) as (manager, storage):

        def work() -> None:
            nonlocal manager
            with manager:
                pass
            del manager
            gc.collect()

        forked(work)
        with (
            ckpt.StateManager(root, model=nn.Linear(2, 2)) as another,
            pytest.raises(ckpt.LockedError, match=f"process {os.getpid()}"),
        ):
            another.resume()
        storage.gate.set()


@pytest.mark.not_on_s3("a fork shares the sockets of its parent")
def test_a_forked_child_leaves_the_context_at_once_and_its_parent_keeps_the_root(root: Place) -> None:
    assert run_alone(_left, str(root)) == 0
    assert ckpt.verify(root) == {"second": [], "first": []}


def _built(rank: int, root: str) -> None:
    with saving(root):

        def work() -> None:
            with ckpt.StateManager(f"{root}-of-the-child", model=nn.Linear(2, 2)) as own:
                own.save_state("theirs")
            with (
                ckpt.StateManager(root, model=nn.Linear(2, 2)) as other,
                pytest.raises(ckpt.LockedError, match=f"process {os.getppid()}"),
            ):
                other.save_state("theirs", wait=True)

        forked(work)


@pytest.mark.not_on_s3("a fork shares the sockets of its parent")
def test_a_forked_child_saves_with_a_manager_and_a_root_of_its_own(root: Place) -> None:
    assert run_alone(_built, str(root)) == 0
    assert ckpt.verify(root) == {"second": [], "first": []}
    assert ckpt.verify(f"{root}-of-the-child") == {"theirs": []}


def _loaded(rank: int, root: str) -> None:
    with saving(root):
        data = TensorDataset(torch.arange(8.0))
        loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
        assert len(list(loader)) == 4


@pytest.mark.not_on_s3("a fork shares the sockets of its parent")
def test_workers_of_a_loader_are_forked_during_a_save(root: Place) -> None:
    assert run_alone(_loaded, str(root)) == 0
    assert ckpt.verify(root) == {"second": [], "first": []}


def _terminated(rank: int, root: str) -> None:
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
        manager.resume()
        manager.step()  # from here on the manager answers SIGTERM
        heard, tell = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(60)
            os.write(tell, b"x")  # a signal that comes while Python forks is dropped
            while True:
                time.sleep(0.01)
        os.read(heard, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not manager.told_to_stop()


@pytest.mark.not_on_s3("a fork shares the sockets of its parent")
def test_a_forked_child_that_is_told_to_terminate_does(root: Place) -> None:
    assert run_alone(_terminated, str(root)) == 0


@pytest.mark.not_on_s3("a fork shares the sockets of its parent")
def test_a_forked_child_that_ends_as_a_program_does_ends_at_once(root: Place) -> None:
    script = """
        import os, signal, sys
        from tests.save.test_fork import saving
        with saving(sys.argv[1]):
            child = os.fork()
            if not child:
                signal.alarm(60)
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(root)], check=True, timeout=300)
    assert ckpt.verify(root) == {"second": [], "first": []}

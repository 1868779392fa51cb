"""Background saves: what is saved is the state at the call, and what fails is raised by a later call."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.save.snapshot.tensor_copies import TensorCopy, copy_on_host
from ckpt.storage import ANY, Buffer
from tests.helpers.places import PassedOn, Place
from tests.helpers.processes import interrupt, run_ranks
from tests.helpers.training import exact


class GatedStorage(PassedOn):
    """A disk that writes tensors only while its gate is open, and fails if it is set to."""

    def __init__(self, root: Place | str) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.full = False
        self.broken = False

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        if key.endswith(".safetensors"):
            assert self.gate.wait(60)
            if self.full:
                raise ckpt.FullError("no space left")
            if self.broken:
                raise RuntimeError("a mistake")
        super().write(key, pieces, over=over)


class Run:
    """A model with buffers, its optimizer, a scheduler and an object of the user's own."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)

    def manager(self, root: Any, **options: Any) -> ckpt.StateManager:
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        manager = ckpt.StateManager(root, **parts, **options)
        manager.register(average=self.average)
        return manager

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 6)).pow(2).sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.average.update_parameters(self.model)

    def state(self) -> str:
        return exact([part.state_dict() for part in (self.model, self.optimizer, self.scheduler, self.average)])


def loaded(root: Place, name: str) -> str:
    other = Run(99)
    with other.manager(root) as manager:
        manager.load_state(name)
    return other.state()


@pytest.fixture
def gated(root: Place) -> Iterator[GatedStorage]:
    storage = GatedStorage(root)
    yield storage
    storage.gate.set()


@pytest.mark.also_on_s3
def test_training_goes_on_while_a_checkpoint_is_written(root: Place, gated: GatedStorage) -> None:
    run = Run(1)
    with run.manager(gated) as manager:
        run.step()
        gated.gate.clear()
        manager.save_state("a")
        saved = run.state()
        for _ in range(3):
            run.step()
        assert not (root / "a" / "manifest.json").exists()
        gated.gate.set()
        manager.wait()
        assert (root / "a" / "manifest.json").exists()
    assert loaded(root, "a") == saved != run.state()


def test_leaving_the_context_finishes_what_is_under_way(root: Place, gated: GatedStorage) -> None:
    gated.gate.clear()
    with Run(1).manager(gated) as manager:
        manager.save_state("a")
        threading.Timer(0.2, gated.gate.set).start()
    assert ckpt.verify(root) == {"a": []}


@pytest.mark.slow
def test_a_program_that_ends_in_whatever_way_finishes_its_save(root: Place) -> None:
    """Each is a fork of one program, which ends as a program does."""
    ends = {"": "0", "sys.exit(3)": "3", "raise ValueError('a mistake')": "1"}
    script = f"""
        import os, sys, time, torch, ckpt
        from tests.helpers.places import PassedOn
        class Slow(PassedOn):
            def write(self, key, pieces, *, over="*"):
                time.sleep(0.1)
                super().write(key, pieces, over=over)
        for number, end in enumerate({list(ends)!r}):
            if not os.fork():
                manager = ckpt.StateManager(Slow(f"{root}/{{number}}"), model=torch.nn.Linear(2, 2))
                manager.save_state("a")
                exec(end)
                break
            print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=170, check=True
    )
    assert ended.stdout.split() == list(ends.values()), ended.stderr
    for number in range(len(ends)):
        assert ckpt.verify(root / str(number)) == {"a": []}


@pytest.mark.parametrize("call", ["wait", "step", "save_state", "load_state", "close"])
def test_what_failed_behind_is_raised_by_the_next_call(root: Place, gated: GatedStorage, call: str) -> None:
    manager = Run(1).manager(gated)
    manager.save_state("good", wait=True)
    gated.full = True
    manager.save_state("bad")
    if call == "step":  # it does not wait: it tells what is known
        while manager.session.saver.busy:
            pass
    with pytest.raises(ckpt.FullError, match="no space left"):
        getattr(manager, call)()
    gated.full = False
    if call != "close":
        manager.save_state("better", wait=True)
        manager.close()
    assert ckpt.verify(root) == {"good": []} | ({"better": []} if call != "close" else {})


@pytest.mark.parametrize("how", ["full", "broken"])
def test_the_error_of_the_loop_comes_before_that_of_a_save(gated: GatedStorage, how: str) -> None:
    setattr(gated, how, True)

    def train() -> None:
        with Run(1).manager(gated) as manager:
            manager.save_state("bad")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def test_a_second_save_waits_for_the_first(root: Place, gated: GatedStorage) -> None:
    run = Run(1)
    with run.manager(gated) as manager:
        gated.gate.clear()
        manager.save_state("a")
        first = run.state()
        run.step()
        threading.Timer(0.2, gated.gate.set).start()
        manager.save_state("b")
        assert (root / "a" / "manifest.json").exists()
        second = run.state()
        run.step()
    assert [loaded(root, name) for name in ("a", "b")] == [first, second]


def test_a_save_goes_on_when_whoever_waits_for_it_is_interrupted(root: Place, gated: GatedStorage) -> None:
    run = Run(1)
    manager = run.manager(gated)
    gated.gate.clear()
    manager.save_state("a")
    first = run.state()
    run.step()
    for call in (manager.wait, lambda: manager.save_state("b"), manager.close):
        interrupt(call)
        assert manager.session.saver.busy
    threading.Timer(0.2, gated.gate.set).start()
    manager.save_state("b")
    second = run.state()
    run.step()
    manager.close()
    assert [loaded(root, name) for name in ("a", "b")] == [first, second]


def test_a_second_save_is_left_out_if_that_is_wanted(
    root: Place, gated: GatedStorage, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Run(1).manager(gated, saving=ckpt.SaveOptions(when_busy="skip")) as manager,
        caplog.at_level(logging.INFO, "ckpt"),
    ):
        gated.gate.clear()
        assert manager.save_state("a") == "a"
        assert manager.save_state("b") is None
        gated.gate.set()
        manager.wait()
        assert manager.save_state("c") == "c"
    assert ckpt.verify(root) == {"c": [], "a": []}
    assert "ckpt skips b" in caplog.text


def test_the_final_state_is_never_left_out(root: Place, gated: GatedStorage) -> None:
    run = Run(1)
    with run.manager(gated, saving=ckpt.SaveOptions(when_busy="skip"), save_every=1) as manager:
        for _ in manager.epochs(1):
            for number in manager.batches(range(3)):
                run.step()
                gated.gate.clear()
                manager.step()
                if number == 2:
                    threading.Timer(0.2, gated.gate.set).start()
    assert ckpt.verify(root) == {"step-00000003": [], "step-00000001": []}
    assert loaded(root, "step-00000003") == run.state()


def test_memory_is_not_made_ready_anew_while_a_save_uses_what_there_is(
    gated: GatedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.save.snapshot.snapshots._LITTLE", 0)
    run = Run(1)
    with run.manager(gated) as manager:
        images = manager.session.saver.snapshots.memory
        gated.gate.clear()
        manager.save_state("a")
        before = images.size
        run.step()
        manager.step()
        assert images.size == before
        gated.gate.set()
        manager.wait()
        manager.step()
        assert images.size > before


def test_without_memory_for_a_copy_training_waits_and_is_told_once(
    root: Place, gated: GatedStorage, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(1)
    with run.manager(gated, saving=ckpt.SaveOptions(host_memory=1000)) as manager:
        for name in ("a", "b"):
            run.step()
            manager.save_state(name)
            assert (root / name / "manifest.json").exists()
    assert loaded(root, "b") == run.state()
    assert caplog.text.count("saving=ckpt.SaveOptions(host_memory=...) sets how much may be used") == 1


def test_a_manifest_says_how_long_training_waited(root: Place, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ckpt"), Run(1).manager(root) as manager:
        manager.save_state("a")
    seconds = json.loads((root / "a" / "manifest.json").read_bytes())["seconds"]
    assert set(seconds) == {"blocked", "copied", "written", "total"}
    assert 0 < seconds["blocked"] <= seconds["total"]
    assert "training waited" in caplog.text
    assert "durable after" in caplog.text


def test_an_unsupported_value_is_refused_at_once(root: Place) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"odd": object()}

        def load_state_dict(self, state: Any) -> None: ...

    with Run(1).manager(root) as manager:
        manager.register(odd=Odd())
        with pytest.raises(ckpt.UnsupportedError, match=r"odd\.odd"):
            manager.save_state("a")


@pytest.mark.slow
def test_every_kept_checkpoint_is_the_state_at_its_step(root: Place) -> None:
    """Many steps, a save at each, with second saves, edits in place and exceptions in between."""
    rng, last = random.Random(1), 20
    run = Run(1)
    states: dict[str, str] = {}
    with run.manager(root, keep=ckpt.Keep(last=last)) as manager:
        manager.resume()
        for number in range(3 * last):
            try:
                run.step()
                manager.step()
                kind = rng.choice(["plain", "twice", "edit", "data", "error", "wait"])
                if kind == "edit":
                    with torch.no_grad():
                        run.model[0].weight.mul_(0.99)  # type: ignore[operator]
                name = f"step-{number:05d}"
                states[name] = run.state()
                manager.save_state(name, wait=kind == "wait")
                if kind == "twice":
                    states[f"{name}-again"] = states[name]
                    manager.save_state(f"{name}-again")
                if kind == "data":  # unseen by autograd, right after the save
                    run.model[0].weight.data.mul_(1.01)  # type: ignore[operator]
                if kind == "error":
                    raise ValueError("a batch that cannot be read")
            except ValueError:
                continue
    kept = [checkpoint.name for checkpoint in ckpt.list_checkpoints(root)]
    assert len(kept) == last
    assert ckpt.verify(root) == {name: [] for name in kept}
    assert all(loaded(root, name) == states[name] for name in kept)


@pytest.mark.not_on_s3("nothing is written")
def test_what_is_on_the_host_can_be_copied_while_the_program_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors refuse work then, and a save that began just before still has this to do."""
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    sources = [torch.randn(3 << 20) for _ in range(3)]
    memory = torch.zeros(3 * sources[0].nbytes, dtype=torch.uint8)
    copy_on_host([TensorCopy("", source, index * source.nbytes) for index, source in enumerate(sources)], memory)
    assert torch.equal(memory.view(torch.float32), torch.cat(sources))


def _save_on_two_ranks(rank: int, root: str) -> None:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(1)
    model = nn.Linear(50, 50)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    states: dict[Any, str] = {}
    with ckpt.StateManager(
        root,
        model=wrapped,
        optimizer=optimizer,
        ranks=ckpt.RankOptions(timeout=30),
        saving=ckpt.SaveOptions(layout="sharded"),
    ) as manager:
        for number in range(5):
            optimizer.zero_grad()
            wrapped(torch.randn(3, 50)).pow(2).sum().backward()
            optimizer.step()
            states[manager.save_state(f"step-{number}")] = exact([model.state_dict(), optimizer.state_dict()])
        for name in reversed(states):
            manager.load_state(name)
            assert exact([model.state_dict(), optimizer.state_dict()]) == states[name]


@pytest.mark.slow
def test_ranks_save_behind_their_backs_while_they_train(root: Place) -> None:
    assert run_ranks(2, _save_on_two_ranks, str(root)) == [0, 0]
    assert len(ckpt.list_checkpoints(root)) == 5


def _fail_on_rank_1(rank: int, root: str) -> None:
    storage = GatedStorage(root)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    with ckpt.StateManager(
        storage, model=model, ranks=ckpt.RankOptions(timeout=30), saving=ckpt.SaveOptions(layout="sharded")
    ) as manager:
        manager.save_state("good", wait=True)
        storage.full = rank == 1
        manager.save_state("bad")
        with pytest.raises(ckpt.FullError, match="rank 1: no space left"):
            manager.wait()
        storage.full = False
        manager.save_state("better")


@pytest.mark.slow
def test_what_fails_on_one_rank_is_told_on_all(root: Place) -> None:
    assert run_ranks(2, _fail_on_rank_1, str(root)) == [0, 0]
    assert ckpt.verify(root) == {"better": [], "good": []}


def _skip_on_two_ranks(rank: int, root: str) -> None:
    storage = GatedStorage(root)
    with ckpt.StateManager(
        storage, model=nn.Linear(4, 4), ranks=ckpt.RankOptions(timeout=30), saving=ckpt.SaveOptions(when_busy="skip")
    ) as manager:
        storage.gate.clear()
        assert manager.save_state("a") == "a"
        assert manager.save_state("b") is None
        storage.gate.set()
        manager.wait()


@pytest.mark.slow
def test_all_ranks_leave_out_the_same_saves(root: Place) -> None:
    assert run_ranks(2, _skip_on_two_ranks, str(root)) == [0, 0]
    assert ckpt.verify(root) == {"a": []}

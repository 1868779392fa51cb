"""Several ranks: the main one writes, all of them agree, and nobody hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.ranks.find import find_ranks
from ckpt.ranks.store_and_heartbeats import Heartbeat, TimedStore
from ckpt.ranks.store_group import BuiltManagers, StoreGroup, built_here
from ckpt.storage import ANY, Buffer, open_storage
from tests.helpers.places import PassedOn, Place, committed
from tests.helpers.processes import run_ranks
from tests.helpers.training import Job, records, train


def _manager(root: str, timeout: float = 20.0) -> tuple[ckpt.StateManager, nn.Linear]:
    model = nn.Linear(3, 3)
    return ckpt.StateManager(root, model=DistributedDataParallel(model), ranks=ckpt.RankOptions(timeout=timeout)), model


def _save_then_load(rank: int, root: str) -> None:
    manager, model = _manager(root)
    with manager:
        for step in range(5):
            nn.init.constant_(model.weight, step)
            torch.manual_seed(1000 * rank + step)
            name = manager.save_state(f"step-{step}")
            drawn = torch.rand(3)
            nn.init.constant_(model.weight, -1.0)
            assert manager.load_state().name == name
            assert torch.equal(model.weight, torch.full((3, 3), float(step)))
            assert torch.equal(torch.rand(3), drawn)


@pytest.mark.slow
@pytest.mark.also_on_s3
def test_a_save_directly_followed_by_a_load_works_on_every_rank(root: Place) -> None:
    assert run_ranks(2, _save_then_load, str(root)) == [0, 0]


@pytest.mark.slow
def test_only_the_main_rank_writes(root: Place) -> None:
    job = Job(str(root), "distributed", save_every=3)
    assert run_ranks(2, _train_where_only_the_main_rank_may_write, job) == [0, 0]
    files = sorted((root / "step-00000003").files())
    assert files == [
        "manifest.copy.json",
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "rank-00000.json",
        "rank-00001.json",
        "state.json",
    ]


def _train_where_only_the_main_rank_may_write(rank: int, job: Job) -> None:
    if rank != 0:

        def refuse(self: object, key: str, pieces: object, *, over: object = ANY) -> None:
            assert key.startswith(".try-"), f"rank {rank} wrote {key}"

        type(open_storage(job.root)).write = refuse  # type: ignore[method-assign]
    train(rank, job)


def _save_on_one_rank_only(rank: int, root: str, who: int) -> None:
    manager, _ = _manager(root, timeout=1.0)
    with manager:
        if rank == who:
            began = time.monotonic()
            with pytest.raises(ckpt.RanksError, match=rf"rank {1 - who} did not answer within 1 s.*is_main_process"):
                manager.save_state("alone", wait=True)
            assert time.monotonic() - began < 10.0
        dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_save_on_one_rank_only_is_noticed_and_the_other_is_named(root: Place, who: int) -> None:
    assert run_ranks(2, _save_on_one_rank_only, str(root), who) == [0, 0]
    assert not committed(root)


def _do_different_things(rank: int, root: str) -> None:
    manager, _ = _manager(root)
    with (
        manager,
        pytest.raises(ckpt.RanksError, match=r"rank 0 called save_state\('a'\); rank 1 called save_state\('b'\)"),
    ):
        manager.save_state("ab"[rank], wait=True)


@pytest.mark.slow
def test_ranks_that_call_different_things_are_told_so(root: Place) -> None:
    assert run_ranks(2, _do_different_things, str(root)) == [0, 0]


class _Loader:
    """A loader whose position cannot be held, on rank 1 alone."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def state_dict(self) -> dict[str, object]:
        return {"hook": print if self.rank == 1 else None}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError("nothing was saved")


def _fail_on_one_rank(rank: int, root: str) -> None:
    manager, _ = _manager(root)
    with manager:
        for _ in manager.batches(_Loader(rank)):
            with pytest.raises(ckpt.UnsupportedError, match=r"loader\.0\.state\.hook: a function"):
                manager.save_state("no", wait=True)
        manager.save_state("yes")


@pytest.mark.slow
def test_what_fails_on_one_rank_is_raised_on_all_and_nothing_is_committed(root: Place) -> None:
    assert run_ranks(2, _fail_on_one_rank, str(root)) == [0, 0]
    assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(root)] == ["yes"]


def _lose_a_rank(rank: int, root: str) -> None:
    manager, _ = _manager(root, timeout=3.0)
    dist.barrier()  # what one rank has imported by now, the other has too
    with manager:
        manager.save_state("before", wait=True)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(ckpt.RanksError, match="rank 1 did not answer"):
            manager.save_state("after", wait=True)
    os._exit(0)  # without a farewell to the dead rank


@pytest.mark.slow
@pytest.mark.also_on_s3
def test_a_dead_rank_is_named_and_the_checkpoint_before_stands(root: Place) -> None:
    assert run_ranks(2, _lose_a_rank, str(root), dies=True) == [0, -9]
    assert ckpt.verify(root) == {"before": []}


def _train_until_told(rank: int, job: Job, told: int) -> None:
    """Rank `told` is told to terminate at its fourth step; every rank saves the same one and stops."""
    die = ckpt.StateManager.step

    def step(self: ckpt.StateManager, metrics: dict[str, object] | None = None) -> None:
        if self.progress.step == 3 and rank == told:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)  # others ask once a second
        die(self, metrics)

    ckpt.StateManager.step = step  # type: ignore[method-assign, assignment]
    train(rank, job)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "told"), [(1, 0), (2, 0), (2, 1)])
def test_told_to_terminate_all_ranks_save_the_same_step_and_stop(
    root: Place, tmp_path: Path, world_size: int, told: int
) -> None:
    straight = Job(f"{root}/straight", "distributed", epochs=4, record=str(tmp_path / "straight"))
    run_ranks(world_size, train, straight)
    job = Job(f"{root}/run", "distributed", epochs=4, save_every=1000, record=str(tmp_path / "run"))
    assert run_ranks(world_size, _train_until_told, job, told, dies=True) == [143] * world_size
    (saved,) = ckpt.list_checkpoints(root / "run")
    assert saved.step is not None
    assert 4 <= saved.step < 20  # how soon depends on when the others ask
    run_ranks(world_size, train, job)
    for was, now in zip(records(straight.record or "", world_size), records(job.record or "", world_size), strict=True):
        assert min(map(int, now["steps"])) == saved.step + 1
        assert now["final"] == was["final"]


@pytest.mark.not_on_s3("nothing is stored")
def test_many_processes_without_a_process_group_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ckpt.RanksError, match="init_process_group"):
        ckpt.StateManager(tmp_path, model=nn.Linear(1, 1))


def _run_apart(rank: int, root: str) -> None:
    """Ranks that nothing brings together, many steps apart when they are told to stop."""
    model = nn.Linear(2, 2)
    with ckpt.StateManager(root, model=model, ranks=ckpt.RankOptions(timeout=30)) as manager:
        manager.resume()
        for step in range(100_000):
            if step == 20:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.002 if rank == 0 else 0.004)
            manager.step()
    raise AssertionError("never stopped")


@pytest.mark.slow
def test_ranks_that_are_many_steps_apart_stop_at_the_same_one(root: Place) -> None:
    assert run_ranks(2, _run_apart, str(root), dies=True) == [143, 143]
    (saved,) = ckpt.list_checkpoints(root)
    assert saved.manifest is not None
    assert ckpt.verify(root) == {saved.name: []}


class _SlowStorage(PassedOn):
    """A disk that takes longer than the deadline."""

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        if key == "slow/model.safetensors":
            time.sleep(8.0)
        super().write(key, pieces, over=over)


def _save_slowly(rank: int, root: str) -> None:
    model = DistributedDataParallel(nn.Linear(3, 3))
    with ckpt.StateManager(_SlowStorage(root), model=model, ranks=ckpt.RankOptions(timeout=5.0)) as manager:
        manager.save_state("slow")
        manager.save_state("again")


@pytest.mark.slow
def test_a_rank_that_is_at_work_is_waited_for_beyond_the_deadline(root: Place) -> None:
    assert run_ranks(2, _save_slowly, str(root)) == [0, 0]
    assert ckpt.verify(root) == {"again": [], "slow": []}


def _fail_then_save(rank: int, root: str) -> None:
    """One rank is late for a save; when both come to the next one they are in step again."""
    manager, _ = _manager(root, timeout=6.0)
    with manager:
        if rank == 0:
            with pytest.raises(ckpt.RanksError, match="rank 1 did not answer"):
                manager.save_state("missed", wait=True)
        dist.barrier()
        manager.save_state("met")


@pytest.mark.slow
def test_after_a_missed_save_the_ranks_meet_at_the_next(root: Place) -> None:
    assert run_ranks(2, _fail_then_save, str(root)) == [0, 0]
    assert ckpt.verify(root) == {"met": []}


def _leave_an_answer_and_restart(rank: int) -> None:
    """What a killed attempt has left in torchrun's store, which outlives it, is no answer to the next one."""
    if rank == 1:  # the main rank was killed: nobody has read this
        find_ranks("runs/x", 5.0).gather("save_state('a')", "of the killed attempt")
    dist.barrier()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    built_here()._counts.clear()  # as in a new process
    time.sleep(0.5 * rank)  # the main rank looks first
    answers = find_ranks("runs/x", 5.0).gather("save_state('a')", f"of rank {rank}")
    assert answers == (["of rank 0", "of rank 1"] if rank == 0 else [])
    dist.barrier()


@pytest.mark.slow
def test_after_a_restart_by_torchrun_no_answer_of_killed_ranks_is_read() -> None:
    assert run_ranks(2, _leave_an_answer_and_restart) == [0, 0]


def test_while_the_main_rank_waits_for_one_others_see_that_it_lives() -> None:
    store = TimedStore(HashStore(), 5.0)
    group = StoreGroup(store.below("group"), 0, 2, 0.2, store, BuiltManagers())
    with pytest.raises(ckpt.RanksError, match="rank 1 did not answer"):
        group.gather("save_state('a')", "")
    assert store.below("group").add("alive/0", 0) > 0


def test_a_process_that_ends_does_not_wait_for_its_signs_of_life() -> None:
    with Heartbeat(TimedStore(HashStore(), 5.0), 0, 60.0).running():
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "ckpt-alive")
        assert thread.daemon

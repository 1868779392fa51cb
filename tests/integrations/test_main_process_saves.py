"""Scripts that call `save_state` under `if accelerator.is_main_process`, on two ranks, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader

import ckpt
from ckpt.integrations.accelerate import MainProcessSaves, attach
from ckpt.ranks.store_and_heartbeats import TimedStore
from ckpt.ranks.store_group import BuiltManagers, StoreGroup
from tests.helpers.accelerated import Numbers, build, new_accelerator, reseed, train_on
from tests.helpers.processes import run_ranks
from tests.helpers.training import exact

RANKS, EPOCHS, EVERY, WINDOW = 2, 3, 2, 2


def _script(rank: int, output: str, run: int, killed_after: int = 0) -> None:
    """Newest folder, accumulation, evaluation in between, and a save on the main process only."""
    reseed(rank, run)
    accelerator = new_accelerator(rank=rank, world_size=RANKS, gradient_accumulation_steps=WINDOW)
    manager = attach(accelerator, output, main_process_saves=True)
    loader, evaluation, *parts = accelerator.prepare(
        DataLoader(Numbers(), batch_size=2, shuffle=True), DataLoader(Numbers(), batch_size=4), *build()
    )
    updates = -(-len(loader) // WINDOW)
    done = skipped = 0
    folders = [name for name in os.listdir(output) if name.startswith("checkpoint")] if os.path.isdir(output) else []
    if folders:
        newest = max(folders, key=lambda name: int(name.split("-")[1]))
        accelerator.load_state(os.path.join(output, newest))
        done = int(newest.split("-")[1])
        skipped = done % updates * WINDOW
    first, seen = done // updates, list[Any]()
    for epoch in range(first, EPOCHS):
        for number, batch in enumerate(loader):
            if epoch == first and number < skipped:
                continue
            seen.append([epoch, number, batch[0].tolist(), train_on(batch, accelerator, *parts).hex()])
            if accelerator.sync_gradients:
                done += 1
                if done == killed_after:
                    manager.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
                if accelerator.is_main_process and done % EVERY == 0:
                    accelerator.save_state(os.path.join(output, f"checkpoint-{done}"))
                elif not accelerator.is_main_process:
                    torch.rand(2), torch.zeros(64).add_(1)  # it is faster or slower than the main one
        with torch.no_grad():
            seen.append([float(parts[0](batch[1].float().reshape(-1, 1)).sum()) for batch in evaluation])
        if accelerator.is_main_process:
            accelerator.save_state(os.path.join(output, f"epoch_{epoch}"))
    accelerator.wait_for_everyone()
    seen.append(exact([part.state_dict() for part in parts]))
    Path(output, f"seen-{rank}-{run}.json").write_text(json.dumps(seen, default=repr))
    manager.close()
    assert {found.committed for found in ckpt.list_checkpoints(output)} == {True}


def _seen(output: Path, run: int) -> list[Any]:
    return [json.loads((output / f"seen-{rank}-{run}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.slow
def test_ranks_that_did_not_call_it_join_the_save_and_all_resume_bit_for_bit(tmp_path: Path) -> None:
    assert run_ranks(RANKS, _script, str(tmp_path / "straight"), 0) == [0] * RANKS
    run = tmp_path / "run"
    assert run_ranks(RANKS, _script, str(run), 0, 5, dies=True) == [-signal.SIGKILL] * RANKS
    assert run_ranks(RANKS, _script, str(run), 1) == [0] * RANKS
    for straight, rest in zip(_seen(tmp_path / "straight", 0), _seen(run, 1), strict=True):
        assert 0 < len(rest) < len(straight)
        assert straight[-len(rest) :] == rest


def _called_by_all(rank: int, root: str) -> None:
    accelerator = new_accelerator(rank=rank, world_size=RANKS)
    loader, *parts = accelerator.prepare(DataLoader(Numbers(), batch_size=4), *build())
    manager = attach(accelerator, root, main_process_saves=True)
    for number, batch in enumerate(loader):
        train_on(batch, accelerator, *parts)
        if number < 2:
            time.sleep(0.5 * rank)  # the main rank has gone on before the other one has heard of its save
            assert accelerator.save_state(f"step_{number}") == Path(root, f"step_{number}")
    if rank == 0:  # nobody reads a batch any more
        accelerator.save_state("last")
    accelerator.wait_for_everyone()
    if rank == 1:
        with pytest.raises(ckpt.RanksError, match=", but rank 0 continued without a save"):
            accelerator.save_state("mine")
    accelerator.wait_for_everyone()
    manager.close()
    assert {found.name for found in ckpt.list_checkpoints(root) if found.committed} == {"step_0", "step_1", "last"}


@pytest.mark.slow
def test_a_save_that_every_rank_calls_and_one_before_all_wait_for_everyone_are_made_once(tmp_path: Path) -> None:
    assert run_ranks(RANKS, _called_by_all, str(tmp_path)) == [0] * RANKS


def _at_another_moment(rank: int, root: str) -> None:
    """The main rank saves when a batch has been read, before it is trained on: the others come when it has been."""
    accelerator = new_accelerator(rank=rank, world_size=RANKS, gradient_accumulation_steps=4)
    loader, *parts = accelerator.prepare(DataLoader(Numbers(), batch_size=4), *build())
    attach(accelerator, root, main_process_saves=True, ranks=ckpt.RankOptions(timeout=2.0))

    def train() -> None:
        for batch in loader:
            if accelerator.is_main_process:
                accelerator.save_state("early")
            train_on(batch, accelerator, *parts)

    with pytest.raises(ckpt.RanksError, match="at a point that this rank has already passed" if rank else "rank 1"):
        train()
    assert ckpt.list_checkpoints(root) == []
    dist.barrier()


@pytest.mark.slow
def test_a_save_before_the_batch_is_used_is_refused_because_the_other_ranks_are_further(tmp_path: Path) -> None:
    assert run_ranks(RANKS, _at_another_moment, str(tmp_path / "run")) == [0] * RANKS


def test_it_is_true_or_false(tmp_path: Path) -> None:
    accelerator = new_accelerator()
    with pytest.raises(ckpt.ConfigError, match=r"main_process_saves='no' must be True or False"):
        attach(accelerator, tmp_path, main_process_saves="no")  # type: ignore[arg-type]


def test_a_save_that_failed_on_the_main_rank_is_not_joined_later() -> None:
    store, joined = TimedStore(HashStore(), 5.0), list[str | None]()
    groups = [StoreGroup(store.below("group"), rank, 2, 5.0, store, BuiltManagers()) for rank in range(2)]
    main, other = (MainProcessSaves(group, joined.append, lambda: [1]) for group in groups)
    with pytest.raises(OSError, match="full"), main.announced("checkpoint-1"):
        raise OSError("full")
    with pytest.raises(ckpt.RanksError, match="a save on rank 0 failed"):
        other.join_next()
    assert joined == []


def pair(*, place: list[Any] | None = None) -> tuple[MainProcessSaves, MainProcessSaves, list[str | None]]:
    """Two ranks in one process, and what the second has joined."""
    store, joined = TimedStore(HashStore(), 5.0), list[str | None]()
    groups = [StoreGroup(store.below("group"), rank, 2, 5.0, store, BuiltManagers()) for rank in range(2)]
    main = MainProcessSaves(groups[0], joined.append, lambda: [1])
    return main, MainProcessSaves(groups[1], joined.append, lambda: place or [1]), joined


def test_saves_are_joined_at_the_meeting_that_they_were_called_before_each_once() -> None:
    main, other, joined = pair()
    main.meet()
    other.meet()
    assert joined == []
    for name in ("a", None):
        with main.announced(name):
            main.meet()  # a hook of the save waits for everyone
    main.meet()
    other.meet()
    assert joined == ["a", None]
    with main.announced("early"):  # before the next meeting
        pass
    assert other.join_next()
    main.meet()
    assert not other.join_next()
    other.meet()
    main.meet()
    with main.announced("of the meeting after"):
        pass
    other.meet()
    assert joined == ["a", None, "early"]
    main.meet()
    other.meet()
    assert joined == ["a", None, "early", "of the meeting after"]


def test_a_save_of_another_place_is_refused() -> None:
    main, other, joined = pair(place=[2])
    with main.announced("a"):
        pass
    with pytest.raises(
        ckpt.RanksError,
        match=r"at a point that this rank has already passed, .* are \[1, 1\] on rank 0, but \[1, 2\] on this rank",
    ):
        other.meet()
    assert joined == []


def test_who_waits_for_the_main_rank_asks_it_ever_less_often_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    _, other, joined = pair()
    pauses: list[float] = []
    now = time.monotonic()
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(time, "monotonic", lambda: now + 40.0 * len(pauses))
    with pytest.raises(ckpt.RanksError, match="for 1800 s, rank 0 has neither read its next batch"):
        other.meet()
    assert pauses[:3] == pytest.approx([0.0002, 0.0003, 0.00045])
    assert pauses[-1] == 0.02
    assert len(pauses) == 45
    assert joined == []

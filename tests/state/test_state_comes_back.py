"""State that nobody would miss until it is wrong: comparing a thing with itself does not show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.load.broadcast import RankReads, plan_reads
from ckpt.state import rng
from tests.helpers.places import Place
from tests.helpers.processes import run_ranks, seed_everything
from tests.helpers.training import exact


def stepped(learning_rate: float) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.5, 0.6))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_the_learning_rate_that_a_schedule_had_reached_comes_back_with_the_optimizer_alone(root: Place) -> None:
    model, optimizer = stepped(0.1)
    optimizer.param_groups[0]["lr"] = 0.025  # as a schedule by hand does
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.save_state("a")
    again, fresh = nn.Linear(3, 3), torch.optim.AdamW
    resumed = fresh(again.parameters(), lr=0.1)
    with ckpt.StateManager(root, model=again, optimizer=resumed) as manager:
        manager.load_state("a")
    assert resumed.param_groups[0]["lr"] == 0.025
    assert resumed.param_groups[0]["betas"] == (0.5, 0.6)
    assert exact(resumed.state_dict()) == exact(optimizer.state_dict())


class Counting(torch.optim.SGD):
    """An optimizer that keeps something beside its state and its groups."""

    counted = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "counted": self.counted}

    def load_state_dict(self, state_dict: Any) -> None:
        state = dict(state_dict)
        self.counted = state.pop("counted")
        super().load_state_dict(state)


def test_what_an_optimizer_keeps_beside_its_groups_comes_back(root: Place) -> None:
    model = nn.Linear(2, 2)
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.counted = 17
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.save_state("a", wait=True)
        optimizer.counted = 0
        manager.load_state("a")
    assert optimizer.counted == 17


def test_a_number_differs_with_each_of_what_it_follows_from() -> None:
    state = torch.Generator().manual_seed(1).get_state()
    other = torch.Generator().manual_seed(2).get_state()
    found = [rng.number(given, *more) for given in (state, other) for more in ((), (0,), (1,), (0, 1), (1, 0), (-1,))]
    assert len(set(found)) == len(found)
    assert all(0 <= number < 1 << 63 for number in found)
    assert rng.number(state, 3, 4) == rng.number(state.clone(), 3, 4)


def _draw_after_a_resume(rank: int, root: str, record: str, *, save: bool) -> None:
    import random

    import numpy as np

    seed_everything(0)  # a script that seeds every rank alike
    with ckpt.StateManager(root, model=nn.Linear(1, 1), ranks=ckpt.RankOptions(timeout=60.0)) as manager:
        if save:
            seed_everything(rank)
            manager.save_state("a", wait=True)
        else:
            manager.resume()
        draws = [torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()]
    Path(f"{record}-{rank}.json").write_text(json.dumps(draws))


def _save(rank: int, root: str, record: str) -> None:
    _draw_after_a_resume(rank, root, record, save=True)


def _resume(rank: int, root: str, record: str) -> None:
    _draw_after_a_resume(rank, root, record, save=False)


@pytest.mark.slow
def test_ranks_that_are_new_draw_numbers_that_no_other_rank_draws(root: Place, tmp_path: Path) -> None:
    run_ranks(2, _save, str(root), str(tmp_path / "saved"))
    run_ranks(4, _resume, str(root), str(tmp_path / "resumed"))
    then = [json.loads((tmp_path / f"saved-{rank}.json").read_text()) for rank in range(2)]
    now = [json.loads((tmp_path / f"resumed-{rank}.json").read_text()) for rank in range(4)]
    assert now[:2] == then
    for generator in range(3):
        assert len({str(draws[generator]) for draws in now}) == 4


def test_only_files_of_which_all_ranks_want_the_same_bytes_are_read_together() -> None:
    told: list[RankReads] = [
        {"host": "a", "files": {"common": "1", "rows": "2", "mine": "3"}, "once_per_job": False},
        {"host": "a", "files": {"common": "1", "rows": "another digest"}, "once_per_job": False},
        {"host": "b", "files": {"common": "1"}, "once_per_job": False},
    ]
    (plan,) = plan_reads(told)
    assert plan["ranks"] == [0, 1]
    assert set(plan["files"]) == {"common"}


@pytest.mark.parametrize("names", [("b", "a"), ("step-9", "step-10", "best")])
def test_list_checkpoints_has_the_one_saved_last_first(root: Place, names: tuple[str, ...]) -> None:
    with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
        for name in names:
            manager.save_state(name, wait=True)
    found = ckpt.list_checkpoints(root)
    assert [checkpoint.name for checkpoint in found] == list(reversed(names))
    assert [checkpoint.manifest.sequence for checkpoint in found if checkpoint.manifest] == list(
        range(len(names), 0, -1)
    )

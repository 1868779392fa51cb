"""Ranks that have missed each other once meet again at the next call."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
from tests.helpers.places import Place
from tests.helpers.processes import run_ranks

pytestmark = pytest.mark.slow


def _miss_then_save(rank: int, root: str, late: int, times: int) -> None:
    model = DistributedDataParallel(nn.Linear(3, 3))
    with ckpt.StateManager(root, model=model, ranks=ckpt.RankOptions(timeout=2.0)) as manager:
        for number in range(times):
            if rank != late:
                with pytest.raises(ckpt.RanksError, match=f"rank {late} did not answer"):
                    manager.save_state(f"missed-{number}", wait=True)
            dist.barrier()
            manager.save_state(f"met-{number}", wait=True)
            assert manager.load_state().name == f"met-{number}"


@pytest.mark.parametrize("late", [0, 1])
def test_after_a_save_that_one_rank_missed_all_of_them_save_and_load_the_next(root: Place, late: int) -> None:
    assert run_ranks(2, _miss_then_save, str(root), late, 2) == [0, 0]
    assert ckpt.verify(root) == {"met-0": [], "met-1": []}

"""`manager.fingerprint()`: whether two runs are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import ckpt
from tests.helpers.processes import run_ranks


class _Run:
    """A small run: its model, its optimizer and its manager."""

    def __init__(self, root: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        data: Any = torch.randn(24, 8)
        self.loader = DataLoader[Any](data, batch_size=4, shuffle=True)
        self.manager = ckpt.StateManager(root, model=self.model, optimizer=self.optimizer)

    def train(self) -> dict[int, dict[str, str]]:
        """Train for six steps, a checkpoint after the third, and return the fingerprints after each."""
        found = {}
        with self.manager as manager:
            for batch in manager.batches(self.loader):
                self.model(batch + torch.randn(4, 8)).sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                manager.step()
                found[manager.progress.step] = manager.fingerprint()
                if manager.progress.step == 3:
                    manager.save_state(wait=True)
        return found


def test_a_resumed_run_has_the_fingerprints_of_one_that_was_never_interrupted(tmp_path: Path) -> None:
    straight, resumed = _Run(tmp_path).train(), _Run(tmp_path).train()
    assert [[*straight], [*resumed]] == [[1, 2, 3, 4, 5, 6], [4, 5, 6]]
    assert resumed == {step: straight[step] for step in (4, 5, 6)}
    assert not any(straight[3][part] == straight[6][part] for part in ("model", "optimizer", "rng", "data"))


def test_one_bit_changes_the_fingerprint_of_its_part_alone(tmp_path: Path) -> None:
    run = _Run(tmp_path / "run")
    with run.manager as manager:
        before = manager.fingerprint()
        with torch.no_grad():
            run.model.weight.view(torch.int32)[3, 4] ^= 1
        after = manager.fingerprint()
        assert {part for part in before if before[part] != after[part]} == {"model"}
        torch.rand(1)
        last = manager.fingerprint()
        assert {part for part in after if after[part] != last[part]} == {"rng"}


def _of_shards(rank: int, folder: str) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8))
    with ckpt.StateManager(folder, model=model) as manager:
        Path(f"{folder}-{rank}").write_text(manager.fingerprint()["model"])


@pytest.mark.slow
def test_each_rank_has_the_fingerprint_of_its_own_shards(tmp_path: Path) -> None:
    found = []
    for run in ("one", "two"):
        assert run_ranks(2, _of_shards, str(tmp_path / run)) == [0, 0]
        found.append([Path(f"{tmp_path / run}-{rank}").read_text() for rank in range(2)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]

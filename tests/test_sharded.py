"""State that is spread over ranks: saved in pieces, loaded in any other way of spreading it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt
from tests.processes import run_ranks
from tests.sharded import MODELS, state, step


def _save(rank: int, root: str, how: str) -> None:
    model = MODELS[how](1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with ckpt.StateManager(root, model=model, optimizer=optimizer, timeout=60) as manager:
        for number in range(2):
            step(model, optimizer, number)
        manager.save_state(how)
        saved = state(model, optimizer)
        for number in range(2, 4):
            step(model, optimizer, number)
        later = state(model, optimizer)
    if rank == 0:
        Path(root, f"{how}.txt").write_text(saved)
        Path(root, f"{how}-later.txt").write_text(later)


def _load(rank: int, root: str, saved: list[str], how: str, same: bool) -> None:
    for name in saved:
        model = MODELS[how](2)
        optimizer = torch.optim.AdamW(model.parameters())
        with ckpt.StateManager(root, model=model, optimizer=optimizer, timeout=60) as manager:
            restored = manager.load_state(name)
        assert {"model", "optimizer"} <= set(restored.restored)
        assert state(model, optimizer) == Path(root, f"{name}.txt").read_text(), f"{name} into {how}"
        if same:
            for number in range(2, 4):
                step(model, optimizer, number)
            assert state(model, optimizer) == Path(root, f"{name}-later.txt").read_text()


SAVED = ["fsdp2", "hsdp", "tp", "fsdp2-tp", "fsdp1", "fsdp1-flat", "fsdp1-mesh"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each way to spread a model, saved by four ranks."""
    root = tmp_path_factory.mktemp("sharded")
    for how in SAVED:
        assert run_ranks(4, _save, str(root), how) == [0] * 4
    return root


@pytest.mark.parametrize("how", ["fsdp2", "hsdp", "tp", "fsdp2-tp", "fsdp1", "fsdp1-flat", "fsdp1-mesh", "ddp"])
def test_what_four_ranks_saved_loads_in_every_other_way_on_four(root: Path, how: str) -> None:
    assert run_ranks(4, _load, str(root), SAVED, how, False) == [0] * 4


@pytest.mark.parametrize("how", SAVED)
def test_training_goes_on_as_if_uninterrupted(root: Path, how: str) -> None:
    assert run_ranks(4, _load, str(root), [how], how, True) == [0] * 4


OTHERS = [
    (1, "ddp"),
    (2, "fsdp2"),
    (2, "ddp"),
    (2, "tp"),
    (2, "fsdp1"),
    (3, "fsdp2"),
    (3, "fsdp1-flat"),
    (8, "fsdp2"),
    (8, "hsdp"),
    (8, "fsdp2-tp"),
]


@pytest.mark.parametrize(("world_size", "how"), OTHERS)
def test_what_four_ranks_saved_loads_on_another_number(root: Path, world_size: int, how: str) -> None:
    assert run_ranks(world_size, _load, str(root), SAVED, how, False) == [0] * world_size

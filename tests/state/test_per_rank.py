"""`register(..., per_rank=True)`: every rank saves and restores its own state, whatever the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.helpers.places import Place
from tests.helpers.processes import run_alone, run_ranks


class _Buffer:
    """A replay buffer: numbers and tensors, of another length on each rank."""

    def __init__(self, number: int) -> None:
        self.seen, self.items = number, torch.full((number,), float(number))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "items": self.items}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.items = state["seen"], state["items"]


def _manager(root: str) -> ckpt.StateManager:
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    return ckpt.StateManager(root, model=model, ranks=ckpt.RankOptions(timeout=60))


def _save(rank: int, root: str) -> None:
    with _manager(root) as manager:
        buffer = _Buffer(10 + rank)
        manager.register(buffer=buffer, per_rank=True)
        manager.save_state("a", wait=True)


def _load(rank: int, root: str, saved_by: int, now: int) -> None:
    buffer = _Buffer(3)
    with _manager(root) as manager:
        manager.register(per_rank=True, buffer=buffer)
        restored = manager.load_state("a")
    number = 10 + rank if rank < saved_by else 3
    assert buffer.seen == number
    assert torch.equal(buffer.items, torch.full((number,), float(number)))
    said = restored.approximated.get("buffer", "")
    if now == saved_by:
        assert not said, said
    elif now < saved_by:
        assert said == "saved by 2 ranks, resumed by 1: rank 1 is gone"
    elif rank < saved_by:
        assert said == "saved by 2 ranks, resumed by 3: rank 2 is new and not restored"
    else:
        assert "this rank is new, and its _Buffer keeps the state that it has" in said
    assert "buffer" in str(restored)
    assert not restored.skipped


@pytest.mark.slow
def test_every_rank_has_its_own_state_back_at_any_number_of_ranks_and_new_ranks_keep_theirs(root: Place) -> None:
    assert run_ranks(2, _save, str(root)) == [0, 0]
    assert run_ranks(2, _load, str(root), 2, 2) == [0, 0]
    assert run_ranks(3, _load, str(root), 2, 3) == [0, 0, 0]
    assert run_alone(_load, str(root), 2, 1) == 0


@pytest.mark.slow
def test_equal_states_are_saved_for_every_rank_too(root: Place) -> None:
    """Or a rank that is new could not be told from one that had the same state."""
    assert run_ranks(2, _save_equal, str(root)) == [0, 0]
    files = set((root / "a").files())
    assert {"buffer-00000.safetensors", "buffer-00001.safetensors"} <= files
    assert "differs" not in (root / "a" / "state.json").read_bytes().decode()


def _save_equal(rank: int, root: str) -> None:
    with _manager(root) as manager:
        manager.register(buffer=_Buffer(4), per_rank=True)
        manager.save_state("a", wait=True)


def test_what_is_registered_for_all_ranks_is_not_taken_for_a_ranks_own_nor_the_other_way_round(tmp_path: Path) -> None:
    for name, saved_so in (("own", True), ("common", False)):
        with _manager(str(tmp_path / name)) as manager:
            manager.register(buffer=_Buffer(4), per_rank=saved_so)
            manager.save_state("a", wait=True)
        buffer = _Buffer(3)
        with _manager(str(tmp_path / name)) as manager:
            manager.register(buffer=buffer, per_rank=not saved_so)
            with pytest.raises(ckpt.MismatchError, match=r"buffer.*: missing: the checkpoint has no such part"):
                manager.load_state("a")
            restored = manager.load_state("a", strict=False)
        assert any("not managed here" in why for key, why in restored.skipped.items() if key.startswith("buffer"))
        assert buffer.seen == 3


def test_a_name_is_given_once_and_per_rank_is_true_or_false(tmp_path: Path) -> None:
    with _manager(str(tmp_path)) as manager:
        manager.register(buffer=_Buffer(1), per_rank=True)
        with pytest.raises(ckpt.ConfigError, match="a part of that name already exists"):
            manager.register(buffer=_Buffer(1))
        with pytest.raises(ckpt.ConfigError, match="must be True or False"):
            manager.register(per_rank=_Buffer(1))
        with pytest.raises(ckpt.ConfigError, match="has no state_dict"):
            manager.register(number=3, per_rank=True)


def test_generators_are_each_ranks_own_with_or_without_it(tmp_path: Path) -> None:
    dice = torch.Generator().manual_seed(5)
    with _manager(str(tmp_path)) as manager:
        manager.register(dice=dice, per_rank=True)
        manager.save_state("a", wait=True)
        expected = torch.rand(3, generator=dice)
        manager.load_state("a")
    assert torch.equal(torch.rand(3, generator=dice), expected)

"""Models on the meta device: a checkpoint is loaded straight into them, shard by shard where they are sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpt
from tests.helpers.processes import run_ranks
from tests.helpers.sharded import plain, state, step


class Net(nn.Module):
    """With tied weights, a buffer that is saved, and layers that may be elsewhere already."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(self.words(words)))
        return found


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(5)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Net, Path]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with ckpt.StateManager(tmp_path, model=model, optimizer=optimizer) as manager:
        train(model, optimizer)
        manager.save_state("saved", wait=True)
        train(model, optimizer)
    return model, tmp_path


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == again and torch.equal(value, found) for (name, value), (again, found) in pairs)


@pytest.mark.parametrize("partly", [False, True])
def test_training_goes_on_with_a_model_that_was_on_meta_and_an_optimizer_that_was_built_for_it(
    saved: tuple[Net, Path], partly: bool
) -> None:
    trained, root = saved
    model = on_meta()
    if partly:
        model.body.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.load_state("saved")
        assert model.head.weight is model.words.weight
        train(model, optimizer)
    assert equal(model, trained)


def test_a_model_alone_is_loaded_so_too(saved: tuple[Net, Path]) -> None:
    _, root = saved
    model, other = on_meta(), Net()
    ckpt.load_model(root / "saved", model)
    ckpt.load_model(root / "saved", other)
    assert equal(model, other)


def test_what_no_checkpoint_has_is_named_and_nothing_is_changed(saved: tuple[Net, Path]) -> None:
    _, root = saved
    model = on_meta()
    model.register_buffer("angles", torch.empty(3, device="meta"), persistent=False)
    with (
        ckpt.StateManager(root, model=model) as manager,
        pytest.raises(ckpt.MismatchError, match=r"no values for angles\. Call to_empty"),
    ):
        manager.load_state("saved")
    assert all(tensor.device.type == "meta" for tensor in model.state_dict().values())


def test_a_load_that_fails_later_leaves_nothing_that_could_be_saved(saved: tuple[Net, Path]) -> None:
    _, root = saved
    damaged = root / "saved" / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    model = on_meta()
    with ckpt.StateManager(root, model=model, optimizer=torch.optim.AdamW(model.parameters())) as manager:
        with pytest.raises(ckpt.DamagedError):
            manager.load_state("saved")
        with pytest.raises(ckpt.StateError, match="failed halfway"):
            manager.save_state("after", wait=True)


def test_what_does_not_fit_is_not_left_without_values(saved: tuple[Net, Path]) -> None:
    _, root = saved
    model = on_meta()
    model.more = nn.Linear(2, 2, device="meta")
    with (
        ckpt.StateManager(root, model=model) as manager,
        pytest.raises(ckpt.MismatchError, match=r"no values for more\.weight, more\.bias\."),
    ):
        manager.load_state("saved", strict=False)


def _save(rank: int, root: str) -> None:
    model = plain(1)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        step(model, optimizer, 0)
        manager.save_state("saved")
        step(model, optimizer, 1)
    if rank == 0:
        Path(f"{root}.txt").write_text(state(model, optimizer))
    else:
        state(model, optimizer)


def _load(rank: int, root: str) -> None:
    with torch.device("meta"):
        model = plain(2)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.load_state("saved")
        step(model, optimizer, 1)
    assert state(model, optimizer) == Path(f"{root}.txt").read_text()


@pytest.mark.slow
def test_shards_are_loaded_into_a_sharded_model_on_meta(tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path / "run"))
    run_ranks(2, _load, str(tmp_path / "run"))

"""Weights that are tied here and not in the checkpoint, or the other way round, or over the stages of a pipeline."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpt
from tests.helpers.processes import run_ranks

ROWS, WIDTH = 12, 8


class Net(nn.Module):
    """An embedding, a layer, and a head, which may be the embedding's weight. A stage has one half of it."""

    def __init__(self, *, tied: bool, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(torch.tanh(self.layer(self.embed(numbers))))
        return outputs


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(model((torch.arange(6) + step) % ROWS).square().mean())
        optimizer.step()


def _saved(root: Path, *, tied: bool, equal: bool = False, layout: Any = "auto") -> tuple[Net, torch.optim.Optimizer]:
    """A trained model with its checkpoint. `equal`: embedding and head, though not tied, and their state are equal."""
    model = Net(tied=tied)
    optimizer = _adam(model)
    _train(model, optimizer)
    if equal:
        model.head.weight.data.copy_(model.embed.weight)
        optimizer.state[model.head.weight] = copy.deepcopy(optimizer.state[model.embed.weight])
    with ckpt.StateManager(root, model=model, optimizer=optimizer, saving=ckpt.SaveOptions(layout=layout)) as manager:
        manager.save_state("saved")
    return model, optimizer


@pytest.mark.parametrize("layout", ["full", "sharded"])
class TestUntiedIntoTied:
    def test_two_values_for_one_tensor_are_refused_with_both_names_and_the_way_out(
        self, tmp_path: Path, layout: str
    ) -> None:
        _saved(tmp_path, tied=False, layout=layout)
        model = Net(tied=True, seed=1)
        before = model.embed.weight.detach().clone()
        with (
            ckpt.StateManager(tmp_path, model=model, optimizer=_adam(model)) as manager,
            pytest.raises(ckpt.MismatchError) as refused,
        ):
            manager.load_state("saved")
        text = str(refused.value)
        why = "its values in the checkpoint differ from those of embed.weight, with which it is tied here"
        assert f"model: head.weight: {why}" in text
        assert "optimizer: state.head.weight: its state in the checkpoint differs from that of embed.weight" in text
        assert "tie_word_embeddings=False" in text
        assert "unexpected" not in text
        assert torch.equal(model.embed.weight, before)
        with pytest.raises(ckpt.MismatchError, match=r"head\.weight: its values in the checkpoint differ"):
            ckpt.load_model(tmp_path / "saved", model)
        assert torch.equal(model.embed.weight, before)

    def test_without_strict_the_first_name_is_taken_and_the_other_one_named(self, tmp_path: Path, layout: str) -> None:
        saved, state = _saved(tmp_path, tied=False, layout=layout)
        model = Net(tied=True, seed=1)
        optimizer = _adam(model)
        with ckpt.StateManager(tmp_path, model=model, optimizer=optimizer) as manager:
            restored = manager.load_state("saved", strict=False)
        assert {"model.head.weight", "optimizer.state.head.weight"} <= restored.skipped.keys()
        assert torch.equal(model.embed.weight, saved.embed.weight)
        moments = (one.state[two.embed.weight]["exp_avg"] for one, two in ((optimizer, model), (state, saved)))
        assert torch.equal(*moments)
        assert "model.head.weight" in ckpt.load_model(tmp_path / "saved", Net(tied=True), strict=False)

    def test_equal_values_are_fine(self, tmp_path: Path, layout: str) -> None:
        saved, state = _saved(tmp_path, tied=False, equal=True, layout=layout)
        model = Net(tied=True, seed=1)
        optimizer = _adam(model)
        with ckpt.StateManager(tmp_path, model=model, optimizer=optimizer) as manager:
            restored = manager.load_state("saved")
        assert not restored.skipped
        assert not restored.approximated
        assert torch.equal(model.head.weight, saved.head.weight)
        assert torch.equal(optimizer.state[model.head.weight]["exp_avg"], state.state[saved.head.weight]["exp_avg"])
        assert ckpt.load_model(tmp_path / "saved", Net(tied=True)) == {}


def test_two_parameters_in_one_memory_are_tied_too(tmp_path: Path) -> None:
    _saved(tmp_path, tied=False)
    model = Net(tied=False, seed=1)
    model.head.weight.data = model.embed.weight.data
    with pytest.raises(ckpt.MismatchError, match=r"head\.weight: its values .* differ from those of embed\.weight"):
        ckpt.load_model(tmp_path / "saved", model)


@pytest.mark.parametrize("layout", ["full", "sharded"])
def test_a_tied_checkpoint_gives_an_untied_model_the_value_twice_and_names_the_copied_state(
    tmp_path: Path, layout: str
) -> None:
    saved, state = _saved(tmp_path, tied=True, layout=layout)
    model = Net(tied=False, seed=1)
    optimizer = _adam(model)
    with ckpt.StateManager(tmp_path, model=model, optimizer=optimizer) as manager:
        restored = manager.load_state("saved")
    assert torch.equal(model.embed.weight, saved.embed.weight)
    assert torch.equal(model.head.weight, saved.embed.weight)
    moments = [optimizer.state[one]["exp_avg"] for one in (model.embed.weight, model.head.weight)]
    assert all(torch.equal(moment, state.state[saved.embed.weight]["exp_avg"]) for moment in moments)
    assert "embed.weight: the two were tied" in restored.approximated["optimizer.state.head.weight"]
    _train(model, optimizer, 1)  # each is stepped by itself
    assert not torch.equal(*moments)


class _Stage(nn.Module):
    """The first or the last half of a tied model; both have its one weight."""

    def __init__(self, rank: int, whole: Net) -> None:
        super().__init__()
        if rank == 0:
            self.embed = whole.embed
        else:
            self.layer, self.head = whole.layer, whole.head


def _gradients(whole: Net, step: int) -> None:
    whole.zero_grad()
    torch.autograd.backward(whole((torch.arange(6) + step) % ROWS).square().mean())


def _stages(rank: int, folder: str, load: str, save: str) -> None:
    """Two stages that keep their copies of the embedding equal, as pipelines do; the gradients are the whole one's."""
    whole = Net(tied=True, seed=3)
    stage = _Stage(rank, whole)
    optimizer = _adam(stage)
    assert dist.get_world_size() == 2
    with ckpt.StateManager(f"{folder}/run", model=stage, optimizer=optimizer) as manager:
        if load:
            restored = manager.load_state(load)
            assert not any(key.startswith("optimizer") for key in restored.approximated)
            shared = (
                whole.embed.weight.detach().clone()
            )  # of the half that this rank has not, the layer alone is missing
            expected = torch.load(f"{folder}/{load}.pt")
            assert torch.equal(shared, expected["embed.weight"])
            whole.load_state_dict(expected)
        for step in range(2):
            _gradients(whole, step)
            optimizer.step()
            if rank == 0:  # the stage with the layer steps it; the other one needs it for the next gradients
                dist.recv(whole.layer.weight.data, 1)
                dist.recv(whole.layer.bias.data, 1)
            else:
                dist.send(whole.layer.weight.data, 0)
                dist.send(whole.layer.bias.data, 0)
        manager.save_state(save)
    if rank == 0:
        torch.save(whole.state_dict(), f"{folder}/{save}.pt")


@pytest.mark.slow
def test_tied_embeddings_go_from_stages_to_a_whole_model_and_back_with_their_optimizer(tmp_path: Path) -> None:
    run_ranks(2, _stages, str(tmp_path), "", "stages")
    model = Net(tied=True)
    optimizer = _adam(model)
    with ckpt.StateManager(tmp_path / "run", model=model, optimizer=optimizer) as manager:
        restored = manager.load_state("stages")
        assert not any(key.startswith("optimizer") for key in restored.approximated)
        for step in range(2):
            _gradients(model, step)
            optimizer.step()
        manager.save_state("whole")
    torch.save(model.state_dict(), tmp_path / "whole.pt")
    run_ranks(2, _stages, str(tmp_path), "whole", "again")

    straight = Net(tied=True, seed=3)
    stepper = _adam(straight)
    for step in (0, 1) * 3:
        _gradients(straight, step)
        stepper.step()
    last = torch.load(tmp_path / "again.pt")
    assert all(torch.equal(value, last[name]) for name, value in straight.state_dict().items())


def _into_shards(rank: int, folder: str) -> None:
    """Every rank compares what it holds of the two; only the last row, which rank 1 has, differs in one of them."""
    for name in ("differ", "equal"):
        model = Net(tied=True, seed=1)
        fully_shard(model)
        optimizer = _adam(model)
        with ckpt.StateManager(f"{folder}/{name}", model=model, optimizer=optimizer) as manager:
            if name == "differ":
                with pytest.raises(ckpt.MismatchError, match=r"head\.weight: its values in the checkpoint") as refused:
                    manager.load_state("saved")
                assert "state.head.weight" not in str(refused.value)
            else:
                manager.load_state("saved")
                assert type(optimizer.state[model.embed.weight]["exp_avg"]).__name__ == "DTensor"
                manager.save_state("sharded")


@pytest.mark.slow
def test_ranks_of_a_sharded_tied_model_agree_on_an_untied_checkpoint(tmp_path: Path) -> None:
    for name in ("differ", "equal"):
        model = Net(tied=False)
        optimizer = _adam(model)
        _train(model, optimizer)
        model.head.weight.data.copy_(model.embed.weight)
        optimizer.state[model.head.weight] = copy.deepcopy(optimizer.state[model.embed.weight])
        model.head.weight.data[-1, -1] += name == "differ"
        with ckpt.StateManager(tmp_path / name, model=model, optimizer=optimizer) as manager:
            manager.save_state("saved")
    run_ranks(2, _into_shards, str(tmp_path))
    model = Net(tied=False, seed=2)  # and back: what the shards have saved as one tensor fills both
    optimizer = _adam(model)
    with ckpt.StateManager(tmp_path / "equal", model=model, optimizer=optimizer) as manager:
        restored = manager.load_state("sharded")
    assert torch.equal(model.embed.weight, model.head.weight)
    assert "optimizer.state.head.weight" in restored.approximated

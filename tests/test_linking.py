"""What training does not change is written once, and linked from one checkpoint to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.processes import run_ranks
from tests.training import exact

FROZEN = "model+frozen.safetensors"


def adapted(seed: int) -> Any:
    """A frozen base of a megabyte and more, and a small part that is trained."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(900, 900), nn.Linear(900, 8), nn.BatchNorm1d(8))
    model[0].requires_grad_(False)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 1800).reshape(2, 900)).pow(2).sum().backward()
    optimizer.step()


def run(root: Path, names: list[str], **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = adapted(1)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    with ckpt.StateManager(root, model=model, optimizer=optimizer, **options) as manager:
        for name in names:
            train(model, optimizer)
            manager.save_state(name)
    return model, optimizer


def loads_equal(root: Path, name: str, model: nn.Module) -> bool:
    other = adapted(2)
    with ckpt.StateManager(root, model=other) as manager:
        manager.load_state(name, strict=False)
    return exact(other.state_dict()) == exact(model.state_dict())


def inode(root: Path, name: str, file: str = FROZEN) -> int:
    return (root / name / file).stat().st_ino


def test_frozen_weights_are_one_file_in_all_checkpoints(tmp_path: Path) -> None:
    model, _ = run(tmp_path, ["a", "b", "c"])
    assert inode(tmp_path, "a") == inode(tmp_path, "b") == inode(tmp_path, "c")
    assert inode(tmp_path, "b", "model.safetensors") != inode(tmp_path, "c", "model.safetensors")
    assert ckpt.verify(tmp_path) == {"c": [], "b": [], "a": []}
    assert loads_equal(tmp_path, "c", model)


def test_every_checkpoint_stays_whole_when_the_others_are_removed(tmp_path: Path) -> None:
    model, _ = run(tmp_path, ["a", "b", "c"], keep=ckpt.Keep(last=1))
    assert ckpt.verify(tmp_path) == {"c": []}
    assert (tmp_path / "c" / FROZEN).stat().st_nlink == 1
    assert loads_equal(tmp_path, "c", model)


def test_a_frozen_weight_that_was_changed_after_all_is_written_anew(tmp_path: Path) -> None:
    model = adapted(1)
    with ckpt.StateManager(tmp_path, model=model) as manager:
        manager.save_state("a")
        model[0].weight.data[3, 5] += 1  # behind the back of autograd
        manager.save_state("b")
        after = exact(model.state_dict())
    assert inode(tmp_path, "a") != inode(tmp_path, "b")
    other = adapted(2)
    with ckpt.StateManager(tmp_path, model=other) as manager:
        manager.load_state("b")
    assert exact(other.state_dict()) == after


def test_a_resumed_run_links_to_what_it_has_loaded(tmp_path: Path) -> None:
    run(tmp_path, ["a"])
    model = adapted(2)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    with ckpt.StateManager(tmp_path, model=model, optimizer=optimizer) as manager:
        manager.resume()
        train(model, optimizer)
        manager.save_state("b")
    assert inode(tmp_path, "a") == inode(tmp_path, "b")


def test_a_file_that_somebody_has_removed_is_written_anew(tmp_path: Path) -> None:
    model = adapted(1)
    with ckpt.StateManager(tmp_path, model=model) as manager:
        manager.save_state("a", wait=True)
        (tmp_path / "a" / FROZEN).unlink()
        manager.save_state("b")
    assert ckpt.verify(tmp_path / "b") == {"b": []}


def test_a_checkpoint_that_replaces_another_of_its_name_links_too(tmp_path: Path) -> None:
    model, _ = run(tmp_path, ["a", "a", "a"])
    assert len(list((tmp_path / "a").glob("model+frozen*"))) == 1
    assert ckpt.verify(tmp_path) == {"a": []}
    assert loads_equal(tmp_path, "a", model)


def test_a_model_that_is_frozen_as_a_whole_keeps_its_plain_name(tmp_path: Path) -> None:
    teacher = nn.Linear(900, 900).requires_grad_(False)
    with ckpt.StateManager(tmp_path, model={"teacher": teacher}) as manager:
        manager.save_state("a")
        manager.save_state("b")
    assert inode(tmp_path, "a", "model.teacher.safetensors") == inode(tmp_path, "b", "model.teacher.safetensors")


def test_both_files_merge_to_one(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, _ = run(tmp_path / "run", ["a"])
    ckpt.merge(tmp_path / "run" / "a", tmp_path / "model.safetensors")
    assert exact(load_file(tmp_path / "model.safetensors")) == exact(dict(model.state_dict()))


def save_spread(rank: int, root: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = adapted(1)
    fully_shard(model[0])
    fully_shard(model)
    with ckpt.StateManager(root, model=model, timeout=30) as manager:
        manager.save_state("a")
        for parameter in model[1].parameters():
            nn.init.ones_(parameter)
        manager.save_state("b")


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_links_its_own_frozen_pieces(tmp_path_factory: pytest.TempPathFactory, rank: int) -> None:
    root = tmp_path_factory.mktemp("spread")
    assert run_ranks(2, save_spread, str(root)) == [0, 0]
    frozen, trained = f"model/{rank:05d}+frozen.safetensors", f"model/{rank:05d}.safetensors"
    assert inode(root, "a", frozen) == inode(root, "b", frozen)
    assert inode(root, "a", trained) != inode(root, "b", trained)
    other = adapted(2)
    with ckpt.StateManager(root, model=other) as manager:
        manager.load_state("b")
    reference = adapted(1)
    assert torch.equal(other[0].weight, reference[0].weight)
    assert torch.equal(other[1].weight, torch.ones(8, 900))

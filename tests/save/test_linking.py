"""What training does not change is written once, and linked from one checkpoint to the next."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.storage import ANY, Buffer
from tests.helpers.places import Folder, PassedOn, Place
from tests.helpers.processes import run_ranks
from tests.helpers.training import exact

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


class Noting(PassedOn):
    """Knows what was written to it, and what was linked."""

    def __init__(self, root: Place | str) -> None:
        super().__init__(root)
        self.written: list[str] = []
        self.linked: list[str] = []

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        super().write(key, pieces, over=over)
        self.written.append(key)

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        self.linked.append(target)


def run(root: Place | Noting, names: list[str], **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = adapted(1)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    with ckpt.StateManager(root, model=model, optimizer=optimizer, **options) as manager:
        for name in names:
            train(model, optimizer)
            manager.save_state(name)
    return model, optimizer


def loads_equal(root: Place, name: str, model: nn.Module) -> bool:
    other = adapted(2)
    with ckpt.StateManager(root, model=other) as manager:
        manager.load_state(name, strict=False)
    return exact(other.state_dict()) == exact(model.state_dict())


@pytest.mark.also_on_s3
def test_frozen_weights_are_written_once(root: Place) -> None:
    storage = Noting(root)
    model, _ = run(storage, ["a", "b", "c"])
    assert storage.linked == [f"b/{FROZEN}", f"c/{FROZEN}"]
    assert {f"{name}/model.safetensors" for name in "abc"} | {f"a/{FROZEN}"} <= set(storage.written)
    assert ckpt.verify(root) == {"c": [], "b": [], "a": []}
    assert loads_equal(root, "c", model)


@pytest.mark.not_on_s3("the server copies what is linked: there are no hard links")
def test_frozen_weights_are_one_file_in_all_checkpoints(tmp_path: Path) -> None:
    run(Folder(tmp_path) / "all", ["a", "b", "c"])
    assert len({(tmp_path / "all" / name / FROZEN).stat().st_ino for name in "abc"}) == 1
    run(Folder(tmp_path) / "last", ["a", "b", "c"], keep=ckpt.Keep(last=1))
    assert (tmp_path / "last" / "c" / FROZEN).stat().st_nlink == 1


@pytest.mark.also_on_s3
def test_every_checkpoint_stays_whole_when_the_others_are_removed(root: Place) -> None:
    model, _ = run(root, ["a", "b", "c"], keep=ckpt.Keep(last=1))
    assert ckpt.verify(root) == {"c": []}
    assert loads_equal(root, "c", model)


def test_a_frozen_weight_that_was_changed_after_all_is_written_anew(root: Place) -> None:
    model = adapted(1)
    storage = Noting(root)
    with ckpt.StateManager(storage, model=model) as manager:
        manager.save_state("a")
        model[0].weight.data[3, 5] += 1  # unseen by autograd
        manager.save_state("b")
    assert storage.linked == []
    assert loads_equal(root, "b", model)


def test_a_resumed_run_links_to_what_it_has_loaded(root: Place) -> None:
    run(root, ["a"])
    model, storage = adapted(2), Noting(root)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    with ckpt.StateManager(storage, model=model, optimizer=optimizer) as manager:
        manager.resume()
        train(model, optimizer)
        manager.save_state("b")
    assert storage.linked == [f"b/{FROZEN}"]


def test_a_file_that_somebody_has_removed_is_written_anew(root: Place) -> None:
    model = adapted(1)
    with ckpt.StateManager(root, model=model) as manager:
        manager.save_state("a", wait=True)
        (root / "a" / FROZEN).unlink()
        manager.save_state("b")
    assert ckpt.verify(root / "b") == {"b": []}


def test_a_checkpoint_that_replaces_another_of_its_name_links_too(root: Place) -> None:
    model, _ = run(root, ["a", "a", "a"])
    assert len([name for name in (root / "a").files() if name.startswith("model+frozen")]) == 1
    assert ckpt.verify(root) == {"a": []}
    assert loads_equal(root, "a", model)


def test_a_model_that_is_frozen_as_a_whole_keeps_its_plain_name(root: Place) -> None:
    teacher, storage = nn.Linear(900, 900).requires_grad_(False), Noting(root)
    with ckpt.StateManager(storage, model={"teacher": teacher}) as manager:
        manager.save_state("a")
        manager.save_state("b")
    assert storage.linked == ["b/model.teacher.safetensors"]


def test_what_is_frozen_and_small_stays_with_the_rest(root: Place) -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    with ckpt.StateManager(root, model=model) as manager:
        manager.save_state("a")
    assert [name for name in (root / "a").files() if name.startswith("model")] == ["model.safetensors"]


def test_both_files_merge_to_one(root: Place, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, _ = run(root, ["a"])
    ckpt.merge(root / "a", tmp_path / "model.safetensors")
    assert exact(load_file(tmp_path / "model.safetensors")) == exact(dict(model.state_dict()))


def save_spread(rank: int, root: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = adapted(1)
    fully_shard(model[0])
    fully_shard(model)
    storage = Noting(root)
    with ckpt.StateManager(storage, model=model, ranks=ckpt.RankOptions(timeout=30)) as manager:
        manager.save_state("a")
        for parameter in model[1].parameters():
            nn.init.ones_(parameter)
        manager.save_state("b")
    assert storage.linked == [f"b/model/{rank:05d}+frozen.safetensors"]
    assert f"b/model/{rank:05d}.safetensors" in storage.written


@pytest.mark.slow
def test_every_rank_links_its_own_frozen_pieces(root: Place) -> None:
    assert run_ranks(2, save_spread, str(root)) == [0, 0]
    other = adapted(2)
    with ckpt.StateManager(root, model=other) as manager:
        manager.load_state("b")
    reference = adapted(1)
    assert torch.equal(other[0].weight, reference[0].weight)
    assert torch.equal(other[1].weight, torch.ones(8, 900))

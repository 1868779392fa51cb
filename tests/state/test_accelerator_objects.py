"""What a manager finds in an accelerator, what it tells hooks, and what it saves of the accelerator itself."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from ckpt.errors import StateError, UnsupportedError
from ckpt.root.retention import Keep
from ckpt.state import accelerator as objects
from ckpt.state.accelerator import AcceleratorObjects
from tests.helpers.accelerated import new_accelerator


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def _prepared(**options: Any) -> tuple[Any, AcceleratorObjects, list[Any]]:
    accelerator = new_accelerator(**options)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(6)), 2, shuffle=True)
    found = list(accelerator.prepare(model, optimizer, ExponentialLR(optimizer, 0.9), loader))
    return accelerator, AcceleratorObjects(accelerator), found


def test_prepared_objects_are_found_without_accelerates_wrappers() -> None:
    accelerator, source, (model, optimizer, scheduler, loader) = _prepared()
    found = source.find()
    assert found.models == {"model": model}
    assert found.optimizers == {"optimizer": optimizer.optimizer}
    assert found.others == {"scheduler": scheduler.scheduler}
    assert (found.custom, found.left_out) == ({}, frozenset())
    assert source.loaders() == {"dataloader.0": loader}
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    second = accelerator.prepare(nn.Linear(1, 1))
    found = source.find()
    assert found.models == {"model.0": model, "model.1": second}
    assert found.custom == {"custom.0": counter}
    assert source.gradients is False
    accelerator.scaler = Counter()
    assert source.find().others["scaler"] is accelerator.scaler


def test_an_object_that_has_left_the_accelerator_is_named() -> None:
    accelerator, source, _ = _prepared()
    source.find()
    accelerator._models.clear()
    with pytest.raises(StateError, match=r"the accelerator has dropped model \(a Linear\)"):
        source.find()
    empty = AcceleratorObjects(new_accelerator())
    for act, words in ((empty.before_save, "save"), (empty.before_load, "load into")):
        with pytest.raises(StateError, match=f"this accelerator has prepared nothing that ckpt could {words}"):
            act("folder")
    only_a_loader = new_accelerator()
    only_a_loader.prepare(DataLoader(TensorDataset(torch.arange(6)), 2))
    AcceleratorObjects(only_a_loader).before_load("folder")


def test_gradients_are_saved_where_they_are_accumulated() -> None:
    assert AcceleratorObjects(new_accelerator(gradient_accumulation_steps=2)).gradients is True
    assert AcceleratorObjects(new_accelerator(gradient_accumulation_steps=1)).gradients is False


def test_the_projects_folder_names_and_limit_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def source(**options: Any) -> AcceleratorObjects:
        return AcceleratorObjects(new_accelerator(project_config=ProjectConfiguration(**options)))

    plain = source()
    assert (plain.root, plain.keep, plain.name()) == (None, None, None)
    folder = source(project_dir=str(tmp_path))
    assert (folder.root, folder.keep) == (str(tmp_path), None)
    named = source(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=3, iteration=5)
    assert (named.root, named.name()) == (os.path.join(tmp_path, "checkpoints"), "checkpoint_5")
    assert named.keep == Keep(last=3)
    assert caplog.text == ""
    limited = source(project_dir=str(tmp_path), total_limit=3)
    assert limited.keep is None
    assert "total_limit=3 has no effect" in caplog.text


def test_hooks_are_called_as_accelerate_does_and_may_take_models_over(tmp_path: Path) -> None:
    accelerator, source, (model, *_) = _prepared()
    other = accelerator.prepare(nn.DataParallel(nn.Linear(2, 2)))
    told: list[Any] = []

    def saving(models: list[Any], weights: list[Any], folder: str) -> None:
        told.append((list(models), [list(state) for state in weights], folder, os.path.isdir(folder)))
        weights.pop(0)

    def loading(models: list[Any], folder: str) -> None:
        told.append((list(models), folder))
        models.remove(other)

    folder = str(tmp_path / "new" / "a")
    source.before_save(folder)
    assert (told, os.path.exists(folder)) == ([], False)  # there are no hooks
    accelerator.register_save_state_pre_hook(saving)
    accelerator.register_load_state_pre_hook(loading)
    source.before_save(folder)
    assert told == [([model, other], [["weight", "bias"], ["module.weight", "module.bias"]], folder, True)]
    assert source.find().left_out == {"model.0"}
    source.after_save()
    assert source.find().left_out == frozenset()
    assert accelerator.project_configuration.iteration == 1
    source.before_load(folder)
    assert told[1:] == [([model, other], folder)]
    assert source.find().left_out == {"model.1"}
    source.go_back({})
    assert source.find().left_out == frozenset()
    source.before_save("memory://a")
    assert not os.path.exists("memory:")


def test_counters_of_the_accelerator_and_its_loaders_come_back() -> None:
    accelerator, source, (*_, loader) = _prepared()
    accelerator.step, accelerator.sync_gradients, loader.iteration = 3, False, 4
    accelerator.project_configuration.iteration = 7
    saved = source.state()
    assert (saved["step"], saved["sync_gradients"], saved["saves"]) == (3, False, 8)
    assert saved["loaders"]["dataloader.0"]["iteration"] == 4
    fresh, other, (*_, again) = _prepared()
    other.go_back({})
    assert (fresh.step, again.iteration) == (0, 0)
    other.go_back(saved)
    assert (fresh.step, fresh.sync_gradients, again.iteration) == (3, False, 4)
    assert fresh.project_configuration.iteration == 8
    again.iteration = 0
    other.go_back({**saved, "loaders": {}})
    assert again.iteration == 0


def test_seeds_and_generators_of_loaders_come_back() -> None:
    def made(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        sampler = SimpleNamespace(initial_seed=seed, generator=generator)
        return SimpleNamespace(iteration=seed, batch_sampler=None, sampler=sampler, generator=None)

    one, other = made(3), made(9)
    objects._set_loader_state(other, objects._loader_state(one))
    assert (other.iteration, other.sampler.initial_seed) == (3, 3)
    assert torch.equal(other.sampler.generator.get_state(), one.sampler.generator.get_state())


def test_who_is_told_of_new_loaders_is_told_until_the_release() -> None:
    accelerator, source, _ = _prepared()
    told: list[int] = []
    source.on_loader(lambda: told.append(1))
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(6)), 2))
    assert told == [1]
    assert source.loaders()["dataloader.1"] is loader
    prepares = vars(accelerator)["prepare_data_loader"]
    assert prepares.__reduce__() == (getattr, (accelerator, "prepare_data_loader"))
    later = AcceleratorObjects(accelerator)
    later.on_loader(lambda: told.append(2))
    source.release()  # another one has come since
    accelerator.prepare(DataLoader(TensorDataset(torch.arange(6)), 2))
    assert told == [1, 2]
    later.release()
    assert "prepare_data_loader" not in vars(accelerator)
    later.release()
    accelerator.prepare(DataLoader(TensorDataset(torch.arange(6)), 2))
    assert told == [1, 2]


def test_what_keeps_its_state_to_itself_is_refused() -> None:
    def kind(name: str) -> Any:
        return SimpleNamespace(distributed_type=SimpleNamespace(value=name))

    with pytest.raises(UnsupportedError, match="ckpt can't save under Megatron-LM"):
        AcceleratorObjects(kind("MEGATRON_LM"))
    with pytest.raises(UnsupportedError, match="this release of Accelerate has no Accelerator"):
        AcceleratorObjects(kind("NO"))
    source = AcceleratorObjects(new_accelerator(gradient_accumulation_steps=2))
    for name, sharded, gradients in (("DEEPSPEED", True, False), ("FSDP", True, True), ("MULTI_GPU", False, True)):
        source.accelerator = SimpleNamespace(**vars(kind(name)), gradient_accumulation_steps=2, _models=[])
        assert (source._is_sharded, source.gradients) == (sharded, gradients), name

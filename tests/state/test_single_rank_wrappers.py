"""FSDP 1 and ZeroRedundancyOptimizer on one rank, in this process, and what other tools need to rebuild a model."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer

from ckpt.errors import UnsupportedError
from ckpt.formats.sharded_tensors import is_sharded, local_tensor
from ckpt.state import fsdp1, model_config
from ckpt.state.fsdp1 import Fsdp1ModelPart, Fsdp1OptimizerPart
from ckpt.state.joined import Joined
from ckpt.state.parts import UNKNOWN, WHOLE_PART
from ckpt.state.registry import model_part, optimizer_part
from ckpt.state.unwrap import is_fsdp1
from ckpt.state.zero_redundancy import ZeroRedundancyPart


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    """A job of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _stepped(model: nn.Module, optimizer: Any, size: int = 2) -> None:
    model(torch.ones(1, size)).sum().backward()
    optimizer.step()


# -- FSDP 1 -----------------------------------------------------------------------------------------------------------


def _wrapped(*, original: bool = True) -> Any:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=original)


def _whole(state: dict[str, Any]) -> dict[str, list[Any]]:
    """On one rank, its shards are everything."""
    return {name: (local_tensor(value) if is_sharded(value) else value).tolist() for name, value in state.items()}


@pytest.mark.parametrize("original", [True, False])
def test_a_model_under_fsdp_1_is_saved_by_the_names_of_the_bare_model_and_loaded(original: bool) -> None:
    model, other = _wrapped(original=original), _wrapped(original=original)
    part = model_part("model", model)
    assert isinstance(part, Fsdp1ModelPart)
    assert is_fsdp1(model)
    assert part.is_sharded()
    assert len(part.layouts(None)) == 1
    state = part.capture()
    assert list(state) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    saved = _whole(state)
    again = model_part("model", other)
    assert _whole(again.capture()) != saved
    again.load(state)
    assert _whole(again.capture()) == saved
    assert fsdp1.is_flat(model) is not original


@pytest.mark.parametrize("original", [True, False])
def test_the_optimizer_of_such_a_model_is_saved_and_loaded(original: bool) -> None:
    def made() -> tuple[Any, torch.optim.Optimizer, Any]:
        model = _wrapped(original=original)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        return model, optimizer, optimizer_part("optimizer", optimizer, {"": model})

    model, optimizer, part = made()
    assert isinstance(part, Fsdp1OptimizerPart)
    unstepped = part.capture()
    assert unstepped["state"] == {}
    assert len(optimizer.state) == 0  # asking has left nothing behind
    _stepped(model, optimizer)
    saved = part.capture()
    assert sorted(saved["state"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert part.is_sharded()
    assert (part.names(), part._live_state(), part._other_names()) == (None, {}, {})
    other, fresh, again = made()
    fresh.param_groups[0]["lr"] = 0.5
    again._set_state(saved, {})
    assert fresh.param_groups[0]["lr"] == 0.1
    assert {name: _whole(entry) for name, entry in again.capture()["state"].items()} == {
        name: _whole(entry) for name, entry in saved["state"].items()
    }
    fresh.param_groups[0]["lr"] = 0.5
    again._set_state(unstepped, {})
    assert len(fresh.state) == 0
    assert fresh.param_groups[0]["lr"] == 0.1
    assert other is not model


def test_joined_optimizers_are_not_for_fsdp_1() -> None:
    model = _wrapped()
    joined = Joined([torch.optim.Adam(model.parameters())]).as_one("optimizer")
    with pytest.raises(UnsupportedError, match="there can be only one optimizer"):
        Fsdp1OptimizerPart("optimizer", joined, {"": model}).capture()


# -- ZeroRedundancyOptimizer ------------------------------------------------------------------------------------------


def test_the_state_of_a_zero_redundancy_optimizer_is_that_of_its_inner_one() -> None:
    model = nn.Linear(2, 1)
    outer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    part: Any = optimizer_part("optimizer", outer, {"": model})
    assert isinstance(part, ZeroRedundancyPart)
    assert (part.managed, part.optimizer) == (outer, outer.optim)
    assert (part.kind, part.other_kinds) == ("Adam", ("ZeroRedundancyOptimizer",))
    assert part.replication({}, None) is UNKNOWN
    assert part.tied_to_ranks([]) == {}
    assert part.tied_to_ranks(["a"]) == {WHOLE_PART: "part of it"}
    _stepped(model, outer)
    outer.param_groups[0]["lr"] = 0.7  # as a scheduler does
    saved = part.capture()
    assert saved["param_groups"][0]["lr"] == 0.7
    assert list(saved["state"]) == ["weight", "bias"]
    outer.param_groups[0]["lr"] = 0.2
    part._load(saved, {})
    assert (outer.param_groups[0]["lr"], outer.optim.param_groups[0]["lr"]) == (0.7, 0.7)
    assert outer.param_groups[0]["params"] == list(model.parameters())
    with pytest.raises(
        UnsupportedError, match="before training, because it builds its optimizer only when training starts"
    ):
        ZeroRedundancyPart.of("optimizer", SimpleNamespace(), {})


# -- configurations ---------------------------------------------------------------------------------------------------


def test_the_configuration_of_a_transformers_model_is_described() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, n_positions=4)
    model = transformers.GPT2LMHeadModel(config)
    found = model_config.describe(model, [])
    assert found["config"]["architectures"] == ["GPT2LMHeadModel"]
    assert found["config"]["n_embd"] == 4
    assert "base" not in found
    assert "generation_config" in found
    model.config.name_or_path = "some/base"
    model.generation_config = None
    found = model_config.describe(model, [])
    assert found["base"] == "some/base"
    assert "generation_config" not in found
    kind = type("FSDPGPT2LMHeadModel", (type(model),), {})  # as `fully_shard` renames it
    model.__class__ = kind
    assert model_config.describe(model, [])["config"]["architectures"] == ["GPT2LMHeadModel"]
    assert model_config.describe(nn.Linear(1, 1), []) == {}
    odd = nn.Linear(1, 1)
    odd.config = {"not": "theirs"}  # type: ignore[assignment]
    assert model_config.describe(odd, []) == {}


def test_the_adapters_of_a_peft_model_are_described() -> None:
    peft = pytest.importorskip("peft")

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)

        def forward(self, inputs: torch.Tensor) -> Any:
            return self.first(inputs)

    model = peft.get_peft_model(Small(), peft.LoraConfig(target_modules=["first"], r=1))
    names = list(model.state_dict())
    (adapter,) = model_config.describe(model, names)["adapters"].values()
    assert model_config.describe(model, names)["adapters"] is model_config.describe(model, names)["adapters"]
    assert adapter["config"]["inference_mode"] is True
    assert adapter["config"]["target_modules"] == ["first"]
    assert adapter["config"]["auto_mapping"]["base_model_class"] == "Small"
    assert sorted(adapter["tensors"].values()) == sorted(name for name in names if "lora_" in name)
    assert all(".default" not in name for name in adapter["tensors"])
    model.add_adapter(
        "second", peft.LoraConfig(target_modules=["first"], r=1, task_type="CAUSAL_LM", base_model_name_or_path="b")
    )
    found = model_config.describe(model, list(model.state_dict()))["adapters"]
    assert sorted(found) == ["default", "second"]
    assert found["second"]["config"]["base_model_name_or_path"] == "b"
    assert found["second"]["config"].get("auto_mapping") is None
    targets = [SimpleNamespace(target_modules=given) for given in (["embed_tokens"], ["first"], "embed_tokens", None)]
    assert [model_config._targets_embeddings(config) for config in targets] == [True, False, False, False]

"""State of unusual kinds: compiled and averaged models, 8-bit optimizers, adapters. It comes back, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import ckpt
from tests.helpers.training import exact


def network(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 64))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 64)).pow(2).sum().backward()
    optimizer.step()


def test_a_compiled_model_is_saved_under_its_own_names_and_loads_into_either(tmp_path: Path) -> None:
    model = network(1)
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(compiled.parameters())
    step(compiled, optimizer)
    with ckpt.StateManager(tmp_path, model=compiled, optimizer=optimizer) as manager:
        manager.save_state("a")
    for wrapped in (lambda model: model, lambda model: torch.compile(model, backend="eager")):
        other = network(2)
        again = torch.optim.AdamW(other.parameters())
        with ckpt.StateManager(tmp_path, model=wrapped(other), optimizer=again) as manager:
            manager.load_state("a")
        assert exact(other.state_dict()) == exact(model.state_dict())
        assert exact(again.state_dict()) == exact(optimizer.state_dict())


@pytest.mark.parametrize("average", [None, 0.9], ids=["swa", "ema"])
@pytest.mark.parametrize("given", ["registered", "model"])
def test_an_averaged_model_comes_back_and_goes_on_as_it_would_have(
    tmp_path: Path, average: float | None, given: str
) -> None:
    def objects(seed: int) -> tuple[Any, Any, Any, Any]:
        model = network(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        how = get_ema_multi_avg_fn(average) if average else None  # type: ignore[no-untyped-call]
        averaged = AveragedModel(model, multi_avg_fn=how, use_buffers=True)
        return model, optimizer, averaged, SWALR(optimizer, swa_lr=0.05)

    def advance(model: Any, optimizer: Any, averaged: Any, scheduler: Any) -> None:
        step(model, optimizer)
        averaged.update_parameters(model)
        scheduler.step()

    def manager_of(model: Any, optimizer: Any, averaged: Any, scheduler: Any) -> ckpt.StateManager:
        models = model if given == "registered" else {"trained": model, "averaged": averaged}
        manager = ckpt.StateManager(tmp_path, model=models, optimizer=optimizer, scheduler=scheduler)
        if given == "registered":
            manager.register(averaged=averaged)
        return manager

    first, second = objects(1), objects(2)
    for _ in range(3):
        advance(*first)
    with manager_of(*first) as manager:
        manager.save_state("a")
        for _ in range(3):
            advance(*first)  # changes the average while it is written
    with manager_of(*second) as manager:
        manager.load_state("a")
    for _ in range(3):
        advance(*second)
    assert [exact(each.state_dict()) for each in first] == [exact(each.state_dict()) for each in second]
    assert int(first[2].n_averaged) == 6


class Blockwise(torch.optim.Optimizer):
    """Momentum in 8 bits with a scale for each block and a table, in plain tensors: as bitsandbytes keeps it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=0, state1=torch.zeros_like(parameter, dtype=torch.uint8), absmax1=torch.ones(1))
                    state["qmap1"] = torch.linspace(-1, 1, 256)
                old = state["qmap1"][state["state1"].int()] * state["absmax1"]
                new = 0.9 * old + parameter.grad
                state["absmax1"] = new.abs().max().reshape(1)
                state["state1"].copy_(torch.bucketize(new / state["absmax1"], state["qmap1"]).clamp_(max=255))
                parameter.sub_(group["lr"] * new)
                state["step"] += 1


def quantized(parameters: Any, kind: str) -> Any:
    from torchao import optim

    return getattr(optim, kind)(parameters, lr=0.01)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "blockwise": Blockwise,
    "torchao 8 bits": lambda parameters: quantized(parameters, "AdamW8bit"),
    "torchao 4 bits": lambda parameters: quantized(parameters, "AdamW4bit"),
    "torchao fp8": lambda parameters: quantized(parameters, "AdamWFp8"),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_with_few_bits_goes_on_as_it_would_have(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    model, other = network(1), network(2)
    with torch.compiler.set_stance("force_eager"):
        optimizer = make(model.parameters())
        step(model, optimizer)
        with ckpt.StateManager(tmp_path, model=model, optimizer=optimizer) as manager:
            manager.save_state("a")
            step(model, optimizer)
        again = make(other.parameters())
        with ckpt.StateManager(tmp_path, model=other, optimizer=again) as manager:
            manager.load_state("a")
        step(other, again)
    assert exact(other.state_dict()) == exact(model.state_dict())
    assert exact(plain(again)) == exact(plain(optimizer))
    assert any(tensor.dtype in (torch.uint8, torch.float8_e4m3fn) for tensor in plain(optimizer))
    (file,) = (tmp_path / "a").glob("optimizer*.safetensors")
    names = load_file(file).keys()
    assert all(name.startswith(("state.", "param_groups[")) for name in names), "pieces are named below their tensor"


def plain(optimizer: Any) -> list[torch.Tensor]:
    """The tensors of an optimizer's state, and for those that are made of others, these."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    tensors: list[Any] = [value for value in values if isinstance(value, torch.Tensor)]
    flat = [
        [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        for tensor in tensors
        if is_made_of_others(tensor)
    ]
    return [
        *(tensor for tensor in tensors if not is_made_of_others(tensor)),
        *(piece for pieces in flat for piece in pieces),
    ]


def is_made_of_others(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "__tensor_flatten__")


class Masked(torch.Tensor):
    """A tensor of a kind that nobody knows."""


def test_a_tensor_of_an_unknown_kind_is_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    model = network(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    optimizer.state[model[0].weight]["momentum_buffer"] = torch.ones(64, 64).as_subclass(Masked)
    with (
        ckpt.StateManager(tmp_path / "root", model=model, optimizer=optimizer) as manager,
        pytest.raises(ckpt.UnsupportedError, match=r"optimizer\.state\.0\.weight\.momentum_buffer: a .*Masked"),
    ):
        manager.save_state("a")
    assert not (tmp_path / "root" / "a").exists()


def test_what_a_checkpoint_says_a_tensor_is_made_into_must_be_known(tmp_path: Path) -> None:
    from ckpt.formats.native.documents import Decoder

    evil = {"$packed": {"kind": "os", "tensors": {}, "context": []}}
    with pytest.raises(ckpt.DamagedError, match="unknown kind 'os'"):
        Decoder(lambda name: torch.ones(1)).decode(evil)


def adapted(seed: int) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=16, n_embd=128, n_layer=2, n_head=2))
    return get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"))


def test_later_checkpoints_of_a_lora_write_the_bytes_of_its_adapters_alone(tmp_path: Path) -> None:
    model = adapted(1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with ckpt.StateManager(tmp_path, model=model) as manager:
        for name in ("a", "b"):
            with torch.no_grad():
                for parameter in trained:
                    parameter.add_(1)
            manager.save_state(name)
    sizes = [{path.stat().st_ino: path.stat().st_size for path in (tmp_path / name).iterdir()} for name in "ab"]
    tensors = sum(parameter.nbytes for parameter in trained)
    written = sum(size for inode, size in sizes[1].items() if inode not in sizes[0])
    assert tensors < written < tensors + 64_000  # headers, values and the manifest
    assert sum(sizes[1].values()) > written + (1 << 20)  # and yet it is whole
    other = adapted(2)
    with ckpt.StateManager(tmp_path, model=other) as manager:
        manager.load_state("b")
    assert exact(other.state_dict()) == exact(model.state_dict())


class Held:
    """An object whose tensors are transposed in memory, in another order of three dimensions, tied, and plain."""

    def __init__(self, value: float) -> None:
        transposed = torch.arange(6.0).reshape(2, 3).t() * value
        permuted = (torch.arange(24.0).reshape(2, 3, 4) * value).permute(2, 0, 1)
        self.state = {"a": transposed, "b": permuted, "again": transposed, "c": torch.ones(2, 3) * value}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_tensors_come_back_in_the_order_in_memory_that_they_had(tmp_path: Path) -> None:
    saved, loaded = Held(1.0), Held(2.0)
    loaded.state = {}
    with ckpt.StateManager(tmp_path) as manager:
        manager.register(held=saved)
        manager.save_state("a")
    with ckpt.StateManager(tmp_path) as manager:
        manager.register(held=loaded)
        manager.load_state("a")
    assert exact(loaded.state) == exact(saved.state)
    strides = {name: tensor.stride() for name, tensor in loaded.state.items()}
    assert strides == {"a": (1, 3), "b": (1, 12, 4), "again": (1, 3), "c": (3, 1)}
    assert loaded.state["a"].data_ptr() == loaded.state["again"].data_ptr()

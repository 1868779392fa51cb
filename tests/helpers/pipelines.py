"""Pipelines of torch.distributed.pipelining, and what it takes to compare them with models spread in other ways."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckpt.state.model import ModelPart
from ckpt.state.optimizer import OptimizerPart
from tests.helpers.sharded import whole

LAYERS, WIDTH, SAMPLES = 8, 128, 8  # a weight has 64 KB: that much is balanced over replicas


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = inputs + self.down(torch.tanh(self.up(inputs)))
        return outputs


class Net(nn.Module):
    """Stages are copies of it without the layers of others: names are those of the whole model."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            inputs = layer(inputs)
        return inputs

    def part(self, stage: int, stages: int) -> Net:
        part, each = copy.deepcopy(self), LAYERS // stages
        for number in range(LAYERS):
            if number // each != stage:
                del part.layers[str(number)]
        return part


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).pow(2).mean()


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


@dataclass
class Job:
    """A model as this rank has it, with an optimizer for each of its parts, and how it trains."""

    parts: list[nn.Module]
    train: Callable[[torch.Tensor, torch.Tensor], Any]
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in self.parts]

    def step(self, number: int) -> None:
        """The same data on every rank, so that all replicas compute the same."""
        inputs = torch.linspace(-1, 1, SAMPLES * WIDTH).reshape(SAMPLES, WIDTH) * (1 + number)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.train(inputs, inputs.flip(0))
        for optimizer in self.optimizers:
            optimizer.step()

    def digests(self) -> dict[str, str]:
        """Every tensor that this rank has a part of, whole, by name."""
        found = {}
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            state = OptimizerPart("optimizer", optimizer, {"": part}).capture()
            named = {f"{name}/{key}": value for name, entry in state["state"].items() for key, value in entry.items()}
            for name, value in {**ModelPart("model", part).capture(), **named}.items():
                found[name] = digest(whole(value))
        return found


def _whole_model(seed: int) -> Job:
    return _trained_whole(Net(seed))


def _trained_whole(model: nn.Module) -> Job:
    def train(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        torch.autograd.backward(loss_of(model(inputs), targets))

    return Job([model], train)


def _fsdp(seed: int) -> Job:
    model = Net(seed)
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    return _trained_whole(model)


def _pipeline(seed: int, degree: int, schedule: Any, *, chunks: int = 1, apply: Callable[[Net, Any], Any]) -> Job:
    """`degree` ranks make a pipeline of `degree * chunks` stages; `apply` spreads a stage over the other dimension."""
    mesh = init_device_mesh("cpu", (degree, dist.get_world_size() // degree), mesh_dim_names=("pp", "other"))
    rank, stages, whole_net = mesh["pp"].get_local_rank(), degree * chunks, Net(seed)
    mine = [rank + chunk * degree for chunk in range(chunks)]
    parts = [apply(whole_net.part(stage, stages), mesh["other"]) for stage in mine]
    group = mesh["pp"].get_group()
    made = [
        PipelineStage(part, stage, stages, torch.device("cpu"), group=group)
        for part, stage in zip(parts, mine, strict=True)
    ]
    runner = schedule(made if chunks > 1 else made[0], n_microbatches=4, loss_fn=loss_of)

    def train(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        last = {"target": targets} if rank == degree - 1 else {}
        runner.step(*([inputs] if rank == 0 else []), **last)

    return Job(parts, train)


def _as_it_is(part: Net, mesh: Any) -> Net:
    return part


def _sharded(part: Net, mesh: Any) -> Net:
    for layer in part.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(part, mesh=mesh)
    return part


def _tensor_parallel(part: Net, mesh: Any) -> Net:
    for layer in part.layers.values():
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return part


WAYS: dict[str, Callable[[int], Job]] = {
    "whole": _whole_model,
    "fsdp": _fsdp,
    "pp": lambda seed: _pipeline(seed, dist.get_world_size(), ScheduleGPipe, apply=_as_it_is),
    "pp2": lambda seed: _pipeline(seed, 2, Schedule1F1B, apply=_as_it_is),
    "pp2-fsdp": lambda seed: _pipeline(seed, 2, Schedule1F1B, apply=_sharded),
    "pp8-fsdp": lambda seed: _pipeline(seed, 8, ScheduleGPipe, apply=_sharded),
    "pp2-tp": lambda seed: _pipeline(seed, 2, ScheduleGPipe, apply=_tensor_parallel),
    "pp2-interleaved-fsdp": lambda seed: _pipeline(seed, 2, ScheduleInterleaved1F1B, chunks=2, apply=_sharded),
}


def write(folder: str, name: str, digests: dict[str, str]) -> None:
    """Note what this rank has, for `read`."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    Path(folder, f"{name}.{rank}.json").write_text(json.dumps(digests))


def read(folder: str, name: str) -> dict[str, str]:
    """What all ranks had together; they must have had the same of what several have."""
    found: dict[str, str] = {}
    for path in sorted(Path(folder).glob(f"{name}.*.json")):
        for tensor, value in json.loads(path.read_text()).items():
            assert found.setdefault(tensor, value) == value, f"{tensor} differs between ranks"
    return found


def missing(digests: dict[str, str], saved: dict[str, str]) -> Sequence[str]:
    return [name for name in digests if digests[name] != saved.get(name)]


def without_layer(part: nn.Module, number: str) -> nn.Module:
    layers = part.get_submodule("layers")
    assert isinstance(layers, nn.ModuleDict)
    del layers[number]
    return part

"""torchtitan's own Trainer on the CPU, with ckpt in place of its checkpointer.

torchtitan asks for an accelerator and for calls of a later PyTorch: `run_on_cpu` gives it what it lacks, once in a
process, before anything else of it is imported. What trains is its debug model, with its meshes and its containers.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset

import ckpt
from ckpt.state.joined import JoinedOptimizer
from ckpt.state.model import ModelPart
from ckpt.state.optimizer import OptimizerPart
from tests.helpers.pipelines import digest
from tests.helpers.sharded import whole

VOCABULARY, LENGTH = 2048, 16
WAYS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "tp2-fsdp": {"tensor_parallel_degree": 2},
    "pp2-fsdp": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
    "pp2-tp": {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
}
TRAINED = ("tp2-fsdp", "pp2-fsdp")


class Tokens(IterableDataset[Any]):
    """Every sample is known by its number; each rank of the data-parallel dimension has its own."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.at = rank, ranks, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            generator = torch.Generator().manual_seed(self.at * self.ranks + self.rank)
            tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)
            self.at += 1
            yield {"input": tokens[:-1], "positions": torch.arange(LENGTH, dtype=torch.int32)}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@cache
def run_on_cpu() -> Any:
    """The module `torchtitan.trainer`, imported so that it runs here."""
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    import torchtitan.tools.utils as utils

    device: Any = types.ModuleType("cpu")
    vars(device).update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    device.get_device_name = lambda _=None: "cpu"
    device.get_device_properties = lambda _=None: types.SimpleNamespace(total_memory=1 << 34)
    device.memory_stats = lambda _=None: {}
    device.reset_peak_memory_stats = device.empty_cache = lambda: None
    device.current_device, device.device_count = lambda: 0, lambda: 1
    utils.device_module, utils.device_type = device, "cpu"

    import torchtitan.trainer
    from torchtitan.distributed import utils as distributed

    distributed.set_pg_timeouts = lambda **_: None  # torch.distributed.set_timeout is younger than this torch
    return torchtitan.trainer


@cache
def _components() -> tuple[Any, Any]:
    """A tokenizer that is not asked, and a loader of `Tokens`."""
    run_on_cpu()
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.tokenizer import BaseTokenizer

    class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCABULARY

    class Loader(ParallelAwareDataloader):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
            super().__init__(Tokens(dp_rank, dp_world_size), dp_rank, dp_world_size, batch_size=local_batch_size)

    return NoTokenizer, Loader


def trainer(dump_folder: str, way: str, *, steps: int, seed: int = 1, **settings: Any) -> Any:
    """torchtitan's Trainer of its debug model, which saves after every second step. `settings`: of its checkpointer."""
    module = run_on_cpu()
    from torchtitan.models.common import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    os.environ.setdefault("LOCAL_RANK", "0")
    from ckpt.integrations.torchtitan import CkptCheckpointer

    tokenizer, loader = _components()
    config: Any = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention has no gradients on a CPU
    config.tokenizer, config.dataloader = tokenizer.Config(), loader.Config()
    options = {"enable": True, "interval": 2, "ranks": ckpt.RankOptions(timeout=300), **settings}
    config.checkpoint = CkptCheckpointer.Config(**options)
    config.dump_folder, config.validator.enable = dump_folder, False
    config.training.seq_len, config.training.local_batch_size, config.training.steps = LENGTH, 4, steps
    config.lr_scheduler.total_steps, config.debug.seed = 10, seed
    config.training.disable_cuda_graphs, config.training.mixed_precision_param = True, "float32"
    config.optimizer.implementation = "for-loop"
    config.parallelism.spmd_backend = "partial_dtensor"
    for name, value in WAYS[way].items():
        setattr(config.parallelism, name, value)
    made = module.Trainer(config)
    for part in made.model_parts:
        for inner in part.modules():
            if isinstance(inner, FSDPModule):
                inner.set_force_sum_reduction_for_comms(True)  # gloo has no other
    if hasattr(made, "pp_schedule"):
        made.pp_schedule.step = _step_of(made.pp_schedule)
    return made


def after_each_step(made: Any, call: Callable[[Any], object]) -> None:
    """Let a trainer call this, with itself, after each step, once its checkpointer has done its part."""
    save = made.checkpointer.save

    def save_and_call(curr_step: int, last_step: bool = False) -> bool:
        saved: bool = save(curr_step, last_step)
        call(made)
        return saved

    made.checkpointer.save = save_and_call


def _step_of(schedule: Any) -> Callable[..., None]:
    """`step` with microbatches, as torchtitan calls it: of a later PyTorch."""

    def step(*, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, **_: Any) -> None:
        for stage in schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]:
            stage.has_backward = schedule._has_backward
            stage.clear_runtime_states()
        inputs = arg_mbs if arg_mbs is not None else [()] * len(kwarg_mbs)
        schedule._step_microbatches(inputs, kwarg_mbs, target_mbs, losses, False, loss_kwargs=loss_kwargs)

    return step


def digests(made: Any) -> dict[str, str]:
    """Every tensor that this rank has a part of, whole, by name, and the options of the optimizers."""
    model: Any = ckpt.Joined(made.model_parts).as_one("model")
    state = OptimizerPart("optimizer", JoinedOptimizer(made.optimizers.optimizers), {"": model}).capture()
    named = {f"{name}/{key}": value for name, entry in state["state"].items() for key, value in entry.items()}
    found = {name: digest(whole(value)) for name, value in {**ModelPart("model", model).capture(), **named}.items()}
    options = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    return {**found, "options": repr(options), "schedule": repr(made.lr_schedulers.state_dict())}


def is_installed() -> bool:
    """Whether torchtitan is there, with all that it imports."""
    from importlib.util import find_spec

    return all(find_spec(name) for name in ("torchtitan", "triton", "tyro", "tensorboard", "spmd_types", "einops"))


def folder_of(base: str, way: str) -> str:
    path = Path(base, way)
    path.mkdir(parents=True, exist_ok=True)
    return str(path)


def synchronise() -> None:
    if dist.is_initialized():
        dist.barrier()

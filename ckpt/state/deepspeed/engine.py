"""DeepSpeed engines: recognising them, their optimizers and schedulers, and configurations that are not supported."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ckpt.compat.deepspeed import is_fragmented
from ckpt.errors import ConfigError, UnsupportedError
from ckpt.state.objects import ManagedObjects, Stateful
from ckpt.state.unwrap import is_engine

KEY = "deepspeed"  # of an engine's part

_PARTITIONED = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer")
_WHOLE = ("FP16_Optimizer", "FP16_UnfusedOptimizer")
_NONE = ("NoneType", "DeepSpeedZeRoOffload")  # evaluation only


def is_partitioned(engine: Any) -> bool:
    """Whether ZeRO partitions the optimizer's state over the ranks."""
    return _kind(engine) in _PARTITIONED


def with_engines(found: ManagedObjects) -> ManagedObjects:
    """The objects with engines' own optimizers and schedulers left to the engines' parts."""
    engines = engines_in(found.models)
    if not engines:
        return found
    theirs = {id(value) for engine in engines.values() for value in (engine.optimizer, engine.lr_scheduler)}
    optimizers = _without(found.optimizers, theirs)
    for key, engine in engines.items():
        _refuse_unfit(key, engine)
        if _kind(engine) not in (*_PARTITIONED, *_NONE):
            optimizers[key.replace("model", "optimizer", 1)] = engine.optimizer
    return replace(found, optimizers=optimizers, others=_without(found.others, theirs))


def _without(objects: Mapping[str, Stateful], identities: set[int]) -> dict[str, Stateful]:
    return {key: value for key, value in objects.items() if id(value) not in identities}


def engines_in(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    return {key: model for key, model in models.items() if is_engine(model)}


def refuse_bare(key: str, model: nn.Module) -> None:
    """Refuse a model without the engine that trains it: loading would not change the engine's master weights."""
    trained = (hasattr(parameter, "ds_id") or is_fragmented(parameter) for parameter in model.parameters())
    if not is_engine(model) and any(trained):
        raise ConfigError(
            f"{key} is trained by a DeepSpeed engine, which keeps its weights once more. Give the engine itself: what "
            "deepspeed.initialize() or accelerator.prepare() has returned."
        )


def refuse_some_ranks(keys: Collection[str], members: tuple[int, ...]) -> None:
    """Refuse engines for a manager of some ranks: their partitions are those of all ranks of the job."""
    if keys:
        raise UnsupportedError(
            f"{', '.join(sorted(keys))}: DeepSpeed divides its state over all ranks of the job, and this manager has "
            f"{len(members)} of them. Leave out process_group= and alone=, and build the manager on every rank."
        )


def _kind(engine: Any) -> str:
    return type(engine.optimizer).__name__


def _refuse_unfit(key: str, engine: Any) -> None:
    """Raise one error that names every unsupported feature of an engine."""
    found = list(_obstacles(engine))
    if found:
        raise UnsupportedError(
            f"{key}: ckpt keeps DeepSpeed with ZeRO 0 to 3, also offloaded to the CPU. It does not keep "
            f"{', nor '.join(found)}. Train without, or save with DeepSpeed's own save_checkpoint()."
        )


def _obstacles(engine: Any) -> Iterator[str]:
    kind, offloaded = _kind(engine), (engine.zero_offload_optimizer(), engine.zero_offload_param())
    if not isinstance(engine.optimizer, Optimizer) and kind not in (*_PARTITIONED, *_WHOLE, *_NONE):
        yield f"its {kind}"
    if engine.pipeline_parallelism:
        yield "pipeline parallelism"
    if engine.has_moe_layers:
        yield "mixtures of experts"
    if engine.mp_world_size > 1 or engine.autotp_size() > 1:
        yield "tensor parallelism"
    if engine.sequence_parallel_size > 1:
        yield "sequence parallelism"
    if any(part is not None and part.device == "nvme" for part in offloaded):
        yield "offload to NVMe"
    if engine.zero_hpz_partition_size() > 1:
        yield "a secondary partition (zero_hpz_partition_size)"
    if engine.zero_quantized_weights() or engine.zero_quantized_nontrainable_weights():
        yield "quantized weights"
    if engine.zero_elastic_checkpoint():
        yield "elastic_checkpoint"
    if engine.data_efficiency_enabled():
        yield "data efficiency and curricula"

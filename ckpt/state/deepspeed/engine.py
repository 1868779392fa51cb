"""DeepSpeed engines: which they are, what of them can be kept, and what they bring themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ckpt.errors import ConfigError, UnsupportedError
from ckpt.state.objects import Found

KEY = "deepspeed"  # of the part that an engine is

_PARTITIONED = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer")
_WHOLE = ("FP16_Optimizer", "FP16_UnfusedOptimizer")
_NONE = ("NoneType", "DeepSpeedZeRoOffload")  # for evaluation alone


def is_engine(model: Any) -> bool:
    """Whether it is what `deepspeed.initialize` returns. Whoever has one has imported it."""
    module = sys.modules.get("deepspeed.runtime.engine")
    return module is not None and isinstance(model, module.DeepSpeedEngine)


def is_partitioned(engine: Any) -> bool:
    """Whether ZeRO divides the optimizer's state among the ranks."""
    return _kind(engine) in _PARTITIONED


def with_engines(found: Found) -> Found:
    """What was found, where engines bring their optimizers and schedulers themselves."""
    engines = engines_in(found.models)
    if not engines:
        return found
    theirs = {id(one) for engine in engines.values() for one in (engine.optimizer, engine.lr_scheduler)}
    optimizers = {key: one for key, one in found.optimizers.items() if id(one) not in theirs}
    for key, engine in engines.items():
        _refuse_unfit(key, engine)
        if _kind(engine) not in (*_PARTITIONED, *_NONE):
            optimizers[key.replace("model", "optimizer", 1)] = engine.optimizer
    others = {key: one for key, one in found.others.items() if id(one) not in theirs}
    return replace(found, optimizers=optimizers, others=others)


def engines_in(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    return {key: model for key, model in models.items() if is_engine(model)}


def refuse_bare(key: str, model: nn.Module) -> None:
    """A model without the engine that trains it: the engine's own weights would not learn of what is loaded."""
    trained = (hasattr(one, "ds_id") or hasattr(one, "_hp_mapping") for one in model.parameters())
    if not is_engine(model) and any(trained):
        raise ConfigError(
            f"{key} is trained by a DeepSpeed engine, which keeps its weights once more. Give the engine itself: what "
            "deepspeed.initialize() or accelerator.prepare() has returned."
        )


def _kind(engine: Any) -> str:
    return type(engine.optimizer).__name__


def _refuse_unfit(key: str, engine: Any) -> None:
    """Every way of training that has state which is not kept, by its name."""
    found = list(_obstacles(engine))
    if found:
        raise UnsupportedError(
            f"{key}: ckpt keeps DeepSpeed with ZeRO 0 to 3, also offloaded to the CPU. It does not keep "
            f"{', nor '.join(found)}. Train without, or save with DeepSpeed's own save_checkpoint()."
        )


def _obstacles(engine: Any) -> Iterator[str]:
    kind, config = _kind(engine), engine._config.zero_config
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
    if any(one is not None and one.device == "nvme" for one in (config.offload_optimizer, config.offload_param)):
        yield "offload to NVMe"
    if config.zero_hpz_partition_size > 1:
        yield "a secondary partition (zero_hpz_partition_size)"
    if config.zero_quantized_weights or config.zero_quantized_nontrainable_weights:
        yield "quantized weights"
    if config.elastic_checkpoint:
        yield "elastic_checkpoint"
    if engine.data_efficiency_enabled():
        yield "data efficiency and curricula"

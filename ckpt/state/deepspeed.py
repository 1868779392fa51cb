"""DeepSpeed engines: their models, optimizers and schedulers, captured and restored through DeepSpeed's own calls.

ZeRO partitions master weights and the optimizer's state over the ranks, as flat tensors without names. Each rank saves
its partitions for itself; another number of ranks cuts them anew (`ckpt/state/deepspeed_regroup.py`). The model is
saved beside them by parameter name, which any number of ranks can load.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ckpt.compat.deepspeed import in_window
from ckpt.errors import ConfigError, MismatchError, StateError, UnsupportedError
from ckpt.formats.layout import Box, Layout, Members
from ckpt.formats.native.documents import to_json
from ckpt.formats.native.manifest import digest
from ckpt.formats.sharded_tensors import gathered, is_sharded
from ckpt.formats.tensors import narrowed
from ckpt.state.deepspeed_regroup import Regrouping, SavedPartitionsPart, parameter_shapes
from ckpt.state.model import ModelPart
from ckpt.state.objects import ManagedObjects, Stateful
from ckpt.state.parts import WHOLE_PART, Notes, Read, Unmarked, UnshardedPart
from ckpt.state.unwrap import clean_names, unwrap

_log = logging.getLogger("ckpt")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_SCALER = "loss_scaler"
_FOR_OTHER_TOOLS = ("param_slice_mappings", "universal_checkpoint_info", "zero_stage")  # objects that no load needs
_PARTITIONED = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer")
_WHOLE = ("FP16_Optimizer", "FP16_UnfusedOptimizer")
_MASTER = "get_full_hp_param"  # a method that an engine gives to parameters of which it has a master copy
_NONE = ("NoneType", "DeepSpeedZeRoOffload")  # evaluation only


def with_engines(found: ManagedObjects, engines: Mapping[str, Any]) -> ManagedObjects:
    """The objects with engines' own optimizers and schedulers left to the engines' parts."""
    theirs = {id(value) for engine in engines.values() for value in (engine.optimizer, engine.lr_scheduler)}
    optimizers = _without(found.optimizers, theirs)
    for key, engine in engines.items():
        _refuse_unfit(key, engine)
        if _kind(engine) not in (*_PARTITIONED, *_NONE):
            optimizers[key.replace("model", "optimizer", 1)] = engine.optimizer
    return replace(found, optimizers=optimizers, others=_without(found.others, theirs))


def _without(objects: Mapping[str, Stateful], identities: set[int]) -> dict[str, Stateful]:
    return {key: value for key, value in objects.items() if id(value) not in identities}


def refuse_bare(key: str, model: nn.Module) -> None:
    """Refuse a model without the engine that trains it: loading would not change the engine's master weights."""
    utilities = sys.modules.get("deepspeed.utils")
    if utilities is not None and not hasattr(utilities, _MASTER):
        _log.warning(
            "this release of DeepSpeed has no deepspeed.utils.%s, so ckpt can't tell if you pass a model without its "
            "engine; such a model would load no master weights.", _MASTER,
        )  # fmt: skip
    if any(is_partitioned(parameter) or hasattr(parameter, _MASTER) for parameter in model.parameters()):
        raise ConfigError(
            f"a DeepSpeed engine trains {key}, and keeps its own copy of the weights. Pass the engine that "
            "deepspeed.initialize() or accelerator.prepare() returned."
        )


def refuse_some_ranks(keys: Collection[str], members: tuple[int, ...]) -> None:
    """Refuse engines for a manager of some ranks: their partitions are those of all ranks of the job."""
    if keys:
        raise UnsupportedError(
            f"{', '.join(sorted(keys))}: DeepSpeed divides its state across all ranks of the job, but this manager has "
            f"only {len(members)} of them. Leave out process_group= and alone=, and build the manager on every rank."
        )


def _kind(engine: Any) -> str:
    return type(engine.optimizer).__name__


def _refuse_unfit(key: str, engine: Any) -> None:
    """Raise one error that names every unsupported feature of an engine."""
    found = list(_obstacles(engine))
    if found:
        raise UnsupportedError(
            f"{key}: ckpt can't save DeepSpeed with {' or '.join(found)}. ckpt supports ZeRO 0 to 3, with or without "
            "CPU offload. For anything else, use DeepSpeed's own save_checkpoint()."
        )


def _obstacles(engine: Any) -> Iterator[str]:
    kind, offloaded = _kind(engine), (engine.zero_offload_optimizer(), engine.zero_offload_param())
    if not isinstance(engine.optimizer, Optimizer) and kind not in (*_PARTITIONED, *_WHOLE, *_NONE):
        yield f"the optimizer {kind}"
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


def _refresh(engine: Any) -> None:
    """Update an engine's master weights and caches after its model has been loaded."""
    if hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.optimizer.refresh_fp32_params()
    if hasattr(engine.optimizer, "checkpoint_event_epilogue"):
        engine.optimizer.checkpoint_event_epilogue()


# -- parts ------------------------------------------------------------------------------------------------------------


@dataclass
class EngineModelPart(ModelPart):
    """The model of an engine; under ZeRO 3, every rank has its rows of each parameter."""

    is_collective: ClassVar[bool] = True

    def capture(self) -> dict[str, Any]:
        return _rows(self._state())

    def places(self) -> dict[str, Any]:
        return _empty_rows(self._state())

    def _marks(self) -> Unmarked:
        marks = super()._marks()
        if marks:
            raise UnsupportedError(
                f"{self.key}: ckpt.mark_sharded works with fully_shard, but not with FSDP 1 or DeepSpeed."
            )
        return marks

    def is_sharded(self) -> bool:
        return any(map(is_partitioned, self.model.parameters())) or super().is_sharded()

    def layouts(self, members: Members) -> frozenset[Layout]:
        partitioned = any(map(is_partitioned, self.model.parameters()))
        return frozenset({_zero3_layout()}) if partitioned else super().layouts(members)

    def load(self, state: dict[str, Any], left: Collection[str] = ()) -> None:
        module = unwrap(self.model)
        live = module.state_dict(keep_vars=True)
        raw = clean_names(module, live)
        _fill(live, {name: state[clean] for name, clean in raw.items() if clean not in left})
        there = {name: state[clean] for name, clean in raw.items() if not is_partitioned(live[name])}
        module.load_state_dict(there, strict=False)
        _refresh(self.model)


def is_partitioned(value: Any) -> bool:
    """Whether a value is a parameter that ZeRO 3 has partitioned: it has no data of its own."""
    return hasattr(value, "ds_id")


@dataclass
class EnginePart(UnshardedPart):
    """The state that all ranks of an engine share: counters, scheduler, and torch's gradient scaler.

    Step hooks can be registered on it, as on an optimizer of torch.
    """

    key: str
    engine: Any
    same_class: bool = False
    can_be_sharded: bool = False
    _counted: int | None = None  # the last step that the post hooks were called for

    @property
    def kind(self) -> str:
        return type(self.engine).__name__

    def capture(self) -> dict[str, Any]:
        counters = {name: getattr(self.engine, name) for name in _COUNTERS}
        parts = {name: None if value is None else value.state_dict() for name, value in self._parts().items()}
        return {**counters, **parts, "in_window": in_window(self.engine)}

    def check(self, saved: Mapping[str, Any]) -> dict[str, str]:
        if in_window(self.engine):
            raise StateError(
                f"{self.key}: the engine is in the middle of an accumulation window, and its gradients would mix with "
                "the loaded state. Load at the end of a window, or into a new engine."
            )
        parts = self._parts().items()
        missing = [name for name, value in parts if value is not None and saved[name] is None]
        unexpected = [name for name, value in parts if value is None and saved[name] is not None]
        unfit = dict.fromkeys(missing, "missing in the checkpoint")
        return unfit | dict.fromkeys(unexpected, "unexpected: the engine has none")

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> Callable[[], None]:
        notes.skipped.update({f"{self.key}.{name}": why for name, why in unfit.items()})
        if saved["in_window"]:
            notes.approximated["gradients"] = (
                "saved in the middle of an accumulation window, whose gradients DeepSpeed keeps to itself: the next "
                "update is made without them"
            )
        values = read()
        return lambda: self._load(values())

    def _load(self, values: Any) -> None:
        for name in _COUNTERS:
            setattr(self.engine, name, values[name])
        for name, value in self._parts().items():
            if value is not None and values[name] is not None:
                value.load_state_dict(values[name])
        self._counted = None

    def own_parts(self, rank: int) -> dict[str, PartitionsPart]:
        """What a rank saves for itself, if ZeRO partitions the optimizer's state over the ranks."""
        key = f"{self.key}-{rank:05d}"
        return {key: PartitionsPart(key, self.engine)} if _kind(self.engine) in _PARTITIONED else {}

    def _parts(self) -> dict[str, Stateful | None]:
        without_zero, with_zero = "torch_autocast_z0_gradscaler", "torch_autocast_gradscaler"
        scaler = getattr(self.engine, without_zero, None) or getattr(self.engine.optimizer, with_zero, None)
        return {"lr_scheduler": self.engine.lr_scheduler, "grad_scaler": scaler}

    @property
    def in_window(self) -> bool:
        """Whether the engine is within an accumulation window."""
        return in_window(self.engine)

    @property
    def stepped(self) -> torch.optim.Optimizer | None:
        """The torch optimizer inside the engine's own, which makes the steps; None if the engine wraps none."""
        inner = getattr(self.engine.optimizer, "optimizer", None)
        return inner if isinstance(inner, torch.optim.Optimizer) else None

    def register_step_pre_hook(self, hook: Callable[..., None]) -> Any:
        assert self.stepped is not None
        return self.stepped.register_step_pre_hook(lambda *_: hook(self))

    def register_step_post_hook(self, hook: Callable[..., None]) -> Any:
        def after_step(*_: Any) -> None:
            if self._counted != self.engine.global_steps:  # ZeRO steps once for each parameter group
                self._counted = self.engine.global_steps
                hook(self)

        assert self.stepped is not None
        return self.stepped.register_step_post_hook(after_step)


@dataclass
class PartitionsPart(UnshardedPart):
    """A rank's ZeRO partitions of master weights and optimizer state."""

    key: str
    engine: Any
    same_class: bool = True
    can_be_sharded: bool = False

    @property
    def kind(self) -> str:
        optimizer = self.engine.optimizer
        return f"{type(optimizer).__name__} of {type(optimizer.optimizer).__name__}"

    def capture(self) -> dict[str, Any]:
        given = self.engine.optimizer.state_dict()
        state = {name: value for name, value in given.items() if name not in (*_FOR_OTHER_TOOLS, _SCALER)}
        return {"state": state, "scaler": _scaler_state(given.get(_SCALER)), "parameters": self._parameters()}

    def check(self, saved: Mapping[str, Any]) -> dict[str, str]:
        if saved["parameters"] != self._parameters():
            return {
                WHOLE_PART: "the optimizer's parameters, their groups or their order are not those of the checkpoint"
            }
        live = _scaler_state(getattr(self.engine.optimizer, _SCALER, None))
        if saved["scaler"].get("class") != live.get("class"):
            return {WHOLE_PART: f"a {saved['scaler'].get('class')} in the checkpoint, a {live.get('class')} here"}
        return {}

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> Callable[[], None]:
        values = read()
        return lambda: self._load(values())

    def of_other_ranks(self, saved_by: int) -> dict[str, SavedPartitionsPart]:
        """Parts that load what another number of ranks saved, by their keys."""
        if dist.get_world_size(self.engine.optimizer.dp_process_group) != dist.get_world_size():
            return {}
        regrouping = Regrouping(self.engine, saved_by, self._load)
        stem = self.key.rpartition("-")[0]
        keys = {f"{stem}-{rank:05d}": rank for rank in range(saved_by)}
        return {key: SavedPartitionsPart(key, rank, self.kind, regrouping) for key, rank in keys.items()}

    def missed(self, why: str, notes: Notes, *, strict: bool) -> None:
        if strict:
            raise MismatchError(
                f"the checkpoint has no partitions of DeepSpeed's optimizer for these ranks: {why}. Nothing was "
                "changed. Start the same number of processes as the run that saved the checkpoint, with the same "
                "configuration. To restore only the model's weights and the counters, and start the optimizer over, "
                "use strict=False.",
                (self.key,),
            )
        notes.skipped[self.key] = f"{why}: the optimizer starts over, from the model's weights"

    def _load(self, values: Any) -> None:
        optimizer, state = self.engine.optimizer, values["state"]
        scaler = getattr(optimizer, _SCALER, None)
        if scaler is not None:
            vars(scaler).update(values["scaler"]["values"])
            state = {**state, _SCALER: scaler}
        mine = {dist.get_rank(optimizer.dp_process_group): state}  # ZeRO indexes a list of all ranks' states by rank
        if hasattr(optimizer, "checkpoint_event_prologue"):
            optimizer.checkpoint_event_prologue()
        optimizer.load_state_dict(mine, load_optimizer_states=True, load_from_fp32_weights=True)
        if hasattr(optimizer, "checkpoint_event_epilogue"):
            optimizer.checkpoint_event_epilogue()

    def _parameters(self) -> str:
        """A digest of the names and shapes of all parameters in order: flat partitions fit only the same ones."""
        shapes = parameter_shapes(self.engine)
        groups = [[(name, list(shape)) for name, shape in group.items()] for group in shapes]
        return digest(to_json(groups))


def _scaler_state(scaler: Any) -> dict[str, Any]:
    return {} if scaler is None else {"class": type(scaler).__name__, "values": dict(vars(scaler))}


# -- ZeRO 3 partitions every parameter as flat tensors ----------------------------------------------------------------
#
# Here such a parameter becomes a DTensor that is sharded along dimension 0. Parameters are gathered one at a time
# through DeepSpeed's own calls, and each rank keeps its rows. These calls are collective: every rank makes them.


def _zero3_layout() -> Layout:
    """The layout of parameters in a checkpoint: sharded along dimension 0 over all ranks."""
    world_size = dist.get_world_size()
    return Layout((world_size,), tuple(range(world_size)), ("S0",))


def _rows(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with this rank's rows of every partitioned parameter, in new memory. Tied parameters share it."""
    return _replaced(state, _rows_of)


def _empty_rows(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same, uninitialised. Not collective."""
    return _replaced(state, _empty_rows_of)


@torch.no_grad()
def _fill(state: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Fill partitioned parameters with the sharded or full values in `known`, by name. Others are not changed."""
    found = {id(value): (name, value) for name, value in state.items() if is_partitioned(value) and name in known}
    if not found:
        return
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    for name, parameter in found.values():
        whole = gathered(known[name]) if is_sharded(known[name]) else known[name]
        with GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(whole)


def _replaced(state: Mapping[str, Any], make: Callable[[Any], Any]) -> dict[str, Any]:
    made: dict[int, Any] = {}
    for value in state.values():
        if is_partitioned(value) and id(value) not in made:
            made[id(value)] = make(value)
    return {name: made.get(id(value), value) for name, value in state.items()}


def _empty_rows_of(parameter: Any) -> Any:
    return _sharded(torch.empty(parameter.ds_shape, dtype=parameter.dtype, device="meta"), parameter.device)


@torch.no_grad()
def _rows_of(parameter: Any) -> Any:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

    gather = parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE  # small parameters are complete on every rank
    with GatheredParameters([parameter] if gather else []):
        return _sharded(parameter.data, parameter.device)


def _sharded(whole: torch.Tensor, device: torch.device) -> Any:
    """This rank's rows of a tensor; uninitialised for one on the meta device. A scalar is replicated."""
    from torch.distributed.tensor import DTensor, Shard

    box = _zero3_layout().box(tuple(whole.shape), dist.get_rank()) if whole.dim() else Box((), ())
    piece = torch.empty(box.sizes, dtype=whole.dtype, device=device)
    if not whole.is_meta and not box.is_empty:
        piece.copy_(narrowed(whole, box.ranges))
    if not whole.dim():
        return piece
    mesh, stride = _mesh(device.type, dist.group.WORLD), torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(piece, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=stride)


@lru_cache(maxsize=4)
def _mesh(device: str, group: Any) -> Any:
    """The mesh of all ranks, cached for as long as the process group is the same."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (dist.get_world_size(),))

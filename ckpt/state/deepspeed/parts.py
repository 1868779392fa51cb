"""The state of a DeepSpeed engine, captured and restored through its own calls.

ZeRO partitions master weights and the optimizer's state over the ranks, as flat tensors without names. Each rank saves
its partitions for itself, so they fit only the same number of ranks. The model is saved beside them by parameter name,
which any number of ranks can load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ckpt.compat.deepspeed import in_window, parameter_shapes
from ckpt.errors import MismatchError, StateError
from ckpt.formats.native.documents import to_json
from ckpt.formats.native.manifest import digest
from ckpt.state.deepspeed.other_ranks import Regrouping, SavedPartitionsPart
from ckpt.state.objects import Stateful
from ckpt.state.parts import WHOLE_PART, Notes, Read, UnshardedPart

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_SCALER = "loss_scaler"
_FOR_OTHER_TOOLS = ("param_slice_mappings", "universal_checkpoint_info", "zero_stage")  # objects that no load needs


def refresh(engine: Any) -> None:
    """Update an engine's master weights and caches after its model has been loaded."""
    if hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.optimizer.refresh_fp32_params()
    if hasattr(engine.optimizer, "checkpoint_event_epilogue"):
        engine.optimizer.checkpoint_event_epilogue()


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
                f"{self.key}: the engine holds gradients of an accumulation window, which would mix with what is "
                "loaded. Load when a window is done, or into a new engine."
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
                "changed. Start as many processes as saved it, with the same configuration; or use strict=False, which "
                "restores the model's weights and the counters, and lets the optimizer begin anew.",
                (self.key,),
            )
        notes.skipped[self.key] = f"{why}: the optimizer begins anew, from the model's weights"

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

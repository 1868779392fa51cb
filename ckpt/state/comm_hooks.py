"""State of DDP communication hooks, which belongs to neither model nor optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt.state.parts import Notes, Read, UnshardedPart, has_state
from ckpt.state.unwrap import kinds_in, modules_in

KEY = "comm_hooks"


@dataclass
class HooksPart(UnshardedPart):
    """The communication hooks' states that can be saved, as one rank has them.

    torch's post-local SGD counts iterations, and averages the gradients of all ranks until it begins; states of the
    user's own have `state_dict` and `load_state_dict`.
    """

    key: str
    states: Mapping[str, Any]
    same_class: bool = False
    can_be_sharded: bool = False
    kind: str = KEY

    def capture(self) -> dict[str, Any]:
        return {name: {"class": type(state).__name__, "state": _captured(state)} for name, state in self.states.items()}

    def check(self, saved: Any) -> dict[str, str]:
        return {}  # another hook than before is noted, and does not prevent a resume

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> Callable[[], None]:
        values = read()
        fitting = [name for name, state in self.states.items() if _class_in(saved, name) == type(state).__name__]
        for name in self.states.keys() - fitting:
            notes.approximated[f"{KEY}.{name}"] = "the checkpoint has no state of such a hook: it begins anew"
        return lambda: self._load(values(), fitting)

    def missed(self, why: str, notes: Notes, *, strict: bool) -> None:
        notes.approximated[KEY] = f"{why}: communication hooks begin anew, with their warm-up"

    def _load(self, values: Any, fitting: list[str]) -> None:
        for name in fitting:
            state, saved = self.states[name], values[name]["state"]
            if _is_local_sgd(state):
                state.iter = saved["iter"]
            else:
                state.load_state_dict(saved)


def saved_hooks(models: Mapping[str, nn.Module], rank: int) -> dict[str, HooksPart]:
    """The part of these models' communication hooks; none if no hook has state that can be saved."""
    states = {name: state for name, state in _states(models).items() if _is_local_sgd(state) or has_state(state)}
    key = f"{KEY}-{rank:05d}"
    return {key: HooksPart(key, states)} if states else {}


def lacking_state(models: Mapping[str, nn.Module]) -> dict[str, str]:
    """The unsaved state of these models' communication hooks, by key, each with the consequence."""
    return {
        f"{name.partition('/')[0]}.powerSGD": (
            "PowerSGD's error feedback and warm starts belong to gradient buckets, which a new process lays out anew: "
            "they are not saved, and begin anew, so that compressed gradients differ at first"
        )
        for name, state in _states(models).items()
        if _is(state, "powerSGD_hook", "PowerSGDState")
    }


def _states(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """The states of all communication hooks, by the model's key and the number of the wrapper in it."""
    found: dict[str, Any] = {}
    for key, model in models.items():
        if not any(isinstance(module, DistributedDataParallel) for module in kinds_in(model)):
            continue
        wrappers = [module for module in modules_in(model) if isinstance(module, DistributedDataParallel)]
        for number, wrapper in enumerate(wrappers):
            found |= {f"{key}/{number}": state for _, state in getattr(wrapper, "_comm_hooks", ())}
    return found


def _captured(state: Any) -> Any:
    return {"iter": state.iter} if _is_local_sgd(state) else state.state_dict()


def _class_in(saved: Any, name: str) -> Any:
    entry = saved.get(name) if isinstance(saved, Mapping) else None
    return entry.get("class") if isinstance(entry, Mapping) else None


def _is_local_sgd(state: Any) -> bool:
    return _is(state, "post_localSGD_hook", "PostLocalSGDState")


def _is(state: Any, module: str, name: str) -> bool:
    """Whether this is a state of torch's hook. Imports nothing: a live one has imported its module."""
    hooks = sys.modules.get(f"torch.distributed.algorithms.ddp_comm_hooks.{module}")
    return hooks is not None and isinstance(state, getattr(hooks, name))

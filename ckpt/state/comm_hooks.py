"""State of DDP that belongs to neither model nor optimizer: its communication hooks, and its buckets of gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from ckpt.compat.torch_ddp import Wrapper, hooks_of
from ckpt.state import power_sgd
from ckpt.state.ddp_buckets import (
    about_to_change,
    buckets_of,
    ddp_wrappers,
    decide_sums,
    obstacle,
    restore_buckets,
    saved_buckets,
)
from ckpt.state.parts import Notes, Read, UnshardedPart, has_state

KEY = "comm_hooks"

_OTHER_SUMS = "gradients are summed in other buckets in the first step, and may be rounded in another way"
_NO_STATE = "the checkpoint has no state of such a hook"

Setter = Callable[[Any], None]  # loads what was read


@dataclass
class HooksPart(UnshardedPart):
    """The states of communication hooks that can be saved, and the buckets, as one rank has them.

    torch's post-local SGD counts iterations, and averages the gradients of all ranks until it begins; PowerSGD keeps
    what it left out of earlier gradients; states of the user's own have `state_dict` and `load_state_dict`.
    """

    key: str
    wrappers: Mapping[str, Wrapper]
    same_class: bool = False
    can_be_sharded: bool = False
    kind: str = KEY

    def capture(self) -> dict[str, Any]:
        return {name: _captured(wrapper) for name, wrapper in self.wrappers.items()}

    def check(self, saved: Any) -> dict[str, str]:
        return {}  # another hook than before is noted, and does not prevent a resume

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> Callable[[], None]:
        values = read()
        setters = {name: _setters(name, wrapper, _entry(saved, name), notes) for name, wrapper in self.wrappers.items()}

        def load() -> None:
            found = values()
            for name, to_set in setters.items():
                for set_state in to_set:
                    set_state(found[name])

        return load

    def missed(self, why: str, notes: Notes, *, strict: bool) -> None:
        if any(_kept_state(wrapper) is not None for wrapper in self.wrappers.values()):
            notes.approximated[KEY] = f"{why}: communication hooks begin anew, with their warm-up"


def saved_hooks(models: Mapping[str, nn.Module], rank: int) -> dict[str, HooksPart]:
    """The part of these models' hooks and buckets; none if they have no effect on a resume."""
    wrappers = {name: wrapper for name, wrapper in ddp_wrappers(models).items() if decide_sums(wrapper)}
    key = f"{KEY}-{rank:05d}"
    return {key: HooksPart(key, wrappers)} if wrappers else {}


def lacking_state(models: Mapping[str, nn.Module]) -> dict[str, str]:
    """What a save lacks of these models' hooks and buckets, by key, each with the consequence."""
    lacking: dict[str, str] = {}
    for name, wrapper in ddp_wrappers(models).items():
        if not decide_sums(wrapper):
            continue
        model, why = name.partition("/")[0], obstacle(wrapper)
        if why is not None:
            lacking[f"{model}.buckets"] = f"{why}: {_OTHER_SUMS}"
        elif about_to_change(wrapper):
            lacking[f"{model}.buckets"] = f"saved after the first step, before DDP has laid them out: {_OTHER_SUMS}"
        for _, state in hooks_of(wrapper):
            if why is not None and power_sgd.is_power_sgd(state):
                lacking[f"{model}.powerSGD"] = f"{why}: PowerSGD's error feedback is not saved, and begins anew"
            elif not _is_kept(state) and not _has_none(state):
                lacking[f"{model}.comm_hook"] = (
                    f"the communication hook's {type(state).__name__} has no state_dict and load_state_dict: what it "
                    "holds is not saved, and begins anew. Give it both"
                )
    return lacking


def is_hook_state(value: Any) -> bool:
    """Whether this is the state of a communication hook of torch's."""
    return _is_local_sgd(value) or power_sgd.is_power_sgd(value)


def has_hook_state(saved: Any) -> bool:
    """Whether a saved part has the state of a hook, and not buckets alone."""
    return isinstance(saved, Mapping) and any("class" in _entry(saved, name) for name in saved)


def _captured(wrapper: Wrapper) -> dict[str, Any]:
    found: dict[str, Any] = {} if obstacle(wrapper) else {"buckets": buckets_of(wrapper).as_json()}
    kept = _kept_state(wrapper)
    if kept is None:
        return found
    hook, state = kept
    found["class"] = type(state).__name__
    if _is_local_sgd(state):
        found["state"] = {"iter": state.iter}
    else:
        found["state"] = power_sgd.captured(state, hook) if power_sgd.is_power_sgd(state) else state.state_dict()
    return found


def _kept_state(wrapper: Wrapper) -> tuple[Any, Any] | None:
    """The hook whose state is saved, and that state. A wrapper has one hook at most."""
    for hook, state in hooks_of(wrapper):
        if _is_kept(state) and not (power_sgd.is_power_sgd(state) and obstacle(wrapper)):
            return hook, state
    return None


def _setters(name: str, wrapper: Wrapper, saved: Mapping[str, Any], notes: Notes) -> list[Setter]:
    """The functions that set the buckets and the hook's state. What cannot be set is noted."""
    buckets = None if obstacle(wrapper) else saved_buckets(wrapper, saved.get("buckets"))
    setters: list[Setter] = []
    if buckets is not None:
        found = buckets
        setters.append(lambda _: _require(restore_buckets(wrapper, found)))
    elif "buckets" in saved:
        notes.approximated[f"{KEY}.{name}.buckets"] = (
            f"{obstacle(wrapper) or 'saved with other parameters'}: {_OTHER_SUMS}"
        )
    kept = _kept_state(wrapper)
    if kept is None:
        if "class" in saved:
            unused = f"the state of the saved run's {saved['class']} is not used"
            notes.approximated[f"{KEY}.{name}"] = f"{obstacle(wrapper) or 'there is no such hook here'}: {unused}"
        return setters
    hook, state = kept
    why = None if saved.get("class") == type(state).__name__ else _NO_STATE
    if why is None and power_sgd.is_power_sgd(state):
        if buckets is None:
            why = "saved with other parameters"
        else:
            why = power_sgd.misfit(state, hook, saved.get("state"), len(buckets.layout))
    if why is not None:
        notes.approximated[f"{KEY}.{name}"] = f"{why}: it begins anew"
        return setters
    return [*setters, lambda entry: _set_state(state, entry["state"], wrapper)]


def _require(is_done: bool) -> None:
    # not to be named and passed over: ranks that sum in different buckets would wait for each other
    if not is_done:
        raise RuntimeError("DistributedDataParallel of this torch does not take the buckets that were saved.")


def _set_state(state: Any, saved: Any, wrapper: Wrapper) -> None:
    if _is_local_sgd(state):
        state.iter = saved["iter"]
    elif power_sgd.is_power_sgd(state):
        power_sgd.restore(state, saved, wrapper)
    else:
        state.load_state_dict(saved)


def _entry(saved: Any, name: str) -> Mapping[str, Any]:
    entry = saved.get(name) if isinstance(saved, Mapping) else None
    return entry if isinstance(entry, Mapping) else {}


def _is_kept(state: Any) -> bool:
    return is_hook_state(state) or has_state(state)


def _has_none(state: Any) -> bool:
    """Whether a hook's state holds nothing that changes: none, a process group, what torch's own hooks take."""
    return state is None or isinstance(state, dist.ProcessGroup) or type(state).__module__.startswith("torch.")


def _is_local_sgd(state: Any) -> bool:
    """Whether this is torch's PostLocalSGDState. Imports nothing: a live one has imported its module."""
    hooks = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook")
    return hooks is not None and isinstance(state, hooks.PostLocalSGDState)

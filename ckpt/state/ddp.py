"""DistributedDataParallel: what its ranks have in common, its communication hooks, and its buckets of gradients.

A new process begins with one bucket, and lays buckets out in the order in which gradients arrive after its first step.
In another bucket a sum over three ranks and more is rounded in another way, and hooks that compress gradients by bucket
compress others: a resumed run has the buckets of the saved one from its first step on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt.compat import torch_ddp
from ckpt.compat.torch_ddp import Wrapper, has_rebuilt, hooks_of
from ckpt.formats.checks import damage_reported, reason
from ckpt.formats.layout import Members
from ckpt.state import rng
from ckpt.state.parts import HOOKS, Notes, Read, SavedTensor, UnshardedPart, has_state
from ckpt.state.unwrap import clean_names, is_engine, is_instance, kinds_in, modules_in, parameters_in

_log = logging.getLogger("ckpt")
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"

# -- which tensors are equal on every rank by construction ------------------------------------------------------------

# these give every rank the same gradients; others, such as local SGD, let the weights of ranks diverge
_SYNCHRONOUS = {f"{_HOOKS}.{name}" for name in ("default_hooks", "powerSGD_hook", "quantization_hooks")}


def equal_parameters(models: Iterable[nn.Module], members: Members = None) -> frozenset[int]:
    """The identities of parameters that DeepSpeed, or DistributedDataParallel over all these ranks, keeps equal."""
    found: set[int] = set()
    for model in models:
        if is_engine(model):
            found.update(map(id, model.parameters()))
        for wrapper in _synchronised(model, members):
            ignored = wrapper.parameters_to_ignore
            if ignored:
                named = wrapper.module.named_parameters(remove_duplicate=False)
                found.update(id(parameter) for name, parameter in named if name not in ignored)
            else:
                found.update(map(id, parameters_in(wrapper.module)))
    return frozenset(found)


def broadcast_buffers(model: nn.Module, members: Members = None) -> frozenset[int]:
    """The identities of buffers that every forward pass overwrites with those of rank 0."""
    found: set[int] = set()
    for wrapper in _synchronised(model, members):
        if wrapper.broadcast_buffers:
            named = wrapper.module.named_buffers(remove_duplicate=False)
            found.update(id(buffer) for name, buffer in named if name not in wrapper.parameters_to_ignore)
    return frozenset(found)


def _synchronised(model: nn.Module, members: Members) -> Iterator[DistributedDataParallel]:
    for module in modules_in(model):
        if isinstance(module, DistributedDataParallel) and _is_synchronous(module, members):
            yield module


def _is_synchronous(wrapper: DistributedDataParallel, members: Members) -> bool:
    """Whether the wrapper spans all ranks (not those of a pipeline stage) and keeps their gradients equal."""
    hooks = hooks_of(wrapper)
    if members is None:
        everywhere = dist.get_world_size(wrapper.process_group) == dist.get_world_size()
    else:
        everywhere = {*members} <= {*dist.get_process_group_ranks(wrapper.process_group)}
    return everywhere and all(getattr(hook, "__module__", "") in _SYNCHRONOUS for hook, _ in hooks)


# -- buckets ----------------------------------------------------------------------------------------------------------

_ANY_ORDER = 2  # ranks: the sum of so many numbers does not depend on their order


@dataclass(frozen=True)
class Buckets:
    """The parameters in each bucket, by their numbers, and a digest of all parameters that are summed, in order."""

    layout: tuple[tuple[int, ...], ...]
    parameters: str

    def as_json(self) -> dict[str, Any]:
        return {"layout": [_runs(bucket) for bucket in self.layout], "parameters": self.parameters}


_known: WeakKeyDictionary[nn.Module, tuple[int, bool, Buckets]] = WeakKeyDictionary()
_restored: WeakKeyDictionary[nn.Module, Buckets] = WeakKeyDictionary()


def ddp_wrappers(models: Mapping[str, nn.Module]) -> dict[str, Wrapper]:
    """The DDP wrappers in models, by the model's key and their number in it."""
    found: dict[str, Wrapper] = {}
    for key, model in models.items():
        if any(isinstance(module, DistributedDataParallel) for module in kinds_in(model)):
            wrappers = (module for module in modules_in(model) if isinstance(module, DistributedDataParallel))
            found |= {f"{key}/{number}": wrapper for number, wrapper in enumerate(wrappers)}
    return found


def decide_sums(wrapper: Wrapper) -> bool:
    """Whether gradients depend on their buckets: a hook may do anything with them."""
    return dist.get_world_size(wrapper.process_group) > _ANY_ORDER or bool(hooks_of(wrapper))


def buckets_of(wrapper: Wrapper) -> Buckets:
    """The buckets that the next backward pass uses, if no forward pass lays them out anew before."""
    moment = (id(wrapper.reducer), has_rebuilt(wrapper))
    known = _known.get(wrapper)
    if known is None or known[:2] != moment:
        _known[wrapper] = known = (*moment, _read(wrapper))
    return known[2]


def about_to_change(wrapper: Wrapper) -> bool:
    """Whether the next forward pass lays the buckets out anew, in a way that is not known yet."""
    rebuilds = wrapper.static_graph or not wrapper.find_unused_parameters
    if not rebuilds or has_rebuilt(wrapper) or _restored.get(wrapper) == buckets_of(wrapper):
        return False
    return any(wrapper.reducer.get_backward_stats())  # not zero after a backward pass


def saved_buckets(wrapper: Wrapper, saved: Any) -> Buckets | None:
    """The buckets in a checkpoint; none if they are not buckets of this wrapper's parameters."""
    digest = buckets_of(wrapper).parameters
    if not isinstance(saved, Mapping) or saved.get("parameters") != digest:
        return None
    number = sum(map(len, buckets_of(wrapper).layout))
    layout = _layout(saved.get("layout"), number)
    return None if layout is None else Buckets(layout, digest)


def obstacle(wrapper: Wrapper) -> str | None:
    """Why a wrapper cannot be given the buckets of another process. The same on every rank."""
    try:
        found = torch_ddp.obstacle(wrapper)
        if found is None:
            buckets_of(wrapper)
        return found
    except Exception as error:  # DDP's private side may change, and a save must not fail for it
        return f"DDP does not expose its buckets ({reason(error)})"


def restore_buckets(wrapper: Wrapper, buckets: Buckets) -> bool:
    """Give a wrapper these buckets, with its hooks. Waits for no other rank. Returns whether it has them."""
    if buckets_of(wrapper) != buckets:
        torch_ddp.lay_out(wrapper, buckets.layout)
        _known.pop(wrapper, None)  # which knows reducers by their id: the new one may have got that of the old one
    _restored[wrapper] = buckets
    return buckets_of(wrapper) == buckets


def _read(wrapper: Wrapper) -> Buckets:
    return Buckets(torch_ddp.layout_of(wrapper), _digest(wrapper))


def _digest(wrapper: Wrapper) -> str:
    parameters = torch_ddp.summed_parameters(wrapper)
    clean = clean_names(wrapper.module, parameters)
    digest = xxhash.xxh3_128()
    for name, parameter in parameters.items():
        digest.update(f"{clean[name]} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    return digest.hexdigest()


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Numbers as pairs of the first and the last of every run up or down: mostly one pair for a bucket."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and _continues(runs[-1], number):
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def _continues(run: list[int], number: int) -> bool:
    first, last = run
    step = number - last
    return abs(step) == 1 and (first == last or (last > first) == (step > 0))


def _layout(saved: Any, number: int) -> tuple[tuple[int, ...], ...] | None:
    """The layout that runs describe, if it has each of so many parameters once."""
    layout: list[tuple[int, ...]] = []
    seen: list[int] = []
    for runs in saved if isinstance(saved, list | tuple) else ():
        begin = len(seen)
        for run in runs if isinstance(runs, list | tuple) else ():
            if not _is_run(run, number) or len(seen) > number:
                return None
            first, last = run
            seen += range(first, last + 1) if first <= last else range(first, last - 1, -1)
        layout.append(tuple(seen[begin:]))
    is_whole = len(seen) == number == len(set(seen)) and all(layout)
    return tuple(layout) if is_whole else None


def _is_run(run: Any, number: int) -> bool:
    if not isinstance(run, list | tuple) or len(run) != 2:
        return False
    return all(isinstance(end, int) and not isinstance(end, bool) and 0 <= end < number for end in run)


# -- hooks ------------------------------------------------------------------------------------------------------------

_OTHER_SUMS = "the first step sums gradients in different buckets, so rounding may differ"
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
    kind: str = HOOKS

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
            notes.approximated[HOOKS] = f"{why}: communication hooks start over, with their warm-up"


def saved_hooks(models: Mapping[str, nn.Module], rank: int) -> dict[str, HooksPart]:
    """The part of these models' hooks and buckets; none if they have no effect on a resume."""
    wrappers = {name: wrapper for name, wrapper in ddp_wrappers(models).items() if decide_sums(wrapper)}
    key = f"{HOOKS}-{rank:05d}"
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
            if why is not None and _is_power_sgd(state):
                lacking[f"{model}.powerSGD"] = f"{why}: PowerSGD's error feedback is not saved, and starts over"
            elif not _is_kept(state) and not _has_none(state):
                lacking[f"{model}.comm_hook"] = (
                    f"the communication hook's {type(state).__name__} has no state_dict and load_state_dict: what it "
                    "holds is not saved, and starts over. Give it both"
                )
    return lacking


def is_hook_state(value: Any) -> bool:
    """Whether this is the state of a communication hook of torch's."""
    return _is_local_sgd(value) or _is_power_sgd(value)


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
        found["state"] = _captured_power_sgd(state, hook) if _is_power_sgd(state) else state.state_dict()
    return found


def _kept_state(wrapper: Wrapper) -> tuple[Any, Any] | None:
    """The hook whose state is saved, and that state. A wrapper has one hook at most."""
    for hook, state in hooks_of(wrapper):
        if _is_kept(state) and not (_is_power_sgd(state) and obstacle(wrapper)):
            return hook, state
    return None


def _setters(name: str, wrapper: Wrapper, saved: Mapping[str, Any], notes: Notes) -> list[Setter]:
    """The functions that set the buckets and the hook's state. What cannot be set is noted."""
    buckets = None if obstacle(wrapper) else saved_buckets(wrapper, saved.get("buckets"))
    setters: list[Setter] = []
    if buckets is not None:
        found = buckets
        setters.append(lambda _: _lay_out(name, wrapper, found, notes))
    elif "buckets" in saved:
        notes.approximated[f"{HOOKS}.{name}.buckets"] = (
            f"{obstacle(wrapper) or 'saved with other parameters'}: {_OTHER_SUMS}"
        )
    kept = _kept_state(wrapper)
    if kept is None:
        if "class" in saved:
            unused = f"the state of the saved run's {saved['class']} is not used"
            notes.approximated[f"{HOOKS}.{name}"] = f"{obstacle(wrapper) or 'there is no such hook here'}: {unused}"
        return setters
    hook, state = kept
    why = None if saved.get("class") == type(state).__name__ else _NO_STATE
    if why is None and _is_power_sgd(state):
        if buckets is None:
            why = "saved with other parameters"
        else:
            why = _power_sgd_misfit(state, hook, saved.get("state"), len(buckets.layout))
    if why is not None:
        notes.approximated[f"{HOOKS}.{name}"] = f"{why}: it starts over"
        return setters
    return [*setters, lambda entry: _set_state(state, entry["state"], wrapper)]


def _lay_out(name: str, wrapper: Wrapper, buckets: Buckets, notes: Notes) -> None:
    try:
        is_done = restore_buckets(wrapper, buckets)
    except TypeError as error:  # another signature, on every rank: the buckets are as they were
        notes.approximated[f"{HOOKS}.{name}.buckets"] = f"this DDP accepts no buckets ({reason(error)}): {_OTHER_SUMS}"
        return
    if not is_done:  # not to be named and passed over: ranks that sum in different buckets would wait for each other
        raise RuntimeError("DistributedDataParallel in this PyTorch release does not accept the saved buckets.")


def _set_state(state: Any, saved: Any, wrapper: Wrapper) -> None:
    if _is_local_sgd(state):
        state.iter = saved["iter"]
    elif _is_power_sgd(state):
        _restore_power_sgd(state, saved, wrapper)
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
    return is_instance(state, f"{_HOOKS}.post_localSGD_hook.PostLocalSGDState")


# -- PowerSGD: what compression has left out so far, by bucket, and where it starts from -------------------------------

# what the tensors depend on; the other options may be changed for a resume
_POWER_SGD = (
    "matrix_approximation_rank", "min_compression_rate", "use_error_feedback", "warm_start",
    "batch_tensors_with_same_shape",
)  # fmt: skip
_COUNTERS = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")
_TENSORS = ("error_dict", "p_memory_dict", "q_memory_dict")


def _is_power_sgd(state: Any) -> bool:
    return is_instance(state, f"{_HOOKS}.powerSGD_hook.PowerSGDState")


def _captured_power_sgd(state: Any, hook: Any) -> dict[str, Any]:
    """The state of a hook as a tree of values and live tensors."""
    return {
        "hook": hook.__qualname__,
        "options": _power_sgd_options(state),
        "counters": {name: getattr(state, name) for name in _COUNTERS},
        "rng": rng.capture_one(state.rng),
        **{name: {str(bucket): tensor for bucket, tensor in getattr(state, name).items()} for name in _TENSORS},
    }


def _power_sgd_misfit(state: Any, hook: Any, saved: Any, number: int) -> str | None:
    """Why a saved state, whose tensors have not been read, does not fit a hook over so many buckets."""
    if not isinstance(saved, Mapping) or saved.get("hook") != hook.__qualname__:
        return "saved with another communication hook"
    options = saved.get("options")
    changed = [
        name
        for name, value in _power_sgd_options(state).items()
        if not isinstance(options, Mapping) or options.get(name) != value
    ]
    if changed:
        return f"saved with another {', '.join(changed)}"
    tensors = [saved.get(name) for name in _TENSORS]
    known = set(map(str, range(number)))
    if not all(isinstance(found, Mapping) and found.keys() <= known for found in tensors):
        return "saved with other buckets"
    kept = [tensor for found in tensors if isinstance(found, Mapping) for tensor in found.values()]
    return None if all(isinstance(tensor, SavedTensor) for tensor in kept) else "saved without its tensors"


def _restore_power_sgd(state: Any, saved: Mapping[str, Any], wrapper: Wrapper) -> None:
    """Set the state of a hook. The wrapper has the buckets that it was saved with."""
    with damage_reported("the saved state of a communication hook", "PowerSGD state"):
        rng.check_one(state.rng, saved["rng"])
        counters = {name: int(saved["counters"][name]) for name in _COUNTERS}
    rng.restore_one(state.rng, saved["rng"])
    for name, value in counters.items():
        setattr(state, name, value)
    device = next(wrapper.module.parameters()).device
    for name in _TENSORS:
        tensors = {int(bucket): tensor.to(device) for bucket, tensor in saved[name].items()}
        getattr(state, name).clear()
        getattr(state, name).update(tensors)
    if wrapper.static_graph or not wrapper.find_unused_parameters:
        _watch(state, wrapper, buckets_of(wrapper))


def _watch(state: Any, wrapper: Wrapper, buckets: Buckets) -> None:
    """After its first step, DDP lays buckets out by the order in which gradients came: mostly the same as before."""

    def check(*_: Any) -> None:
        if not has_rebuilt(wrapper) or not torch.is_grad_enabled():
            return
        handle.remove()
        if buckets_of(wrapper) != buckets:
            for name in _TENSORS:
                getattr(state, name).clear()
            _log.warning(
                "PowerSGD starts its error feedback over, because DDP's buckets differ from those in the saved run: "
                "gradients arrived in a different order."
            )

    handle = wrapper.register_forward_hook(check)


def _power_sgd_options(state: Any) -> dict[str, Any]:
    return {name: getattr(state, name) for name in _POWER_SGD}

"""Optimizers: their state by parameter name, and by index as torch's own `state_dict` has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ckpt.formats.layout import Layout, Members
from ckpt.formats.sharded_tensors import divided, empty_like, is_sharded, local_tensor
from ckpt.formats.tensors import Unsharded
from ckpt.state import division
from ckpt.state.division import without_own_names
from ckpt.state.parts import (
    TIED_HERE,
    UNKNOWN,
    Notes,
    Place,
    Read,
    Replication,
    SavedTensor,
    Unmarked,
    marks_in,
    unusable_states,
)
from ckpt.state.unwrap import (
    all_names,
    has_replicas,
    is_instance,
    parameter_names,
    unwrap,
    without_checkpointing,
)

if TYPE_CHECKING:
    from ckpt.state.joined import JoinedOptimizer

# Optimizers around others: Accelerate's, and torch's PostLocalSGDOptimizer, which averages the weights of ranks.


def is_local_sgd(optimizer: Any) -> bool:
    """Whether this is a PostLocalSGDOptimizer."""
    return is_instance(optimizer, "torch.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer")


def is_joined(optimizer: Any) -> bool:
    """Whether this is a `JoinedOptimizer`, which has others in its `optimizers`."""
    return is_instance(optimizer, "ckpt.state.joined.JoinedOptimizer")


def stepping(optimizer: Any) -> Any:
    """The optimizer that makes the steps, and whose step hooks are called."""
    while True:
        inner = optimizer.optim if is_local_sgd(optimizer) else getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            return optimizer
        optimizer = inner


def class_of(optimizer: Any) -> str:
    """The class that a saved state fits: `AdamW`, or `PostLocalSGDOptimizer(AdamW)`, which has a counter beside it."""
    name = optimizer.kind if is_joined(optimizer) else type(optimizer).__name__
    return f"{name}({class_of(optimizer.optim)})" if is_local_sgd(optimizer) else name


_PLAIN_PARAMETERS = (torch.Tensor, nn.Parameter)
_first_rates: WeakKeyDictionary[Any, list[float | None]] = WeakKeyDictionary()  # of optimizers, when first managed


@dataclass
class OptimizerPart:
    """An optimizer's state by parameter name, so that it can be restored with another order or other wrappers."""

    key: str
    optimizer: torch.optim.Optimizer | JoinedOptimizer
    models: Mapping[str, nn.Module]
    same_class: bool = True
    can_be_sharded: bool = True
    is_collective: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        return class_of(self.optimizer)

    @property
    def managed(self) -> Any:
        """The optimizer that the user has."""
        return self.optimizer

    @property
    def other_kinds(self) -> tuple[str, ...]:
        return ()

    def frozen(self) -> frozenset[str]:
        return frozenset()

    def __post_init__(self) -> None:
        if self.optimizer not in _first_rates:
            _first_rates[self.optimizer] = [_rate(group) for group in self.optimizer.param_groups]

    def about(self, state: Any) -> dict[str, Any]:
        """The learning rates that the script began with, by which a resume knows that it was given others."""
        rates = _first_rates[self.optimizer]
        return {"first_lr": rates} if None not in rates else {}

    def adopt_rates(self, about: Mapping[str, Any]) -> str | None:
        """What to say if the script was given other learning rates than the run whose state this is began with."""
        there, here = about.get("first_lr"), _first_rates[self.optimizer]
        if not isinstance(there, list) or len(there) != len(here) or there == here:
            return None
        if not all(isinstance(rate, int | float) for rate in there):
            return None
        _first_rates[self.optimizer] = there
        changed = [(old, new) for old, new in zip(there, here, strict=True) if old != new]
        was, given = (", ".join(f"{rate:g}" for rate in dict.fromkeys(rates)) for rates in zip(*changed, strict=True))
        return (
            f"{self.key}: the checkpoint's learning rate replaces the script's: the run began with {was}, and you give "
            f"{given}. To use yours, set it after the resume: group['lr'] = {given} for the groups of "
            "optimizer.param_groups, and base_lrs of a scheduler."
        )

    def replication(self, state: Any, members: Members) -> Replication:
        """Equal parameters and gradients give equal optimizer state."""
        if not has_replicas(self.models.values()):
            return UNKNOWN
        from ckpt.state.ddp import equal_parameters

        equal = equal_parameters(self.models.values(), members)
        return Replication(all_equal=bool(equal) and all(id(parameter) in equal for parameter in self._parameters()))

    def names(self) -> frozenset[str] | None:
        if not self.can_be_sharded:
            return None
        names = frozenset(self._names().values())
        return None if any(name.startswith("@") for name in names) else names | self._other_names().keys()

    def share(self, state: Any, elsewhere: Collection[str]) -> Any:
        return division.without(state, elsewhere, len(self.optimizer.param_groups))

    def tied_to_ranks(self, names: Collection[str]) -> dict[str, str]:
        return {name.rpartition(".")[0]: name for name in names}

    def is_sharded(self) -> bool:
        marks = self._marks()
        return any(is_sharded(one) or marks.has(one) for one in self._parameters())

    def layouts(self, members: Members) -> frozenset[Layout]:
        return divided(map(self._marks().whole, self._parameters()), members)

    def _marks(self) -> Unmarked:
        return marks_in(self.models.values())

    def capture(self) -> dict[str, Any]:
        names = self._names()
        raw = self.optimizer.state_dict()
        held = self._with_shards(raw["state"])
        state = {names[index] if isinstance(index, int) else index: value for index, value in held.items()}
        groups = [
            {**without_own_names(group), "params": [names[index] for index in group["params"]]}
            for group in raw["param_groups"]
        ]
        extra = {key: value for key, value in raw.items() if key not in ("state", "param_groups")}
        return {"state": state, "param_groups": groups, **extra}

    def check(self, saved: Mapping[str, Any]) -> dict[str, str]:
        return self._contradictions(saved) | self._misfits(self._named(saved))

    def _misfits(self, saved: Mapping[str, Any]) -> dict[str, str]:
        saved_groups = [group["params"] for group in saved["param_groups"]]
        if len(self.optimizer.param_groups) != len(saved_groups):
            return {"param_groups": f"{len(saved_groups)} in the checkpoint, {len(self.optimizer.param_groups)} here"}
        names = self._names()
        numbered = self.optimizer.state_dict()["param_groups"]
        live_groups = [[names[index] for index in group["params"]] for group in numbered]
        unfit: dict[str, str] = {}
        for index, (live, old) in enumerate(zip(live_groups, saved_groups, strict=True)):
            unfit |= _group_misfits(f"param_groups[{index}]", live, old)
        unfit |= unusable_states(self.optimizer, saved["state"])
        return unfit | (self._misshapen(saved["state"], names) if self._live_state() else {})

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> Callable[[], None]:
        notes.skipped.update({f"{self.key}.{name}": why for name, why in unfit.items()})
        if "param_groups" in unfit:
            return lambda: None
        named = self._named(saved)
        copied = _copied(named["state"])
        for name, of in copied.items():
            notes.approximated[f"{self.key}.state.{name}"] = (
                f"a copy of that of {of}: the two were tied when it was saved"
            )
        values = read(self._places(named), live=bool(self.optimizer.state))
        return lambda: self._load(values(), unfit, copied)

    def _load(self, values: Any, unfit: Mapping[str, str], copied: Collection[str] = ()) -> None:
        values = self._named(values)
        for name in copied:  # or one would be stepped twice
            values["state"][name] = {key: _clone(value) for key, value in values["state"][name].items()}
        self._set_state(values, unfit)

    def _set_state(self, values: Any, unfit: Mapping[str, str]) -> None:
        state = {name: value for name, value in values["state"].items() if f"state.{name}" not in unfit}
        indices = {name: index for index, name in self._names().items()}
        known = self._of_this_rank({indices[name]: value for name, value in state.items() if name in indices})
        live = self.optimizer.state_dict()["param_groups"]
        groups = [
            {**without_own_names(saved_group), "params": _Indices(mine["params"])}
            for saved_group, mine in zip(values["param_groups"], live, strict=True)
        ]
        extra = {key: value for key, value in values.items() if key not in ("state", "param_groups")}
        self.optimizer.load_state_dict({"state": known, "param_groups": groups, **extra})
        self._keep_dtypes(known)

    def _with_shards(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """A state by index, in which what belongs to a marked parameter is sharded as it is.

        Of a DTensor, what is none and has its shape is marked: the shape alone would say that it is one.
        """
        marks, found = self._marks(), dict(state)
        for index, parameter in enumerate(self._parameters()):
            entry = found.get(index)
            if (type(parameter) in _PLAIN_PARAMETERS and not marks) or not isinstance(entry, dict):
                continue
            if marks.has(parameter):
                found[index] = {key: marks.like(parameter, value, key) for key, value in entry.items()}
            elif is_sharded(parameter):
                shape = parameter.size()
                found[index] = {key: _unsharded(value, shape) for key, value in entry.items()}
        return found

    def _of_this_rank(self, state: dict[Any, Any]) -> dict[Any, Any]:
        """The same, with this rank's shards of what belongs to marked parameters."""
        marks = self._marks()
        for index, parameter in enumerate(self._parameters() if marks else ()):
            if marks.has(parameter) and isinstance(state.get(index), dict):
                entry = state[index].items()
                state[index] = {key: local_tensor(value) for key, value in entry}
        return state

    def _places(self, named: Mapping[str, Any]) -> Place:
        """Where to read the tensors of a saved state whose parameters have names.

        Existing state is read in place: it may be most of the memory, which must not be needed twice. Otherwise, state
        of the parameter's shape gets the parameter's device and sharding.
        """
        parameters = self._parameters_by_name()  # once: it walks all models
        state = self._live_state()
        marks = self._marks()
        owners: dict[
            str, tuple[Any, Any]
        ] = {}  # by the name of a saved tensor: its parameter, and the key of the state
        for name, entry in named["state"].items():
            for key, tensor in _tensors_of(entry) if name in parameters else ():
                owners.setdefault(tensor.name, (parameters[name], key))

        def find(saved: SavedTensor) -> Any:
            parameter, key = owners.get(saved.name, (None, None))
            if parameter is None:
                return None
            there = marks.like(parameter, state.get(parameter, {}).get(key) if state else None, key)
            like = marks.state_like(parameter, key)
            if isinstance(there, torch.Tensor) and (there.dtype, tuple(there.size())) == (saved.dtype, saved.shape):
                return None if saved.unsharded and is_sharded(there) else there
            fits = saved.shape and tuple(like.size()) == saved.shape and not saved.unsharded
            return empty_like(like, saved.dtype) if fits else None

        return find

    def _live_state(self) -> Mapping[Any, Any]:
        """The state of parameters as it is now, if it can be compared with, or read into, by parameter."""
        return self.optimizer.state

    def _parameters_by_name(self) -> dict[str, Any]:
        numbered = {nameless(index): parameter for index, parameter in enumerate(self._parameters())}
        return numbered | dict(zip(self._names().values(), self._parameters(), strict=True))

    def _named(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """A saved state in which parameters that were saved by index have names: their order says which they are."""
        listed = [name for group in saved["param_groups"] for name in group["params"]]
        clean = {name: without_checkpointing(name) for name in listed if isinstance(name, str)}
        named = renamed(saved, clean | {nameless(index): name for index, name in self._names().items()})
        return division.under_first_names(named, self._other_names())

    def _other_names(self) -> dict[str, str]:
        """The further names of tied parameters, each with the first one, which their state has here."""
        mine, first, others = set(map(id, self._parameters())), dict[int, str](), dict[str, str]()
        for key, model in self.models.items():
            for clean, identity in all_names(unwrap(model)):
                name = f"{key}.{clean}" if key else clean
                if identity in mine and first.setdefault(identity, name) != name:
                    others[name] = first[identity]
        return others

    def _contradictions(self, saved: Mapping[str, Any]) -> dict[str, str]:
        """State of parameters that are one here, and of which the checkpoint has two, if they differ."""
        listed = {name for group in saved["param_groups"] for name in group["params"]}
        twice = {name: first for name, first in self._other_names().items() if {name, first} <= listed}
        state, parameters, marks = saved["state"], self._parameters_by_name() if twice else {}, self._marks()
        return {
            f"state.{name}": f"its state in the checkpoint differs from that of {first}, {TIED_HERE}"
            for name, first in twice.items()
            if not _equal(state.get(name), state.get(first), marks.whole(parameters[first]))
        }

    def _keep_dtypes(self, saved: Mapping[int, Any]) -> None:
        """Undo the cast of `load_state_dict` to the parameter's dtype: fp32 moments of bf16 weights would lose bits."""
        for index, parameter in enumerate(self._parameters()):
            for key, value in saved.get(index, {}).items() if isinstance(saved.get(index), dict) else ():
                live = self.optimizer.state[parameter].get(key)
                if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor) and live.dtype != value.dtype:
                    self.optimizer.state[parameter][key] = value.to(live.device)

    def _misshapen(self, state: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, str]:
        """State whose shape differs from the live one. Live state is needed to compare with."""
        unfit, marks = {}, self._marks()
        for name, parameter in zip(names.values(), self._parameters(), strict=True):
            live, saved = self.optimizer.state.get(parameter, {}), state.get(name, {})
            if marks.has(parameter):
                live = {key: marks.like(parameter, value, key) for key, value in live.items()}
            for key in live.keys() & saved.keys() if isinstance(saved, dict) else ():
                there, here = getattr(saved[key], "shape", None), getattr(live[key], "shape", None)
                if there is not None and here is not None and tuple(there) != tuple(here):
                    unfit[f"state.{name}"] = f"{key} has shape {list(there)} in the checkpoint, {list(here)} here"
        return unfit

    def _parameters(self) -> list[torch.Tensor]:
        """The parameters in the order of their indices in `state_dict`."""
        found: dict[int, torch.Tensor] = {}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                found.setdefault(id(parameter), parameter)
        return list(found.values())

    def _names(self) -> dict[int, str]:
        """The name of each parameter by its index. Parameters of no managed model are named by their index."""
        known: dict[int, str] = {}
        for key, model in self.models.items():
            for identity, name in parameter_names(unwrap(model)).items():
                known.setdefault(identity, f"{key}.{name}" if key else name)
        return {i: known.get(id(p), nameless(i)) for i, p in enumerate(self._parameters())}


class _Indices(list[int]):
    """The indices of a group's parameters. `Optimizer.load_state_dict` looks every tensor's parameter up in them: in a
    plain list, that takes most of a load of thousands of tensors."""

    def __init__(self, indices: Iterable[int]) -> None:
        super().__init__(indices)
        self._all = frozenset(self)

    def __contains__(self, index: object) -> bool:
        return index in self._all


def _rate(group: Mapping[str, Any]) -> float | None:
    """The learning rate of a group before any scheduler changed it; None if it has none that is a plain number."""
    rate = group.get("initial_lr", group.get("lr"))
    if isinstance(rate, torch.Tensor) and rate.numel() == 1:
        rate = rate.item()
    return float(rate) if isinstance(rate, int | float) and math.isfinite(rate) else None


def _group_misfits(where: str, live: Sequence[str], old: Sequence[str]) -> dict[str, str]:
    """The parameters that only the live or only the saved group has."""
    missing, unexpected = set(live) - set(old), set(old) - set(live)
    unfit = {f"{where}.{name}": "missing in the checkpoint" for name in live if name in missing}
    why = "unexpected: the optimizer has no such parameter"
    return unfit | {f"{where}.{name}": why for name in old if name in unexpected}


def _unsharded(value: Any, shape: torch.Size) -> Any:
    """State of a DTensor; plain tensors of the parameter's shape, in lists too, are marked."""
    if type(value) is torch.Tensor:
        return Unsharded(value) if value.dim() and value.size() == shape else value
    return type(value)(_unsharded(item, shape) for item in value) if type(value) in (list, tuple) else value


def _tensors_of(entry: Any) -> Iterator[tuple[Any, SavedTensor]]:
    """The saved tensors in a parameter's state, each with its key; also those of lists, without one."""
    for key, value in entry.items() if isinstance(entry, dict) else ():
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, SavedTensor):
                yield (key if item is value else None), item


def _copied(state: Mapping[str, Any]) -> dict[str, str]:
    """Parameters that have another's state: they were tied, and are not here. Each with the other's name."""
    owners: dict[str, str] = {}
    return {
        name: owner
        for name, entry in state.items()
        for _, tensor in _tensors_of(entry)
        if (owner := owners.setdefault(tensor.name, name)) != name
    }


def _clone(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_clone, value))
    return value.clone() if isinstance(value, torch.Tensor) else value


def _equal(one: Any, other: Any, place: Any) -> bool:
    """Whether two saved states are the same. `place`: the parameter, of whose sharding state of its shape is."""
    if isinstance(one, SavedTensor) and isinstance(other, SavedTensor):
        return one.equals(other, place if one.shape == tuple(place.size()) and not one.unsharded else None)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key], place) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(_equal(*pair, place) for pair in zip(one, other, strict=True))
    return bool(one == other)


def nameless(index: int | str) -> str:
    """The key of a parameter without a known name."""
    return f"@{index}"


def by_name(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A `state_dict` with `prefix` before every parameter name. Indices become `nameless` keys."""
    order = [parameter for group in state["param_groups"] for parameter in group["params"]]
    return renamed(state, {key: nameless(key) if isinstance(key, int) else f"{prefix}{key}" for key in order})


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state by parameter name in the form of torch's `state_dict`: parameters are numbered group by group."""
    order = [name for group in state["param_groups"] for name in group["params"]]
    return renamed(state, {name: number for number, name in enumerate(dict.fromkeys(order))})


def renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """A state with other keys for its parameters. A key that is not in `names` is kept."""
    groups = [{**group, "params": [names.get(key, key) for key in group["params"]]} for group in state["param_groups"]]
    by_key = {names.get(key, key): value for key, value in state["state"].items()}
    return {**state, "state": by_key, "param_groups": groups}

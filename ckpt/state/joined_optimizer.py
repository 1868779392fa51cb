"""Several optimizers as one: its groups are those of all of them, joined where their options are the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckpt.errors import ConfigError, UnsupportedError

_Group = dict[str, Any]
NAMES = "param_names"  # of an optimizer's own parameters, beside `params`, if it was given named ones: no option


class StateOfAll(Mapping[Any, Any]):
    """The state of every parameter. A lookup adds nothing, as one in the mapping of an optimizer would."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], owners: Mapping[int, torch.optim.Optimizer]) -> None:
        self._optimizers, self._owners = optimizers, owners

    def __getitem__(self, parameter: Any) -> Any:
        owner = self._owners.get(id(parameter))
        if owner is None or parameter not in owner.state:
            raise KeyError(parameter)
        return owner.state[parameter]

    def __iter__(self) -> Iterator[Any]:
        for optimizer in self._optimizers:
            yield from optimizer.state

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)


class JoinedOptimizer:
    """Has the state of several optimizers of one class, each of which has parameters of its own.

    The groups at the same position are one if all optimizers have as many and their options are equal; else all groups
    with equal options are one. Parameters are numbered in the order of these groups.
    """

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers: list[torch.optim.Optimizer] = optimizers
        classes = sorted({type(optimizer).__name__ for optimizer in optimizers})
        if not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers) or len(classes) > 1:
            raise ConfigError(
                f"optimizer=ckpt.Joined(...) takes torch optimizers of one class, and has {', '.join(classes)}."
            )
        self._owners: dict[int, torch.optim.Optimizer] = {}
        for optimizer in optimizers:
            self._owners |= {id(value): optimizer for value in _parameters(optimizer)}

    @property
    def kind(self) -> str:
        """Their class."""
        return type(self.optimizers[0]).__name__

    @property
    def state(self) -> StateOfAll:
        return StateOfAll(self.optimizers, self._owners)

    @property
    def param_groups(self) -> list[_Group]:
        return [
            {**without_names(groups[0]), "params": [value for group in groups for value in group["params"]]}
            for groups in self._joined_groups()
        ]

    def state_dict(self) -> dict[str, Any]:
        numbers, state, extra = self._numbers(), dict[int, Any](), dict[str, Any]()
        for optimizer in self.optimizers:
            saved = optimizer.state_dict()
            own = [numbers[id(value)] for value in _parameters(optimizer)]
            state |= {own[number]: entry for number, entry in saved["state"].items()}
            extra |= {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
        if extra:
            raise UnsupportedError(
                f"{self.kind} has state beside that of its parameters ({', '.join(extra)}), of which only one can be "
                "in a checkpoint. Give the optimizers as a list instead of ckpt.Joined."
            )
        groups = [{**group, "params": [numbers[id(value)] for value in group["params"]]} for group in self.param_groups]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        numbers, options = self._numbers(), self._options_of(state["param_groups"])
        for optimizer in self.optimizers:
            own = [numbers[id(value)] for value in _parameters(optimizer)]
            entries = {place: state["state"][number] for place, number in enumerate(own) if number in state["state"]}
            places, groups = {number: place for place, number in enumerate(own)}, []
            for group in optimizer.param_groups:
                listed = [places[numbers[id(value)]] for value in group["params"]]
                groups.append({**without_names(options[id(group)]), "params": listed})
            optimizer.load_state_dict({"state": entries, "param_groups": groups})

    def _options_of(self, saved: list[_Group]) -> dict[int, _Group]:
        """The saved group by the identity of every live group that is part of it."""
        pairs = zip(self._joined_groups(), saved, strict=True)
        return {id(group): group_saved for groups, group_saved in pairs for group in groups}

    def _numbers(self) -> dict[int, int]:
        """The number of every parameter by its identity."""
        found: dict[int, int] = {}
        for group in self.param_groups:
            for value in group["params"]:
                found.setdefault(id(value), len(found))
        return found

    def _joined_groups(self) -> list[list[_Group]]:
        """Live groups, those together that are one."""
        positions = list(zip(*(optimizer.param_groups for optimizer in self.optimizers), strict=False))
        every = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        if len(positions) * len(self.optimizers) == len(every):
            together = [list(groups) for groups in positions]
            if all(_same_options(groups[0], group) for groups in together for group in groups[1:]):
                return together
        joined: list[list[_Group]] = []
        for group in every:
            same = next((groups for groups in joined if _same_options(groups[0], group)), None)
            joined.append([group]) if same is None else same.append(group)
        return joined


def without_names(group: Mapping[str, Any]) -> _Group:
    """A group without the names of its parameters. The live optimizer has them, and torch keeps these in a load."""
    return {key: value for key, value in group.items() if key != NAMES}


def contained_optimizers(value: Any) -> dict[str, JoinedOptimizer]:
    """The optimizers in one that holds others in its `optimizers`, as torchtitan's container does, by their class."""
    inner = getattr(value, "optimizers", None)
    if not isinstance(value, torch.optim.Optimizer) or not isinstance(inner, list | tuple) or not inner:
        return {}
    if not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in inner):
        return {}
    classes = dict.fromkeys(type(optimizer) for optimizer in inner)
    return {kind.__name__: JoinedOptimizer([one for one in inner if type(one) is kind]) for kind in classes}


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """In the order of their numbers in `state_dict`."""
    seen: set[int] = set()
    for group in optimizer.param_groups:
        for value in group["params"]:
            if id(value) not in seen:
                seen.add(id(value))
                yield value


def _same_options(one: _Group, other: _Group) -> bool:
    keys = one.keys() - {"params", NAMES}
    return keys == other.keys() - {"params", NAMES} and all(_equal(one[key], other[key]) for key in keys)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)

"""Several objects that are one: the parts of a model that a rank has, and an optimizer for each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ckpt.errors import ConfigError, UnsupportedError
from ckpt.state.division import OWN_NAMES, without_own_names
from ckpt.state.unwrap import JoinedModel, clean_names, is_engine, is_fsdp1

_FEW = 5


class JoinedState:
    """Objects with the same state, such as the schedulers of the optimizers of all parts: saved once, loaded by all."""

    def __init__(self, objects: list[Any]) -> None:
        self.objects = objects

    def state_dict(self) -> Any:
        first, *others = [item.state_dict() for item in self.objects]
        if any(other != first for other in others):
            raise UnsupportedError(
                f"ckpt.Joined can't join {len(self.objects)} objects of class {type(self.objects[0]).__name__}, "
                "because their states differ. Give the objects as a list instead."
            )
        return first

    def load_state_dict(self, state: Any) -> None:
        for item in self.objects:
            item.load_state_dict(state)


class Joined:
    """Save several objects as one, so that ranks with different numbers of objects can load the checkpoint.

        StateManager(root, model=Joined(parts), optimizer=Joined(optimizers), scheduler=Joined(schedulers))

    Join models that are parts of one larger model, for example this rank's stages of a pipeline: modules, or
    `PipelineStage`s of torch.distributed.pipelining. The parts' parameters must have the same names as in the full
    model. Join optimizers if each part of the model, or each parameter, has its own; all must be of the same class.
    Join schedulers and scalers if all have the same state.

    Args:
        objects: All objects of this rank. If each part of a model numbers its layers from zero, a dict gives each a
            prefix (`{"stages.3": part}`). For optimizers, the keys of a dict don't matter: if the keys are names of
            parameters, which contain dots, ckpt joins the dict even without `Joined`.

    Raises:
        ConfigError: You passed no objects.
    """

    def __init__(self, objects: Iterable[Any] | Mapping[str, Any]) -> None:
        self.objects = dict(objects) if isinstance(objects, Mapping) else list(objects)
        if not self.objects:
            raise ConfigError("ckpt.Joined got no objects. Pass all objects of this rank.")

    def as_one(self, kind: str) -> Any:
        """The object that a manager manages."""
        values = list(self.objects.values()) if isinstance(self.objects, dict) else self.objects
        ways: dict[str, Callable[[list[Any]], Any]] = {
            "model": self._model,
            "optimizer": JoinedOptimizer,
            "scheduler": JoinedState,
            "scaler": JoinedState,
        }
        if kind not in ways:
            raise ConfigError(
                f"{kind}=ckpt.Joined(...): ckpt.Joined joins only models, optimizers, schedulers or scalers."
            )
        return ways[kind](values)

    def _model(self, values: list[Any]) -> JoinedModel:
        prefixes = list(self.objects) if isinstance(self.objects, dict) else [""] * len(values)
        parts = [getattr(value, "submod", value) for value in values]
        wrong = [type(part).__name__ for part in parts if not isinstance(part, nn.Module)]
        if wrong:
            raise ConfigError(f"model=ckpt.Joined(...) takes modules, not {', '.join(wrong)}.")
        model = JoinedModel(zip(prefixes, parts, strict=True))
        _refuse_unjoinable(model)
        return model


def _refuse_unjoinable(model: JoinedModel) -> None:
    """Refuse parts that have a name twice, and those of FSDP 1 and DeepSpeed, whose state is theirs alone."""
    if is_fsdp1(model) or any(map(is_engine, model.parts)):
        raise UnsupportedError("model=ckpt.Joined(...) can't join parts under FSDP 1 or DeepSpeed. Use fully_shard.")
    counts = Counter(clean_names(model, model.state_dict(keep_vars=True)).values())
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        more = f" and {len(twice) - _FEW} more" if len(twice) > _FEW else ""
        raise ConfigError(
            f"model=ckpt.Joined(...): several parts have parameters named {', '.join(twice[:_FEW])}{more}. Give "
            'each part its prefix in the full model: ckpt.Joined({"stages.3": part}).'
        )


_Group = dict[str, Any]


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
                f"optimizer=ckpt.Joined(...) takes torch optimizers of one class, not {', '.join(classes)}."
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
            {**without_own_names(groups[0]), "params": [value for group in groups for value in group["params"]]}
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
                f"{self.kind} has state that belongs to no parameter ({', '.join(extra)}), so ckpt.Joined can't join "
                "several such optimizers. Give the optimizers as a list instead."
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
                groups.append({**without_own_names(options[id(group)]), "params": listed})
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
    keys = one.keys() - {"params", OWN_NAMES}
    return keys == other.keys() - {"params", OWN_NAMES} and all(_equal(one[key], other[key]) for key in keys)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)

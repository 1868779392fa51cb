"""State that is divided by name over the ranks: a pipeline's model, whose ranks have different layers, as one state.

The state of a model is a mapping by name. That of an optimizer has one under `state`, and names in `param_groups`. All
functions take states as JSON, before tensors are read, and return None for a state of any other form.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

_STATE, _GROUPS, _NAMES = "state", "param_groups", "params"
OWN_NAMES = "param_names"  # of an optimizer that was given named parameters, beside `params`: no option


def without_own_names(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without the names of its parameters. The live optimizer has them, and torch keeps these in a load."""
    return {key: value for key, value in group.items() if key != OWN_NAMES}


def united(states: Iterable[Any]) -> dict[str, Any] | None:
    """One state that contains all of these; None if two of them contradict each other."""
    whole: dict[str, Any] | None = None
    for state in states:
        if not _is_plain(state):
            return None
        whole = state if whole is None else _joined(whole, state)
        if whole is None:
            return None
    return whole


def without(state: Any, names: Collection[str], groups: int | None = None) -> Any:
    """A state without what belongs to these names. `groups`: an optimizer has as many parameter groups here; if there
    are more, those without any parameter left are left out."""
    if not names or not _is_plain(state):
        return state
    if not _is_optimizer(state):
        return {name: value for name, value in state.items() if name not in names}
    kept = [
        {**group, _NAMES: [name for name in group[_NAMES] if name not in names]}
        for group in state[_GROUPS]
    ]  # fmt: skip
    if groups is not None and len(kept) > groups:
        kept = [group for group in kept if group[_NAMES]]
    return {**state, _STATE: without(state[_STATE], names), _GROUPS: kept}


def under_all_names(state: Any, ties: Mapping[str, str]) -> Any:
    """The state of an optimizer in which every parameter that was tied is there under each of its names.

    `ties`: the other names of parameters, each with one that they were saved under. Whoever has the parameter under any
    of them, as the last stage of a pipeline has the embedding of the first one, finds its state.
    """
    if not _is_plain(state) or not _is_optimizer(state):
        return state
    groups_of_names: dict[str, list[str]] = {}
    for name, first in ties.items():
        groups_of_names.setdefault(first, [first]).append(name)
    listed = names_in(state) or frozenset()
    found: dict[str, list[str]] = {}
    for names in groups_of_names.values():
        there = [name for name in names if name in listed]
        if len(there) == 1:
            found[there[0]] = [name for name in names if name not in listed]
    entries = dict(state[_STATE])
    for name, others in found.items():
        entries |= {other: entries[name] for other in others if name in entries}
    groups = [
        {**group, _NAMES: [other for name in group[_NAMES] for other in (name, *found.get(name, ()))]}
        for group in state[_GROUPS]
    ]
    return {**state, _STATE: entries, _GROUPS: groups}


def under_first_names(state: Mapping[str, Any], others: Mapping[str, str]) -> dict[str, Any]:
    """The state of an optimizer in which tied parameters are there once. `others`: names, each with the one to keep."""
    kept = {name for group in state[_GROUPS] for name in group[_NAMES]}
    renamed: dict[str, str] = {}
    for name, first in others.items():
        if name in kept and first not in kept:
            renamed[name] = first
            kept.add(first)
    dropped = others.keys() - renamed.keys()
    entries = {renamed.get(name, name): entry for name, entry in state[_STATE].items() if name not in dropped}
    groups = [
        {**group, _NAMES: [renamed.get(name, name) for name in group[_NAMES] if name not in dropped]}
        for group in state[_GROUPS]
    ]
    return {**state, _STATE: entries, _GROUPS: groups}


def names_in(state: Any) -> frozenset[str] | None:
    """The names of a model's tensors, or of an optimizer's parameters."""
    if not _is_plain(state):
        return None
    groups = state[_GROUPS] if _is_optimizer(state) else [{_NAMES: list(state)}]
    return frozenset(name for group in groups for name in group[_NAMES])


def has_nameless(state: Any) -> bool:
    """Whether an optimizer has parameters of no managed model, which have no names but numbers: `@0`."""
    return _is_optimizer(state) and any(name.startswith("@") for name in names_in(state) or ())


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    if _is_optimizer(one) != _is_optimizer(other):
        return None
    if not _is_optimizer(one):
        return _merged(one, other)
    rest, more = (
        {key: value for key, value in state.items() if key not in (_STATE, _GROUPS)} for state in (one, other)
    )
    entries, groups = _merged(one[_STATE], other[_STATE]), _joined_groups(one[_GROUPS], other[_GROUPS])
    extra = _merged(rest, more)
    if entries is None or groups is None or extra is None:
        return None
    return {_STATE: entries, _GROUPS: groups, **extra}


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    if any(other[key] != value for key, value in one.items() if key in other):
        return None
    return {**one, **other}


def _joined_groups(ones: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Group by group where there are as many on both sides, else those with the same options."""
    if len(ones) == len(others):
        pairs = zip(ones, others, strict=True)
        return [_with_names(one, other) for one, other in pairs] if _same_options(ones, others) else None
    joined = list(ones)
    for other in others:
        found = [index for index, one in enumerate(joined) if _options(one) == _options(other)]
        if len(found) > 1:
            return None
        if found:
            joined[found[0]] = _with_names(joined[found[0]], other)
        else:
            joined.append(other)
    return joined


def _same_options(ones: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    return all(_options(one) == _options(other) for one, other in zip(ones, others, strict=True))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != _NAMES}


def _with_names(group: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {**group, _NAMES: list(dict.fromkeys([*group[_NAMES], *other[_NAMES]]))}


def _is_optimizer(state: Mapping[str, Any]) -> bool:
    groups = state.get(_GROUPS)
    return isinstance(groups, list) and isinstance(state.get(_STATE), dict)


def _is_plain(state: Any) -> bool:
    """Whether all its keys are names: a mapping with others is an object with a single key that starts with `$`."""
    if not isinstance(state, dict):
        return False
    mappings = [state, state[_STATE]] if _is_optimizer(state) else [state]
    return not any(key.startswith("$") for mapping in mappings for key in mapping)

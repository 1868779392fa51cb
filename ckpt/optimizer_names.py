"""State of optimizers by parameter name, and by number as torch's own `state_dict` has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def nameless(number: int) -> str:
    """What a parameter goes by that has no name, or none that is known: its number."""
    return f"@{number}"


def by_name(state: Mapping[str, Any]) -> dict[str, Any]:
    """A `state_dict` by parameter name: as its groups tell (`param_names`), or else by number."""
    names: dict[Any, str] = {}
    for group in state["param_groups"]:
        told = group.get("param_names") or [_name(one) for one in group["params"]]
        names |= dict(zip(group["params"], told, strict=True))
    groups = [{**group, "params": [names[one] for one in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {names.get(key, key): one for key, one in state["state"].items()}, "param_groups": groups}


def _name(parameter: str | int) -> str:
    return nameless(parameter) if isinstance(parameter, int) else parameter


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state by parameter name as torch's optimizers give and take it: parameters are numbered group by group."""
    order = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(order))}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    found = {numbers.get(name, name): one for name, one in state["state"].items()}
    return {**state, "state": found, "param_groups": groups}

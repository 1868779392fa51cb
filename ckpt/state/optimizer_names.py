"""State of optimizers by parameter name, and by number as torch's own `state_dict` has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def nameless(number: int) -> str:
    """What a parameter goes by that has no name, or none that is known: its number."""
    return f"@{number}"


def by_name(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A `state_dict` by parameter name, which `prefix` is put before; a parameter without a name goes by its number."""
    order = [parameter for group in state["param_groups"] for parameter in group["params"]]
    return renamed(state, {one: nameless(one) if isinstance(one, int) else f"{prefix}{one}" for one in order})


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state by parameter name as torch's optimizers give and take it: parameters are numbered group by group."""
    order = [name for group in state["param_groups"] for name in group["params"]]
    return renamed(state, {name: number for number, name in enumerate(dict.fromkeys(order))})


def renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """The same with other names for parameters. Whatever has none in `names` stays as it is."""
    groups = [{**group, "params": [names.get(one, one) for one in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {names.get(key, key): one for key, one in state["state"].items()}, "param_groups": groups}

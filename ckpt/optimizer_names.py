"""State of optimizers by parameter name, and by number as torch's own `state_dict` has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def nameless(number: int) -> str:
    """What a parameter goes by that has no name, or none that is known: its number."""
    return f"@{number}"


def by_name(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A `state_dict` by parameter name, which `prefix` is put before; a parameter without a name goes by its number."""

    def name(parameter: str | int) -> str:
        return nameless(parameter) if isinstance(parameter, int) else f"{prefix}{parameter}"

    groups = [{**group, "params": [name(one) for one in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {name(key): one for key, one in state["state"].items()}, "param_groups": groups}


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state by parameter name as torch's optimizers give and take it: parameters are numbered group by group."""
    order = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(order))}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    found = {numbers.get(name, name): one for name, one in state["state"].items()}
    return {**state, "state": found, "param_groups": groups}

"""The state that every rank has of its own: what its fields must be, checked before live objects are written to."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ckpt.data.repartition import Layout
from ckpt.errors import DamagedError
from ckpt.state import rng
from ckpt.state.plain_values import are_plain
from ckpt.util.checked_json import Rule, broken_rules, is_count, is_list, is_mapping, is_text, joined


def _is_start(value: Any) -> bool:
    return value == {} or rng.is_state(value)


def _is_layout(value: Any) -> bool:
    numbers = value if is_mapping(lambda number: number is None or is_count(number))(value) else {"": 0}
    known = {known.name for known in fields(Layout)}
    return numbers.keys() <= known and 0 not in [number for name, number in numbers.items() if name != "replica"]


_COUNT = Rule(is_count, "a number, 0 or more", required=False)
_SIZE = Rule(lambda value: value is None or is_count(value), "a number or null", required=False)
_FLAG = Rule(lambda value: isinstance(value, bool), "true or false", required=False)
_TEXT = Rule(is_text, "text", required=False)
_START = Rule(_is_start, "the states of random generators", required=False)
_LIST = Rule(is_list(lambda value: True), "a list", required=False)

POSITION = {
    **dict.fromkeys(("batches", "samples", "start", "ahead", "before", "skipped"), _COUNT),
    **dict.fromkeys(("dataset_size", "sampler_size"), _SIZE),
    **dict.fromkeys(("worn", "done", "exhausted", "trained", "split"), _FLAG),
    **dict.fromkeys(("digest", "indices"), _TEXT),
    **dict.fromkeys(("rng", "rng_ahead"), _START),
    **dict.fromkeys(("generators", "generators_now", "samplers"), _LIST),
    "world_size": Rule(lambda value: is_count(value, 1), "a number, 1 or more", required=False),
    "layout": Rule(_is_layout, "the layout of an epoch", required=False),
    "contents": Rule(is_mapping(is_text), "digests", required=False),
}


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_number_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, int) and abs(value) < 1 << 53)


_REMARKS = Rule(is_mapping(is_text), "reasons by name", required=False)
_STATE = {
    "rng": Rule(rng.is_state, "the states of random generators"),
    "generators": Rule(_is_dict, "a mapping"),
    "loaders": Rule(is_mapping(_is_dict), "positions by loader"),
    "loop": Rule(_is_dict, "a mapping", required=False),
    "source": Rule(_is_dict, "a mapping", required=False),
    "lacking": _REMARKS,
    "values": Rule(are_plain, "plain values by name", required=False),
}
_LOOP = {
    "remarks": _REMARKS,
    "steps_per_epoch": Rule(_is_number_or_none, "a number or null", required=False),
    **dict.fromkeys(("plain_epochs", "per_step", "ahead"), Rule(is_count, "a number, 0 or more", required=False)),
}
_ACCELERATOR = {
    "step": Rule(is_count, "a number, 0 or more"),
    "sync_gradients": Rule(lambda value: isinstance(value, bool), "true or false"),
    "saves": Rule(is_count, "a number, 0 or more"),
    "loaders": Rule(is_mapping(_is_dict), "counters by loader"),
}
_COUNTERS = {
    "iteration": Rule(is_count, "a number, 0 or more"),
    "seeds": Rule(is_list(_is_number_or_none), "a list of seeds"),
    "generators": Rule(is_list(lambda value: True), "a list"),
}


def check_rank_state(state: Any, where: str) -> dict[str, Any]:
    """Return a rank's own state if every field is what it must be; the error names all that are not."""
    if state == {}:  # Lightning's checkpoints keep that elsewhere
        return {}
    problems = broken_rules(state, _rules(state)) or _inner_problems(state)
    if problems:
        raise DamagedError(f"{where} is damaged: {joined(problems)}.")
    checked: dict[str, Any] = state
    return checked


def _rules(state: Any) -> dict[str, Rule]:
    """What must be there. A tool that keeps no generators left them out of what it saved, and the state says so."""
    lacking = state.get("lacking") if isinstance(state, dict) else None
    left_out = isinstance(lacking, dict) and "rng" in lacking and "rng" not in state
    return {key: rule for key, rule in _STATE.items() if key != "rng"} if left_out else _STATE


def _inner_problems(state: dict[str, Any]) -> list[str]:
    problems = broken_rules(state.get("loop", {}), _LOOP, "loop")
    for key, position in state["loaders"].items():
        problems += broken_rules(position, POSITION, key)
    source = state.get("source")
    if source:  # empty without an accelerator
        problems += broken_rules(source, _ACCELERATOR, "source")
        loaders = source["loaders"] if not problems else {}
        problems += [line for key, counters in loaders.items() for line in broken_rules(counters, _COUNTERS, key)]
    return problems

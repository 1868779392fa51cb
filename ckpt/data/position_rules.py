"""What the fields of a saved position must be: anybody may have written them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ckpt.data.epoch_layout import Layout
from ckpt.state import rng
from ckpt.util.checked_json import Rule, is_count, is_list, is_mapping, is_text


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

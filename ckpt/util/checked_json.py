"""JSON documents that anybody may have written: parsed without surprises, and checked against rules by field.

A rule is a condition on a value, and the words that say what the value must be. Fields without a rule are ignored:
documents of later versions have more of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

LARGEST_NUMBER = 2**53 - 1  # what every reader of JSON reads exactly
_LONGEST_TEXT = 4096
_SHOWN = 60  # characters of a value in a message
_MOST_NAMED = 8  # offenders in a message
_SEGMENT = re.compile(r"[^/\\\0]+")


def parse_json(data: bytes) -> Any:
    """The value of a JSON text in UTF-8. Whatever is wrong with it is a ValueError, its depth and NaN too."""
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


@dataclass(frozen=True)
class Rule:
    """What a field must be: a condition, and the words for it. A field that is not `required` may be missing."""

    holds: Callable[[Any], bool]
    must_be: str
    required: bool = True


Rules = Mapping[str, Rule]


def broken_rules(document: Any, rules: Rules, of: str = "") -> list[str]:
    """Every field of a document that is missing, or is not what it must be. `of` names the document in the messages."""
    prefix = f"{of}: " if of else ""
    if not isinstance(document, dict):
        return [f"{prefix}{shown(document)} must be a mapping"]
    missing = [f"{prefix}{name} is missing" for name, rule in rules.items() if rule.required and name not in document]
    wrong = [
        f"{prefix}{name} is {shown(document[name])} and must be {rule.must_be}"
        for name, rule in rules.items()
        if name in document and not rule.holds(document[name])
    ]
    return missing + wrong


def joined(problems: Collection[str]) -> str:
    """Problems as one text: the first of them, and how many more there are."""
    some = [*problems][:_MOST_NAMED]
    more = len(problems) - len(some)
    return "; ".join(some) + (f"; and {more} more" if more else "")


def shown(value: Any) -> str:
    """A value that somebody else chose, short enough for a message, and in ASCII."""
    text = ascii(value) if isinstance(value, str | int | float | bool | None) else f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def is_text(value: Any) -> bool:
    """Text that can be encoded, shown and stored: no lone surrogates, no NUL, and not without end."""
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_count(value: Any, least: int = 0, most: int = LARGEST_NUMBER) -> bool:
    """A whole number between two others."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_finite(value: Any) -> bool:
    """A number with which floats can be computed."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e308


def is_moment(value: Any) -> bool:
    """A timestamp with its time zone, in ISO 8601, that every other zone can express too."""
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return False
    return moment is not None and moment.tzinfo is not None and 1 < moment.year < 9999


def is_key(value: Any) -> bool:
    """A relative path of names joined by `/` that does not lead out of a root."""
    return is_text(value) and is_relative(value)


def is_relative(key: str) -> bool:
    """Whether a path has only names in it: neither `.` nor `..`, no empty name, no backslash, no NUL."""
    return all(word not in (".", "..") and _SEGMENT.fullmatch(word) for word in key.split("/"))


def is_mapping(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A mapping from text to values of one kind."""
    return lambda value: isinstance(value, dict) and all(is_text(key) and of(item) for key, item in value.items())


def is_list(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A list of values of one kind."""
    return lambda value: isinstance(value, list | tuple) and all(map(of, value))

"""Documents that anybody may have written: what is wrong with each is said, and nothing of it is believed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckpt.util.checked_json import (
    Rule,
    broken_rules,
    is_count,
    is_finite,
    is_key,
    is_list,
    is_mapping,
    is_moment,
    is_relative,
    is_text,
    joined,
    parse_json,
    shown,
)

LARGEST = 2**53 - 1
CHECKS: dict[Callable[[Any], bool], tuple[list[Any], list[Any]]] = {
    is_text: (["", "é日", "a" * 4096], ["a" * 4097, "a\0", "\ud800", 5, None, b"a"]),
    is_count: ([0, 1, LARGEST], [-1, LARGEST + 1, True, False, 1.0, "1", None]),
    is_finite: ([0, -1.5, 1e308, -1e308, 10**300], [1.1e308, -(10**309), float("nan"), float("inf"), True, "1", None]),
    is_moment: (
        ["2026-11-18T10:00:00+00:00", "0002-01-01T00:00:00+00:00", "9998-12-31T00:00:00-08:00"],
        ["2026-11-18T10:00:00", "0001-01-01T00:00:00+00:00", "9999-01-01T00:00:00+00:00", "yesterday", "", 5, None],
    ),
    is_key: (
        ["a", "a/b.c", "..a/.b", "é"],
        ["", "/a", "a/", "a//b", ".", "..", "a/../b", "a/.", "a\\b", "a\0", "\ud800", "a" * 4097, 5, None],
    ),
    is_relative: (["a", "a/b", "\ud800"], ["", "/a", "a/..", ".", "a\\b", "a\0b"]),
    is_list(is_count): ([[], [1, 2], (1,)], [[1, "2"], ["2", 1], "12", {1: 2}, None, 5]),
    is_mapping(is_count): ([{}, {"a": 1}], [{"a": "1"}, {"a": 1, "b": "1"}, {1: 1}, {"a": 1, 2: 1}, [("a", 1)], None]),
    lambda value: is_count(value, 2, 4): ([2, 3, 4], [1, 5]),
}


@pytest.mark.parametrize("check", CHECKS)
def test_a_condition_holds_for_these_values_and_not_for_those(check: Callable[[Any], bool]) -> None:
    right, wrong = CHECKS[check]
    assert [value for value in right if not check(value)] == []
    assert [value for value in wrong if check(value)] == []


def test_a_text_that_is_no_json_is_a_value_error() -> None:
    assert parse_json(b'{"a": [1, 2.5, null, true, "\xc3\xa9"]}') == {"a": [1, 2.5, None, True, "é"]}
    for text in (b"", b"{", b"NaN", b"[Infinity]", b"-Infinity", b"\xff", b"[" * 100_000):
        with pytest.raises(ValueError, match=r"."):
            parse_json(text)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(b"[" * 100_000)
    with pytest.raises(ValueError, match="NaN is not a number in JSON"):
        parse_json(b"NaN")


def test_every_field_that_is_missing_or_wrong_is_named() -> None:
    rules = {
        "step": Rule(is_count, "a number"),
        "name": Rule(is_text, "text"),
        "note": Rule(is_text, "text", required=False),
    }
    assert broken_rules({"step": 1, "name": "a", "other": object()}, rules) == []
    assert broken_rules({"step": -1, "note": 5}, rules) == [
        "name is missing", "step is -1 and must be a number", "note is 5 and must be text",
    ]  # fmt: skip
    assert broken_rules({}, {"step": Rule(is_count, "a number")}, "file") == ["file: step is missing"]
    assert broken_rules({"step": "x"}, {"step": Rule(is_count, "one")}, "f") == ["f: step is 'x' and must be one"]
    assert broken_rules([1], rules, "file") == ["file: a list must be a mapping"]


def test_messages_are_short_whatever_a_document_says() -> None:
    assert shown("é") == "'\\xe9'"
    values: list[Any] = [1, 2.5, True, None, [1], {}]
    assert [shown(value) for value in values] == ["1", "2.5", "True", "None", "a list", "a dict"]
    assert shown("a" * 58) == f"'{'a' * 58}'"  # 60 characters
    assert shown("a" * 59) == f"'{'a' * 59}..."
    assert joined(["a"]) == "a"
    assert joined([*"abcdefgh"]) == "a; b; c; d; e; f; g; h"
    assert joined([*"abcdefghij"]) == "a; b; c; d; e; f; g; h; and 2 more"

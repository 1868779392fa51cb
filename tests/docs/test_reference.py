"""The reference has every public name, and a docstring for every argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ckpt
from ckpt import errors
from ckpt.testing import assert_exact_resume
from tests.docs.pages import DOCS

REFERENCE = "".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))
ENTRIES = re.findall(r"^::: (\S+)$", REFERENCE, re.MULTILINE)
IN_PROSE = {"Converted", "Diff", "Difference"}  # which say it in sentences
NOT_ARGUMENTS = {"self", "unnamed", "unknown", "on_read"}


def public() -> dict[str, Any]:
    names = {name: getattr(ckpt, name) for name in ckpt.__all__ if not name.startswith("_")}
    return {name: value for name, value in names.items() if not hasattr(errors, name)}


def methods() -> dict[str, Any]:
    named = vars(ckpt.StateManager).items()
    return {f"StateManager.{name}": value for name, value in named if not name.startswith("_") and name != "session"}


def test_every_public_name_and_method_has_its_place_in_the_reference() -> None:
    missing = {f"ckpt.{name}" for name in (*public(), *methods())} - set(ENTRIES)
    assert missing == set()
    assert len(ENTRIES) == len(set(ENTRIES))


def documented() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, value in {**public(), **methods(), "assert_exact_resume": assert_exact_resume}.items():
        if callable(value) and name not in IN_PROSE and not isinstance(value, property):
            yield name, value


@pytest.mark.parametrize(("name", "value"), list(documented()))
def test_a_call_with_several_arguments_says_what_each_is(name: str, value: Callable[..., Any]) -> None:
    taken = [each for each in inspect.signature(value).parameters if each not in NOT_ARGUMENTS]
    said = described(inspect.getdoc(value) or "")
    if name == "StateManager.push_to_hub":
        assert "see `ckpt.push_to_hub`" in (inspect.getdoc(value) or "")
    elif said or len(taken) > 2:
        assert [each for each in taken if each not in said] == []
        assert set(said) <= set(taken)


def described(text: str) -> list[str]:
    """The names in the sections of arguments or attributes."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?: +.*\n?)+)", text, re.MULTILINE)
    return [name for section in sections for name in re.findall(r"^    \**(\w+): ", section, re.MULTILINE)]


def test_a_description_is_found_by_its_section() -> None:
    text = "Do it.\n\nArgs:\n    first: One: or\n        two: of them.\n    **others: Rest.\n\nReturns:\n    That.\n"
    assert described(text) == ["first", "others"]

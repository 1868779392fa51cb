"""Named by hostile pickles: if it is imported or called, a reader has executed what it read."""

from __future__ import annotations

FIRED: list[str] = []


def fire(*args: object) -> str:
    FIRED.append(repr(args))
    return "fired"

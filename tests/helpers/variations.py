"""Which cells of a matrix `make test` runs, and which only `make test-all` does."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cells(every: Iterable[Any], often: Collection[Any]) -> list[Any]:
    """All cells for `parametrize`. Those that are not in `often` are `long`."""
    found = [(cell, cell in often) for cell in every]
    assert sum(runs for _, runs in found) == len(often), f"no such cell in {[cell for cell, _ in found]}"
    return [
        pytest.param(*(cell if isinstance(cell, tuple) else (cell,)), marks=[] if runs else pytest.mark.long)
        for cell, runs in found
    ]

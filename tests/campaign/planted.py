"""Faults planted into the library's surroundings, to show that the campaign would find such."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import xxhash


def _no_fsync() -> None:
    """Nothing is ever made durable."""

    def leave_it(descriptor: int) -> None: ...

    os.fsync = os.fdatasync = leave_it  # type: ignore[assignment]


class _Constant:
    """A hash that is the same for everything."""

    def __init__(self, data: Any = b"") -> None: ...

    def update(self, data: Any) -> None: ...

    def hexdigest(self) -> str:
        return "0" * 32


def _no_hash() -> None:
    """Altered bytes are not noticed."""
    vars(xxhash).update(xxh3_128=_Constant, xxh3_128_hexdigest=lambda _: "0" * 32)


PLANTED: dict[str, Callable[[], None]] = {"no-fsync": _no_fsync, "no-hash": _no_hash}

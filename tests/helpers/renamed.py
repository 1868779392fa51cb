"""A private name of another library that a new release has renamed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.compat.private import Private


@contextmanager
def renamed(private: Private) -> Iterator[None]:
    """While this lasts, ckpt looks for a name that the library does not have, as after a release that renamed it."""
    name, told = private.name, private._told
    private.name, private._told = f"{name}_of_another_release", False
    try:
        yield
    finally:
        private.name, private._told = name, told

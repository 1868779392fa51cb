"""Errors of objects that do not take their saved state back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.errors import CkptError, StateError


@contextmanager
def naming_part(key: str) -> Iterator[None]:
    """Turns an error of a managed object, of whatever class, into a `StateError` that names its part."""
    try:
        yield
    except CkptError:
        raise
    except Exception as error:
        raise StateError(f"{key} did not take its state back: {type(error).__name__}: {error}") from error

"""Errors of reading what a file holds: whatever goes wrong, the file is damaged, and one `DamagedError` says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.errors import CkptError, DamagedError

_LONGEST = 300  # characters of a reason: it may quote the file


@contextmanager
def damage_reported(where: str, what: str) -> Iterator[None]:
    """Raise `DamagedError` for bytes of `where` that are no `what`: parsers of hostile bytes raise errors of any kind.

    Errors of ckpt's own pass unchanged, those of the storage among them.
    """
    try:
        yield
    except CkptError:
        raise
    except Exception as error:
        raise DamagedError(f"{where} is no {what}: {reason(error)}.") from error


def reason(error: Exception) -> str:
    """What an error says, short enough to be shown."""
    text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    text = text.rstrip(".")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."

"""Errors that PyTorch's writers raise in place of the one that stopped them: a full disk, Ctrl-C, damaged tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.errors import CkptError

_MEANT = (CkptError, OSError, KeyboardInterrupt)


@contextmanager
def first_error_raised() -> Iterator[None]:
    """Raise the error that came first, where PyTorch raises another one from it, or lists it by rank."""
    try:
        yield
    except BaseException as error:  # CheckpointException is no Exception
        meant = next((one for one in _behind(error) if isinstance(one, _MEANT)), None)
        if meant is None or meant is error:
            raise
        raise meant from None


def _behind(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised from or while handling, the last one first."""
    left, seen = [error], set()
    while left:
        one = left.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        failures = getattr(one, "failures", None)
        inner = [failure[0] for failure in failures.values()] if isinstance(failures, dict) else []
        left += [other for other in (*inner, one.__cause__, one.__context__) if isinstance(other, BaseException)]

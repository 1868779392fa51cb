"""Pausing of Python's cyclic garbage collector."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0  # in all threads
_was_enabled = False  # before the first of them


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the collector in this context. The last of several threads that leave theirs enables it again.

    For milliseconds in which thousands of objects are allocated, all of which are kept: they would trigger collections,
    and those a full one, which takes 0.2 s in a large process, holds up training, and finds nothing. A program that
    disables the collector meanwhile would find it enabled, so the context must be short.
    """
    _begin()
    try:
        yield
    finally:
        _end()


def _begin() -> None:
    global _pauses, _was_enabled
    with _lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1


def _end() -> None:
    global _pauses
    with _lock:
        _pauses -= 1
        if not _pauses and _was_enabled:
            gc.enable()


def _resume_in_child() -> None:
    """A forked child has none of the threads that would enable the collector again: a DataLoader's worker, say."""
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_resume_in_child)

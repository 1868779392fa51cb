"""Python's garbage collector, kept away from where it would be called up for nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Thousands of new objects would call it up, and it looks at all there is: that takes a fifth of a second.

    What is made here is kept, so there is nothing for it to find; and training, or its start, waits.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

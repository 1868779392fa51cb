"""What the fork server preloads first: nothing is collected while it imports, nor what it has imported in its children.

A collection would go through a million objects there, and in a child copy each of their pages: half a second.
"""

from __future__ import annotations

import gc
import os

_SERVER = os.getpid()


def _begin() -> None:
    if os.getppid() == _SERVER:
        gc.freeze()
        gc.enable()


gc.disable()
os.register_at_fork(after_in_child=_begin)

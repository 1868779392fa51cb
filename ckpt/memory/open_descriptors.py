"""Descriptors that a forked child must not keep: a data loader's worker may live on for as long as the run."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class OpenDescriptors:
    """Descriptors of this process that are closed in every child that it forks.

    Open and add one, or discard and close it, with `guard` held: no child is forked meanwhile.
    """

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self._descriptors: set[int] = set()
        os.register_at_fork(
            before=self.guard.acquire, after_in_parent=self.guard.release, after_in_child=self._close_in_child
        )

    def add(self, descriptor: int) -> None:
        self._descriptors.add(descriptor)

    def discard(self, descriptor: int) -> None:
        self._descriptors.discard(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor, unless this is a forked child, where it is closed already."""
        if descriptor in self._descriptors:
            self._descriptors.discard(descriptor)
            os.close(descriptor)

    def _close_in_child(self) -> None:
        for descriptor in self._descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()
        self.guard.release()

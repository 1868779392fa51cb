"""Where the training loop runs: its process and thread, and whether it is inside a loader right now."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


class TrainingThread:
    """Tells the training loop from everything else that may iterate over a loader."""

    def __init__(self) -> None:
        self._identity: tuple[int, int] | None = None  # process and thread
        self._reads = False

    @property
    def is_known(self) -> bool:
        return self._identity is not None

    def start(self) -> None:
        """Training has been resumed, in this thread."""
        self._identity = (os.getpid(), threading.get_ident())

    def may_be_here(self) -> bool:
        """Whether this may be the training loop: where gradients are disabled it is evaluation, and what another
        thread or a worker reads is ahead of the loop by an unknown number of batches."""
        here = (os.getpid(), threading.get_ident())
        return not self._reads and self._identity in (None, here) and torch.is_grad_enabled()

    def read(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches. Loaders that are read inside of this one are not the training loop's."""
        while True:
            self._reads, before = True, self._reads
            try:
                taken = next(batches, None)
            finally:
                self._reads = before
            if taken is None:
                return
            yield taken
            del taken  # or it would live as long as the next batch takes

"""Detection of forked children: they inherit an object, but none of its threads and locks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ckpt.errors import ConfigError


@dataclass(frozen=True)
class OwnerProcess:
    """The process that created an object."""

    process: int = field(default_factory=os.getpid)

    @property
    def is_here(self) -> bool:
        """True in that process, False in a forked child of it."""
        return os.getpid() == self.process

    def require(self, call: str) -> None:
        """Raise in a forked child: the call would wait for threads that it does not have, or write without lock."""
        if not self.is_here:
            raise ConfigError(
                f"{call}: this StateManager belongs to process {self.process}, and this is process {os.getpid()}, a "
                "fork of it. Nothing was done. Build a StateManager in the child, with a root of its own."
            )

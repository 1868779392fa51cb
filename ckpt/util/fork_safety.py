"""Which process an object belongs to: a forked child inherits the object, but none of its threads and locks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ckpt.errors import ConfigError


@dataclass(frozen=True)
class OwnerProcess:
    """The process that made an object."""

    process: int = field(default_factory=os.getpid)

    @property
    def is_here(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self.process

    def require(self, call: str) -> None:
        """Refuse a call in a forked child: it would wait for threads that it does not have, or write to the parent's
        root without the lock."""
        if not self.is_here:
            raise ConfigError(
                f"{call}: this StateManager belongs to process {self.process}, and this is process {os.getpid()}, a "
                "fork of it. Nothing was done. Build a StateManager in the child, with a root of its own."
            )

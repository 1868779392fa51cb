"""Objects that belong to one process: forked children inherit them without threads and locks, copies are refused."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import NoReturn

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


class NotCopyableError(ConfigError, TypeError):
    """Raised by `copy` and `pickle`; whoever tries to copy what can be copied expects a TypeError."""


def refuse_copy(self: object) -> NoReturn:
    """The `__reduce__` of what holds locks, threads and live objects."""
    raise NotCopyableError(
        f"a {type(self).__name__} can be neither copied nor pickled: it holds its root. Keep it out of what is copied "
        "or sent to other processes, and build one where it is needed."
    )

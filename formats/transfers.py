"""Bytes of a file that are wanted, and where they go.

Whoever opens a file says what is wanted and where; whoever reads decides when, how much at once, and in how many
threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ckpt.formats.tensor_bytes import as_bytes, host_bytes


class ByteReader(Protocol):
    """All that a format needs of a file."""

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`."""

    def read_into(self, start: int, *buffers: memoryview) -> None:
        """Fill the buffers, one after the other, from `start` on."""


@dataclass(frozen=True)
class Transfer:
    """Bytes of a file on their way: into memory, or to whoever takes them from there.

    `into` is a dense tensor on any device, whose bytes may be filled in any order. Where there is none, `take` gets all
    the bytes at once, in memory of the CPU.
    """

    reader: Any = field(repr=False)
    start: int
    size: int
    into: torch.Tensor | None = field(default=None, repr=False)
    take: Callable[[torch.Tensor], None] | None = field(default=None, repr=False)

    @property
    def stop(self) -> int:
        return self.start + self.size


Want = Callable[[Transfer], None]


def at_once(transfer: Transfer) -> None:
    """Read it now."""
    memory = transfer.into if transfer.into is not None else torch.empty(transfer.size, dtype=torch.uint8)
    here = memory if memory.device.type == "cpu" else torch.empty(transfer.size, dtype=torch.uint8)
    transfer.reader.read_into(transfer.start, host_bytes(here))
    if here is not memory:
        as_bytes(memory).copy_(here)
    if transfer.take is not None:
        transfer.take(memory)

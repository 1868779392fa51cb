"""Requests to read bytes of a file into memory.

Formats say which bytes go where. The reader decides when to read, how much at once, and in how many threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ckpt.formats.tensor_bytes import as_bytes, host_bytes


class ByteReader(Protocol):
    """A file, as far as a format needs it."""

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`."""

    def read_into(self, start: int, *buffers: memoryview) -> None:
        """Fill the buffers one after the other with the bytes from `start` on."""


@dataclass(frozen=True)
class Transfer:
    """A range of bytes to read: straight into a tensor, or through a CPU buffer to a callback.

    `into` is a dense tensor on any device, whose bytes may be filled in any order. Without it, `take` gets all the
    bytes at once as a CPU tensor.
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
    """Carry out a transfer now."""
    memory = transfer.into if transfer.into is not None else torch.empty(transfer.size, dtype=torch.uint8)
    here = memory if memory.device.type == "cpu" else torch.empty(transfer.size, dtype=torch.uint8)
    transfer.reader.read_into(transfer.start, host_bytes(here))
    if here is not memory:
        as_bytes(memory).copy_(here)
    if transfer.take is not None:
        transfer.take(memory)

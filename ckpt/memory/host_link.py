"""Sends snapshots from the memory of one host to that of another, beside the training.

Through a process group of its own, with the gloo backend and one rank of each host: nothing waits behind the training's
collectives, and none of those is disturbed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ckpt.errors import StorageError
from ckpt.formats.layout import Members
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, Manifest
from ckpt.memory.replica_plan import files_in
from ckpt.ranks.group import Ranks
from ckpt.root.catalog import find
from ckpt.storage import Storage
from ckpt.util.option_values import parse_size

BANDWIDTH_VARIABLE = "CKPT_MEMORY_BANDWIDTH"
_BANDWIDTH = 1e9  # bytes per second
_BLOCK = 8 << 20
_PATIENCE = timedelta(seconds=30)  # with a host that sends or takes nothing
_MOST_HEADER = 64 << 20  # bytes
_DATA, _DONE = 1, 2  # tags: two hosts may send to each other at the same time, and confirm


class LinkError(StorageError):
    """The other host is gone, or this run ends."""


@dataclass
class Pace:
    """Keeps transfers below a number of bytes per second."""

    bandwidth: float
    _free_at: float = 0.0  # when what was sent so far is paid for

    def wait(self, size: int) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + size / self.bandwidth
        time.sleep(max(0.0, self._free_at - now - 0.01))  # a short sleep would be too long


@dataclass
class HostLink:
    """A connection between the first ranks of all hosts."""

    group: Any
    members: Members = None  # the numbers in the job of the ranks that are connected here, if they are not all
    bandwidth: float = field(default_factory=lambda: bandwidth())
    closing: bool = False
    _block: torch.Tensor = field(default_factory=lambda: torch.empty(_BLOCK, dtype=torch.uint8), repr=False)

    @classmethod
    def connect(cls, owners: Sequence[int], ranks: Ranks) -> HostLink | None:
        """Every rank makes this call. Returns None on those that are not first on their host."""
        some = ranks.members is not None  # then no other rank of the job takes part
        numbers = [ranks.members[owner] for owner in owners] if ranks.members is not None else [*owners]
        try:
            group = dist.new_group(numbers, _PATIENCE, "gloo", use_local_synchronization=some)
        except (RuntimeError, ValueError) as error:
            raise LinkError(f"the hosts cannot be connected: {error}") from error
        return cls(group, ranks.members) if ranks.rank in owners else None

    def send(self, storage: Storage, name: str, receiver: int) -> None:
        """Send a snapshot: its files that are here, and the manifest last. Returns when the other host has committed
        it."""
        manifest = Manifest.from_bytes(storage.read(f"{name}/{FILE_NAME}"), name)
        keys = [f"{name}/{path}" for path in (*files_in(storage, manifest), FILE_NAME)]
        sizes = {entry.key: entry.size for entry in storage.list(name)}
        header = {"name": name, "id": manifest.id, "files": [(key, sizes[key]) for key in keys]}
        self._send_header(header, receiver)
        pace, block = Pace(self.bandwidth), torch.empty(_BLOCK, dtype=torch.uint8)
        for key in keys:
            for start in range(0, sizes[key], _BLOCK):
                part = block[: min(_BLOCK, sizes[key] - start)]
                storage.read_into(key, start, part.numpy().data)
                self._send(part, receiver)
                pace.wait(len(part))
        self._receive(torch.empty(1, dtype=torch.uint8), receiver, _DONE)

    def receive(self, storage: Storage, sender: int) -> str:
        """Take a snapshot, and commit it: its manifest comes last. Returns its name.

        Another part of the same snapshot is kept, for it may be what a third host needs; another of that name is not.
        """
        header = self._receive_header(sender)
        there = find(storage, header["name"]).manifest
        if there is None or there.id != header["id"]:
            remove_files(storage, header["name"])
        for key, size in header["files"]:
            storage.write(key, self._pieces(size, sender))
        self._send(torch.ones(1, dtype=torch.uint8), sender, _DONE)
        return str(header["name"])

    def _pieces(self, size: int, sender: int) -> Iterator[memoryview]:
        for start in range(0, size, _BLOCK):
            part = self._block[: min(_BLOCK, size - start)]
            self._receive(part, sender)
            yield part.numpy().data

    def _send_header(self, header: dict[str, Any], receiver: int) -> None:
        data = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        self._send(torch.tensor([len(data)]), receiver)
        self._send(data, receiver)

    def _receive_header(self, sender: int) -> dict[str, Any]:
        length = torch.zeros(1, dtype=torch.int64)
        self._receive(length, sender)
        if not 0 < int(length) <= _MOST_HEADER:
            raise LinkError(f"rank {sender} sends something else than a snapshot.")
        data = torch.empty(int(length), dtype=torch.uint8)
        self._receive(data, sender)
        header: dict[str, Any] = json.loads(data.numpy().tobytes())
        return header

    def _send(self, data: torch.Tensor, receiver: int, tag: int = _DATA) -> None:
        self._wait(lambda: dist.isend(data, self._in_job(receiver), self.group, tag), receiver)

    def _receive(self, data: torch.Tensor, sender: int, tag: int = _DATA) -> None:
        self._wait(lambda: dist.irecv(data, self._in_job(sender), self.group, tag), sender)

    def _in_job(self, rank: int) -> int:
        return rank if self.members is None else self.members[rank]

    def _wait(self, begin: Callable[[], Any], other: int) -> None:
        if self.closing:
            raise LinkError("this run ends.")
        try:
            begin().wait()
        except RuntimeError as error:
            raise LinkError(f"the host of rank {other} does not answer: {error}") from error


def remove_files(storage: Storage, name: str) -> None:
    """Remove a snapshot, its manifest and the copy of that first. Nobody may be reading it."""
    storage.delete([f"{name}/{FILE_NAME}", f"{name}/{COPY_NAME}"])
    storage.delete([entry.key for entry in storage.list(name)])


def bandwidth() -> float:
    """Bytes per second that copies may take of the network: `CKPT_MEMORY_BANDWIDTH`, as '500MB', or 1 GB."""
    given = os.environ.get(BANDWIDTH_VARIABLE)
    return float((parse_size(given) if given else None) or _BANDWIDTH)

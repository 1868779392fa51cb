"""The hashes that a manifest lists of a file, computed on the device that its tensors are on, before they are fetched.

They are XXH3-128 of every 32 MB of the file. XXH3 goes through a block in steps of 1 KiB. What one KiB adds to the
lanes depends on no other, so all of them are summed up side by side. To scramble the lanes, the KiB of a block must be
in order; blocks are side by side. The last KiB of each block is treated otherwise, on the host: what crosses the bus is
1,152 bytes for every 32 MB.

A header, and a KiB in which one tensor ends and another begins, are first copied together on the device. Only devices
with Triton's kernels (`xxh3_kernels.py`) do this. Elsewhere the host hashes what was fetched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import xxhash

from ckpt.formats.fingerprint import BLOCK as KIB
from ckpt.formats.fingerprint import (
    LANES,
    LAST_STRIPE,
    PRIME,
    SCRAMBLE,
    START,
    STRIPES,
    divided,
    kernel_table,
    merged,
    products,
    scrambled,
    shifted,
    swapped,
    words64,
)
from ckpt.formats.tensors import host_bytes

_log = logging.getLogger("ckpt")
_STRIPE = 8 * LANES  # bytes
_SLOT = KIB + _STRIPE  # bytes of the end of a block: its last KiB, and the stripe before
_BATCH = 16 << 30  # bytes that are hashed side by side; the sums take a sixteenth of it
_MOST_GATHERED = 512 << 20  # bytes that lie so that they must be copied first
_UNIT = 256  # KiB that one program of the kernel sums up: kernels of training wait until some programs have ended
_ALIGNMENT = 4  # bytes: the kernel reads 32 bits at a time


class _Block(NamedTuple):
    """One block of a file: where the file's contents lie that reach into it, and its place in the file."""

    contents: list[tuple[int, torch.Tensor]]  # each with its place in the file
    start: int
    stop: int

    @property
    def whole(self) -> int:
        """KiB before the last, which has 1 to 1024 bytes."""
        return (self.stop - self.start - 1) // KIB


def hashes_on_device(
    files: Sequence[Sequence[bytes | torch.Tensor]], device: torch.device, block_size: int
) -> Callable[[], list[tuple[str, ...]]] | None:
    """Enqueue the work in the current stream, and return the function that waits for the hashes of each file's blocks.

    The contents of a file are headers and flat bytes on the device. None if the device cannot do this, or has no memory
    for it.
    """
    if device.type != "cuda":
        return None
    try:
        return _enqueued(files, device, block_size) if _has_kernels() else None
    except torch.OutOfMemoryError:
        return None


def _enqueued(
    files: Sequence[Sequence[bytes | torch.Tensor]], device: torch.device, block_size: int
) -> Callable[[], list[tuple[str, ...]]]:
    per_file = [list(_blocks(_on_device(contents, device), block_size)) for contents in files]
    blocks = [block for found in per_file for block in found]
    table = kernel_table(device)
    results = [(batch, *_Batch.of(batch).run(table)) for batch in _batches(blocks)]
    module: Any = torch.get_device_module(device)
    event = module.current_stream(device).record_event(module.Event(blocking=True)) if device.type == "cuda" else None

    def read() -> list[tuple[str, ...]]:
        if event is not None:
            event.synchronize()  # it may be read on another thread, which has another current stream
        found = iter([one for batch, lanes, ends in results for one in _finished(batch, lanes.cpu(), ends.cpu())])
        results.clear()  # or the device's memory would be held as long as this function
        return [tuple(next(found) for _ in blocks) for blocks in per_file]

    return read


@cache
def _has_kernels() -> bool:
    """Whether there is Triton, with a compiler that makes of the kernels what xxhash computes."""
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        data = torch.arange(70_001).to(torch.uint8)
        contents: list[bytes | torch.Tensor] = [bytes(host_bytes(data[:1000]))]
        contents += [data[1000:40_004].to(device), data[40_004:].to(device)]
        parts = (host_bytes(data[start : start + 32 * KIB]) for start in range(0, len(data), 32 * KIB))
        expected = tuple(map(xxhash.xxh3_128_hexdigest, parts))
        return _enqueued([contents], device, 32 * KIB)() == [expected]
    except Exception as error:  # whatever the compiler raises
        if "out of memory" in str(error):  # PyTorch's, or Triton's: no answer, so the next save asks again
            raise torch.OutOfMemoryError(str(error)) from error
        _log.debug("the device can't hash the tensors of a save, so the host does: %s", error)
        return False


def _on_device(contents: Sequence[bytes | torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    for content in contents:
        if not isinstance(content, bytes):
            yield content
        elif content:
            yield torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def _blocks(contents: Iterator[torch.Tensor], block_size: int) -> Iterator[_Block]:
    """The blocks of a file."""
    open_block, at = _Block([], 0, block_size), 0
    for content in contents:
        done = 0
        while done < content.numel():
            open_block.contents.append((at, content))
            done = min(content.numel(), open_block.stop - at)
            if at + done == open_block.stop:
                yield open_block
                open_block = _Block([], open_block.stop, open_block.stop + block_size)
                if done < content.numel():
                    continue
        at += content.numel()
    if at > open_block.start:
        yield open_block._replace(stop=at)


def _batches(blocks: list[_Block]) -> Iterator[list[_Block]]:
    batch, size = list[_Block](), 0
    for block in blocks:
        batch.append(block)
        size += block.stop - block.start
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Run(NamedTuple):
    """Whole KiB that lie one after the other: in a content, or among those that are gathered."""

    content: torch.Tensor | None  # None: gathered
    start: int  # bytes, in it
    row: int  # of the sums
    kibs: int


class _Copy(NamedTuple):
    """Bytes of a content, and their place among what is gathered, or, with `is_end`, among the ends of blocks."""

    content: torch.Tensor
    start: int
    place: int
    size: int
    is_end: bool


@dataclass
class _Batch:
    """Blocks that are hashed side by side: where their KiB lie, each of which has a row in the sums."""

    rows: list[int] = field(default_factory=list)  # of each block
    runs: list[_Run] = field(default_factory=list)
    copies: list[_Copy] = field(default_factory=list)
    gathered: int = 0  # KiB
    _last_gathered: int = -1  # row

    @classmethod
    def of(cls, blocks: Sequence[_Block]) -> _Batch:
        batch, row = cls(), 0
        for number, block in enumerate(blocks):
            batch.rows.append(block.whole)
            batch._add(block, number, row)
            row += block.whole
        return batch

    def _add(self, block: _Block, number: int, row: int) -> None:
        body = block.start + block.whole * KIB
        end = max(block.start, body - _STRIPE)  # the last 64 bytes of a block may begin in the KiB before its last one
        for place, content in block.contents:
            start, stop = max(block.start, place), min(block.stop, place + content.numel())
            if start < body:
                self._add_rows(content, place, start, min(stop, body), block.start, row)
            if stop > end:
                first = max(start, end)
                slot = number * _SLOT + _STRIPE + first - body
                self.copies.append(_Copy(content, first - place, slot, stop - first, is_end=True))

    def _add_rows(self, content: torch.Tensor, place: int, start: int, stop: int, origin: int, row: int) -> None:
        """Those from `start` to `stop` of a file, for the content at `place`, in the block that begins at `origin`."""
        first, last = -(-start // KIB) * KIB, stop // KIB * KIB
        is_aligned = (content.data_ptr() + first - place) % _ALIGNMENT == 0
        borders = [(start, stop)]
        if first < last and is_aligned:
            borders = [(start, first), (last, stop)]
            self.runs.append(_Run(content, first - place, row + (first - origin) // KIB, (last - first) // KIB))
        for begin, end in borders:
            if begin < end:
                self._gather(content, begin - place, begin - origin, end - begin, row)

    def _gather(self, content: torch.Tensor, start: int, offset: int, size: int, row: int) -> None:
        first, last = row + offset // KIB, row + (offset + size - 1) // KIB
        if first != self._last_gathered:  # otherwise the content before has begun this KiB, and it is gathered already
            self.gathered += 1
            self.runs.append(_Run(None, (self.gathered - 1) * KIB, first, 1))
        place = (self.gathered - 1) * KIB + offset % KIB
        if last > first:
            self.runs.append(_Run(None, self.gathered * KIB, first + 1, last - first))
            self.gathered += last - first
        self._last_gathered = last
        self.copies.append(_Copy(content, start, place, size, is_end=False))

    def run(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The lanes of every block before its last KiB, and its end. `table`: what kernels need, on the device."""
        if self.gathered * KIB > _MOST_GATHERED:
            # caught by `hashes_on_device`: the host hashes instead
            raise torch.OutOfMemoryError("hashing these tensors would need a copy that is too large")
        device = table.device
        gathered = torch.empty(self.gathered * KIB, dtype=torch.uint8, device=device)
        ends = torch.zeros(len(self.rows), _SLOT, dtype=torch.uint8, device=device)
        sums = torch.empty(sum(self.rows), LANES, dtype=torch.int64, device=device)
        if device.type != "cuda":
            return _by_operators(self, gathered, ends, sums), ends
        return _by_kernels(self, gathered, ends, sums, table), ends


def _by_kernels(
    batch: _Batch, gathered: torch.Tensor, ends: torch.Tensor, sums: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    from ckpt.formats import xxh3_kernels

    if batch.copies:
        owner, start, sizes = divided([copy.size for copy in batch.copies], KIB)
        sources = torch.tensor([copy.content.data_ptr() + copy.start for copy in batch.copies])
        targets = torch.tensor([(ends if copy.is_end else gathered).data_ptr() + copy.place for copy in batch.copies])
        xxh3_kernels.copy_bytes(sources[owner] + start, targets[owner] + start, sizes, sums.device)
    if batch.runs:
        owner, start, counts = divided([run.kibs for run in batch.runs], _UNIT)
        lies = [(gathered if run.content is None else run.content).data_ptr() + run.start for run in batch.runs]
        rows = torch.tensor([run.row for run in batch.runs])
        xxh3_kernels.fill_sums(sums, torch.tensor(lies)[owner] + start * KIB, rows[owner] + start, counts, table)
    return xxh3_kernels.scrambled(sums, batch.rows, table, PRIME)


def _by_operators(batch: _Batch, gathered: torch.Tensor, ends: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """The same without kernels: far too slow for blocks of 32 MB, and what the kernels are compared with."""
    for content, start, place, size, is_end in batch.copies:
        target = ends.view(-1) if is_end else gathered
        target[place : place + size] = content[start : start + size]
    for run in batch.runs:
        data = (gathered if run.content is None else run.content)[run.start : run.start + run.kibs * KIB]
        words = data.clone().view(torch.int64).view(-1, STRIPES, LANES)
        sums[run.row : run.row + run.kibs] = _added(words).sum(1)
    return scrambled(sums, torch.tensor(batch.rows)) if len(sums) else START.repeat(len(batch.rows), 1)


def _added(words: torch.Tensor) -> torch.Tensor:
    """What each stripe of a KiB adds to the lanes."""
    secrets = torch.stack([words64(8 * stripe, LANES) for stripe in range(STRIPES)]).to(words.device)
    return products(words ^ secrets) + swapped(words)


def _finished(blocks: Sequence[_Block], lanes: torch.Tensor, ends: torch.Tensor) -> Iterator[str]:
    """The hashes of blocks, on the host, from their lanes before the last KiB, and their ends."""
    sizes = torch.tensor([block.stop - block.start for block in blocks])
    whole = torch.tensor([block.whole for block in blocks])
    rest = sizes - whole * KIB
    mixed = (lanes ^ shifted(lanes, 47) ^ words64(SCRAMBLE, LANES)) * PRIME
    lanes = torch.where((whole > 0)[:, None], mixed, lanes)
    words = ends[:, _STRIPE:].contiguous().view(torch.int64).view(-1, STRIPES, LANES)
    counted = torch.arange(STRIPES) < ((rest - 1) // _STRIPE)[:, None]
    lanes = lanes + torch.where(counted[..., None], _added(words), 0).sum(1)
    last = ends.gather(1, rest[:, None] + torch.arange(_STRIPE)).contiguous().view(torch.int64)
    lanes = lanes + products(last ^ words64(LAST_STRIPE, LANES)) + swapped(last)
    for size, end, (low, high) in zip(sizes.tolist(), ends, merged(lanes, sizes).tolist(), strict=True):
        if size <= KIB:  # the shortest have another way to be hashed
            yield xxhash.xxh3_128_hexdigest(host_bytes(end[_STRIPE : _STRIPE + size]))
        else:
            yield f"{high % (1 << 64):016x}{low % (1 << 64):016x}"

"""The hashes of a file that is written: of every block, and of its head; in SHA-256 too, where that is asked for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from ckpt.formats.native.block_hash import (
    BLOCK_SIZE,
    BlockHasher,
    Hash,
    digest,
    digests_of_every,
    sha256,
    xxh3_128,
)
from ckpt.formats.native.manifest import FileRecord
from ckpt.util.threads import ThreadCall

if TYPE_CHECKING:
    from ckpt.formats.state import FilePlan

Advance = Callable[[float], None]

# SHA-256 takes a core for 0.4 GB/s and more, and training needs cores too: half of those of this rank, at most four
_RANKS_HERE = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
_WORTH_THREADS = 4 << 20  # bytes
_FAST_THREADS = 2  # beside training: one hashes as fast as memory is read by one
_SHA256_THREADS = min(4, max(1, (os.cpu_count() or 1) // (2 * _RANKS_HERE)))


class FileHasher:
    """Hashes the pieces of a file on their way, and makes its record in the manifest."""

    def __init__(self, plan: FilePlan, *, sha256: bool = False) -> None:
        self._plan = plan
        self._hasher = BlockHasher(sha256=sha256)
        self._head = b""

    def through(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the pieces unchanged, having hashed each. The head is within the first one."""
        for piece in self._hasher.through(pieces):
            self.of_head(piece)
            yield piece

    def of_head(self, piece: memoryview) -> FileHasher:
        """Keep the head, if this is the first piece."""
        self._head = self._head or bytes(piece[: self._plan.head])
        return self

    def record(self, path: str, by_sha256: tuple[str, ...] = (), blocks: tuple[str, ...] = ()) -> FileRecord:
        """The record; `by_sha256` and `blocks` are those of the blocks, if others have computed them."""
        by_sha256 = by_sha256 or self._hasher.sha256_digests
        return FileRecord(
            name=self._plan.path,
            path=path,
            size=self._plan.size if blocks else self._hasher.size,
            blocks=blocks or self._hasher.digests,
            head=(self._plan.head, digest(self._head)) if self._plan.head else None,
            sha256=by_sha256,
            head_sha256=sha256(self._head) if self._plan.head and by_sha256 else "",
        )


def hashed(plan: FilePlan, path: str, advance: Advance, *, sha256: bool = False) -> FileRecord:
    """The record of a file. What is in memory is hashed block by block, in threads, where that is what takes the time:

    by SHA-256, and by any hash where the memory is the file, so that nothing is written.
    """
    shared = plan.in_memory and plan.size >= _WORTH_THREADS
    if shared and plan.reserved is not None:
        return _hashed_in_threads(plan, path, advance, sha256=sha256)
    if not sha256 or not shared:
        return _run_through(FileHasher(plan, sha256=sha256), plan, advance).record(path)
    beside = _InThreads(plan, hashlib.sha256, _SHA256_THREADS)
    try:
        hasher = _run_through(FileHasher(plan), plan, advance)
    finally:
        by_sha256 = beside.result()
    return hasher.record(path, by_sha256)


def _hashed_in_threads(plan: FilePlan, path: str, advance: Advance, *, sha256: bool) -> FileRecord:
    slow = _InThreads(plan, hashlib.sha256, _SHA256_THREADS) if sha256 else None
    try:
        blocks = _InThreads(plan, xxh3_128, _FAST_THREADS).result()
    finally:
        by_sha256 = slow.result() if slow is not None else ()
    advance(plan.size)
    return FileHasher(plan).of_head(next(plan.pieces())).record(path, by_sha256, blocks)


class _InThreads:
    """The hash of every block, computed in threads from now on. Each goes through all pieces, for its blocks."""

    def __init__(self, plan: FilePlan, new: Callable[[], Hash], threads: int) -> None:
        threads = min(threads, -(-plan.size // BLOCK_SIZE))
        work = [partial(_of_every, plan, number, threads, new) for number in range(threads)]
        self._calls = [ThreadCall(call, "ckpt-hash") for call in work]

    def result(self) -> tuple[str, ...]:
        """Waits for all of them, also where one has failed: they read memory that is used again."""
        for call in self._calls:
            call.has_failed()
        found = {index: block for call in self._calls for index, block in call.result().items()}
        return tuple(found[index] for index in sorted(found))


def _of_every(plan: FilePlan, first: int, step: int, new: Callable[[], Hash]) -> dict[int, str]:
    return digests_of_every(plan.pieces(), first, step, new)


def _run_through(hasher: FileHasher, plan: FilePlan, advance: Advance) -> FileHasher:
    for piece in hasher.through(plan.pieces()):
        advance(len(piece))
    return hasher

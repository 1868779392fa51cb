"""The hashes of a file that is written: of every block, and of its head; in SHA-256 too, where that is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from ckpt.formats.native.block_hash import BLOCK_SIZE, BlockHasher, digest, sha256, sha256_of_every
from ckpt.formats.native.manifest import FileRecord
from ckpt.util.threads import ThreadCall

if TYPE_CHECKING:
    from ckpt.formats.state import FilePlan

Advance = Callable[[float], None]

# SHA-256 takes a core for 0.4 GB/s and more, and training needs cores too: half of those of this rank, at most four
_RANKS_HERE = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
_WORTH_THREADS = 4 << 20  # bytes
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
            self._head = self._head or bytes(piece[: self._plan.head])
            yield piece

    def record(self, path: str, by_sha256: tuple[str, ...] = ()) -> FileRecord:
        """The record; `by_sha256` are the blocks' if others have computed them."""
        by_sha256 = by_sha256 or self._hasher.sha256_digests
        return FileRecord(
            name=self._plan.path,
            path=path,
            size=self._hasher.size,
            blocks=self._hasher.digests,
            head=(self._plan.head, digest(self._head)) if self._plan.head else None,
            sha256=by_sha256,
            head_sha256=sha256(self._head) if self._plan.head and by_sha256 else "",
        )


def hashed(plan: FilePlan, path: str, advance: Advance, *, sha256: bool = False) -> FileRecord:
    """The record of a file. What is in memory is hashed by SHA-256 in threads of its own, block by block."""
    if not sha256 or not plan.in_memory or plan.size < _WORTH_THREADS:
        return _run_through(FileHasher(plan, sha256=sha256), plan, advance).record(path)
    beside = _Sha256InThreads(plan)
    try:
        hasher = _run_through(FileHasher(plan), plan, advance)
    finally:
        by_sha256 = beside.result()
    return hasher.record(path, by_sha256)


class _Sha256InThreads:
    """The SHA-256 of every block, computed in threads from now on. Each goes through all pieces, for its blocks."""

    def __init__(self, plan: FilePlan) -> None:
        threads = min(_SHA256_THREADS, -(-plan.size // BLOCK_SIZE))
        work = [partial(_sha256_of_every, plan, number, threads) for number in range(threads)]
        self._calls = [ThreadCall(call, "ckpt-sha256") for call in work]

    def result(self) -> tuple[str, ...]:
        """Waits for all of them, also where one has failed: they read memory that is used again."""
        for call in self._calls:
            call.has_failed()
        found = {index: block for call in self._calls for index, block in call.result().items()}
        return tuple(found[index] for index in sorted(found))


def _sha256_of_every(plan: FilePlan, first: int, step: int) -> dict[int, str]:
    return sha256_of_every(plan.pieces(), first, step)


def _run_through(hasher: FileHasher, plan: FilePlan, advance: Advance) -> FileHasher:
    for piece in hasher.through(plan.pieces()):
        advance(len(piece))
    return hasher

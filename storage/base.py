"""The storage protocol: what every backend guarantees, and what an object store must offer to become a storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ckpt.errors import ConfigError, ConflictError, DamagedError, LockedError, TruncatedError
from ckpt.util.checked_json import is_relative

Buffer = bytes | bytearray | memoryview
ANY = "*"  # any version, or none
ROOT_LOCK = ".lock"  # the file by which a folder is known as the root of a run
LARGEST_DOCUMENT = 64 << 20  # bytes: the manifest of a checkpoint of 50 TB has no more


@dataclass(frozen=True)
class ReservedFile:
    """A file below the root of a storage that is no object yet: a write of its bytes gives it the name of one."""

    path: str
    inode: int
    size: int


@dataclass(frozen=True)
class StablePieces:
    """Pieces whose size is known, and which do not change until they are written.

    Some may still be on their way: to iterate waits for each. `file`: where they are already, when they have arrived.
    """

    size: int
    pieces: Callable[[], Iterator[memoryview]]
    file: ReservedFile | None = None

    @classmethod
    def of(cls, pieces: Iterable[Buffer]) -> StablePieces | None:
        """The pieces as such, if they are in a list; None for a stream, whose pieces are valid one at a time."""
        if isinstance(pieces, cls):
            return pieces
        if not isinstance(pieces, list):
            return None
        views = [memoryview(piece).cast("B") for piece in pieces]
        return cls(sum(map(len, views)), lambda: iter(views))

    def __iter__(self) -> Iterator[memoryview]:
        return self.pieces()


@dataclass(frozen=True)
class Entry:
    """A stored object: its key below the root, its size in bytes, and its `version`, if the listing says it."""

    key: str
    size: int
    version: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Unfinished:
    """A write that has not ended: its key, the bytes that have arrived, and its age in seconds by the store's clock."""

    key: str
    size: int
    age: float


class LostError(LockedError):
    """The lock file that this process held exclusively was removed: others are not excluded any more."""


@runtime_checkable
class Storage(Protocol):
    """Objects under keys, below one root.

    A key is a relative path of names joined by `/`. What holds for every storage:

    - `write` is atomic and durable: a reader sees the old object or the whole new one, never a part, and when
      `write` has returned the object outlives a crash of the machine. A `write` that fails leaves the old object,
      unless it raises a `NotDurableError`: then the new one is there, but may be lost in a crash. Of an object store
      that did not answer, nothing is known: read what is there.
    - `list` is never cached: an object is listed from the moment its `write` returned until its `delete` did.
    - Nothing outside the root is read, written or removed.
    - Whatever fails raises a `StorageError`; nothing under a key is an `AbsentError`, fewer bytes than were asked for a
      `TruncatedError`, no space left a `FullError`, another version under it than was expected a `ConflictError`.
      Only the first two say that bytes are gone: where reading fails for another reason, another one must be raised.
    """

    is_local: bool  # bytes that one process has read cost the others on its host next to nothing: page cache or memory

    @property
    def url(self) -> str:
        """The root, as a user would write it. Holds no secret."""

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> str | None:
        """Store the pieces, one after the other, as the object `key`; an older one is replaced.

        Returns the version that was written, where the storage says so at once; it may say so only if `over` is given.

        `over` is the `version` that may be replaced; with none, nothing may be there. Of two who write over the same
        version one succeeds. The other gets a `ConflictError`, and the object is kept.

        Pieces in a list, and `StablePieces`, must not change until `write` returns; those of another iterable, until
        the next is asked for.
        """

    def version(self, key: str) -> str | None:
        """A name for the present content of an object, which changes when it is written. None if there is no object."""

    def link(self, source: str, target: str) -> None:
        """Store the object `source` under `target` too, without transferring its bytes where possible.

        As atomic and durable as `write`. Removing one of the two leaves the other.
        """

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of `key` from `start` up to `stop` (its end if none); fewer where the object ends earlier."""

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        """Fill the buffers, one after the other, with the bytes of `key` from `start`; fewer are a `TruncatedError`.

        `again` says that the same bytes will be asked for again soon.
        """

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key is below `prefix`, at any depth, in no particular order."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the objects, the first before all others, the last after them. A missing one is no error."""

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        """Writes below `prefix` that have not ended: in progress, or left behind by a process that was killed."""

    def sweep(self, prefix: str = "", *, age: float | None = None) -> None:
        """Remove what unfinished writes below `prefix` have left. Call it only while nobody writes there.

        Writes younger than `age` seconds are kept. Without `age` all are removed; but on object stores, where others
        may write below the root all the same, those younger than a day are kept unless `prefix` is given.
        """

    def lock(self, key: str, *, shared: bool = False, note: str = "") -> AbstractContextManager[None]:
        """Hold `key` until the context is left or this process has ended, even if it is killed.

        Many may hold it shared, or one exclusively. Does not wait for the lock: if it is held, a `LockedError`
        quotes the holder's `note`. Only to find out whether a holder on another machine is alive may take a minute.
        Where the filesystem has no locks, nothing is held and a warning is logged once.
        """


@runtime_checkable
class PageCached(Storage, Protocol):
    """A storage whose objects are files that the system keeps in its page cache once they were read."""

    def evict(self, key: str) -> None:
        """Drop an object from the page cache, so that the next read comes from the disk."""


@runtime_checkable
class Reserving(Protocol):
    """The methods that a storage in memory has besides `Storage`, so that its objects need not be copied there."""

    def reserve(self, size: int) -> tuple[int, ReservedFile]:
        """A file of that size, with a descriptor by which the caller maps it, fills it, and which it closes."""

    def reserve_again(self, file: ReservedFile) -> ReservedFile | None:
        """The memory of this file, which is mapped still, if the object that it became was deleted; else None."""

    def give_up(self, file: ReservedFile) -> None:
        """The file has become no object, or has: in the first case, its memory is free for the next one."""


@runtime_checkable
class Interruptible(Protocol):
    """The members that a storage has besides `Storage` if requests that wait for a server can be ended early."""

    @property
    def progress(self) -> int:
        """Grows with every answer of the server, and with bytes that are sent or received for the first time."""

    def giving_up(self) -> AbstractContextManager[None]:
        """Until the context is left, requests fail with a `TransientError`: at once, those under way too."""


@runtime_checkable
class Grouping(Protocol):
    """The method that a storage has besides `Storage` if files that are written together take it less time."""

    def grouped(self) -> AbstractContextManager[None]:
        """Objects that this thread writes or links in the context may be made durable together, when it is left.

        Until then, what was written may be invisible, and its errors not raised. Where leaving it fails, each object is
        there or not; after a `NotDurableError` all are.
        """


@runtime_checkable
class Staging(Protocol):
    """The methods that a storage has besides `Storage` if objects appear by commits, whose number is limited.

    Objects are staged, by any process, and then published together: all of them appear at the same moment. Until then
    they are not visible, and nobody has to clean them up.
    """

    def stage(self, key: str, pieces: Iterable[Buffer]) -> str:
        """Upload bytes, to be published under `key`. Returns a receipt, which is valid in every process."""

    def publish(self, receipts: Mapping[str, str], *, gone: Iterable[str] = ()) -> None:
        """Publish staged objects by their receipts, and remove the keys in `gone`: all of it or nothing.

        Soon after another commit this is deferred, to the next commit or to `settle`. If the process is killed before,
        nothing has changed.
        """

    def settle(self) -> None:
        """Commit what was deferred: then everything published is durable, and everything deleted is gone."""


class Objects(Protocol):
    """A client of an object store, below one prefix. Keys are checked already; errors are `StorageError`s."""

    @property
    def url(self) -> str:
        """The bucket and the prefix, as a user would write them. Holds no secret."""

    def put(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> str:
        """Store an object as `Storage.write` does. Returns its version, if `over` was given."""

    def version(self, key: str) -> str | None:
        """As `Storage.version`."""

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """As `Storage.read`."""

    def fill(self, key: str, start: int, buffers: list[memoryview]) -> int:
        """Fill the buffers in turn from `start`. Returns how many bytes are missing because the object ends earlier."""

    def copy(self, source: str, target: str) -> None:
        """Copy an object inside the store."""

    def entries(self, prefix: str) -> Iterator[Entry]:
        """The objects below a prefix, never from a cache."""

    def remove(self, keys: list[str]) -> None:
        """Remove objects, in no particular order."""

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """As `Storage.unfinished`."""

    def abort(self, prefix: str, age: float) -> None:
        """Abort unfinished writes below a prefix that began at least `age` seconds ago."""


@runtime_checkable
class Seeking(Protocol):
    """The method that a client has besides `Objects` if it can begin a listing after any key."""

    def page(self, after: str) -> tuple[list[Entry], bool]:
        """The objects after a key, in the order of keys: those of one answer; and whether there are more."""


def read_document(storage: Storage, key: str, most: int = LARGEST_DOCUMENT) -> bytes:
    """All bytes of a small object: a manifest, a marker. Of a larger one no more than `most` are ever read."""
    try:
        data = storage.read(key, 0, most + 1)
    except TruncatedError as error:
        raise DamagedError(f"{key} is damaged: {error}") from error
    if len(data) > most:
        raise DamagedError(f"{key} is damaged: it has more than {most:,} bytes, too many for such a file.")
    return data


def check_key(key: str) -> str:
    """Return `key` if it is valid: it cannot lead out of the root."""
    if not is_relative(key) or not _is_encodable(key):
        raise ConfigError(
            f"{key!r} is not a key. A key must consist of names joined by '/', without '.', '..', backslashes or empty "
            "names."
        )
    return key


def _is_encodable(key: str) -> bool:
    """Whether a key can be the name of a file."""
    try:
        os.fsencode(key)
    except UnicodeEncodeError:
        return False
    return True


def below(key: str, prefix: str) -> bool:
    """Whether `key` lies below the folder `prefix`. Every key lies below the empty one."""
    return not prefix or key.startswith(prefix.rstrip("/") + "/")


def changed(where: str) -> ConflictError:
    """The error of a write that finds another version than the one it may replace."""
    return ConflictError(
        f"{where} has changed: somebody else wrote it in the meantime, and ckpt keeps their version. Make sure that "
        "only one run writes there."
    )

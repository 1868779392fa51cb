"""What a storage promises."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ckpt.errors import ConfigError, ConflictError, LockedError

Buffer = bytes | bytearray | memoryview
ANY = "*"  # whatever is there


@dataclass(frozen=True)
class Entry:
    """One stored object: its key below the root and its size in bytes."""

    key: str
    size: int


@dataclass(frozen=True)
class Unfinished:
    """A write that has not ended: its key, the bytes that are there, and the seconds since, by the storage's clock."""

    key: str
    size: int
    age: float


class LostError(LockedError):
    """What this process held alone has been removed: nothing keeps others from writing there."""


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
      `TruncatedError`, no space left a `FullError`, something else under it than was expected a `ConflictError`. Only
      the first two say that bytes are gone: what could merely not be read must be any other one.
    """

    is_local: bool  # bytes that one process has read cost the others on its host next to nothing: page cache or memory

    @property
    def url(self) -> str:
        """The root, as a user would write it. Holds no secret."""

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        """Store the pieces, one after the other, as the object `key`; an older one is replaced.

        `over` is the `version` that may be replaced; with none, nothing may be there. Of two who write over the same
        version one succeeds. The other gets a `ConflictError`, and what is there stays.

        Pieces in a list are there and stay as they are until `write` returns; of others, each until the next one is
        asked for.
        """

    def version(self, key: str) -> str | None:
        """A name for the object as it is now, which it keeps until other bytes are written. None if there is none."""

    def link(self, source: str, target: str) -> None:
        """Store what is under `source` under `target` too, without moving it where that can be done.

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
        """Remove the objects, the first before all others, the last after them. What is not there is no error."""

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        """Writes below `prefix` that have not ended: under way, or left behind by somebody who was killed."""

    def sweep(self, prefix: str = "", *, age: float | None = None) -> None:
        """Remove what unfinished writes below `prefix` left behind. Call it only while nobody writes there.

        What is younger than `age` seconds stays. If none is given, all goes; but where others may write below the root
        all the same, what is younger than a day stays unless `prefix` is given.
        """

    def lock(self, key: str, *, shared: bool = False, note: str = "") -> AbstractContextManager[None]:
        """Hold `key` until the context is left or this process is gone, however it goes.

        Many may hold it shared, or one alone. Does not wait for it: if somebody else is in the way, a `LockedError`
        quotes the holder's `note`. Only to learn whether a holder elsewhere is still alive may take a minute. Where the
        place below has no locks, nothing is held and a warning is logged once.
        """


@runtime_checkable
class Staging(Protocol):
    """What a storage has beside `Storage` where objects are shown by commits, of which there can be only so many.

    Objects are staged, by any process, and then published together: all of them are there from one moment on. Until
    then nothing is to be seen of them, and nobody has to clear them away.
    """

    def stage(self, key: str, pieces: Iterable[Buffer]) -> str:
        """Bring the bytes there, to be published under `key`. Returns a receipt, which is good in every process."""

    def publish(self, receipts: Mapping[str, str], *, gone: Iterable[str] = ()) -> None:
        """Show what was staged, by key, and remove what is `gone`: all of it or nothing.

        Where the last commit is not long ago, that waits for what comes next, or for `settle`; if the process is killed
        meanwhile, what was there before stands.
        """

    def settle(self) -> None:
        """Return when everything that was published is durable, and everything deleted gone."""


class Objects(Protocol):
    """Objects below one prefix of a store. Keys are checked, and errors are ours already."""

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
        """Fill the buffers, one after the other. Returns how many bytes are missing at the end."""

    def copy(self, source: str, target: str) -> None:
        """Let the store copy an object."""

    def entries(self, prefix: str) -> Iterator[Entry]:
        """What there is below a prefix, now."""

    def remove(self, keys: list[str]) -> None:
        """Remove objects, in no particular order."""

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """As `Storage.unfinished`."""

    def abort(self, prefix: str, age: float) -> None:
        """Give up writes below a prefix that began longer ago than `age` seconds, and have not ended."""


_SEGMENT = re.compile(r"[^/\\\0]+")


def check_key(key: str) -> str:
    """Return `key` if it stays below the root, refuse it otherwise."""
    segments = key.split("/")
    if any(segment in (".", "..") or not _SEGMENT.fullmatch(segment) for segment in segments):
        raise ConfigError(
            f"{key!r} is not a key: it must be names joined by '/', without '.', '..', backslashes or empty names."
        )
    return key


def below(key: str, prefix: str) -> bool:
    """Whether `key` lies below the folder `prefix` (everything lies below the empty one)."""
    return not prefix or key.startswith(prefix.rstrip("/") + "/")


def changed(where: str) -> ConflictError:
    """What a write raises that finds another version than the one it may replace."""
    return ConflictError(
        f"{where} is not what it was: somebody else has written it meanwhile, and theirs stays. See to it that one run "
        "alone writes there."
    )

"""A second home: what is committed in one storage is copied to another, behind the training's back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from ckpt import commit
from ckpt.catalog import find, scan, size_problems
from ckpt.commit import Attempt
from ckpt.console import LONG, bar, say, size
from ckpt.errors import CheckpointError, ConflictError, LockedError, StorageError
from ckpt.files import rank_of
from ckpt.formats.manifest import FILE_NAME, FileRecord, Manifest
from ckpt.retention import Keep
from ckpt.storage import Storage
from ckpt.storage.background import Background
from ckpt.stored_file import StoredFile, VerifiedFile

_log = logging.getLogger("ckpt")


@dataclass
class _Waiting:
    """A checkpoint to be copied. While it is held, retention leaves it where it is."""

    manifest: Manifest
    held: ExitStack


@dataclass
class Mirror:
    """Copies the checkpoints that are committed in `near` to `far`, one at a time, files first and manifest last.

    A copy has the names, the bytes and the manifest of the original, and every byte is verified on its way. At most
    `backlog` checkpoints wait; older ones are left out, never the newest. What fails is logged, kept in `error` until a
    copy succeeds, and tried again with the next checkpoint, at the close, or by the next run: training goes on.

    Of several hosts with roots of their own each copies what it has, and the last one to be done writes the manifest.
    """

    near: Storage
    far: Storage
    keep: Keep | None = None
    bandwidth: float | None = None  # bytes in a second
    backlog: int = 2
    alone: bool = True  # whether `near` has all files
    leads: bool = True  # of several hosts that copy, one takes the place and clears up there
    error: Exception | None = None
    _there: dict[str, Manifest] | None = None  # none as long as nobody could look
    _names: set[str] = field(default_factory=set)  # under which something lies there, or will
    _waiting: list[_Waiting] = field(default_factory=list)
    _open_ends: list[Manifest] = field(default_factory=list)  # sent from here, but not known to be committed there
    _current: _Waiting | None = None
    _working: bool = False
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _held: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._background = Background("ckpt-mirror")

    @property
    def newest(self) -> Manifest | None:
        """The newest checkpoint there, as far as that is known."""
        return max((self._there or {}).values(), key=lambda one: one.sequence, default=None)

    def is_free(self, name: str) -> bool:
        """Whether certainly nothing lies under that name there, so that files of any names are new."""
        return self._there is not None and name not in self._names

    def hold(self, newest_first: list[Manifest]) -> None:
        """Take the place for this run, and go on with what the last one has not copied to its end.

        Refused if another run copies to it. If it cannot be reached, that is tried again with every copy.
        """
        behind = newest_first[: self.backlog]
        try:
            self._look(behind)
        except LockedError:
            raise
        except StorageError as error:
            self._failed("it could not be looked at", error)
        newest = self.newest
        for manifest in reversed(behind):
            if newest is None or manifest.sequence > newest.sequence:
                self.offer(manifest)

    def offer(self, manifest: Manifest) -> None:
        """Copy a checkpoint as soon as those before it have been. Waits for nothing."""
        held = ExitStack()
        try:
            held.enter_context(self.near.lock(manifest.name, shared=True))
        except StorageError as error:
            self._failed(f"{manifest.name} was not copied", error)
            return
        with self._guard:
            self._names.add(manifest.name)
            self._enqueue(_Waiting(manifest, held))
            idle, self._working = not self._working, True
        if idle:
            self._background.start(self._work)

    def close(self) -> None:
        """Copy all that waits, and let go of the place. What cannot be copied now the next run copies."""
        with self._guard:
            again = bool(self._waiting) and not self._working
            self._working = self._working or again
            if self._working:
                say(f"copying to {self.far.url} before the end: {', '.join(self._to_do)}")
        if again:
            self._background.start(self._work)
        self._background.wait()
        for one in self._waiting:
            _log.warning("%s is not in %s: the next run copies it", one.manifest.name, self.far.url)
            one.held.close()
        self._waiting.clear()
        self._held.close()
        self._there = None

    def _enqueue(self, new: _Waiting) -> None:
        """What is of the same name, or too old to wait any longer, makes room."""
        waiting = [*(one for one in self._waiting if one.manifest.name != new.manifest.name), new]
        self._keep_waiting(waiting, dropped=[one for one in self._waiting if one not in waiting])

    def _keep_waiting(self, waiting: list[_Waiting], dropped: list[_Waiting]) -> None:
        room = max(0, len(waiting) - self.backlog)
        self._waiting = waiting[room:]
        for one in [*dropped, *waiting[:room]]:
            _log.warning("%s is not copied to %s: newer ones wait already", one.manifest.name, self.far.url)
            one.held.close()

    def _next(self) -> _Waiting | None:
        with self._guard:
            self._current = self._waiting.pop(0) if self._waiting else None
            self._working = self._current is not None
            return self._current

    @property
    def _to_do(self) -> list[str]:
        return [one.manifest.name for one in [self._current, *self._waiting] if one is not None]

    def _work(self) -> None:
        while (one := self._next()) is not None:
            try:
                self._copy(one.manifest)
            except CheckpointError as error:  # it is damaged: that copy is never made
                self._failed(f"{one.manifest.name} is not copied", error)
            except Exception as error:  # whatever it is: the checkpoint is safe where it is, and training goes on
                self._failed(f"{one.manifest.name} was not copied and waits for the next one", error)
                self._put_back(one)
                return
            one.held.close()

    def _put_back(self, one: _Waiting) -> None:
        with self._guard:
            self._keep_waiting([one, *self._waiting], dropped=[])
            self._current, self._working = None, False

    def _failed(self, what: str, error: Exception) -> None:
        self.error = error
        _log.warning("%s: %s: %s", self.far.url, what, error)

    def _look(self, going_on: list[Manifest]) -> None:
        """Take the place, find what is there, and clear away what is left of copies that nobody goes on with."""
        if self._there is not None:
            return
        with ExitStack() as held:
            if self.leads:
                commit.take(self.far, held)
                commit.sweep(self.far, spared=[one.name for one in going_on])
            self._names |= {entry.key.partition("/")[0] for entry in self.far.list()}
            self._there = {one.name: one.manifest for one in scan(self.far) if one.manifest is not None}
            self._held = held.pop_all()

    def _copy(self, manifest: Manifest) -> None:
        self._look([manifest, *(one.manifest for one in self._waiting)])
        assert self._there is not None
        self._see_what_others_have_finished(self._there)
        older = self._there.get(manifest.name)
        if older is None or older.id != manifest.id:
            began = time.monotonic()
            self._carry_over(manifest, older)
            _log.info(
                "copied %s to %s: %s in %.2f s",
                manifest.name, self.far.url, size(manifest.size), time.monotonic() - began,
            )  # fmt: skip
        self.error = None
        self._retain()

    def _carry_over(self, manifest: Manifest, older: Manifest | None) -> None:
        """Files that are there already are not sent again: under a name of its own, only a whole one is listed."""
        name = manifest.name
        attempt = Attempt(
            name,
            replaces=tuple(file.path for file in older.files) if older else (),
            over=self.far.version(f"{name}/{FILE_NAME}"),
            id=manifest.id,
        )
        attempt.begin(self.far, [file.path for file in manifest.files])
        there = {entry.key.removeprefix(f"{name}/"): entry.size for entry in self.far.list(name)}
        missing = [file for file in manifest.files if there.get(file.path) != file.size and self._sends(name, file)]
        total = sum(file.size for file in missing)
        with bar(f"copying {name}", total, in_bytes=True, show=total > LONG) as advance:
            moved = _Pace(self.bandwidth, advance).moved
            for file in missing:
                if not self._link(name, file):
                    self._send(name, file, moved)
        self._open_ends.append(manifest)
        if not size_problems(self.far, manifest):
            self._commit(attempt, manifest)

    def _sends(self, name: str, file: FileRecord) -> bool:
        """What all hosts have in common, one of them sends; of the rest, each what it has."""
        if self.alone or rank_of(file.name) is None:
            return self.leads
        return self.near.version(f"{name}/{file.path}") is not None

    def _commit(self, attempt: Attempt, manifest: Manifest) -> None:
        with suppress(ConflictError):  # of two hosts that see that all is there, one commits
            attempt.commit(self.far, manifest, {})
        assert self._there is not None
        self._see_what_others_have_finished(self._there)

    def _see_what_others_have_finished(self, there: dict[str, Manifest]) -> None:
        for manifest in list(self._open_ends):
            known = find(self.far, manifest.name).manifest
            if known is not None and known.sequence >= manifest.sequence:
                there[manifest.name] = known
                self._open_ends.remove(manifest)

    def _link(self, name: str, file: FileRecord) -> bool:
        """Take a file from the newest checkpoint there, if that has the same bytes: frozen weights are sent once."""
        newest = self.newest
        same = next((one for one in newest.files if _same_bytes(one, file)), None) if newest else None
        if newest is None or same is None:
            return False
        try:
            self.far.link(f"{newest.name}/{same.path}", f"{name}/{file.path}")
        except StorageError as error:  # removed by hand, say: then it is sent
            _log.info("%s could not be linked: %s", file.path, error)
            return False
        return True

    def _send(self, name: str, file: FileRecord, moved: Callable[[int], None]) -> None:
        key = f"{name}/{file.path}"
        self.far.write(key, _told(VerifiedFile(StoredFile(self.near, key), file).pieces(), moved))

    def _retain(self) -> None:
        if self.keep is None or self._there is None or not self.leads:
            return
        newest_first = sorted(self._there.values(), key=lambda one: one.sequence, reverse=True)
        left = commit.retain(self.keep, self.far, newest_first, ())
        self._there = {one.name: one for one in left}


def _told(pieces: Iterable[memoryview], moved: Callable[[int], None]) -> Iterator[memoryview]:
    for piece in pieces:
        yield piece
        moved(len(piece))


def _same_bytes(one: FileRecord, other: FileRecord) -> bool:
    return (one.name, one.size, one.blocks) == (other.name, other.size, other.blocks)


class _Pace:
    """No more than so many bytes in a second, counted from the beginning."""

    def __init__(self, bandwidth: float | None, advance: Callable[[float], None]) -> None:
        self._bandwidth = bandwidth
        self._advance = advance
        self._count = 0
        self._began = time.monotonic()

    def moved(self, count: int) -> None:
        """Count them, and wait until more may be."""
        self._count += count
        self._advance(count)
        if self._bandwidth is not None:
            time.sleep(max(0.0, self._count / self._bandwidth - (time.monotonic() - self._began)))

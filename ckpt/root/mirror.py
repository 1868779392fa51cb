"""The mirror: every checkpoint that is committed in the root is copied to a second storage by a background thread.

Copies have the same names, bytes and manifests. A mirror that answers is waited for. One that is away is not, beyond a
bound: what it lacks is safe in the root, and the next run copies it. A local one has no server that could be away: to
sync a large file takes it long, without a sign.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar
from weakref import WeakSet

from ckpt.errors import CheckpointError, ConflictError, LockedError, StorageError, TransientError
from ckpt.formats.native.manifest import FILE_NAME, FileRecord, Manifest
from ckpt.root import deletion
from ckpt.root.catalog import DAY, History, Index, Overview, Summary, find, rank_of
from ckpt.root.lock import lock_root
from ckpt.root.retention import Keep
from ckpt.root.verify import VerifiedFile, size_problems
from ckpt.root.write_link_commit import Attempt
from ckpt.storage import Staging, Storage
from ckpt.storage.base import Interruptible, LostError
from ckpt.util.console import format_size, progress_bar, say
from ckpt.util.threads import OwnerProcess, Worker

AT_START, AT_END = 5.0, 30.0  # seconds
AFTER_SIGTERM = 5.0  # seconds at most: whoever sent it will not wait for long
_LEAST = 1.0  # seconds: for a mirror that was away a moment ago, and may be back
_TO_END = 2.0  # seconds in which a request that was given up ends, where that can be done at all
_TICK = 0.1  # seconds
T = TypeVar("T")


@dataclass(eq=False)
class MirrorPatience:
    """Seconds that a run waits for a mirror that gives no sign of life.

    `at_start` is for all calls of the start together, until one succeeds: the mirror may be away in each of them.
    """

    at_start: float = AT_START
    at_end: float = AT_END
    end_by: float | None = None  # by the monotonic clock: then the end waits for nothing any more
    _spent: float = field(default=0.0, init=False)

    @property
    def left_at_start(self) -> float:
        return max(min(_LEAST, self.at_start), self.at_start - self._spent)

    @property
    def is_away(self) -> bool:
        """Whether the mirror did not answer when it was last asked at the start: that was said already."""
        return self._spent > 0

    def hurry(self, seconds: float | None) -> None:
        """The run was told to terminate: the end waits for a short time. `seconds`: the rest of its grace period."""
        self.at_end = min(self.at_end, AFTER_SIGTERM)
        if seconds is not None:
            self.end_by = time.monotonic() + seconds

    def reached(self, mirror: Storage, call: Callable[[], T]) -> T:
        """The result of a call to the mirror. Raises a `TransientError` if the mirror does not answer for too long."""
        if mirror.is_local:
            return call()
        seconds, began = self.left_at_start, time.monotonic()
        running = Worker("ckpt-mirror-start", daemon=True).start(call)
        wait = QuietWait(lambda: progress_of(mirror), seconds)
        try:
            if not wait.ended(running):
                end_now(mirror, running)
                raise TransientError(f"{mirror.url} has not answered for {seconds:g} s.")
            result: T = running.wait()
        except StorageError:
            self._spent += time.monotonic() - began
            raise
        self._spent = 0.0
        return result

    def start_wait(self, mirror: Storage, progress: Callable[[], object]) -> QuietWait:
        return QuietWait(progress, math.inf if mirror.is_local else self.left_at_start)

    def end_wait(self, mirror: Storage, progress: Callable[[], object]) -> QuietWait:
        return QuietWait(progress, math.inf if mirror.is_local else self.at_end, self.end_by)

    def note_away(self, seconds: float) -> None:
        """The mirror has not answered for so long at the start."""
        self._spent += seconds


class Call(Protocol):
    """A call in another thread."""

    def done_within(self, seconds: float) -> bool: ...


class QuietWait:
    """Waits for calls as long as `progress` changes, at most `seconds` without a change, and not beyond `end_by`."""

    def __init__(self, progress: Callable[[], object], seconds: float, end_by: float | None = None) -> None:
        self._progress = progress
        self._seconds = seconds
        self._end_by = end_by
        self._last, self._since = progress(), time.monotonic()

    def ended(self, call: Call) -> bool:
        """Wait for a call. Returns whether it has ended."""
        while not call.done_within(min(_TICK, self._left())):
            if self._left() <= 0:
                return False
        return True

    def _left(self) -> float:
        now, last = time.monotonic(), self._progress()
        if last != self._last:
            self._last, self._since = last, now
        left = self._since + self._seconds - now
        return left if self._end_by is None else min(left, self._end_by - now)


def progress_of(storage: Storage) -> int:
    """Grows while a storage answers, if it says so."""
    return storage.progress if isinstance(storage, Interruptible) else 0


def end_now(storage: Storage, call: Call) -> bool:
    """End the requests of a call whose time is over, where the storage can do that. Returns whether it has ended."""
    with storage.giving_up() if isinstance(storage, Interruptible) else nullcontext():
        return call.done_within(_TO_END)


_log = logging.getLogger("ckpt")


def begin_copy(target: Storage, attempt: Attempt, files: Iterable[FileRecord]) -> Attempt:
    """Mark a copy to `target`, and return the attempt that commits it over what is there now."""
    attempt.begin(target, [file.path for file in files])
    # only now: with the marker written, no other process removes the replaced checkpoint, so its version is final
    return replace(attempt, expected_version=target.version(f"{attempt.name}/{FILE_NAME}"))


def send_files(
    source: Storage,
    target: Storage,
    attempt: Attempt,
    files: Iterable[FileRecord],
    through: Callable[[Iterator[memoryview]], Iterable[memoryview]],
    *,
    sha256: bool = False,
) -> dict[str, str]:
    """Send files of a committed checkpoint, verified while they are read; their pieces pass `through`.

    Returns the receipts by path, where the target stages files.
    """
    receipts = {}
    for file in files:
        pieces = through(VerifiedFile.of(source, attempt.name, file, sha256=sha256).pieces())
        path = attempt.path_for(file.path)
        if isinstance(target, Staging):
            receipts[path] = target.stage(f"{attempt.name}/{path}", pieces)
        else:
            target.write(f"{attempt.name}/{path}", pieces)
    return receipts


@dataclass
class Copies:
    """Copies committed checkpoints from `source` to `target`: files first, verified while they are read, manifest last.

    Of several hosts with separate roots each copies its own files, and the last to finish writes the manifest.
    """

    source: Storage
    target: Storage
    keep: Keep | None = None
    bandwidth: float | None = None  # bytes per second
    has_all_files: bool = True  # whether `source` has all files of a checkpoint
    is_leader: bool = True  # of several hosts that copy, the leader alone locks, sweeps and applies retention
    is_awaited: bool = True  # or copies are made beside training, which may have progress bars of its own
    stopping: threading.Event = field(default_factory=threading.Event)  # set: the copy under way is given up
    was_listed: bool = False  # whether it is known what the target has
    _sent: int = 0  # pieces, and seconds for which the bandwidth made them wait
    _copied: dict[str, Summary] | None = None  # in the target; None until it was listed. Replaced, never changed
    _index: Index = field(default_factory=Index)  # of the target
    _names: set[str] = field(default_factory=set)  # that are in use in the target, or will be
    _unconfirmed: list[Manifest] = field(default_factory=list)  # sent from here, not yet seen to be committed there
    _held: ExitStack = field(default_factory=ExitStack)
    _history: History = field(init=False)  # of the target

    def __post_init__(self) -> None:
        self._history = History(self.target)

    @property
    def newest(self) -> Summary | None:
        """The newest checkpoint in the target, as far as it is known."""
        return max((self._copied or {}).values(), key=lambda summary: summary.sequence, default=None)

    @property
    def progress(self) -> tuple[int, int]:
        """Two counters that show whether copies make progress: they change while ckpt copies."""
        return self._sent, progress_of(self.target)

    def is_free(self, name: str) -> bool:
        """Whether the target is known to have nothing under that name, so that any file path there is new."""
        return self._copied is not None and name not in self._names

    def reserve(self, name: str) -> None:
        """Record that a copy will be made under that name."""
        self._names.add(name)

    def open_target(self, resumable: list[str]) -> None:
        """Lock the target, list its checkpoints, and sweep interrupted copies other than the `resumable` ones."""
        if self._copied is not None:
            return
        with ExitStack() as held:
            if self.is_leader:
                lock_root(self.target, held)
                # hosts do not wait for each other here: another one may have begun to send, or still be sending
                found = deletion.sweep(self.target, spared=resumable, age=None if self.has_all_files else DAY)
            else:
                found = Overview.of(self.target)
            self._names |= found.files.keys()
            self._copied = {summary.name: summary for summary in found.committed}
            self._index = found.index
            self.was_listed = True
            self._held = held.pop_all()

    def copy(self, manifest: Manifest) -> None:
        """Copy a checkpoint unless the target has it, then apply retention there. Requires `open_target`."""
        self._confirm_commits()
        replaced = (self._copied or {}).get(manifest.name)
        if replaced is None or replaced.id != manifest.id:
            began = time.monotonic()
            try:
                self._send(manifest, self._manifest_of(replaced))
            except LostError:  # the next attempt locks the target again
                self.close()
                raise
            _log.debug(
                "copied %s to %s: %s in %.2f s",
                manifest.name, self.target.url, format_size(manifest.size), time.monotonic() - began,
            )  # fmt: skip
        self._apply_retention()

    def close(self) -> None:
        """Release the lock on the mirror."""
        self._held.close()
        self._copied = None

    def _manifest_of(self, summary: Summary | None) -> Manifest | None:
        """The manifest in the target of which that is the summary; None if it is not there any more."""
        found = find(self.target, summary.name).manifest if summary is not None else None
        return found if found is not None and summary is not None and found.id == summary.id else None

    def _send(self, manifest: Manifest, replaced: Manifest | None) -> None:
        """Send the files that the target lacks, and commit. A path means the same bytes there, and none is partial."""
        name = manifest.name
        attempt = Attempt(
            name,
            replaces=tuple(file.path for file in replaced.files) if replaced else (),
            id=manifest.id,
        )
        begun = begin_copy(self.target, attempt, manifest.files)
        sizes = {entry.key.removeprefix(f"{name}/"): entry.size for entry in self.target.list(name)}
        missing = [file for file in manifest.files if sizes.get(file.path) != file.size and self._is_mine(name, file)]
        total = sum(file.size for file in missing)
        with progress_bar(f"copying {name}", total, in_bytes=True, show=lambda: self.is_awaited) as advance:
            throttle = Throttle(self.bandwidth, self._pause)
            newest = None if manifest.is_authentic or not missing else self._manifest_of(self.newest)
            unlinked = (file for file in missing if not self._link(newest, name, file))
            limit = partial(throttle.limit, advance=advance)
            receipts = send_files(self.source, self.target, begun, unlinked, limit, sha256=manifest.is_authentic)
        self._unconfirmed.append(manifest)
        if receipts or not size_problems(self.target, manifest):
            with suppress(ConflictError):  # of two hosts that find all files there, one commits
                version = begun.commit(self.target, manifest, receipts)
                self._index.add(version, Summary.of(manifest))
        self._confirm_commits()

    def _confirm_commits(self) -> None:
        for manifest in list(self._unconfirmed):
            current = find(self.target, manifest.name).manifest
            if current is not None and current.sequence >= manifest.sequence:
                self._copied = {**(self._copied or {}), manifest.name: Summary.of(current)}
                self._history.add(current)
                self._unconfirmed.remove(manifest)

    def _pause(self, seconds: float) -> None:
        """Wait between two pieces, as the bandwidth asks for. Raises when the copy is given up."""
        end = time.monotonic() + seconds
        while True:
            self._sent += 1
            if self.stopping.wait(max(0.0, min(1.0, end - time.monotonic()))):
                raise TransientError("the run ended before the copy was complete.")
            if time.monotonic() >= end:
                return

    def _is_mine(self, name: str, file: FileRecord) -> bool:
        """Whether this host sends a file: the leader sends those that every host has, each host its own ones."""
        if self.has_all_files or rank_of(file.name) is None:
            return self.is_leader
        return self.source.version(f"{name}/{file.path}") is not None

    def _link(self, newest: Manifest | None, name: str, file: FileRecord) -> bool:
        """Link a file to the newest copy's, if that has the same bytes: frozen weights are sent once.

        Of a signed checkpoint none is: the newest copy's hashes are its own claim.
        """
        same = next((other for other in newest.files if _same_bytes(other, file)), None) if newest else None
        if newest is None or same is None or isinstance(self.target, Staging):
            return False
        try:
            self.target.link(f"{newest.name}/{same.path}", f"{name}/{file.path}")
        except StorageError as error:  # the newest copy was removed by hand, for example: send the file
            _log.debug("ckpt could not link %s, so it sends the file: %s", file.path, error)
            return False
        return True

    def _apply_retention(self) -> None:
        if self._copied is None or not self.is_leader:
            return
        newest_first = sorted(self._copied.values(), key=lambda summary: summary.sequence, reverse=True)
        try:
            left = newest_first
            if self.keep is not None:
                left = deletion.apply_retention(self.keep, self.target, newest_first, (), history=self._history)
        except StorageError as error:  # the copy is committed; the removal is tried again after the next one
            _log.warning("ckpt could not remove old copies: %s", error)
        else:
            self._copied = {summary.name: summary for summary in left}
            self._index.update(self.target, set(self._copied))


def _same_bytes(file: FileRecord, other: FileRecord) -> bool:
    return (file.name, file.size, file.blocks) == (other.name, other.size, other.blocks)


@dataclass
class Throttle:
    """Limits the mean rate since it was made to `bandwidth` bytes per second, by pauses."""

    bandwidth: float | None
    pause: Callable[[float], None] = field(default_factory=lambda: time.sleep)
    _count: int = 0
    _began: float = field(default_factory=lambda: time.monotonic())

    def limit(self, pieces: Iterable[memoryview], advance: Callable[[float], None]) -> Iterator[memoryview]:
        for piece in pieces:
            yield piece
            advance(len(piece))
            self.passed(len(piece))

    def passed(self, size: int) -> None:
        """So many bytes were sent: wait until more may be."""
        self._count += size
        due = 0.0 if self.bandwidth is None else self._count / self.bandwidth
        self.pause(max(0.0, due - (time.monotonic() - self._began)))


@dataclass
class _QueuedCopy:
    """A checkpoint to be copied. While its shared lock is held, retention does not remove it."""

    manifest: Manifest
    held: ExitStack
    has_failed: bool = False

    @property
    def name(self) -> str:
        return self.manifest.name


@dataclass(eq=False)
class MirrorWorker:
    """Copies checkpoints to the mirror one at a time, in the order of their commits.

    At most `backlog` checkpoints wait; older ones are dropped, never the newest. A failure does not stop training: it
    is logged, kept in `error` until a copy succeeds, and tried again with the next checkpoint, at `close`, or by the
    next run. `patience`: how long start and end wait for a mirror that is away.

    The thread is a daemon: one that hangs in a request must not keep the process from ending.
    """

    copies: Copies
    backlog: int = 2
    patience: MirrorPatience = field(default_factory=MirrorPatience)
    error: Exception | None = None
    on_copied: Callable[[str], None] | None = None  # called with the id of a checkpoint that the mirror has
    _waiting: list[_QueuedCopy] = field(default_factory=list)
    _current: _QueuedCopy | None = None
    _working: bool = False
    _woken: bool = False  # whether a checkpoint was enqueued, or `close` called, since the last attempt began
    _is_ending: bool = False  # `close` was called
    _has_skipped: bool = False  # a copy, which was said
    _left_alone: bool = False  # the thread hangs in a request, and the run has ended without it
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._background = Worker("ckpt-mirror", daemon=True)
        self._owner = OwnerProcess()
        self.copies.is_awaited = False
        _all.add(self)

    @property
    def newest(self) -> Summary | None:
        """The newest checkpoint in the mirror, as far as it is known."""
        return self.copies.newest

    @property
    def is_copying(self) -> bool:
        """Whether copies of this process are under way."""
        return self._owner.is_here and self._background.busy

    def is_free(self, name: str) -> bool:
        """Whether the mirror is known to have nothing under that name, so that any file path there is new."""
        return self.copies.is_free(name)

    def start(self, newest_first: list[Summary]) -> None:
        """Lock the mirror for this run, and enqueue what the last run has not copied.

        Refused if another run copies to it. If the mirror cannot be reached, every copy tries again.
        """
        recent = newest_first[: self.backlog]
        self._open([summary.name for summary in recent])
        newest = self.newest
        for summary in reversed(recent):
            if newest is None or summary.sequence > newest.sequence:
                manifest = find(self.copies.source, summary.name).manifest
                if manifest is not None and manifest.id == summary.id:
                    self.enqueue(manifest)

    def _open(self, resumable: list[str]) -> None:
        """Open the mirror on its thread, which goes on trying when the start does not wait for it any longer."""
        opening, seconds, said = _Opening(resumable), self.patience.left_at_start, self.patience.is_away
        with self._guard:
            if self._working:  # the root was locked again: every copy opens the mirror
                return
            self._working = True
        self.copies.stopping.clear()
        self._is_ending = self.copies.is_awaited = False
        self._background.start(lambda: self._work(opening))
        if self.patience.start_wait(self.copies.target, lambda: self.copies.progress).ended(opening):
            error = opening.error
        else:
            self.patience.note_away(seconds)
            error = TransientError(f"it has not answered for {seconds:g} s. Copies wait until it answers.")
        if error is not None and (isinstance(error, LockedError) or not isinstance(error, StorageError)):
            raise error
        if error is not None:
            self._record_failure("it could not be opened", error, logging.DEBUG if said else logging.WARNING)

    def enqueue(self, manifest: Manifest) -> None:
        """Copy a checkpoint after those before it. Returns at once."""
        held = ExitStack()
        try:
            held.enter_context(self.copies.source.lock(manifest.name, shared=True))
        except StorageError as error:
            self._record_failure(f"{manifest.name} was not copied", error)
            return
        self.copies.reserve(manifest.name)
        with self._guard:
            self._add(_QueuedCopy(manifest, held))
            idle, self._working, self._woken = not self._working, True, True
        if idle:
            self._background.start(self._work)

    def close(self) -> None:
        """Copy all waiting checkpoints, and release the mirror.

        If a copy fails, ckpt retries it once before it leaves the copy to the next run. If the mirror gives no sign of
        life for `patience.at_end` seconds, ckpt stops waiting.
        """
        with self._guard:
            names = self._uncopied()
            idle = bool(names) and not self._working
            self._working, self._woken, self._is_ending = self._working or idle, True, True
            self.copies.is_awaited = True
        if names:
            bound = "" if self.copies.target.is_local else f" (up to {self.patience.at_end:g} s without an answer)"
            say(f"copying to {self.copies.target.url} before the end{bound}: {', '.join(names)}")
        if idle:
            self._background.start(self._work)
        ended = self._finish(self.patience.end_wait(self.copies.target, lambda: self.copies.progress))
        self._warn_of_uncopied(given_up=not ended)
        for copy in self._waiting:
            copy.held.close()
        self._waiting.clear()

    def _finish(self, wait: QuietWait) -> bool:
        """Wait for the copies, and release the mirror. Returns whether the copies have ended by themselves.

        Copies that do not end although their requests were given up are left alone: their thread releases the mirror.
        """
        ended = wait.ended(self._background)
        if not ended:
            self.copies.stopping.set()
            stopped = end_now(self.copies.target, self._background)
            with self._guard:
                self._left_alone = self._working and not stopped
        if not self._left_alone:
            releasing = Worker("ckpt-mirror-end", daemon=True).start(self.copies.close)
            if not wait.ended(releasing):
                end_now(self.copies.target, releasing)  # a lease that is not removed now expires
        return ended

    def _uncopied(self) -> list[str]:
        return [copy.name for copy in [self._current, *self._waiting] if copy is not None]

    def _warn_of_uncopied(self, *, given_up: bool) -> None:
        """Say what is not in the mirror, and what becomes of it."""
        target, names = self.copies.target.url, ", ".join(self._uncopied()[-self.backlog :])
        if given_up:
            self.error = self.error or TransientError(f"{target} did not answer at the end of the run.")
            _log.warning("the mirror %s does not answer, so the run ends without it: %s", target, self.error)
        if names:
            unsure = "" if self.copies.was_listed else ", as far as is known"
            _log.warning(
                "these checkpoints are not in the mirror %s%s: %s. All these checkpoints are safe in %s, and the next "
                "run with this mirror copies them.", target, unsure, names, self.copies.source.url,
            )  # fmt: skip

    def _add(self, new: _QueuedCopy) -> None:
        """Append to the queue. An older checkpoint of the same name, and those beyond the backlog, are dropped."""
        waiting = [*(copy for copy in self._waiting if copy.name != new.name), new]
        self._set_waiting(waiting, dropped=[copy for copy in self._waiting if copy not in waiting])

    def _set_waiting(self, waiting: list[_QueuedCopy], dropped: list[_QueuedCopy]) -> None:
        too_many = max(0, len(waiting) - self.backlog)
        self._waiting = waiting[too_many:]
        for copy in [*dropped, *waiting[:too_many]]:
            if copy.manifest not in [kept.manifest for kept in self._waiting]:  # unless it was enqueued again
                _log.log(
                    logging.DEBUG if self._has_skipped else logging.WARNING,
                    "ckpt skips the copy of %s to %s, because newer checkpoints are waiting", copy.name,
                    self.copies.target.url,
                )  # fmt: skip
                self._has_skipped = True
            copy.held.close()

    def _next(self) -> _QueuedCopy | None:
        with self._guard:
            self._current = self._waiting.pop(0) if self._waiting else None
            self._working, self._woken = self._current is not None, False
            return self._current

    def _work(self, opening: _Opening | None = None) -> None:
        """Runs on the mirror's thread, until nothing waits or a copy has failed and nothing new was enqueued."""
        if opening is not None:
            opening.run(self.copies)
        self._copy_all()
        if self._left_alone:  # by `close`
            self.copies.close()
            self._left_alone = False

    def _copy_all(self) -> None:
        while (copy := self._next()) is not None:
            try:
                self.copies.open_target([copy.name, *(other.name for other in self._waiting)])
                self.copies.copy(copy.manifest)
                if self.error is not None:
                    say(f"{self.copies.target.url} can be written again: copied {copy.name}")
                self.error = None
                if self.on_copied is not None:
                    self.on_copied(copy.manifest.id)
            except CheckpointError as error:  # the checkpoint is damaged: it is never copied
                self._record_failure(f"{copy.name} is not copied", error)
            except Exception as error:  # of any kind: the checkpoint is safe in the root, and training continues
                self._record_failure(f"{copy.name} was not copied and waits for the next one", error)
                # a mirror that was removed is locked again; at the end of the run, the reason may have passed
                again = (isinstance(error, LostError) or self._is_ending) and not copy.has_failed
                copy.has_failed = True
                if not self._put_back(copy, again=again):
                    return
                continue
            copy.held.close()

    def _put_back(self, copy: _QueuedCopy, *, again: bool) -> bool:
        """Queue a copy that failed. Returns whether to continue at once: `again`, or as one was enqueued meanwhile."""
        with self._guard:
            self._set_waiting([copy, *self._waiting], dropped=[])
            self._current, self._working = None, (again or self._woken) and not self.copies.stopping.is_set()
            return self._working

    def _record_failure(self, what: str, error: Exception, level: int = logging.WARNING) -> None:
        """A warning, unless the failure before was of the same kind: a mirror may be away for days."""
        if type(error) is type(self.error) and not isinstance(error, CheckpointError):
            level = logging.DEBUG
        if not self.copies.stopping.is_set():  # then `close` says it
            _log.log(level, "%s: %s: %s", self.copies.target.url, what, error)
        self.error = error


class _Opening:
    """The first attempt to open the mirror, and what came of it."""

    def __init__(self, resumable: list[str]) -> None:
        self.error: Exception | None = None
        self._resumable = resumable
        self._ended = threading.Event()

    def done_within(self, seconds: float) -> bool:
        return self._ended.wait(max(0.0, seconds))

    def run(self, copies: Copies) -> None:
        try:
            copies.open_target(self._resumable)
        except Exception as error:  # judged by who waits for it
            self.error = error
        finally:
            self._ended.set()


_all: WeakSet[MirrorWorker] = WeakSet()


@atexit.register
def _finish_copies() -> None:
    """A program that ends without closing its manager: what is being copied is finished, as at `close`."""
    for worker in [worker for worker in _all if worker.is_copying]:
        worker.close()

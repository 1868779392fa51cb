"""The mirror: every checkpoint that is committed in the root is copied to a second storage by a background thread."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from weakref import WeakSet

from ckpt.errors import CheckpointError, LockedError, StorageError, TransientError
from ckpt.formats.native.manifest import Manifest
from ckpt.root.catalog import Summary, find
from ckpt.root.copy import Copies
from ckpt.root.mirror_wait import MirrorPatience, QuietWait, end_now
from ckpt.util.console import say
from ckpt.util.fork_safety import OwnerProcess
from ckpt.util.threads import SerialWorker, ThreadCall

_log = logging.getLogger("ckpt")


@dataclass
class _QueuedCopy:
    """A checkpoint to be copied. While its shared lock is held, retention does not remove it."""

    manifest: Manifest
    held: ExitStack

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
    _left_alone: bool = False  # the thread hangs in a request, and the run has ended without it
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._background = SerialWorker("ckpt-mirror", daemon=True)
        self._owner = OwnerProcess()
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
        self._background.start(lambda: self._work(opening))
        if self.patience.start_wait(self.copies.target, lambda: self.copies.progress).ended(opening):
            error = opening.error
        else:
            self.patience.note_away(seconds)
            error = TransientError(f"it has not answered for {seconds:g} s. Copies wait for it.")
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
        """Copy everything that waits, and release the mirror. What cannot be copied now, the next run copies.

        A copy that began before this call may fail for a reason that has passed: it is tried once more. A mirror that
        gives no sign of life for `patience.at_end` seconds is not waited for any longer.
        """
        with self._guard:
            names = self._uncopied()
            idle = bool(names) and not self._working
            self._working, self._woken = self._working or idle, True
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
            releasing = ThreadCall(self.copies.close, "ckpt-mirror-end", daemon=True)
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
            _log.warning("the mirror %s does not answer, and the run ends without it: %s", target, self.error)
        if names:
            unsure = "" if self.copies.was_listed else ", as far as is known"
            _log.warning(
                "not copied to %s%s: %s. Safe in %s, and copied by the next run that has this mirror.",
                target, unsure, names, self.copies.source.url,
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
                _log.warning("%s is not copied to %s: newer ones wait already", copy.name, self.copies.target.url)
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
                self.error = None
                if self.on_copied is not None:
                    self.on_copied(copy.manifest.id)
            except CheckpointError as error:  # the checkpoint is damaged: it is never copied
                self._record_failure(f"{copy.name} is not copied", error)
            except Exception as error:  # of any kind: the checkpoint is safe in the root, and training continues
                self._record_failure(f"{copy.name} was not copied and waits for the next one", error)
                if not self._put_back(copy):
                    return
                continue
            copy.held.close()

    def _put_back(self, copy: _QueuedCopy) -> bool:
        """Queue a copy that failed. Returns whether to continue at once: a checkpoint was enqueued meanwhile."""
        with self._guard:
            self._set_waiting([copy, *self._waiting], dropped=[])
            self._current, self._working = None, self._woken and not self.copies.stopping.is_set()
            return self._working

    def _record_failure(self, what: str, error: Exception, level: int = logging.WARNING) -> None:
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

"""The mirror: every checkpoint that is committed in the root is copied to a second storage by a background thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from ckpt.errors import CheckpointError, LockedError, StorageError
from ckpt.formats.native.manifest import Manifest
from ckpt.root.catalog import find
from ckpt.root.copy import Copies
from ckpt.root.summary import Summary
from ckpt.util.console import say
from ckpt.util.threads import SerialWorker

_log = logging.getLogger("ckpt")


@dataclass
class _QueuedCopy:
    """A checkpoint to be copied. While its shared lock is held, retention does not remove it."""

    manifest: Manifest
    held: ExitStack

    @property
    def name(self) -> str:
        return self.manifest.name


@dataclass
class MirrorWorker:
    """Copies checkpoints to the mirror one at a time, in the order of their commits.

    At most `backlog` checkpoints wait; older ones are dropped, never the newest. A failure does not stop training: it
    is logged, kept in `error` until a copy succeeds, and tried again with the next checkpoint, at `close`, or by the
    next run.
    """

    copies: Copies
    backlog: int = 2
    error: Exception | None = None
    on_copied: Callable[[str], None] | None = None  # called with the id of a checkpoint that the mirror has
    _waiting: list[_QueuedCopy] = field(default_factory=list)
    _current: _QueuedCopy | None = None
    _working: bool = False
    _woken: bool = False  # whether a checkpoint was enqueued, or `close` called, since the last attempt began
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._background = SerialWorker("ckpt-mirror")

    @property
    def newest(self) -> Summary | None:
        """The newest checkpoint in the mirror, as far as it is known."""
        return self.copies.newest

    def is_free(self, name: str) -> bool:
        """Whether the mirror is known to have nothing under that name, so that any file path there is new."""
        return self.copies.is_free(name)

    def start(self, newest_first: list[Summary]) -> None:
        """Lock the mirror for this run, and enqueue what the last run has not copied.

        Refused if another run copies to it. If the mirror cannot be reached, every copy tries again.
        """
        recent = newest_first[: self.backlog]
        try:
            self.copies.open_target([summary.name for summary in recent])
        except LockedError:
            raise
        except StorageError as error:
            self._record_failure("it could not be opened", error)
        newest = self.newest
        for summary in reversed(recent):
            if newest is None or summary.sequence > newest.sequence:
                manifest = find(self.copies.source, summary.name).manifest
                if manifest is not None and manifest.id == summary.id:
                    self.enqueue(manifest)

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

        A copy that began before this call may fail for a reason that has passed: it is tried once more.
        """
        with self._guard:
            names = [copy.name for copy in [self._current, *self._waiting] if copy is not None]
            idle = bool(names) and not self._working
            self._working, self._woken = self._working or idle, True
        if names:
            say(f"copying to {self.copies.target.url} before the end: {', '.join(names)}")
        if idle:
            self._background.start(self._work)
        self._background.wait()
        for copy in self._waiting:
            _log.warning("%s is not in %s: the next run copies it", copy.name, self.copies.target.url)
            copy.held.close()
        self._waiting.clear()
        self.copies.close()

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

    def _work(self) -> None:
        """Runs on the mirror's thread, until nothing waits or a copy has failed and nothing new was enqueued."""
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
            self._current, self._working = None, self._woken
            return self._working

    def _record_failure(self, what: str, error: Exception) -> None:
        _log.warning("%s: %s: %s", self.copies.target.url, what, error)
        self.error = error

"""A second home: what is committed in the root is copied to a mirror, behind the training's back."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field

from ckpt.errors import CheckpointError, LockedError, StorageError
from ckpt.formats.native.manifest import Manifest
from ckpt.root.copy import Copies
from ckpt.util.console import say
from ckpt.util.threads import SerialWorker

_log = logging.getLogger("ckpt")


@dataclass
class _Waiting:
    """A checkpoint to be copied. While it is held, retention leaves it where it is."""

    manifest: Manifest
    held: ExitStack

    @property
    def name(self) -> str:
        return self.manifest.name


@dataclass
class MirrorWorker:
    """Makes copies one at a time, in the order of the commits.

    At most `backlog` checkpoints wait; older ones are left out, never the newest. What fails is logged, kept in `error`
    until a copy succeeds, and tried again with the next checkpoint, at the close, or by the next run: training goes on.
    """

    copies: Copies
    backlog: int = 2
    error: Exception | None = None
    _waiting: list[_Waiting] = field(default_factory=list)
    _current: _Waiting | None = None
    _working: bool = False
    _came: bool = False  # whether another one, or the end, came since the last attempt began
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._background = SerialWorker("ckpt-mirror")

    @property
    def newest(self) -> Manifest | None:
        """The newest checkpoint there, as far as that is known."""
        return self.copies.newest

    def is_free(self, name: str) -> bool:
        """Whether certainly nothing lies under that name there, so that files of any names are new."""
        return self.copies.is_free(name)

    def start(self, newest_first: list[Manifest]) -> None:
        """Take the place for this run, and go on with what the last one has not copied to its end.

        Refused if another run copies to it. If it cannot be reached, that is tried again with every copy.
        """
        behind = newest_first[: self.backlog]
        try:
            self.copies.open_target([one.name for one in behind])
        except LockedError:
            raise
        except StorageError as error:
            self._failed("it could not be looked at", error)
        newest = self.newest
        for manifest in reversed(behind):
            if newest is None or manifest.sequence > newest.sequence:
                self.enqueue(manifest)

    def enqueue(self, manifest: Manifest) -> None:
        """Copy a checkpoint as soon as those before it have been. Waits for nothing."""
        held = ExitStack()
        try:
            held.enter_context(self.copies.source.lock(manifest.name, shared=True))
        except StorageError as error:
            self._failed(f"{manifest.name} was not copied", error)
            return
        self.copies.reserve(manifest.name)
        with self._guard:
            self._add(_Waiting(manifest, held))
            idle, self._working, self._came = not self._working, True, True
        if idle:
            self._background.start(self._work)

    def close(self) -> None:
        """Copy all that waits, and let go of the place. What cannot be copied now the next run copies.

        An attempt that has begun before may fail for what was then: what it leaves is tried once more.
        """
        with self._guard:
            to_do = [one.name for one in [self._current, *self._waiting] if one is not None]
            idle = bool(to_do) and not self._working
            self._working, self._came = self._working or idle, True
        if to_do:
            say(f"copying to {self.copies.target.url} before the end: {', '.join(to_do)}")
        if idle:
            self._background.start(self._work)
        self._background.wait()
        for one in self._waiting:
            _log.warning("%s is not in %s: the next run copies it", one.name, self.copies.target.url)
            one.held.close()
        self._waiting.clear()
        self.copies.close()

    def _add(self, new: _Waiting) -> None:
        """What is of the same name, or too old to wait any longer, makes room."""
        waiting = [*(one for one in self._waiting if one.name != new.name), new]
        self._let_wait(waiting, dropped=[one for one in self._waiting if one not in waiting])

    def _let_wait(self, waiting: list[_Waiting], dropped: list[_Waiting]) -> None:
        too_many = max(0, len(waiting) - self.backlog)
        self._waiting = waiting[too_many:]
        for one in [*dropped, *waiting[:too_many]]:
            _log.warning("%s is not copied to %s: newer ones wait already", one.name, self.copies.target.url)
            one.held.close()

    def _next(self) -> _Waiting | None:
        with self._guard:
            self._current = self._waiting.pop(0) if self._waiting else None
            self._working, self._came = self._current is not None, False
            return self._current

    def _work(self) -> None:
        while (one := self._next()) is not None:
            try:
                self.copies.open_target([one.name, *(other.name for other in self._waiting)])
                self.copies.copy(one.manifest)
                self.error = None
            except CheckpointError as error:  # it is damaged: that copy is never made
                self._failed(f"{one.name} is not copied", error)
            except Exception as error:  # whatever it is: the checkpoint is safe where it is, and training goes on
                self._failed(f"{one.name} was not copied and waits for the next one", error)
                if not self._put_back(one):
                    return
                continue
            one.held.close()

    def _put_back(self, one: _Waiting) -> bool:
        """Returns whether to go on at once: with one that came meanwhile, and whom nobody else would wake."""
        with self._guard:
            self._let_wait([one, *self._waiting], dropped=[])
            self._current, self._working = None, self._came
            return self._working

    def _failed(self, what: str, error: Exception) -> None:
        _log.warning("%s: %s: %s", self.copies.target.url, what, error)
        self.error = error

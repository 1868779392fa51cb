"""What is told of every checkpoint that was saved, to those who asked for it with `on_save`."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ckpt.formats.native.manifest import Manifest

_log = logging.getLogger("ckpt")
_REMEMBERED = 100  # checkpoints that may still be on their way to the mirror


@dataclass(frozen=True)
class SaveReport:
    """A checkpoint that is committed.

    Attributes:
        name: Of the checkpoint.
        url: Where it is.
        step: At which it was saved.
        size: Bytes of all its files.
        linked: Bytes of those that an earlier checkpoint has already, stored once.
        blocked: Seconds that training waited for it.
        durable: Seconds from the call until it was committed and durable.
        mirrored: Whether the mirror has it, None without a mirror; a second report says when it does.
        metrics: Those of the checkpoint.
    """

    name: str
    url: str
    step: int
    size: int
    linked: int
    blocked: float
    durable: float
    mirrored: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest, root: str, linked: int, mirrored: bool | None) -> SaveReport:
        blocked, durable = (manifest.seconds.get(key, 0.0) for key in ("blocked", "total"))
        return cls(
            manifest.name, f"{root}/{manifest.name}", manifest.step, manifest.size, linked, blocked, durable,
            mirrored, dict(manifest.metrics),
        )  # fmt: skip


Callback = Callable[[SaveReport], object]


class SaveReports:
    """Keeps reports, which come from the threads that write and copy, until the thread of training asks for them."""

    def __init__(self) -> None:
        self.callbacks: list[Callback] = []
        self._due: deque[SaveReport] = deque()
        self._sent: dict[str, SaveReport] = {}  # by id, as long as the mirror may still copy them
        self._lock = threading.Lock()

    def add(self, id: str, report: SaveReport) -> None:
        """A checkpoint with this id was committed."""
        if self.callbacks:
            with self._lock:
                self._due.append(report)
                self._sent[id] = report
                while len(self._sent) > _REMEMBERED:
                    del self._sent[next(iter(self._sent))]

    def mirrored(self, id: str) -> None:
        """The mirror has the checkpoint with this id."""
        with self._lock:
            if (report := self._sent.pop(id, None)) is not None:
                self._due.append(replace(report, mirrored=True))

    def deliver(self) -> None:
        """Call every callback with every report. What one raises is logged: the checkpoint is saved all the same."""
        while self._due:
            report = self._due.popleft()
            for callback in self.callbacks:
                try:
                    callback(report)
                except Exception as error:
                    _log.warning("on_save: %s failed at %s: %s: %s", callback, report.name, type(error).__name__, error)

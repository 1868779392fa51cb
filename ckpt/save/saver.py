"""Serialises a manager's saves: one transaction at a time, in the foreground or on the save thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ckpt.errors import NotDurableError
from ckpt.formats.native.manifest import Manifest
from ckpt.ranks.consensus import MAIN, Result, decide_together
from ckpt.save.capture import ComparisonHistory
from ckpt.save.read_back import CommittedFiles, ReadBack
from ckpt.save.root_writer import RootWriter
from ckpt.save.snapshot.snapshots import Snapshot, Snapshots
from ckpt.save.transaction import SaveRequest, SaveTransaction
from ckpt.storage import Staging
from ckpt.util.threads import OwnerProcess, Worker, gc_paused

_log = logging.getLogger("ckpt")
_PAUSE = 0.01  # seconds

# What is said of a commit to those who asked for it with `on_save`.
_REMEMBERED = 100  # checkpoints that may still be on their way to the mirror


@dataclass(frozen=True)
class SaveReport:
    """Describes a committed checkpoint.

    Attributes:
        name: The checkpoint's name.
        url: The checkpoint's URL or path.
        step: The step at which ckpt saved it.
        size: Bytes of all its files.
        linked: Bytes of files that an earlier checkpoint already has, so that ckpt stores them only once.
        blocked: Seconds that training waited for the save.
        durable: Seconds from the call until the checkpoint was committed and durable.
        mirrored: True once the mirror has it (in a second report); None without a mirror.
        metrics: The checkpoint's metrics.
        slowest_rank: The rank that took longest to write its files: every save waits for it.
        slowest: The seconds that this rank took.
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
    slowest_rank: int = MAIN
    slowest: float = 0.0

    @classmethod
    def of(
        cls, manifest: Manifest, root: str, linked: int, mirrored: bool | None, slowest: tuple[int, float]
    ) -> SaveReport:
        blocked, durable = (manifest.seconds.get(key, 0.0) for key in ("blocked", "total"))
        return cls(
            manifest.name, f"{root}/{manifest.name}", manifest.step, manifest.size, linked, blocked, durable,
            mirrored, dict(manifest.metrics), *slowest,
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
                    _log.warning(
                        "the on_save callback %s failed for %s: %s: %s",
                        callback,
                        report.name,
                        type(error).__name__,
                        error,
                    )


# Saves in the background: one is being written, and at most one waits for its turn.


class QueuedSave(NamedTuple):
    """A save that was captured: its name, what writes it, and what gives it up."""

    name: str
    run: Callable[[], None]
    discard: Callable[[], None]


class SaveQueue:
    """Runs saves one after the other in the save thread. `wait` or `check` raises the error of one that failed."""

    def __init__(self) -> None:
        self._worker = Worker("ckpt-save")
        self._turn = threading.Condition()
        self._is_running = False
        self._waiting: QueuedSave | None = None
        self._earlier: BaseException | None = None  # an error that nobody has been told yet
        self.is_awaited = False  # training waits for the save under way

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._worker.busy

    def add(self, save: QueuedSave) -> None:
        """Begin this save, after the one under way if there is one. Blocks while another waits for its turn.

        If the one before has failed, that is raised, and this one is not begun.
        """
        with self._turn:
            with self._awaited():
                self._turn.wait_for(lambda: self._waiting is None)
            self._put(save)

    def withdraw(self) -> QueuedSave | None:
        """Take back the save that waits for its turn, if there is one."""
        with self._turn:
            save, self._waiting = self._waiting, None
            return save

    def restore(self, save: QueuedSave) -> None:
        """Put a save back that was withdrawn. None was added meanwhile."""
        with self._turn:
            try:
                self._worker.check()
            except BaseException as error:  # of the one before: raised later, as this one must be written all the same
                self._earlier = error
            self._put(save)

    def wait(self) -> None:
        """Wait until no save is under way. If a save failed, raises its error; later calls don't raise it again."""
        with self._awaited():
            self._worker.wait()
        self._raise_earlier()

    def check(self) -> None:
        """Raise the error of a failed save, if none is under way. Does not wait."""
        self._worker.check()
        self._raise_earlier()

    @contextmanager
    def _awaited(self) -> Iterator[None]:
        self.is_awaited = True
        try:
            yield
        finally:
            self.is_awaited = False

    def _raise_earlier(self) -> None:
        error, self._earlier = self._earlier, None
        if error is not None:
            raise error

    def _put(self, save: QueuedSave) -> None:
        if self._is_running:
            self._waiting = save
        else:
            self._worker.start(lambda: self._run_all(save))
            self._is_running = True  # the thread needs the lock to end

    def _run_all(self, save: QueuedSave) -> None:
        """Run a save, and every one that waits when it is done, though it may have failed."""
        error: BaseException | None = None
        following: QueuedSave | None = save
        while following is not None:
            try:
                following.run()
            except BaseException as failure:
                error = error or failure
            following = self._next()
        if error is not None:
            raise error

    def _next(self) -> QueuedSave | None:
        with self._turn:
            save, self._waiting = self._waiting, None
            self._is_running = save is not None
            self._turn.notify_all()
            return save


class Saver:
    """Saves into one root, for one manager: captures on the caller's thread, writes there or on the save thread.

    `read_back`: whether checkpoints are read back from the disk.
    """

    def __init__(
        self,
        root: RootWriter,
        snapshots: Snapshots | None = None,
        read_back: bool | None = None,
        channel: str = "saving",
    ) -> None:
        self.root = root
        self.snapshots = snapshots or Snapshots()
        self.read_back = ReadBack(root, read_back)
        self.compared = ComparisonHistory()
        self.reports = SaveReports()
        self.has_news = False  # for the thread of training: see `tell`
        if root.mirror is not None:
            root.mirror.on_copied = self._note_copied
        self.owner = OwnerProcess()
        self._channel = root.ranks.channel(channel)  # saves run beside whatever else the ranks talk about
        self._queue = SaveQueue()
        self._written: Snapshot | None = None  # of the last save, in memory until the next one
        self.has_saved = False  # or has tried to
        self.has_prefaulted = False
        self._replaced = 0  # saves

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._queue.busy

    def is_busy_anywhere(self, name: str) -> bool:
        """Whether a save is under way on any rank, so that the save of this name is skipped. The same on every rank."""
        found = decide_together(self.root.ranks, f"save_state({name!r})", Result(self.busy), any)
        if found and self.root.ranks.rank == MAIN:
            _log.info("ckpt skips %s, because it is still writing the previous save", name)
        return found

    def prefault(self, tensors: Callable[[], Iterable[torch.Tensor]], *, for_devices_only: bool) -> None:
        """Allocate host memory for these tensors in the background, once, so that the first save is no slower.

        Not while a save uses the memory that there is.
        """
        if not self.has_prefaulted and not self.busy:
            self.has_prefaulted = True
            self.snapshots.prefault(tensors(), for_devices_only=for_devices_only)

    def reading(self) -> AbstractContextManager[None]:
        """A context in which memory is not prefaulted, so that a load has the machine for itself."""
        return self.snapshots.paused() if self.has_prefaulted else nullcontext()

    def save(self, request: SaveRequest, *, wait: bool, replace: bool = False, root: RootWriter | None = None) -> None:
        """Capture, write and commit on all ranks, or raise on all. Without `wait`, only the capture is waited for.

        With `replace` nothing is waited for while another save is being written: this one takes the place of the one
        that waits for its turn, if there is one. `root`: the writer of another root, which is released after it.
        """
        self.owner.require(f"save_state({request.name!r})")
        self.reports.deliver()
        self.has_saved = True
        if replace and not wait:
            self._replace_waiting(request.name)
        else:
            self._queue.wait()
        save = self._capture(request, root or self.root, snapshot=not wait)
        save.attended = wait or not self._is_detached(save, everywhere=replace)
        if not save.attended:
            self._begin(save)
            return
        self._queue.wait()
        self._carry_out(save)
        if wait and isinstance(save.root.storage, Staging):
            self._settle_together(request.name)
        self.reports.deliver()

    def _is_detached(self, save: SaveTransaction, *, everywhere: bool) -> bool:
        """Whether training may continue. With `everywhere`, on all ranks: or one would replace what another writes."""
        if not everywhere:
            return save.detached
        call = f"save_state({save.request.name!r}) (in memory)"
        return decide_together(self.root.ranks, call, Result(save.detached), all)

    def _begin(self, save: SaveTransaction) -> None:
        self.has_news = True
        try:
            self._queue.add(QueuedSave(save.request.name, lambda: self._carry_out(save), save.discard))
        except Exception:  # not an interrupt: the save may have begun
            save.discard()
            raise

    def _capture(self, request: SaveRequest, root: RootWriter, *, snapshot: bool) -> SaveTransaction:
        if not self.busy:
            self._release_written()
        save = SaveTransaction(root, self.snapshots, self._channel, self.compared, request)
        queue = self._queue
        save.is_awaited = lambda: queue.is_awaited
        with gc_paused():
            save.capture()
            save.take_snapshot(wanted=snapshot)
            if snapshot and not save.detached and self.busy:  # the memory may be that of the save under way
                self._queue.wait()
                self._release_written()
                save.take_snapshot(wanted=True)
        return save

    def _replace_waiting(self, name: str) -> None:
        """Take the place of the save that waits for its turn, if it does so on all ranks."""
        waiting = self._queue.withdraw()
        mine = Result[str | None](None if waiting is None else waiting.name)
        replaced: str | None = None
        try:
            replaced = decide_together(self.root.ranks, f"save_state({name!r}) (its turn)", mine, _common)
        finally:
            if waiting is not None and replaced is None:  # it has begun on another rank
                self._queue.restore(waiting)
        if waiting is not None and replaced is not None:
            waiting.discard()
            self._report_replaced(replaced, name)

    def _report_replaced(self, replaced: str, name: str) -> None:
        """At level WARNING the first time: a program that saves so often replaces many. `close` says how many."""
        if self.root.ranks.rank == MAIN:
            level = logging.INFO if self._replaced else logging.WARNING
            text = "ckpt skips %s and saves %s instead, because it can't write checkpoints as fast as they come"
            _log.log(level, text, replaced, name)
        self._replaced += 1

    def abandon(self, patience: float) -> None:
        """Wait so many seconds for the save under way, then for no other rank any more."""
        deadline = time.monotonic() + patience
        while self.busy and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        self._channel.abandon()

    def release_idle(self) -> None:
        """Give back the memory of the last save, unless a save is under way or its files are being read back."""
        if not self.busy and not self.read_back.busy:
            self._release_written()

    def _release_written(self) -> None:
        """Give back the memory of the last save. Nothing may be reading it."""
        self.read_back.stop()
        written, self._written = self._written, None
        if written is not None:
            written.release()

    def wait(self) -> None:
        """Wait until no save is under way and all saves are durable. If a save failed, raises its error; later
        calls don't raise it again."""
        self.owner.require("wait()")
        try:
            self._queue.wait()
        finally:
            self.reports.deliver()
        if self.root.ranks.rank == MAIN:
            self.root.settle()

    def tell(self, *, errors: bool) -> None:
        """Deliver the reports of saves behind training, and with `errors` raise the one of a save that failed, once.

        To be called while there `has_news`: from the beginning of such a save on until it was told of.
        """
        self.has_news = self.busy  # asked first: a save that ends after this is told of at the next step
        if errors:
            self.check()
        self.reports.deliver()

    def check(self) -> None:
        """Raise the error of the last save, if it has failed and nothing has raised it yet."""
        self._queue.check()

    def _note_copied(self, id: str) -> None:
        self.reports.mirrored(id)
        self.has_news = True

    def close(self) -> None:
        """Finish the copies to the mirror, then release snapshot memory and the root.

        If you interrupted the wait for a save, that save is still under way, so nothing is released. A forked child
        releases nothing, because the saver belongs to the parent process.
        """
        if self.busy or not self.owner.is_here:
            return
        if self._replaced > 1 and self.root.ranks.rank == MAIN:
            _log.warning(
                "ckpt skipped %d saves, because newer saves replaced them before ckpt could write them", self._replaced
            )
        self._release_written()
        self.snapshots.close()
        self.root.close()
        self.reports.deliver()  # of copies to the mirror

    def _carry_out(self, save: SaveTransaction) -> None:
        self._release_written()
        try:
            with self._channel.working():
                save.run()
        except Exception as error:
            self._after_failure(save.root, save.request.name, error)
            raise
        finally:
            self._written = save.snapshot
            if save.snapshot is not None:
                save.snapshot.leave_devices()
                if not save.snapshot.in_host_memory:
                    self._release_written()
        if save.is_saved:
            self._report(save)
        if save.root is not self.root:
            save.root.close()
            return
        if not save.is_saved:
            self.read_back.start(_committed(save))  # this save stopped the reading of the same checkpoint
            return
        before = [summary.name for summary in self.root.lock.committed]
        self.root.retain()
        kept = {summary.name for summary in self.root.lock.committed}
        removed = [name for name in before if name not in kept]
        save.trace(f"kept {len(kept)} checkpoints" + (f", removed {', '.join(removed)}" if removed else ""))
        self.read_back.start(_committed(save))

    def _report(self, save: SaveTransaction) -> None:
        root = save.root
        manifest = root.committed_as(save.request.name) if root.ranks.rank == MAIN else None
        if manifest is not None:
            mirrored = None if root.mirror is None else False
            report = SaveReport.of(manifest, root.storage.url, save.linked, mirrored, save.slowest)
            self.reports.add(manifest.id, report)

    def _after_failure(self, root: RootWriter, name: str, error: Exception) -> None:
        root.abandon(name, error)
        if root is not self.root:
            root.close()
        if root.ranks.rank == MAIN:
            prefix = "" if isinstance(error, NotDurableError) else f"{root.storage.url}/{name} was not saved: "
            _log.error("%s%s", prefix, error)

    def _settle_together(self, name: str) -> None:
        with self._channel.working():
            call = f"save_state({name!r}) (durable)"
            decide_together(self._channel, call, Result(), lambda _: self.root.settle())


def _common(names: list[str | None]) -> str | None:
    """The name that all ranks have; None if one has another, or none."""
    return names[0] if len(set(names)) == 1 else None


def _committed(save: SaveTransaction) -> CommittedFiles:
    """The files that this rank has written, and their bytes where a snapshot or a document has them in memory."""
    in_memory = {document.path: document for document in save.documents}
    if save.snapshot is not None and save.snapshot.in_host_memory:
        in_memory |= save.snapshot.files
        in_memory |= {file.path: file for file in save.captured.get().diverged_files}
    return CommittedFiles(save.request.name, save.root.lineage.parent or "", tuple(save.written), in_memory)

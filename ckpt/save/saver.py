"""Serialises a manager's saves: one transaction at a time, in the foreground or on the save thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from ckpt.errors import NotDurableError
from ckpt.ranks.consensus import Result, decide_together
from ckpt.ranks.group import MAIN
from ckpt.save.comparison_history import ComparisonHistory
from ckpt.save.root_writer import RootWriter
from ckpt.save.snapshot import Snapshots
from ckpt.save.transaction import SaveRequest, SaveTransaction
from ckpt.storage import Staging
from ckpt.util.fork_safety import OwnerProcess
from ckpt.util.gc_pause import gc_paused
from ckpt.util.threads import SerialWorker

_log = logging.getLogger("ckpt")


class Saver:
    """Saves into one root, for one manager: captures on the caller's thread, writes there or on the save thread.

    `host_memory`: bytes that snapshots may take at most.
    """

    def __init__(self, root: RootWriter, host_memory: int | None = None) -> None:
        self.root = root
        self.snapshots = Snapshots(host_memory)
        self.compared = ComparisonHistory()
        self.owner = OwnerProcess()
        self._channel = root.ranks.channel("saving")  # saves run beside whatever else the ranks talk about
        self._background = SerialWorker("ckpt-save", caller_first=True)
        self._has_prefaulted = False

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._background.busy

    def is_busy_anywhere(self, name: str) -> bool:
        """Whether a save is under way on any rank, so that the save of this name is skipped. The same on every rank."""
        found: bool = decide_together(self.root.ranks, f"save_state({name!r})", Result(self.busy), any)
        if found and self.root.ranks.rank == MAIN:
            _log.info("%s is not saved: the save before it is still being written", name)
        return found

    def prefault(self, tensors: Callable[[], Iterable[torch.Tensor]], *, for_devices_only: bool) -> None:
        """Allocate host memory for these tensors in the background, once, so that the first save is no slower.

        Not while a save uses the memory that there is.
        """
        if not self._has_prefaulted and not self.busy:
            self._has_prefaulted = True
            self.snapshots.prefault(tensors(), for_devices_only=for_devices_only)

    def save(self, request: SaveRequest, *, wait: bool) -> None:
        """Capture, write and commit on all ranks, or raise on all. Without `wait`, only the capture is waited for."""
        self.owner.require(f"save_state({request.name!r})")
        self._background.wait()
        save = SaveTransaction(self.root, self.snapshots, self._channel, self.compared, request)
        with gc_paused():
            save.capture(snapshot=not wait)
        save.attended = wait or not save.detached
        if save.attended:
            self._carry_out(save)
        else:
            self._background.start(lambda: self._carry_out(save))
        if wait and isinstance(self.root.storage, Staging):
            self._settle_together(request.name)

    def wait(self) -> None:
        """Until no save is under way, and all are durable. Raises the error of a failed save, once."""
        self.owner.require("wait()")
        self._background.wait()
        if self.root.ranks.rank == MAIN:
            self.root.settle()

    def check(self) -> None:
        """Raise the error of the last save, if it has failed and nothing has raised it yet."""
        self._background.check()

    def close(self) -> None:
        """Release snapshot memory and the root, when all copies to the mirror are made.

        If waiting for a save was interrupted, that save is still under way and keeps both. In a forked child nothing is
        released: all of it is the parent's.
        """
        if self.busy or not self.owner.is_here:
            return
        self.snapshots.close()
        self.root.close()

    def _carry_out(self, save: SaveTransaction) -> None:
        try:
            with self._channel.working():
                save.run()
        except Exception as error:
            self._after_failure(save.request.name, error)
            raise
        self.root.retain()

    def _after_failure(self, name: str, error: Exception) -> None:
        self.root.abandon(name, error)
        if self.root.ranks.rank == MAIN:
            prefix = "" if isinstance(error, NotDurableError) else f"{self.root.storage.url}/{name} was not saved: "
            _log.error("%s%s", prefix, error)

    def _settle_together(self, name: str) -> None:
        with self._channel.working():
            call = f"save_state({name!r}) (durable)"
            decide_together(self._channel, call, Result(), lambda _: self.root.settle())

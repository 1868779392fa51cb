"""The memory tier of a run: snapshots in host memory between the checkpoints of the root."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.errors import CkptError, FullError, RanksError, StorageError
from ckpt.memory.meeting import Meeting
from ckpt.memory.place import read_step, remove_token, write_step
from ckpt.memory.replicas import Replicas
from ckpt.memory.room import GIVE_WAY, SAVE, SKIP, TrainingPeak, Verdict, View, save_unless, verdict_of
from ckpt.memory.slot_storage import slot_storage
from ckpt.memory.slots import SlotSaver, SlotWriter
from ckpt.memory.statistics import Statistics
from ckpt.ranks.consensus import MAIN, Ranks, Result, decide_together
from ckpt.ranks.hosts import Hosts
from ckpt.ranks.schedule_and_signals import SaveSchedule
from ckpt.root.catalog import manifests_of_run
from ckpt.save.capture import ComparisonHistory
from ckpt.save.root_writer import Lineage, RootWriter
from ckpt.save.saver import Saver, SaveReport
from ckpt.save.transaction import SaveRequest
from ckpt.storage import Storage

if TYPE_CHECKING:
    from ckpt.save.cadence import Cadence

_log = logging.getLogger("ckpt")


def warn_of_unsaved(root: RootWriter, taken_at: int) -> None:
    """Warn if no checkpoint of the run is as new as the snapshot of this step. What cannot be listed is not judged."""
    with suppress(StorageError):
        found = manifests_of_run(root.storage, root.lineage.run)
        steps = [int(manifest.progress.get("step", 0)) for manifest in found]
        if max(steps, default=0) < taken_at:
            url = root.storage.url
            newest = f"the newest checkpoint in {url} has step {max(steps):,}" if steps else f"{url} has no checkpoint"
            _log.warning(
                "the run has ended, so ckpt removes the snapshot of step %s from memory, but %s. Call save_state() at "
                "the end of training.", f"{taken_at:,}", newest,
            )  # fmt: skip


def warn_left_out(every: int | str) -> None:
    """Once: the snapshot before is still being written, or copied to the next host."""
    _log.warning(
        "Skipped a memory snapshot: the previous one is still being written. Memory(every=%r) asks for snapshots "
        "too often for this machine. From now on, ckpt counts skipped snapshots without a warning.", every,
    )  # fmt: skip


def report_off_until(step: int, why: str, *, again: bool) -> None:
    """The tier gives way to the training. A warning the first time."""
    text = "snapshots in memory are off until step %d: %s. Training and the root are not affected."
    _log.log(logging.INFO if again else logging.WARNING, text, step, why.rstrip("."))


_PAUSE = 10  # intervals between snapshots until a tier that gave way is tried again; doubled every time
_LONGEST_PAUSE = 1000
_WORTH_PREPARING = 64 << 20  # bytes
_PATIENCE = 2.0  # seconds that the end of a failed run waits for the snapshot under way


@dataclass
class MemoryTier:
    """Takes snapshots of the state into memory, so often as `every` says, and finds those that a killed run has left.

    `saver`: that of the root, whose writer numbers both and whose snapshot memory both use. `meeting`: finds and
    makes the folder of this host. `replicas`: the copies that hosts keep of each other's snapshots. `cadence`: chooses
    the time between snapshots, if `every` is "auto". Whatever goes wrong here is one line in the log, and never an
    error of the training, except that a rank is gone.
    """

    every: int | str
    ranks: Ranks
    saver: Saver
    meeting: Meeting
    replicas: Replicas
    cadence: Cadence | None = None
    statistics: Statistics = field(default_factory=Statistics)
    compared: ComparisonHistory = field(default_factory=ComparisonHistory)
    crashed_at: int | None = None  # the step that the run before had reached
    _slots: SlotSaver | None = None
    _error: Exception | None = None  # of the last snapshot
    _taken_at: int | None = None  # step at which one was due
    _due_at: int | None = None
    _asked_at: int = 0
    _apart: int = 1  # steps between the last two for which the schedule asked
    _held_at: int | None = None  # step of the newest one that was begun and not given up
    continues: bool = False  # whether this run continues from what is in memory
    _is_settled: bool = False  # what was there before is this run's own, or was removed
    _has_trained: bool = False
    _is_prepared: bool = False  # or it was tried
    _resume_at: int = 0  # the step before which nothing is tried, after the tier gave way
    _pause: int = _PAUSE
    _said: set[str] = field(default_factory=set)
    _damaged: set[str] = field(default_factory=set)
    _has_received: bool = False  # a snapshot from another host
    _peak: TrainingPeak = field(default_factory=TrainingPeak)
    is_off: bool = False

    def __post_init__(self) -> None:
        steps, time = (self.every, None) if isinstance(self.every, int) else (None, self.every)
        self._apart = steps or 1
        interval = time if self.cadence is None else self.cadence.after_step
        if self.cadence is not None:
            tier = weakref.ref(self)  # without a cycle: a root that nobody uses any more is free at once
            self.cadence.busy = lambda: (found := tier()) is not None and found.busy
        self._schedule = SaveSchedule(self.ranks, steps, interval, what="snapshot")

    @property
    def hosts(self) -> Hosts:
        """Which ranks share a host's memory."""
        return self.meeting.hosts

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing a snapshot."""
        return self._slots is not None and self._slots.busy

    def find(self) -> Storage | None:
        """The snapshots that are in this host's memory, if any host has a folder. Every rank makes this call."""
        self.wait()
        if not self._meet():
            return None
        self._has_received |= self.replicas.restore(self.meeting)
        place = self.meeting.place
        if place is not None and self.ranks.rank == MAIN:
            self.crashed_at = read_step(place)
        there = decide_together(self.ranks, "load_state() (in memory)", Result(place is not None), any)
        return slot_storage(place) if there else None

    def loaded(self, passed_over: list[str] | None) -> None:
        """A checkpoint was loaded: from memory, where these snapshots cannot be used; None if it came from elsewhere.

        Then what is in memory is damaged, older, or was left on purpose: a later resume must not take it, once this run
        has the root and makes a step. Until then the snapshots may be those of a run that lives. Every rank makes this
        call.
        """
        self.continues = passed_over is not None
        self._damaged |= set(passed_over or ())
        self._taken_at = None  # training may have gone back: the same step is taken again
        if self._is_settled and not self.continues:
            self._held_at = None
            self._close_slots()
            self.meeting.forget()

    def root_is_held(self) -> None:
        """The main rank has locked the root: what is in memory elsewhere, and not continued from, is not the root's."""
        if self._is_settled:
            self.meeting.renew_token()  # the root was removed under this run, and made anew
        elif not self.continues:
            remove_token(self.saver.root.storage)

    def settle(self) -> None:
        """This run has the root: snapshots of before are its own, or are removed. Every rank makes this call."""
        if self._is_settled or not self._meet():
            return
        self._is_settled = True
        if self.cadence is not None and self.ranks.rank == MAIN:
            self.cadence.begin()
        self._schedule.restart()
        self.meeting.settle() if self.continues else self.meeting.forget()

    def stepped(self, step: int) -> None:
        """Record the step that training has reached: a restart says what the crash has cost. On every rank.

        The first step after a load that has left the snapshots takes the root: without that, a crash before the next
        save or snapshot would resume from what was gone back from.
        """
        if not (self._is_settled or self.continues or self.is_off) and self._meet():
            self._take_root()
        self._has_trained = True
        if self._slots is not None:
            self._slots.reports.deliver()
        if self.meeting.place is not None and self._is_settled and self.ranks.rank == MAIN:
            with suppress(OSError):
                write_step(self.meeting.place, step)

    def is_due(self, step: int) -> bool:
        """Whether a snapshot is to be taken after this step. The same on every rank; all ask once after every step."""
        is_asked_for = self._schedule.is_due(step)
        if is_asked_for:
            self._schedule.restart()
            self._apart = self._schedule.steps or max(1, step - self._asked_at)
            self._asked_at = step
        is_due = is_asked_for and step >= self._resume_at and not self.is_off and step != self._taken_at
        self._due_at = step if is_due else None
        return is_due

    def is_to_prepare(self, step: int) -> bool:
        """Whether memory is to be made ready after this step, the first of a run. The same on every rank.

        A run that continues from memory has its pages already.
        """
        is_over = self._is_prepared or self.continues or self.is_off or self._taken_at is not None
        return step > 0 and not is_over and self._due_at != step

    def prepare(self, request: SaveRequest, step: int) -> None:
        """Begin to make the memory of the first snapshot ready, if it is large. Every rank makes this call."""
        self._is_prepared = True
        verdict = self._agreed(request, step, least=_WORTH_PREPARING)
        if verdict == SAVE:
            self._try(lambda slots: slots.prepare(request))

    def save(self, request: SaveRequest, step: int) -> None:
        """Take a snapshot, unless that of before is under way or there is no room. Every rank makes this call."""
        began = time.monotonic()
        self._taken_at = step
        verdict = self._agreed(request, step)
        if verdict == SKIP:
            self._skip()
        elif verdict == SAVE:
            self._begin(request)
        self.statistics.waited += time.monotonic() - began

    def _agreed(self, request: SaveRequest, step: int, least: int = 0) -> str:
        """What all ranks do. To give way is done here."""
        if not self._meet() or not self._take_root():
            return GIVE_WAY
        verdict = self._agree(request, least)
        if verdict["do"] == SAVE and not self.meeting.complete:
            verdict = self._settle_in(verdict)
        if verdict["do"] == GIVE_WAY:
            self._give_way(verdict, step)
        return verdict["do"]

    def wait(self) -> None:
        """Wait until no snapshot is under way. Raises no error: the next snapshot reports what went wrong."""
        if self._slots is not None:
            try:
                self._slots.wait()
            except Exception as error:  # of any kind: training continues
                self._error = error

    def close(self, *, keep: bool) -> None:
        """End the tier: remove all snapshots in memory, or, with `keep`, leave them for a restart.

        A run that has only read the snapshots also leaves them in memory. With `keep`, ckpt does not wait for a
        snapshot under way: another rank may have died during that snapshot.
        """
        if keep and self._slots is not None:
            self._slots.abandon(_PATIENCE)
            self.replicas.close()
        self._close_slots()
        has_worked = self._is_settled and (self._has_trained or self.saver.has_saved)
        if has_worked and not keep and self.ranks.rank == MAIN and self._held_at is not None:
            warn_of_unsaved(self.saver.root, self._held_at)
        if self._has_received and not self._is_settled:  # only to look: the other host has it as well
            self.meeting.remove()
        self.meeting.end() if has_worked and not keep else self.meeting.leave()
        self._is_settled = self.continues = False  # the root is released: other runs may come
        if self.ranks.rank == MAIN and self.statistics.taken:
            _log.info("%s", self.statistics)

    def _meet(self) -> bool:
        """Whether the tier can be used on all ranks. The same on every rank."""
        try:
            self.meeting.find()
        except RanksError:
            raise
        except (CkptError, OSError) as error:
            self.turn_off(str(error))
        return not self.is_off

    def _take_root(self) -> bool:
        """Lock the root, if that is not done: its run alone has snapshots. Whether it was possible, on every rank."""
        if not self._is_settled:
            try:
                self.saver.root.hold("step() (memory)", resumed=False)
            except RanksError:
                raise
            except (CkptError, OSError) as error:
                self.turn_off(str(error))
                return False
            self.settle()
        return not self.is_off

    def _agree(self, request: SaveRequest, least: int) -> Verdict:
        """What all ranks do, as the main rank decides from what each of them sees; nothing if all have less to save."""
        view = self._view(request)
        call, copies = f"step() (memory, {request.name})", bool(self.replicas.count and not self.replicas.is_off)

        def decide(views: list[View]) -> Verdict:
            if all(view["size"] < least for view in views):
                return {"do": SKIP, "why": "", "free": False, "small": []}
            return verdict_of(views, self.hosts, copies)

        return decide_together(self.ranks, call, Result(view), decide)

    def _view(self, request: SaveRequest) -> View:
        view: View = {"busy": False, "error": "", "full": False, "size": 0, "peak": 0, "room": None}
        try:
            self._check()
            view["busy"] = self.busy
            view["size"], view["peak"] = self._size_of(request), self._peak.more()
            view["room"] = self.meeting.measure_room() if self.meeting.owns_place else None
        except Exception as error:  # of any kind: the others must learn of it
            self._error = error
        if self._error is not None:
            view["error"] = str(self._error) or type(self._error).__name__
            view["full"] = isinstance(self._error, FullError | MemoryError)
        return view

    def _check(self) -> None:
        if self._slots is not None and not self._slots.busy:
            try:
                self._slots.check()
            except Exception as error:
                self._error = error

    def _settle_in(self, verdict: Verdict) -> Verdict:
        """Make the folders that are missing, on all hosts."""
        try:
            why = self.meeting.make(verdict["small"])
        except RanksError:
            raise
        except (CkptError, OSError) as error:
            why = str(error)
        return save_unless(why)

    def _begin(self, request: SaveRequest) -> None:
        self.replicas.prepare(self.hosts)

        def begin(slots: SlotSaver) -> None:
            self.saver.release_idle()
            slots.save(request, wait=False)
            self.meeting.note_life()
            self.statistics.taken += 1
            self._held_at = self._taken_at

        self._try(begin)

    def _try(self, do: Callable[[SlotSaver], None]) -> None:
        try:
            do(self._open_slots())
        except Exception as error:  # of any kind: all ranks learn of it before the next snapshot
            self._error = error

    def _size_of(self, request: SaveRequest) -> int:
        """Bytes that this rank writes: as many as for the last snapshot, or what it would write now."""
        if self._slots is None or self._slots.size is None:
            return sum(file.size for file in request.capture().encode().files)
        return self._slots.size

    def _open_slots(self) -> SlotSaver:
        if self._slots is None:
            main, place = self.saver.root, self.meeting.place
            assert place is not None
            storage = slot_storage(place)
            writer = SlotWriter(
                storage,
                self.ranks,
                hosts=self.hosts,
                numbering=main.numbering,
                seal=main.seal,
                lineage=Lineage(has_resumed=True),
                damaged=self._damaged,
                main=main,
            )
            self._slots = SlotSaver(writer, self.saver.snapshots, read_back=False, channel="memory")
            self._slots.compared = self.compared
            self._slots.after_commit = lambda name: self.replicas.exchange(name, self.meeting.place)
            if self.cadence is not None:
                self._slots.reports.callbacks.append(self._note)
        return self._slots

    def _note(self, report: SaveReport) -> None:
        assert self.cadence is not None
        self.cadence.saved(report.blocked, report.durable)

    def _close_slots(self) -> None:
        self.wait()
        slots, self._slots = self._slots, None
        if slots is not None:
            with suppress(CkptError, OSError):
                slots.close()

    def _skip(self) -> None:
        self.statistics.skipped += 1
        if self.ranks.rank == MAIN and "skip" not in self._said:
            self._said.add("skip")
            warn_left_out(self.every)

    def _give_way(self, verdict: Verdict, step: int) -> None:
        """Try again later. The same on every rank."""
        self._close_slots()
        self.meeting.complete = False
        if verdict["free"] or (self.meeting.place is not None and not self.meeting.place.is_there):
            self.meeting.remove()
            self._held_at = None
        self._error = None
        self._resume_at = step + self._pause * self._apart
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if self.ranks.rank == MAIN:
            report_off_until(self._resume_at, verdict["why"], again="room" in self._said)
            self._said.add("room")

    def turn_off(self, why: str) -> None:
        """Take no more snapshots, and say why. The same on every rank."""
        self.is_off = True
        if self.ranks.rank == MAIN:
            _log.warning("snapshots in memory are off: %s", why)

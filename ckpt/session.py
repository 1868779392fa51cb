"""What a `StateManager` consists of, and how a save, a load and a step go through it.

The manager is the facade: its methods, documented for users. Integrations and the selftest, which need more than users
do, go through `manager.session`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ckpt.data.loop import Loop
from ckpt.data.progress import MetricCurves, as_numbers, checked_metrics
from ckpt.errors import ConfigError, DamagedError, Preempted, StorageError
from ckpt.formats.checkpoint_name import check_name, name_of_step
from ckpt.load.load_state import LiveObjects, Locations, Restored, StateLoader
from ckpt.memory.session_tier import (
    build_tier,
    find_snapshots,
    has_save_hooks,
    memory_facts,
    note_load,
    without_this_save,
)
from ckpt.options import Every, ManagerOptions, RankOptions
from ckpt.ranks.consensus import MAIN, Ranks
from ckpt.ranks.find import find_ranks
from ckpt.ranks.hosts import Hosts, count_hosts, find_hosts, may_have_separate_roots
from ckpt.ranks.schedule_and_signals import Preemption, SaveSchedule
from ckpt.root.catalog import History
from ckpt.root.mirror import Copies, MirrorPatience, MirrorWorker
from ckpt.root.open import refuse_checkpoint, try_out_tiers
from ckpt.root.retention import Keep
from ckpt.root.signing import open_keys
from ckpt.save.capture import LiveState, StateCapture
from ckpt.save.finite_guard import FiniteGuard
from ckpt.save.last_boundary import LastBoundary
from ckpt.save.root_writer import AttemptLog, RootWriter, device_name, versions
from ckpt.save.saver import Saver, SaveReport
from ckpt.save.snapshot.snapshots import Snapshots
from ckpt.save.transaction import SaveRequest
from ckpt.state import rng
from ckpt.state.objects import GivenObjects, ObjectSource
from ckpt.state.registry import StateRegistry, weakly
from ckpt.state.unmanaged import UnmanagedWatch
from ckpt.state.unwrap import walked_once
from ckpt.storage import MemoryStorage, Storage, place_of
from ckpt.util.console import say
from ckpt.util.option_values import AUTO

if TYPE_CHECKING:
    from ckpt.export.card import Training
    from ckpt.export.push import Pusher
    from ckpt.memory.tier import MemoryTier
    from ckpt.save.cadence import Cadence


def meet_ranks(options: RankOptions, tiers: tuple[Storage, ...], patience: MirrorPatience) -> tuple[Ranks, Hosts]:
    """The ranks of a job and their hosts. Refuses a root or a mirror that they cannot use."""
    storage = tiers[0]
    place, own_root = place_of(storage), may_have_separate_roots(storage, shared=options.shared)
    ranks = find_ranks(place, own_root=own_root, **options.meeting)
    if ranks.world_size > 1 and any(isinstance(storage, MemoryStorage) for storage in tiers):
        raise ConfigError(
            "memory:// keeps files inside one process, but this job has several processes. Give a root that all "
            "processes can see."
        )
    try_out_tiers(*tiers, patience=patience)
    refuse_checkpoint(storage)
    return ranks, find_hosts(ranks, storage, shared=options.shared)


def build_mirror(
    options: ManagerOptions,
    tiers: tuple[Storage, ...],
    keep: Keep | None,
    ranks: Ranks,
    hosts: Hosts,
    patience: MirrorPatience,
) -> MirrorWorker | None:
    """The worker that copies to the mirror, if there is one."""
    if (mirror := options.mirror) is None:
        return None
    copies = Copies(
        tiers[0],
        tiers[1],
        keep=keep if mirror.keep is None else mirror.keep,
        bandwidth=mirror.bytes_per_second,
        has_all_files=not hosts.separate_roots,
        is_leader=ranks.rank == MAIN,
    )
    return MirrorWorker(copies, mirror.backlog, patience)


def build_registry(source: ObjectSource, gradients: bool | None, loop: Loop, ranks: Ranks) -> StateRegistry:
    """The registry of the source's objects, whose optimizers the loop watches."""
    gradients = (source.gradients or None) if gradients is None else gradients
    return StateRegistry(source.find, (loop.watch,), gradients=gradients, members=ranks.members)


def connect_loop(loop: Loop, registry: StateRegistry, source: ObjectSource) -> None:
    """Let the loop follow the loaders that it was given. They may outlive the manager, so nothing of it is held by
    them."""
    reference = weakref.ref(registry)
    loop.has_data = lambda: bool((found := reference()) is not None and found.generators)
    loop.before_pass = weakly(registry.refresh)
    loop.sets_iteration = isinstance(source, GivenObjects)
    loop.follow_named()
    source.on_loader(weakly(loop.follow_named))


_Metrics = Mapping[str, Any] | None
_Root = RootWriter | None


def _step_of(loop: Loop) -> Callable[[], int]:
    """Where a loop is, for what outlives the manager, which the loop may hold. Where it is gone, 0."""
    reference = weakref.ref(loop)
    return lambda: found.progress.step if (found := reference()) is not None else 0


class RunState:
    """What a checkpoint of a run holds: everything that is managed, where training is, and how that is called."""

    def __init__(self, ranks: Ranks, source: ObjectSource, registry: StateRegistry, loop: Loop) -> None:
        self.ranks, self.source, self.registry, self.loop = ranks, source, registry, loop
        self.metrics: dict[str, Any] = {}  # of the last step
        self.curves = MetricCurves() if ranks.rank == MAIN else None
        self.attempt = AttemptLog(_step_of(loop), dict if self.curves is None else self.curves.numbers)
        self.saved_at: tuple[int, int] | None = None

    @property
    def position(self) -> tuple[int, int]:
        """Step and epoch."""
        return self.loop.progress.step, self.loop.progress.epoch

    @property
    def is_saved(self) -> bool:
        """Whether the root has a checkpoint of this step, in this epoch."""
        return self.saved_at == self.position

    @property
    def is_step_saved(self) -> bool:
        """Whether the root has a checkpoint of this step, in this epoch or before its end."""
        return self.saved_at is not None and self.saved_at[0] == self.loop.progress.step

    @property
    def name(self) -> str:
        return self.source.name() or name_of_step(self.loop.progress.step)

    def facts(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        return {"progress": self.loop.saved_progress().to_json(), "metrics": metrics}

    def capture(self, capture: StateCapture, source: Mapping[str, Any] | None = None) -> LiveState:
        """Everything as it is now. `source`: the state of the source, if not what it says itself."""
        with walked_once():
            own, lacking = self.registry.own_parts_to_save(self.ranks.rank)
            for what, why in lacking.items():
                self.loop.caveats.tell(f"lacking/{what}", why, what=f"checkpoints lack {what}: ")
            rank_state = {
                "rng": rng.capture(),
                "generators": {key: rng.capture_one(found) for key, found in self.registry.generators.items()},
                "loaders": self.loop.state(),
                "loop": self.loop.seen(),
                "source": self.source.state() if source is None else source,
                "lacking": lacking,
            }
            return capture.capture(self.registry.parts.values(), own, rank_state | self.registry.values.to_save())


def cadence_of(when: Every, saver: Saver, state: RunState) -> Cadence:
    """What chooses the time between saves. On the main rank, it learns of every save, and reads the root's history."""
    from ckpt.save.cadence import Cadence, Failures, Past  # a run that sets the time loads none of it

    failures = Failures.known(count_hosts(), when.failures_per_node_day)  # refused on every rank alike
    if state.ranks.rank != MAIN:
        return Cadence(failures)
    storage, reference = saver.root.storage, weakref.ref(saver)  # the schedule outlives the manager

    def is_busy() -> bool:
        return (found := reference()) is not None and found.busy

    cadence = Cadence(failures, lambda: Past.of(History.of(storage)), is_busy, state.attempt.slowed)

    def note(report: SaveReport) -> None:
        if not report.mirrored:  # a second report of the same save
            cadence.saved(report.blocked, report.durable)

    saver.reports.callbacks.append(note)
    return cadence


class Due:
    """What the next boundary of the loop is to take, the same on every rank: a save, a snapshot in memory, the stop."""

    def __init__(self, options: ManagerOptions, state: RunState, patience: MirrorPatience, saver: Saver) -> None:
        when, ranks = options.save_every, options.ranks
        self._cadence = cadence_of(when, saver, state) if when.time == AUTO else None
        told = {"sigterm": ranks.handle_sigterm, "sigint": ranks.handle_sigint}
        # after SIGTERM the end does not wait long for a mirror that is away
        self.preemption = Preemption(state.ranks, **told, grace=ranks.grace, on_told=patience.hurry)
        interval = when.time if self._cadence is None else self._cadence.after_step
        self.schedule = SaveSchedule(state.ranks, when.steps, interval, on_sigusr1=ranks.save_on_sigusr1)
        self.what: set[str] = set()  # save, snapshot, stop
        self.started = False  # the run has resumed, or begun
        self._state = state
        self._is_boundary_kept = when.exception

    def start(self) -> None:
        if self._cadence is not None and not self.started:
            self._cadence.begin()
        self.started = True
        self.schedule.restart()
        self.schedule.listen()
        self.preemption.listen_early()
        self._state.loop.start()

    def find(self, memory: MemoryTier | None) -> None:
        """Every rank asks after every step, so that all of them find the same."""
        step = self._state.loop.progress.step
        if self.preemption.due(step):
            self.what.add("stop")
        if self.schedule.is_due(step) and not self._state.is_saved:
            self.what.add("save")
        if memory is not None and not self._state.is_saved and (memory.is_due(step) or memory.is_to_prepare(step)):
            self.what.add("snapshot")
        self._state.loop.is_due = bool(self.what) or self._is_boundary_kept

    def take(self) -> set[str]:
        taken, self._state.loop.is_due = set(self.what), False
        self.what.clear()
        return taken

    def close(self) -> None:
        """Restore the previous signal handlers."""
        self.what.clear()
        self.preemption.close()
        self.schedule.close()


@dataclass
class Saves:
    """Saves the state of a run: to its root, to memory, and, after an exception, that of the last boundary."""

    options: ManagerOptions
    state: RunState
    saver: Saver
    loader: StateLoader
    memory: MemoryTier | None
    due: Due

    def __post_init__(self) -> None:
        ranks, registry, when = self.state.ranks, self.state.registry, self.options.save_every
        on_nan = self.options.saving.on_nan
        self._guard = FiniteGuard(ranks, registry, on_nan) if on_nan is not None else None
        refusal = self._guard.problem_here if self._guard is not None else str
        self.boundary = LastBoundary(ranks, registry, refusal) if when.exception else None
        self.unmanaged = UnmanagedWatch(registry, self.state.loop.caveats, when.period)

    def require_usable(self, call: str) -> None:
        """Refuse a call from a forked child, or on objects that a failed load has left half-restored."""
        self.saver.owner.require(call)
        if self.loader.half_loaded is not None:
            self.loader.refuse_half_loaded()

    def to_root(
        self, name: str | None, metrics: _Metrics = None, wait: bool | None = None, busy: str = "", at: _Root = None,
        *, amends: bool = False,
    ) -> str | None:  # fmt: skip
        """Save everything and return the checkpoint's name; None if it is skipped: see `save_state` of the manager."""
        self.require_usable(f"save_state({name!r})" if name else "save_state()")
        state, source = self.state, self.state.source
        wait = not self.options.saving.background if wait is None else wait
        busy = busy or self.options.saving.when_busy
        name = check_name(name) if name is not None else state.name
        numbers = as_numbers(state.metrics if metrics is None else metrics)
        if state.curves is not None:
            state.curves.settle()  # where as_numbers has just waited for the device
        facts = state.facts(numbers)
        if busy == "skip" and not wait and self.saver.is_busy_anywhere(name):
            return None
        state.registry.refresh()
        if self._guard is not None and not self._guard.passes(name):
            self.due.schedule.restart()
            return None
        root = at or self.saver.root
        source.before_save(f"{root.storage.url}/{name}")
        state.registry.refresh()  # hooks may have taken models over
        self.unmanaged.saving()
        state.loop.caveats.tell_lasting()
        if self.memory is not None:
            facts |= memory_facts(self.memory)
        request = SaveRequest(name, lambda: self._captured(name, numbers), facts, True, amends)
        with state.attempt.waiting():
            self.saver.save(request, wait=wait, replace=busy == "replace", root=root)
        source.after_save()
        if source.name() is not None:
            self.due.what.discard("save")  # numbered by its source: it would be another checkpoint
        self.due.start()
        state.saved_at = state.position if at is None else state.saved_at
        return name

    def end(self) -> None:
        """Save the state at the end of an epoch, unless that is done.

        If its last step was saved before, that checkpoint is amended by what has changed since: files that are the same
        stay, and if all are, so does the checkpoint.
        """
        if not self.state.is_saved:
            self.to_root(None, busy="wait", amends=self.state.is_step_saved)

    def to_memory(self) -> None:
        """Take a snapshot of everything into memory, unless the one before is under way or there is no room.

        After a run's first step, memory for it is made ready.
        """
        memory, state = self.memory, self.state
        assert memory is not None
        if has_save_hooks(state.source):
            memory.turn_off("the accelerator has save hooks, whose files a snapshot in memory would lack.")
            return
        step = state.loop.progress.step
        name, facts = name_of_step(step), state.facts(as_numbers(state.metrics))
        take = memory.prepare if memory.is_to_prepare(step) else memory.save
        if self._guard is not None and take == memory.save and not self._guard.passes(f"{name} (memory)"):
            return
        capture = StateCapture(state.ranks, "auto", memory.hosts, memory.compared)
        source = without_this_save(state.source.state())
        request = SaveRequest(name, lambda: state.capture(capture, source), facts)
        with state.attempt.waiting():
            take(request, step)

    def note_boundary(self) -> None:
        """A step is done: remember its state, where it is to be saved if an exception follows."""
        if self.boundary is not None:
            state, request = self.state, None
            if not state.is_saved:
                name, numbers = state.name, as_numbers(state.metrics)
                request = SaveRequest(name, lambda: self._captured(name, numbers), state.facts(numbers), True)
            self.boundary.note(state.loop.progress.step, request)

    def after_exception(self, error: BaseException) -> None:
        """An exception leaves the loop: save the last step boundary, if it can be had and is not saved."""
        if self.boundary is not None and self.saver.owner.is_here and not self.state.is_saved:
            self.boundary.save_after(error, self.saver)

    def _captured(self, name: str, metrics: Mapping[str, float]) -> LiveState:
        root = self.saver.root
        if root.keep is not None:
            root.keep.check(metrics, name)
        return self.state.capture(StateCapture(root.ranks, self.options.saving.layout, root.hosts, self.saver.compared))

    def close(self) -> None:
        self.unmanaged.close()
        if self.boundary is not None:
            self.boundary.close()


class Session:
    """The objects of one manager: storages, ranks, saver, loader, training loop and managed objects."""

    def __init__(self, root: Any, source: ObjectSource, options: ManagerOptions) -> None:
        self.options = options
        self.source = source
        self._may_grow = not isinstance(source, GivenObjects)  # an accelerator prepares objects at any time
        seal, self.trust = open_keys(options.signing, sha256=options.saving.sha256)
        self.tiers = options.open_tiers(root)
        self.storage = self.tiers[0]
        self.patience = options.patience
        self.ranks, hosts = meet_ranks(options.ranks, self.tiers, self.patience)
        keep = source.keep if options.keep is None else options.keep
        self.mirror = build_mirror(options, self.tiers, keep, self.ranks, hosts, self.patience)
        sealing: dict[str, Any] = {"seal": seal if seal.sha256 else None, "head": self.trust.head}
        writer = RootWriter(self.storage, self.ranks, keep, self.mirror, hosts, **sealing)
        snapshots = Snapshots(options.saving.host_memory_bytes, options.saving.device_memory_bytes)
        self.saver = Saver(writer, snapshots, options.saving.read_back)
        self.memory = build_tier(self.saver, **options.tier)
        self.loop = Loop(self.ranks, source.loaders)
        self.registry = build_registry(source, options.saving.gradients, self.loop, self.ranks)
        self.state = RunState(self.ranks, source, self.registry, self.loop)
        writer.attempt = self.state.attempt if self.ranks.rank == MAIN else None
        self.due = Due(options, self.state, self.patience, self.saver)
        self.loader = self._build_loader(hosts)
        self.saves = Saves(options, self.state, self.saver, self.loader, self.memory, self.due)
        self.registry.refresh()
        connect_loop(self.loop, self.registry, source)
        self.loop.at_boundary = weakly(self.take_due)
        self.loop.on_training = weakly(self.saves.unmanaged.trained)
        self.restored: Restored | None = None
        self._reserve_staging()

    def _build_loader(self, hosts: Hosts) -> StateLoader:
        memory = partial(find_snapshots, self.memory) if self.memory is not None else None
        noted = self.saver.root.lock.note_listing
        return StateLoader(
            self.ranks,
            Locations(self.tiers, hosts, self.options.storage_options, self.patience, memory, noted),
            LiveObjects(self.source, self.registry, self.loop),
            self.options.ranks.broadcast,
            self.saver.reading,
            self.saver.root.follow,
            self.trust,
        )

    def _reserve_staging(self) -> None:
        devices = {tensor.device for tensor in self.registry.tensors() if not (tensor.is_cpu or tensor.is_meta)}
        self.saver.snapshots.prepare_devices(devices)
        if devices and all(optimizer.state for optimizer in self.registry.optimizers):
            self.prefault()  # pinning takes long; other memory is prefaulted from the first step on

    def prefault(self) -> None:
        """Make the staging buffer ready in the background, once the size of the state is known."""
        self.saver.prefault(self.registry.tensors, for_devices_only=not self.options.saving.background)

    def step(self, metrics: _Metrics = None) -> None:
        """Count a training step. If a save or a stop is due, ckpt saves or stops when the iteration ends, or
        immediately if ckpt can't tell when the iteration ends."""
        ready = self.due.started and self.saver.owner.is_here
        if not ready or self.loop.is_released or self.loader.half_loaded is not None:
            self._refuse_step()
        if self.saver.has_news:  # ranks would learn of an error at different steps: they are told where they meet
            self.saver.tell(errors=self.ranks.world_size == 1)
        if self._may_grow:
            self.registry.refresh()
        if not self.saver.has_prefaulted:
            self.prefault()
        has_boundary = self.loop.stepped()
        self.saves.unmanaged.stepped()
        if self.memory is not None:
            self.memory.stepped(self.loop.progress.step)
        self.state.metrics = checked_metrics(metrics) if metrics is not None else {}
        if self.state.metrics and self.state.curves is not None:
            self.state.curves.note(self.loop.progress.step, self.state.metrics)
        self.due.find(self.memory)
        if not has_boundary:
            self.take_due()

    def _refuse_step(self) -> None:
        self.saves.require_usable("step()")
        if not self.due.started:  # loading now would undo the step that was just made
            raise ConfigError(
                "you called step() before you resumed the state. Loop over manager.epochs(...) or "
                "manager.batches(...), or call manager.resume() before the loop."
            )
        self.loop.refuse_released("step()")

    def take_due(self) -> None:
        """An iteration of the loop is over: save what is due, and stop if the process was told to.

        Raises:
            Preempted: The process was told to terminate.
        """
        due, saved = self.due.take(), None
        stop = "stop" in due
        if stop or "save" in due:
            saved = self.saves.to_root(None, wait=True if stop else None)
        if saved is None and "snapshot" in due and not self.state.is_saved:  # also where a save was left out
            self.saves.to_memory()
        self.saves.note_boundary()
        if stop:
            self._stop(saved)

    def _stop(self, saved: str | None) -> None:
        if self.ranks.rank == MAIN:
            done = "saved step" if saved is not None else "did not save step"
            say(f"asked to terminate: {done} {self.loop.progress.step} in {self.storage.url}, stopping")
        self.due.preemption.saved()
        raise Preempted(self.due.preemption.exit_status)

    def end_loop(self, error: BaseException | None) -> None:
        """The loop is over: take what is due. After an exception the iteration is not complete, so nothing is."""
        if not self.due.what or not self.saver.owner.is_here or self.loop.is_released:
            return
        if error is None:
            self.due.what.discard("stop")  # the run ends anyway
            self.take_due()
        elif "save" in self.due.what and self.saves.boundary is None:
            what = f"step {self.loop.progress.step} was due to be saved at the end of its iteration"
            self.loop.caveats.tell("cut short", f"{what}, which {type(error).__name__} has cut short: it is not saved.")

    def fingerprint(self) -> dict[str, str]:
        """Return the fingerprint of every part of this rank's state. See `StateManager.fingerprint`."""
        self.saves.require_usable("fingerprint()")
        self.registry.refresh()
        capture = StateCapture(self.ranks, "auto", self.saver.root.hosts, compares=False)
        return self.state.capture(capture).encode().part_fingerprints()

    def load(self, name: str | None, *, strict: bool) -> Restored | None:
        """Load a checkpoint: the one by that name, or the newest that is intact; None if there is none."""
        return self._load(name, strict=strict, before=self._settle_saves)

    def resume(self, *, strict: bool) -> Restored | None:
        """Lock the root for this run, and load its newest intact checkpoint. Returns None if there is no checkpoint.

        Waiting for saves and locking the root need no extra messages between ranks: the ranks exchange their errors
        together with those of the load.
        """
        root = self.saver.root

        def before() -> None:
            take()
            self._settle_saves()

        def then(in_memory: bool) -> None:
            if self.memory is not None:
                self.memory.continues = in_memory  # or holding the root would disown the snapshots
            root.hold_here()

        with root.taking() as take:
            restored = self._load(None, strict=strict, before=before, then=then)
            if restored is None:
                root.hold()
        root.lineage.has_resumed = True
        return restored

    def _settle_saves(self) -> None:
        self.wait()
        if self.saver.has_saved:
            self.saver.read_back.stop()

    def _load(
        self,
        name: str | None,
        *,
        strict: bool,
        before: Callable[[], None],
        then: Callable[[bool], None] = lambda _: None,
    ) -> Restored | None:
        """`before` and `then`: what each rank does before it looks for checkpoints, and when its state is restored;
        `then` is told whether from memory."""
        self.saver.owner.require("load_state()")
        at = self.loop.progress.step
        trained = self.state.saved_at is not None or at > 0
        try:
            restored = self.loader.load(name, strict=strict, verify_before_overwrite=trained, before=before, then=then)
        except (StorageError, DamagedError) as error:
            if name is None or isinstance(error, StorageError):
                self.saver.root.lineage.note_failed_load(error)
            raise
        self.state.attempt.loaded(at, self.saver.root.lineage.resumed)
        if self.memory is not None:
            note_load(self.memory, restored)
        if restored is not None:
            self.due.what.difference_update({"save", "snapshot"})  # of the state that this one has replaced
            self.due.start()
            self.state.saved_at = None if restored.from_memory else self.state.position
            self.restored = restored
            self.saves.unmanaged.resumed_from = restored.name
        return restored

    @cached_property
    def pusher(self) -> Pusher:
        from ckpt.export.push import Pusher  # a run that pushes nothing loads nothing for it

        return Pusher(self.ranks)

    def training_facts(self) -> Training:
        """What a model card can say of this run."""
        from ckpt.export.card import Training

        return Training(
            progress=self.loop.progress.to_json(),
            metrics=as_numbers(self.state.metrics),
            versions=versions(),
            hardware=device_name(),
            world_size=self.ranks.world_size,
            lineage={"run": self.saver.root.lineage.run},
        )

    def wait(self) -> None:
        try:
            self.saver.wait()
        finally:
            if "pusher" in vars(self):
                self.pusher.wait()

    def close(self, error: BaseException | None = None) -> None:
        """Finish all saves, and release everything. After an exception, leave the snapshots in memory for a restart."""
        if not self.saver.owner.is_here:
            return
        try:
            with self.state.attempt.waiting():
                self.wait()
        except BaseException as failure:
            error = failure if error is None or isinstance(error, Preempted) else error
            raise
        finally:
            if self.memory is not None:
                self.memory.close(keep=error is not None and not isinstance(error, Preempted))
            self._end_attempt(error)
            self.loop.release()
            self.source.release()
            self.registry.release()
            self.saves.close()
            self.due.close()
            self.saver.close()
            self.ranks.linger()

    def _end_attempt(self, error: BaseException | None) -> None:
        told = self.due.preemption.told if error is None or isinstance(error, Preempted) else None
        if self.state.curves is not None and error is None:  # a device may have failed, and never answer
            self.state.curves.settle()
        self.state.attempt.end(error, told)

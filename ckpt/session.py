"""What a `StateManager` consists of, and how a save, a load and a step go through it.

The manager is the facade: its methods, documented for users. Integrations and the selftest, which need more than users
do, go through `manager.session`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ckpt.data.loop import Loop
from ckpt.data.progress import as_numbers, checked_metrics
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
from ckpt.options import ManagerOptions, RankOptions
from ckpt.ranks.consensus import MAIN, Ranks, run_on_all_ranks
from ckpt.ranks.find import find_ranks
from ckpt.ranks.hosts import Hosts, find_hosts, may_have_separate_roots
from ckpt.ranks.schedule_and_signals import Preemption, SaveSchedule
from ckpt.root.catalog import manifests_of_run
from ckpt.root.mirror import Copies, MirrorPatience, MirrorWorker
from ckpt.root.open import refuse_checkpoint, try_out_tiers
from ckpt.root.retention import Keep
from ckpt.root.signing import open_keys
from ckpt.save.capture import LiveState, StateCapture
from ckpt.save.finite_guard import FiniteGuard
from ckpt.save.last_boundary import LastBoundary
from ckpt.save.root_writer import RootWriter, device_name, versions
from ckpt.save.saver import Saver
from ckpt.save.snapshot.snapshots import Snapshots
from ckpt.save.transaction import SaveRequest
from ckpt.state import rng
from ckpt.state.objects import GivenObjects, ObjectSource
from ckpt.state.registry import StateRegistry
from ckpt.state.unmanaged import UnmanagedWatch, weakly
from ckpt.state.unwrap import walked_once
from ckpt.storage import MemoryStorage, Storage, place_of
from ckpt.util.console import say

if TYPE_CHECKING:
    from ckpt.export.card import Training
    from ckpt.export.push import Pusher


def meet_ranks(options: RankOptions, tiers: tuple[Storage, ...], patience: MirrorPatience) -> tuple[Ranks, Hosts]:
    """The ranks of a job and their hosts. Refuses a root or a mirror that they cannot use."""
    storage = tiers[0]
    place, own_root = place_of(storage), may_have_separate_roots(storage, shared=options.shared)
    ranks = find_ranks(place, own_root=own_root, **options.meeting)
    if ranks.world_size > 1 and any(isinstance(storage, MemoryStorage) for storage in tiers):
        raise ConfigError("memory:// is in one process, and this job has several. Give it a root that all can see.")
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


def build_preemption(options: RankOptions, ranks: Ranks, patience: MirrorPatience) -> Preemption:
    """What answers SIGTERM, after which the end does not wait long for a mirror that is away."""
    told = {"sigterm": options.handle_sigterm, "sigint": options.handle_sigint}
    return Preemption(ranks, **told, grace=options.grace, on_told=patience.hurry)


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


class Session:
    """The parts of one manager: storages, ranks, saver, loader, training loop and managed objects."""

    def __init__(self, root: Any, source: ObjectSource, options: ManagerOptions) -> None:
        self.options = options
        self.source = source
        self._may_grow = not isinstance(source, GivenObjects)  # an accelerator prepares objects at any time
        self.keep = source.keep if options.keep is None else options.keep
        seal, self.trust = open_keys(options.signing, sha256=options.saving.sha256)
        self.tiers = options.open_tiers(root)
        self.storage = self.tiers[0]
        self.patience = options.patience
        self.ranks, hosts = meet_ranks(options.ranks, self.tiers, self.patience)
        self.mirror = build_mirror(options, self.tiers, self.keep, self.ranks, hosts, self.patience)
        writer = RootWriter(self.storage, self.ranks, self.keep, self.mirror, hosts, seal=seal if seal.sha256 else None)
        snapshots = Snapshots(options.saving.host_memory_bytes, options.saving.device_memory_bytes)
        self.saver = Saver(writer, snapshots, options.saving.read_back)
        self.memory = build_tier(self.saver, **options.tier)
        self.preemption = build_preemption(options.ranks, self.ranks, self.patience)
        when = options.save_every
        self.schedule = SaveSchedule(self.ranks, when.steps, when.time, on_sigusr1=options.ranks.save_on_sigusr1)
        self.loop = Loop(self.ranks, source.loaders)
        self.registry = build_registry(source, options.saving.gradients, self.loop, self.ranks)
        on_nan = options.saving.on_nan
        self.guard = FiniteGuard(self.ranks, self.registry, on_nan) if on_nan is not None else None
        refusal = self.guard.problem_here if self.guard is not None else str
        self.boundary = LastBoundary(self.ranks, self.registry, refusal) if when.exception else None
        self.loader = self._build_loader(hosts)
        self.registry.refresh()
        connect_loop(self.loop, self.registry, source)
        self.loop.at_boundary = weakly(self.take_due)
        self.unmanaged = UnmanagedWatch(self.registry, self.loop.caveats, when.period)
        self.loop.on_training = weakly(self.unmanaged.trained)
        self.metrics: dict[str, Any] = {}
        self.restored: Restored | None = None
        self.due: set[str] = set()  # what the next boundary of the loop is to take: save, snapshot, stop
        self.started = False
        self.saved_at: tuple[int, int] | None = None  # step and epoch
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

    def require_usable(self, call: str) -> None:
        """Refuse a call from a forked child, or on objects that a failed load has left half-restored."""
        self.saver.owner.require(call)
        if self.loader.half_loaded is not None:
            self.loader.refuse_half_loaded()

    def set_started(self) -> None:
        self.started = True
        self.schedule.restart()
        self.schedule.listen()
        self.preemption.listen_early()
        self.loop.start()

    @property
    def position(self) -> tuple[int, int]:
        """Step and epoch."""
        return self.loop.progress.step, self.loop.progress.epoch

    def step(self, metrics: _Metrics = None) -> None:
        """Count a step of training, and find out what is due: it is taken at the boundary of the iteration, or now if
        the loop shows none."""
        if (
            self.loader.half_loaded is not None
            or self.loop.is_released
            or not (self.started and self.saver.owner.is_here)
        ):
            self._refuse_step()
        if self.saver.has_news:  # ranks would learn of an error at different steps: they are told where they meet
            self.saver.tell(errors=self.ranks.world_size == 1)
        if self._may_grow:
            self.registry.refresh()
        if not self.saver.has_prefaulted:
            self.prefault()
        has_boundary = self.loop.stepped()
        self.unmanaged.stepped()
        if self.memory is not None:
            self.memory.stepped(self.loop.progress.step)
        self.metrics = checked_metrics(metrics) if metrics is not None else {}
        self._find_due()
        if not has_boundary:
            self.take_due()

    def _refuse_step(self) -> None:
        self.require_usable("step()")
        if not self.started:  # loading now would undo the step that was just made
            raise ConfigError(
                "step() came before the state was resumed. Go through manager.epochs(...) or manager.batches(...), or "
                "call manager.resume() before the loop."
            )
        self.loop.refuse_released("step()")

    def _find_due(self) -> None:
        """Every rank asks after every step, so that all of them find the same."""
        step = self.loop.progress.step
        if self.preemption.due(step):
            self.due.add("stop")
        if self.schedule.is_due(step) and self.saved_at != self.position:
            self.due.add("save")
        if self.memory is not None and self.is_snapshot_due:
            self.due.add("snapshot")
        self.loop.is_due = bool(self.due) or self.boundary is not None

    def told_to_stop(self) -> bool:
        """Whether all ranks are to stop after this step."""
        return self.preemption.due(self.loop.progress.step)

    def take_due(self) -> None:
        """An iteration of the loop is over: save what is due, and stop if the process was told to.

        Raises:
            Preempted: The process was told to terminate.
        """
        due, self.loop.is_due = set(self.due), False
        self.due.clear()
        stop, saved = "stop" in due, None
        if stop or "save" in due:
            busy = self.options.saving.when_busy
            saved = self.save(None, wait=True if stop else None, when_busy=busy)
        if saved is None and "snapshot" in due and self.saved_at != self.position:  # also where a save was left out
            self.save_to_memory()
        self.note_boundary()
        if stop:
            self._stop(saved)

    def _stop(self, saved: str | None) -> None:
        if self.ranks.rank == MAIN:
            done = "saved step" if saved is not None else "did not save step"
            say(f"told to terminate: {done} {self.loop.progress.step} in {self.storage.url}, stopping")
        self.preemption.saved()
        raise Preempted(self.preemption.exit_status)

    def end_loop(self, error: BaseException | None) -> None:
        """The loop is over: take what is due. After an exception the iteration is not complete, so nothing is."""
        if not self.due or not self.saver.owner.is_here or self.loop.is_released:
            return
        if error is None:
            self.due.discard("stop")  # the run ends anyway
            self.take_due()
        elif "save" in self.due and self.boundary is None:
            what = f"step {self.loop.progress.step} was due to be saved at the end of its iteration"
            self.loop.caveats.tell("cut short", f"{what}, which {type(error).__name__} has cut short: it is not saved.")

    @property
    def is_snapshot_due(self) -> bool:
        """Whether this step is one to be taken into memory, and is not saved to the root."""
        memory, step = self.memory, self.loop.progress.step
        return memory is not None and self.saved_at != self.position and memory.is_due(step)

    def save_to_memory(self) -> None:
        """Take a snapshot of everything into memory, unless the one before is under way or there is no room."""
        assert self.memory is not None
        if has_save_hooks(self.source):
            self.memory.turn_off("the accelerator has save hooks, whose files a snapshot in memory would lack.")
            return
        facts = self._facts(as_numbers(self.metrics))
        name = name_of_step(self.loop.progress.step)
        if self.guard is not None and not self.guard.passes(f"{name} (memory)"):
            return
        capture = StateCapture(self.ranks, "auto", self.memory.hosts, self.memory.compared)
        state = without_this_save(self.source.state())
        self.memory.save(SaveRequest(name, lambda: self._captured(capture, state), facts), self.loop.progress.step)

    def note_boundary(self) -> None:
        """A step is done: remember its state, where it is to be saved if an exception follows."""
        if self.boundary is not None:
            name, numbers = self.default_name(), {} if self.saved_at == self.position else as_numbers(self.metrics)
            request = SaveRequest(name, lambda: self._capture(name, numbers), self._facts(numbers), True)
            self.boundary.note(self.loop.progress.step, None if self.saved_at == self.position else request)

    def save_boundary(self, error: BaseException) -> None:
        """An exception leaves the loop: save the last step boundary, if it can be had and is not saved."""
        if self.boundary is not None and self.saver.owner.is_here and self.saved_at != self.position:
            self.boundary.save_after(error, self.saver)

    def _facts(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        return {"progress": self.loop.saved_progress().to_json(), "metrics": metrics}

    def default_name(self) -> str:
        return self.source.name() or name_of_step(self.loop.progress.step)

    def end_name(self) -> str | None:
        """What to call the final state where the last step was saved already; None for its usual name."""
        saved_in_loop = self.saved_at is not None and self.saved_at[0] == self.loop.progress.step
        return f"{self.default_name()}-end" if saved_in_loop and not self.source.name() else None

    def save_end(self) -> None:
        """Save the state at the end of an epoch, unless that is done."""
        if self.saved_at != self.position:
            self.save(self.end_name(), when_busy="wait")

    def save(
        self, name: str | None, metrics: _Metrics = None, wait: bool | None = None, *, when_busy: str, at: _Root = None
    ) -> str | None:
        """Save everything and return the checkpoint's name; None if it is skipped: see `save_state` of the manager."""
        self.require_usable(f"save_state({name!r})" if name else "save_state()")
        wait = not self.options.saving.background if wait is None else wait
        name = check_name(name) if name is not None else self.default_name()
        numbers = as_numbers(self.metrics if metrics is None else metrics)
        facts = self._facts(numbers)
        if when_busy == "skip" and not wait and self.saver.is_busy_anywhere(name):
            return None
        self.registry.refresh()
        if self.guard is not None and not self.guard.passes(name):
            self.schedule.restart()
            return None
        root = at or self.saver.root
        self.source.before_save(f"{root.storage.url}/{name}")
        self.registry.refresh()  # hooks may have taken models over
        self.unmanaged.saving()
        self.loop.caveats.tell_lasting()
        if self.memory is not None:
            facts |= memory_facts(self.memory)
        request = SaveRequest(name, lambda: self._capture(name, numbers), facts, True)
        self.saver.save(request, wait=wait, replace=when_busy == "replace", root=root)
        self.source.after_save()
        if self.source.name() is not None:
            self.due.discard("save")  # numbered by its source: it would be another checkpoint
        self.set_started()
        self.saved_at = self.position if at is None else self.saved_at
        return name

    def _capture(self, name: str, metrics: Mapping[str, float]) -> LiveState:
        if self.keep is not None:
            self.keep.check(metrics, name)
        root = self.saver.root.hosts
        capture = StateCapture(self.ranks, self.options.saving.layout, root, self.saver.compared)
        return self._captured(capture, self.source.state())

    def _captured(self, capture: StateCapture, source: Mapping[str, Any]) -> LiveState:
        with walked_once():
            own, lacking = self.registry.own_parts_to_save(self.ranks.rank)
            for what, why in lacking.items():
                self.loop.caveats.tell(f"lacking/{what}", why, what=f"checkpoints lack {what}: ")
            rank_state = {
                "rng": rng.capture(),
                "generators": {key: rng.capture_one(found) for key, found in self.registry.generators.items()},
                "loaders": self.loop.state(),
                "loop": self.loop.seen(),
                "source": source,
                "lacking": lacking,
            }
            return capture.capture(self.registry.parts.values(), own, rank_state | self.registry.values.to_save())

    def fingerprint(self) -> dict[str, str]:
        """The fingerprint of every part of the state on this rank: see `fingerprint` of the manager."""
        self.require_usable("fingerprint()")
        self.registry.refresh()
        capture = StateCapture(self.ranks, "auto", self.saver.root.hosts, compares=False)
        return self._captured(capture, self.source.state()).encode().part_fingerprints()

    def load(self, name: str | None, *, strict: bool) -> Restored | None:
        """Load a checkpoint: the one by that name, or the newest that is intact; None if there is none."""
        self.saver.owner.require("load_state()")
        run_on_all_ranks(self.ranks, "load_state() (saves done)", self.wait)
        if self.saver.has_saved:
            self.saver.read_back.stop()
        trained = self.saved_at is not None or self.loop.progress.step > 0
        try:
            restored = self.loader.load(name, strict=strict, verify_before_overwrite=trained)
        except (StorageError, DamagedError) as error:
            if name is None or isinstance(error, StorageError):
                self.saver.root.lineage.note_failed_load(error)
            raise
        if self.memory is not None:
            note_load(self.memory, restored)
        if restored is not None:
            self.due.difference_update({"save", "snapshot"})  # of the state that this one has replaced
            self.set_started()
            self.saved_at = None if restored.from_memory else self.position
            self.restored = restored
            self.unmanaged.resumed_from = restored.name
        return restored

    @cached_property
    def pusher(self) -> Pusher:
        from ckpt.export.push import Pusher  # a run that pushes nothing loads nothing for it

        return Pusher(self.ranks)

    def training_facts(self) -> Training:
        """What a model card can say of this run."""
        from ckpt.export.card import Training, curves

        return Training(
            progress=self.loop.progress.to_json(),
            metrics=as_numbers(self.metrics),
            versions=versions(),
            hardware=device_name(),
            world_size=self.ranks.world_size,
            lineage={"run": self.saver.root.lineage.run},
            curves=curves(manifests_of_run(self.storage, self.saver.root.lineage.run)),
        )

    def stop_listening(self) -> None:
        """Leave signals to whoever answered them before."""
        self.preemption.close()
        self.schedule.close()

    def wait(self) -> None:
        try:
            self.saver.wait()
        finally:
            if "pusher" in vars(self):
                self.pusher.wait()

    def close(self, *, for_restart: bool = False) -> None:
        """Finish and release everything. `for_restart`: what is in memory is left for a restart."""
        if not self.saver.owner.is_here:
            return
        try:
            self.wait()
        except BaseException:
            for_restart = True
            raise
        finally:
            if self.memory is not None:
                self.memory.close(keep=for_restart)
            self.due.clear()
            self.loop.release()
            self.source.release()
            self.registry.release()
            self.unmanaged.close()
            if self.boundary is not None:
                self.boundary.close()
            self.stop_listening()
            self.saver.close()
            self.ranks.linger()

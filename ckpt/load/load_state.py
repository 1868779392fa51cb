"""The loads of a manager: choose a checkpoint, restore it into the live objects, and report what was restored."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ckpt.data.loop import Loop
from ckpt.data.progress import Progress
from ckpt.data.tracked_loader import UnclaimedPositions
from ckpt.errors import ConfigError, StateError, StorageError
from ckpt.formats.checkpoint_name import check_name
from ckpt.formats.checks import damage_reported
from ckpt.formats.native.manifest import Manifest
from ckpt.formats.registry import ACCELERATE, CKPT, claims
from ckpt.load.reader import CheckpointReader
from ckpt.load.restore import Restoration, RestoreRequest, Restoring, rewinder
from ckpt.load.select import Candidate, Choice, MemoryTier, Selection, choose
from ckpt.ranks.consensus import MAIN, Ranks, Result, decide_together, run_on_all_ranks
from ckpt.ranks.hosts import ONE_SHARED_ROOT, Hosts
from ckpt.root.catalog import Checkpoint, Overview
from ckpt.root.folder import ROOT_ITSELF, Folder, open_url
from ckpt.root.mirror import MirrorPatience
from ckpt.root.signing import Trust
from ckpt.shown import Lines
from ckpt.state import rng
from ckpt.state.objects import ObjectSource
from ckpt.state.parts import Notes
from ckpt.state.registry import StateRegistry
from ckpt.storage import LocalStorage, Storage, place_of
from ckpt.storage.local.storage import OneFolder
from ckpt.util.console import html_table, say
from ckpt.util.threads import gc_paused

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Lists what a load restored, approximated and left out, and names the checkpoint.

    Attributes:
        name: The checkpoint's name.
        url: Its URL or path.
        run: The id of the run, which stays the same over all resumes.
        progress: Epoch, batch, step and samples.
        metrics: The checkpoint's metrics.
        restored: The restored parts.
        resharded: Parts that were sharded differently when they were saved.
        approximated: Everything that is not exactly as it was, with the reason.
        skipped: Everything that was left out, with the reason.
        passed_over: Newer checkpoints that ckpt could not use, with the reason.
        from_memory: True if ckpt loaded a snapshot in memory, not a checkpoint from the root.
        root_step: With `from_memory`, the step of the root's newest checkpoint; None if the root has no checkpoint.
        begins_at: The batch at which the next `for` over each loader begins.
    """

    name: str
    url: str
    run: str
    progress: Progress
    metrics: Mapping[str, float] = field(default_factory=dict)
    restored: tuple[str, ...] = ()
    resharded: Mapping[str, str] = field(default_factory=dict)
    approximated: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    passed_over: Mapping[str, str] = field(default_factory=dict)
    from_memory: bool = False
    root_step: int | None = None
    begins_at: str = ""  # where the next `for` over each loader begins
    on_read: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)  # of `epoch`, or of `step`

    @property
    def step(self) -> int:
        self.on_read()
        return self.progress.step

    @property
    def epoch(self) -> int:
        self.on_read()
        return self.progress.epoch

    def __str__(self) -> str:
        return Lines.of([*self._restored_lines(), *self._inexact_lines()])

    def report(self) -> None:
        """Log it: where the run continues as progress, what is not as it was as a warning."""
        where, *what = self._restored_lines()
        say(where)
        _log.debug("%s", Lines.of(what))
        inexact = self._inexact_lines()
        if inexact:
            _log.warning("%s", Lines.of([f"not everything is as it was when {self.name} was saved:", *inexact]))

    def _restored_lines(self) -> list[str]:
        at = self.progress
        position = f"epoch {at.epoch}, batch {at.batch}"
        lines = [f"resumed from {self.url}: step {at.step}, {position}"]
        if self.from_memory:
            has = "no checkpoint" if self.root_step is None else f"step {self.root_step:,}"
            lines = [f"resumed from memory: step {at.step:,} (root has {has})", f"  position      {position}"]
        lines.append(f"  restored      {', '.join(self.restored) or 'nothing'}")
        if self.begins_at:
            lines.append(f"  continues     the next `for` begins at {self.begins_at} (manager.enumerate counts on)")
        return lines + _table("resharded", self.resharded)

    def _inexact_lines(self) -> list[str]:
        tables = {"approximated": self.approximated, "skipped": self.skipped, "passed over": self.passed_over}
        return [line for title, table in tables.items() for line in _table(title, table)]

    def _repr_html_(self) -> str:
        """For notebooks: the lines that are printed, as a table."""
        first, *others = str(self).splitlines()
        return html_table(first, [(line[2:16].strip(), line[16:]) for line in others])


def _table(title: str, reasons: Mapping[str, str]) -> list[str]:
    return [f"  {title:<13} {why if why.startswith(what) else f'{what}: {why}'}" for what, why in reasons.items()]


def restored_from(
    choice: Choice[Restoration],
    restored: tuple[str, ...],
    *,
    begins_at: str = "",
    on_read: Callable[[], None] = lambda: None,
) -> Restored:
    """The report of a load whose restoration is finished."""
    manifest, notes = choice.manifest, choice.ready.notes
    return Restored(
        name=manifest.name,
        url=choice.url,
        run=manifest.run,
        progress=Progress.from_json(manifest.progress),
        metrics=manifest.metrics,
        restored=restored,
        resharded=notes.resharded,
        approximated=notes.approximated,
        skipped=notes.skipped,
        passed_over=choice.passed_over,
        from_memory=choice.in_memory,
        root_step=choice.root_step,
        begins_at=begins_at,
        on_read=on_read,
    )


_OURS, _THEIRS, _NOBODYS = CKPT.name, ACCELERATE.name, ""


@dataclass(frozen=True)
class Locations:
    """The root, then the mirror; which hosts share the root; and the storage options for a folder elsewhere.

    `patience`: how long a load waits for a mirror that is away, if the root has what it looks for. `on_listed`: called
    with what the root has.

    `memory` finds the snapshots in the hosts' memory, on all ranks together; None if there is no such tier.
    """

    tiers: tuple[Storage, ...]
    hosts: Hosts = ONE_SHARED_ROOT
    options: Mapping[str, Any] | None = None
    patience: MirrorPatience | None = None
    memory: Callable[[], MemoryTier | None] | None = None
    on_listed: Callable[[Overview], None] = lambda root: None

    def resolve(
        self, name: str | None, ranks: Ranks, before: Callable[[], object] = lambda: None
    ) -> tuple[Locations, str | None]:
        """Where a checkpoint may be, and its name there. A name with a slash is a path.

        A path into the root, however it is spelled, names a checkpoint there. Elsewhere, a folder of Accelerate is a
        root itself, and one of ckpt a checkpoint in a root where nothing else is looked at. `before`: what each rank
        does before it looks there: the folder may be that of a save under way.
        """
        if not isinstance(name, str) or "/" not in name:
            return self, None if name is None else check_name(name)
        inside = self._name_in_root(name)
        if inside is not None:
            return self, check_name(inside)
        folder = open_url(name, self.options)
        mine = Result.capture(before).then(lambda _: None)
        kind = decide_together(ranks, f"load_state({name!r})", mine, lambda _: _kind(folder))
        if kind == _OURS and isinstance(folder, LocalStorage):
            one = OneFolder(name)
            return Locations((one,)), check_name(one.name)
        if kind != _THEIRS:
            raise ConfigError(
                f"{name!r} is neither the name of a checkpoint in {self.tiers[0].url} nor a folder that "
                "Accelerate saved. Give a plain name. To load a ckpt checkpoint from another root, give that root to "
                "StateManager."
            )
        return Locations((folder,)), ROOT_ITSELF

    def _name_in_root(self, path: str) -> str | None:
        root, _, name = path.rstrip("/").rpartition("/")
        with suppress(ConfigError):  # what is above a URL need not be one
            if place_of(open_url(root or "/", self.options)) == place_of(self.tiers[0]):
                return name
        return None


def _kind(folder: Storage) -> str:
    """Whose checkpoint a folder is."""
    found = claims(Folder.of_checkpoint(folder, ROOT_ITSELF).files)
    return next((kind for kind in (_OURS, _THEIRS) if kind in found), _NOBODYS)


ELSEWHERE = 2  # in place of a tier: of the files of such a checkpoint, the root has none


@dataclass(frozen=True)
class LiveObjects:
    """What a checkpoint is loaded into: the managed objects, where they were found, and the training loop."""

    source: ObjectSource
    registry: StateRegistry
    loop: Loop


@dataclass
class StateLoader:
    """Loads checkpoints into the objects of one manager.

    `broadcast`: as in `RestoreRequest`. `pause_staging`: a context in which staging memory is not prefaulted, so that
    reading does not compete with it. `follow`: called with the manifest that later saves continue from, the names of
    damaged checkpoints, and the tier that has it. `trust`: whose signatures are believed. A load that failed halfway is
    remembered, until another one has succeeded.
    """

    ranks: Ranks
    locations: Locations
    live: LiveObjects
    broadcast: bool | str | None
    pause_staging: Callable[[], AbstractContextManager[None]]
    follow: Callable[[Manifest, Iterable[str], int, Mapping[str, str]], None]
    trust: Trust = field(default_factory=Trust)
    half_loaded: str | None = field(default=None, init=False)

    def load(
        self,
        name: str | None,
        *,
        strict: bool,
        verify_before_overwrite: bool,
        before: Callable[[], None] = lambda: None,
        then: Callable[[bool], None] = lambda _: None,
    ) -> Restored | None:
        """Load the checkpoint by that name, or the newest intact one; None if there is none.

        A name with a slash is a path: of a folder that Accelerate wrote. With `verify_before_overwrite`, live objects
        are unchanged until all that is to replace their state has been verified. `before`: what each rank does before
        it looks for checkpoints; no save may be running after it. `then`: what each does when its state is restored,
        told whether it came from memory. An error of either on one rank is raised on all.
        """
        request = RestoreRequest(
            ranks=self.ranks,
            registry=self.live.registry,
            strict=strict,
            verify_before_overwrite=verify_before_overwrite,
            broadcast=self.broadcast,
            on_first_write=self._set_half_loaded,
            check=self._check_generators,
        )
        with ExitStack() as held:
            held.enter_context(self.ranks.working())
            held.enter_context(gc_paused())
            held.enter_context(self.pause_staging())
            restoring = Restoring(request, before, self.live.registry.refresh, self._find_objects)
            began = time.monotonic()
            choice = choose(selection := self._selection(name, restoring), held)
            if choice is None:
                self._refuse_to_begin()
                return None
            in_own_tiers = selection.tiers is self.locations.tiers
            tier = choice.tier if in_own_tiers else ELSEWHERE
            parts = choice.ready.finish(partial(self._continue_from, choice, tier, then))
            if self.ranks.rank == MAIN:
                _log.debug("verified and loaded %s in %.2f s", choice.url, time.monotonic() - began)
            self.half_loaded = None
        restored = self._report(choice, parts, tier)
        if name is not None and in_own_tiers and self.ranks.rank == MAIN:
            self._tell_newer(choice.manifest)
        return restored

    def _refuse_to_begin(self) -> None:
        """Raise where there is nothing to load, though a checkpoint of the run is known."""
        if (head := self.trust.head) is not None:
            url = self.locations.tiers[0].url
            run_on_all_ranks(self.ranks, "load_state()", lambda: head.refuse_other("", url))

    def refuse_half_loaded(self) -> None:
        """Raise where a load failed halfway: a mixture of two states must be neither trained on nor saved."""
        if self.half_loaded:
            raise StateError(
                f"a load of {self.half_loaded} failed halfway, so the objects are only partly loaded. Build new "
                "objects and a new StateManager, or load another checkpoint first."
            )

    def _set_half_loaded(self, name: str) -> None:
        self.half_loaded = name

    def _selection(self, name: str | None, restoring: Restoring) -> Selection[Restoration]:
        locations, name = self.locations.resolve(name, self.ranks, restoring.before)
        return Selection(
            tiers=locations.tiers,
            ranks=self.ranks,
            prepare=restoring.prepare,
            opening=restoring.opening,
            check=restoring.check,
            name=name,
            hosts=locations.hosts,
            foreign=True,
            memory=locations.memory() if name is None and locations.memory is not None else None,
            trust=self.trust if name is None else self.trust.of_named(),
            patience=locations.patience,
            on_listed=locations.on_listed,
        )

    def _find_objects(self, candidate: Candidate) -> None:
        """Find the objects to load into. Hooks of the user's own may load some of the checkpoint themselves."""
        self.live.source.before_load(candidate.folder)
        self.live.registry.refresh()

    def _check_generators(self, reader: CheckpointReader) -> None:
        """Refuse states that the registered generators would not accept, before anything is changed."""
        with damage_reported(reader.manifest.name, "StateManager checkpoint"):
            saved = reader.state["generators"]
            for key, generator in self.live.registry.generators.items():
                if key in saved:
                    rng.check_one(generator, saved[key])

    def _continue_from(self, choice: Choice[Restoration], tier: int, then: Callable[[bool], None]) -> None:
        self._restore_rank_state(choice.ready.reader, choice.ready.notes)
        self.follow(choice.manifest, choice.damaged, tier, choice.passed_over)
        then(choice.in_memory)

    def _restore_rank_state(self, reader: CheckpointReader, notes: Notes) -> None:
        """Restore this rank's own state: generators, and the positions of its loaders."""
        source, loop = self.live.source, self.live.loop
        with damage_reported(reader.manifest.name, "checkpoint with the state of an Accelerator or engine"):
            source.go_back(reader.state.get("source", {}))
        rewind = rewinder(reader, self.ranks, self.live.registry.generators, notes)
        rewind()
        positions, progress = reader.state["loaders"], Progress.from_json(reader.manifest.progress)
        if reader.manifest.origin:
            from ckpt.load.accelerate import foreign_positions

            found = foreign_positions(reader, source.loaders(), self.ranks, notes)
            positions = {**positions, **found}
            progress.batch = next((saved["batches"] for saved in found.values()), progress.batch)
        saved_by, values = reader.manifest.world_size, reader.state.get("values", {})
        if values and saved_by != self.ranks.world_size:
            notes.approximated["values"] = f"each of {saved_by} ranks had its own: new ranks get the main rank's"
        for name in self.live.registry.values.restore(values):
            notes.skipped[name] = "the checkpoint has no value of that name, so it stays unchanged"
        unclaimed = UnclaimedPositions(positions, rewind, notes.approximated)
        loop.go_back(progress, unclaimed, reader.state.get("loop", {}))
        unclaimed.reported = True  # by the block that is printed next

    def _report(self, choice: Choice[Restoration], parts: list[str], tier: int) -> Restored:
        generators = [key for key in self.live.registry.generators if key not in choice.ready.notes.skipped]
        state = choice.ready.reader.state
        lacking, values = state.get("lacking", {}), ("values",) if state.get("values") else ()
        restored = restored_from(
            choice,
            (*parts, *values, *generators, *(() if "rng" in lacking else ("rng",)), "progress"),
            begins_at=self.live.loop.begins_at(),
            on_read=self.live.loop.note_asked,
        )
        if self.ranks.rank == MAIN:
            restored.report()
            self.trust.warn(choice.manifest)
            if self.trust.head is not None and tier in (0, 1):
                self.trust.head.advance(choice.manifest)
        return restored

    def _tell_newer(self, loaded: Manifest) -> None:
        """Going back lasts from the next save on: say so, or the resume of a killed run undoes it unnoticed."""
        there: list[Checkpoint] = []
        with suppress(StorageError):  # it is loaded; if the root is away, the next save says so
            there = Overview.of(self.locations.tiers[0]).checkpoints
        newest = next((found.summary for found in there if found.summary is not None), None)
        if newest is not None and newest.sequence > loaded.sequence:
            _log.info(
                "%s is newer than %s, which you loaded by name. Until this run saves, a resume would load the "
                "newer checkpoint. To go back for good, save now: manager.save_state().", newest.name, loaded.name,
            )  # fmt: skip

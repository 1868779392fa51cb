"""The loads of a manager: from the choice of a checkpoint to what is told about it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from ckpt.data.epoch_loaders import UnclaimedPositions
from ckpt.data.loop import Loop
from ckpt.data.progress import Progress
from ckpt.errors import ConfigError, StateError
from ckpt.formats.native.manifest import Manifest
from ckpt.load import restore
from ckpt.load.accelerate_reader import folder_of
from ckpt.load.reader import CheckpointReader
from ckpt.load.restore import Restoration
from ckpt.load.restored import Restored
from ckpt.load.select import Choice, choose
from ckpt.ranks.consensus import Result, decide_together, run_on_all_ranks
from ckpt.ranks.group import MAIN, Ranks
from ckpt.ranks.hosts import ONE_SHARED_ROOT, Hosts
from ckpt.root.catalog import check_name
from ckpt.root.folder import ROOT, is_foreign, open_url
from ckpt.state.objects import ObjectSource
from ckpt.state.parts import Notes
from ckpt.state.registry import StateRegistry
from ckpt.storage import Storage, place_of
from ckpt.util.console import say
from ckpt.util.gc_pause import gc_paused


@dataclass
class StateLoader:
    """Loads checkpoints into the objects of one manager, from its root or from the mirror behind it.

    `broadcast`: whether ranks of a host read for each other; if none, where the storage is far away. A load that failed
    half-way is remembered, until another one has succeeded.
    """

    ranks: Ranks
    source: ObjectSource
    managed: StateRegistry
    loop: Loop
    hosts: Hosts
    pause_staging: Callable[[], AbstractContextManager[None]]  # so that reading does not compete with it
    follow: Callable[[Manifest, Iterable[str], bool], None]  # told what later saves continue from
    tiers: tuple[Storage, ...]
    broadcast: bool | None
    options: Mapping[str, Any] | None = None  # for folders elsewhere
    _half_loaded: str | None = None

    def load(self, name: str | None, *, strict: bool, precious: bool) -> Restored | None:
        """The checkpoint by that name, or the newest intact one; none if there is none. Nothing may be under way.

        A name with a slash is a path: of a folder that Accelerate wrote. What is `precious` stays untouched until all
        that is to replace it has been verified.
        """
        with ExitStack() as held:
            held.enter_context(self.ranks.working())
            held.enter_context(gc_paused())
            held.enter_context(self.pause_staging())
            tiers, name = self._find(name)
            hosts = self.hosts if tiers is self.tiers else ONE_SHARED_ROOT
            prepare = functools.partial(self._prepare, strict=strict, precious=precious)
            choice = choose(tiers, self.ranks, name, prepare, held, hosts, foreign=True)
            if choice is None:
                return None
            restoration: Restoration = choice.ready
            parts = restoration.finish()
            self._go_back(restoration.opened, restoration.notes)
            self._half_loaded = None
        return self._tell(choice, parts, restoration.notes)

    def refuse_half_loaded(self) -> None:
        """What is partly one state and partly another must not be trained on, and not be saved."""
        if self._half_loaded:
            raise StateError(
                f"a load of {self._half_loaded} failed half-way, so the objects hold parts of it. Build them anew, and "
                "a new StateManager for them, or load another checkpoint first."
            )

    def _find(self, name: str | None) -> tuple[tuple[Storage, ...], str | None]:
        """Where a checkpoint may be, and its name. A path into the root, however it is spelled, names one there; a
        folder of Accelerate that lies elsewhere is a root itself."""
        if not isinstance(name, str) or "/" not in name:
            return self.tiers, None if name is None else check_name(name)
        inside = self._name_in_root(name)
        if inside is not None:
            return self.tiers, check_name(inside)
        folder = open_url(name, self.options)
        if not decide_together(self.ranks, f"load_state({name!r})", Result(), lambda _: is_foreign(folder, ROOT)):
            raise ConfigError(
                f"{name!r} cannot name a checkpoint in {self.tiers[0].url}, and is no folder that Accelerate "
                "saved. Give a plain name; for a checkpoint of ckpt in another root, give StateManager that root."
            )
        return (folder,), ROOT

    def _name_in_root(self, path: str) -> str | None:
        root, _, name = path.rstrip("/").rpartition("/")
        with suppress(ConfigError):  # what is above a URL need not be one
            if place_of(open_url(root or "/", self.options)) == place_of(self.tiers[0]):
                return name
        return None

    def _prepare(
        self, storage: Storage, manifest: Manifest, held: ExitStack, *, strict: bool, precious: bool
    ) -> Restoration:
        far = not getattr(storage, "is_local", True)

        def touch() -> None:
            self._half_loaded = manifest.name

        run_on_all_ranks(self.ranks, f"load_state({manifest.name!r})", lambda: self._find_for(storage, manifest))
        return Restoration.prepare(
            storage,
            manifest,
            self.ranks,
            self.managed,
            held,
            strict=strict,
            share=far if self.broadcast is None else self.broadcast,
            precious=precious,
            touch=touch,
        )

    def _find_for(self, storage: Storage, manifest: Manifest) -> None:
        """What a checkpoint is to be loaded into. Hooks of the user's own may load some of it themselves."""
        self.source.before_load(folder_of(storage, manifest))
        self.managed.refresh()

    def _go_back(self, opened: CheckpointReader, notes: Notes) -> None:
        """Restore what is this rank's own: generators, and where its loaders are."""
        self.source.go_back(opened.state.get("source", {}))
        rewind = restore.rewinder(opened, self.ranks, self.managed.generators, notes)
        rewind()
        if opened.manifest.origin:
            _note_loaders(opened, self.source.loaders(), notes)
        unclaimed = UnclaimedPositions(opened.state["loaders"], rewind, notes.approximated)
        self.loop.go_back(Progress(**opened.manifest.progress), unclaimed, opened.state.get("loop", {}))
        unclaimed.reported = True  # by the block that is printed next

    def _tell(self, choice: Choice, parts: list[str], notes: Notes) -> Restored:
        manifest = choice.manifest
        generators = [key for key in self.managed.generators if key not in notes.skipped]
        self.follow(manifest, choice.damaged, choice.tier == 0)
        restored = Restored(
            name=manifest.name,
            url=choice.url,
            run=manifest.run,
            progress=Progress(**manifest.progress),
            metrics=manifest.metrics,
            restored=(*parts, *generators, "rng", "progress"),
            resharded=notes.resharded,
            approximated=notes.approximated,
            skipped=notes.skipped,
            passed_over=choice.passed_over,
            begins_at=self.loop.begins_at(),
            on_read=self.loop.patterns.note_asked,
        )
        if self.ranks.rank == MAIN:
            say(str(restored))
        return restored


def _note_loaders(opened: CheckpointReader, loaders: Iterable[str], notes: Notes) -> None:
    """Where a loader was is in a folder of Accelerate only if the loader knows it, and in a way of its own."""
    for key in loaders:
        done = opened.parts.get(key, {}).get("state", {}).get("_num_yielded", "those that were done")
        notes.skipped.pop(key, None)
        notes.approximated[key] = (
            "its epoch begins anew, because Accelerate does not save where every loader was. For the middle of it call "
            f"accelerator.skip_first_batches(loader, {done})"
        )

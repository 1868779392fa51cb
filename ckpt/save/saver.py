"""The saves of a manager, one after the other, into one root."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ckpt.errors import ConfigError, ConflictError, NotDurableError, StorageError, VersionError
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.ranks.consensus import Result, decide_together, run_on_all_ranks
from ckpt.ranks.group import MAIN, Ranks
from ckpt.ranks.hosts import Hosts
from ckpt.root import cleanup
from ckpt.root.catalog import find, scan
from ckpt.root.commit import Attempt, EarlierFile, WrittenFile
from ckpt.root.folder import ROOT, is_foreign
from ckpt.root.lock import lock_root
from ckpt.root.mirror import MirrorWorker
from ckpt.root.open import parent_instead
from ckpt.root.retention import Keep
from ckpt.save.capture import CapturedState, Compared
from ckpt.save.environment import device_name, versions
from ckpt.save.snapshot import Snapshots
from ckpt.save.transaction import Save
from ckpt.storage import Staging, Storage
from ckpt.storage.base import LostError
from ckpt.util.clock import utc_now
from ckpt.util.console import format_size
from ckpt.util.fork_safety import OwnerProcess
from ckpt.util.gc_pause import gc_paused
from ckpt.util.threads import SerialWorker

_log = logging.getLogger("ckpt")


@dataclass
class Saver:
    """Writes checkpoints into one root, for one manager.

    The main rank holds the root from `hold` or the first save until `close`, and knows the checkpoints that are there.
    """

    storage: Storage
    ranks: Ranks
    keep: Keep | None = None
    mirror: MirrorWorker | None = None
    hosts: Hosts = field(default_factory=Hosts)
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    parent: str | None = None
    sequence: int = 0  # of what this run goes on from
    damaged: set[str] = field(default_factory=set)
    earlier: dict[str, EarlierFile] = field(default_factory=dict)  # files of the last checkpoint, on every rank its own
    goes_on: bool = False  # whether this run has seen what is there, or there was nothing
    failed_load: str = ""  # why a load before that could not see what is there
    host_memory: int | None = None
    compared: Compared = field(default_factory=Compared)  # what ranks know of each other's state
    owner: OwnerProcess = field(default_factory=OwnerProcess)
    _committed: list[Manifest] | None = None
    _has_saved: bool = False
    _memory_ready: bool = False
    _unreadable: dict[str, VersionError] = field(default_factory=dict)  # written by a newer ckpt
    _unsure: dict[str, Manifest] = field(default_factory=dict)  # whose commit failed, and may have taken effect
    _last_sequence: int = 0  # the highest that this run has written, or tried to
    _held: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.snapshots = Snapshots(self.host_memory)
        self.talks = self.ranks.channel("saving")  # saves run beside whatever else the ranks talk about
        self._background = SerialWorker("ckpt-save")

    def hold(self) -> None:
        """Take the root for this run, and clear away what a crashed one left. Refused if another run has it."""
        run_on_all_ranks(self.ranks, "resume()", lambda: self._hold() if self.keeps else None)
        self.goes_on = True

    @property
    def keeps(self) -> bool:
        """Whether this rank takes care of a root: the main one of that which all see, or the first of its host."""
        return self.hosts.owns_root(self.ranks.rank)

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._background.busy

    def is_busy_anywhere(self, name: str) -> bool:
        """Whether a save is under way on any rank, so that the one by this name is left out: the same on every rank."""
        found: bool = decide_together(self.ranks, f"save_state({name!r})", Result(self.busy), any)
        if found and self.ranks.rank == MAIN:
            _log.info("%s is not saved: the save before it is still being written", name)
        return found

    def make_memory_ready(self, tensors: Callable[[], Iterable[torch.Tensor]], *, for_devices_only: bool) -> None:
        """Once, when the size of the state is known: so that the first save is as fast as the others.

        Not while a save uses the memory that there is.
        """
        if not self._memory_ready and not self.busy:
            self._memory_ready = True
            self.snapshots.prepare(tensors(), for_devices_only=for_devices_only)

    def wait(self) -> None:
        """Until no save is under way, and all are durable. Raises what went wrong, once."""
        self.owner.require("wait()")
        self._background.wait()
        if self.ranks.rank == MAIN:
            self._settle()

    def check(self) -> None:
        """Raise what went wrong with the last save, if that is known and nobody has been told."""
        self._background.check()

    def save(
        self,
        name: str,
        take: Callable[[], CapturedState],
        optimized: Callable[[], frozenset[int]],
        facts: Mapping[str, Any],
        *,
        wait: bool,
    ) -> None:
        """Capture, write and commit on all ranks, or raise on all. Without `wait`, only the capture is waited for."""
        self.owner.require(f"save_state({name!r})")
        self._background.wait()
        save = Save(self, name, facts)
        with gc_paused():
            save.prepare(take, optimized, snapshot=not wait)
        save.attended = wait or not save.detached
        if save.attended:
            self._carry_out(save)
        else:
            self._background.start(lambda: self._carry_out(save))
        if wait and isinstance(self.storage, Staging):
            self._settle_together(name)

    def _settle_together(self, name: str) -> None:
        with self.talks.working():
            decide_together(self.talks, f"save_state({name!r}) (durable)", Result(), lambda _: self._settle())

    def _settle(self) -> None:
        if isinstance(self.storage, Staging):
            self.storage.settle()

    def _carry_out(self, save: Save) -> None:
        try:
            with self.talks.working():
                self.parent = save.run()
        except Exception as error:
            self._after_failure(save.name, error)
            raise
        self._retain()

    def _after_failure(self, name: str, error: Exception) -> None:
        committed = isinstance(error, NotDurableError)
        if self.keeps and not committed and (name not in self._unsure or self.storage.is_local):
            self._clean_up(name)
        if self.ranks.rank == MAIN:
            said = "" if committed else f"{self.storage.url}/{name} was not saved: "
            _log.error("%s%s", said, error)

    def follow(self, manifest: Manifest, damaged: Iterable[str], in_root: bool = True) -> None:
        """What is saved from here on goes on from this checkpoint.

        Files can be linked only from what was read: what the root has by that name was damaged, if it was not taken.
        """
        self.run, self.parent, self.sequence = manifest.run, manifest.id, manifest.sequence
        self.earlier = {file.name: EarlierFile(manifest.name, file) for file in manifest.files if in_root}
        self.goes_on = True
        self.damaged |= set(damaged)
        if self.hosts.separate_roots and self.keeps:
            self._adopt(manifest)

    def _adopt(self, manifest: Manifest) -> None:
        """Write down what other hosts know to be committed, before its files here are taken for leftovers."""
        there = self.there(manifest.name)
        if FILE_NAME not in there and any(file.path in there for file in manifest.files):
            self.storage.write(f"{manifest.name}/{FILE_NAME}", [manifest.to_bytes()])

    def remove(self, name: str) -> None:
        """Remove a checkpoint, unless somebody is reading it. Nothing may be under way."""
        manifest = find(self.storage, name).manifest
        if manifest is not None and cleanup.remove(self.storage, manifest) and self._committed is not None:
            self._committed = [one for one in self._committed if one.name != name]

    def close(self) -> None:
        """Let go of the root and of memory, when all that waits has been copied.

        A save is still under way only if waiting for it was interrupted: it keeps what it needs. A forked child lets
        its parent keep everything.
        """
        if self.busy or not self.owner.is_here:
            return
        self.snapshots.close()
        if self.mirror is not None:
            with self.ranks.working(job_wide=True):
                self.mirror.close()
            if self._has_saved and self.mirror.error is None:  # what waited to be copied had to stay until now
                self._retain()
        self._release()
        self._has_saved = False

    def _release(self) -> None:
        """Release the root. What is there has to be looked at again."""
        self._held.close()
        self._committed = None

    def _hold(self) -> None:
        if self._committed is not None:
            return
        with ExitStack() as held:  # whatever fails from here on, the root is released
            lock_root(self.storage, held)
            found = cleanup.sweep(self.storage)
            committed = [one.manifest for one in found if one.manifest is not None]
            self._unreadable = {one.name: one.problem for one in found if isinstance(one.problem, VersionError)}
            if self.mirror is not None:
                self.mirror.start([one for one in committed if one.name not in self.damaged])
            self._held = held.pop_all()
        self._committed = committed

    def _in_held_root(self, do: Callable[[], Attempt]) -> Attempt:
        """Do it while this run holds the root. If the root or its lock file was removed, take it again first."""
        self._hold()
        try:
            return do()
        except LostError as lost:
            self._hold_again(lost)
            return do()

    def _hold_again(self, lost: LostError) -> None:
        """Checkpoints that others have saved there meanwhile, this run must resume from before it saves."""
        known, resumed = {one.id: one.name for one in self._committed or ()}, self.goes_on
        self._release()
        self.goes_on = False
        self._hold()
        left = {one.id for one in self._committed or ()}
        self.goes_on = resumed and left <= known.keys()
        gone = ", ".join(name for key, name in known.items() if key not in left) or "none"
        _log.warning("%s The root was taken again, and is made anew. Checkpoints that are gone: %s.", lost, gone)

    def begin(self, name: str, paths: list[str], elsewhere: Collection[str] = ()) -> Attempt:
        """Take the root, if that has not been done, and leave the mark of a save under way.

        `elsewhere` are files of that checkpoint's folder in the roots of other hosts.
        """

        def begin() -> Attempt:
            self._check(name)
            there = {*self.there(name), *elsewhere}
            occupied = tuple(path for path in paths if path in there or not self._is_free_there(name))
            return self._begin(Attempt(name, occupied_paths=occupied), paths)

        return self._in_held_root(begin)

    def join(self, attempt: Attempt, paths: list[str]) -> Attempt:
        """The same in another host's root, for the names that the main rank has chosen."""

        def begin() -> Attempt:
            self._check(attempt.name)
            return self._begin(attempt, paths)

        return self._in_held_root(begin)

    def there(self, name: str) -> list[str]:
        """The files in the folder of a checkpoint."""
        return [entry.key.removeprefix(f"{name}/") for entry in self.storage.list(name)]

    def _check(self, name: str) -> None:
        self._look_again()
        self._refuse_to_overtake(name)
        if not self._committed and is_foreign(self.storage, ROOT):
            raise ConfigError(
                f"{self.storage.url} was written by Accelerate, and stays as it is: nothing is saved into it. "
                f"{parent_instead(self.storage.url)}"
            )
        if is_foreign(self.storage, name):
            raise ConfigError(
                f"{self.storage.url}/{name} was written by Accelerate, and stays as it is. Save under another name."
            )

    def _begin(self, attempt: Attempt, paths: list[str]) -> Attempt:
        older = next((one for one in self._committed or () if one.name == attempt.name), None)
        here = replace(attempt, replaces=tuple(file.path for file in older.files) if older else ())
        here.begin(self.storage, paths)
        # only now: once the mark is there, no other process removes what is replaced, so that its version holds
        return replace(here, expected_version=self._version(attempt.name, older))

    def _is_free_there(self, name: str) -> bool:
        """Whether the mirror has nothing by that name: a path means the same bytes here and there, for good."""
        return self.mirror is None or self.mirror.is_free(name)

    @property
    def _newest(self) -> Manifest | None:
        there = self.mirror.newest if self.mirror is not None else None
        return max([*(self._committed or ()), *filter(None, [there])], key=lambda one: one.sequence, default=None)

    def _version(self, name: str, known: Manifest | None) -> str | None:
        """The version of the manifest that a save replaces. Refused if it is one that this run does not know."""
        version = self.storage.version(f"{name}/{FILE_NAME}")
        there = find(self.storage, name).manifest if version is not None else None
        if there is not None and (known is None or there.id != known.id):
            raise ConflictError(
                f"{self.storage.url}/{name} was saved by another run meanwhile, and stays. See to it that one run "
                "alone writes there, then start this one again: it goes on from the newest checkpoint."
            )
        return version

    def _refuse_to_overtake(self, name: str) -> None:
        """What a run saves becomes the newest, so it must have gone on from what was the newest."""
        newest = self._newest
        if self.failed_load and not self.goes_on:
            raise ConfigError(
                f"nothing is saved, because the load before it failed: {self.failed_load} There may be newer "
                f"checkpoints, and what is saved to {self.storage.url} now would be put before them. Call resume() or "
                "load_state() again until it succeeds, or give this run another root and mirror."
            )
        if newest is not None and not self.goes_on:
            raise ConfigError(
                f"{self.storage.url} has checkpoints ({newest.name} is the newest) that this run has not "
                "resumed from: saving now would put a fresh start before them. Call resume() or load_state() first, or "
                "give this run another root."
            )
        self.goes_on = True
        if name in self._unreadable:
            raise self._unreadable[name]

    def commit(self, attempt: Attempt, stored: list[WrittenFile], facts: Mapping[str, Any]) -> Manifest:
        """Write the manifest, and return it."""
        assert self._committed is not None
        manifest = Manifest(
            name=attempt.name,
            id=attempt.id,
            sequence=1 + max(self.sequence, self._last_sequence, self._newest.sequence if self._newest else 0),
            created=utc_now(),
            run=self.run,
            parent=self.parent,
            files=tuple(sorted((one.file for one in stored), key=lambda file: file.path)),
            versions=versions(),
            hardware=device_name(),
            hosts=self.hosts.records() if self.hosts.separate_roots else (),
            **{"world_size": self.ranks.world_size, **facts},
        )
        self.put(attempt, manifest, {one.file.path: one.receipt for one in stored if one.receipt is not None})
        seconds = facts["seconds"]
        _log.info(
            "saved %s/%s: %s, training waited %.2f s, durable after %.2f s",
            self.storage.url, attempt.name, format_size(manifest.size), seconds["blocked"], seconds["total"],
        )  # fmt: skip
        return manifest

    def put(self, attempt: Attempt, manifest: Manifest, receipts: Mapping[str, str]) -> None:
        """Commit in this root."""
        self._last_sequence = max(self._last_sequence, manifest.sequence)
        try:
            attempt.commit(self.storage, manifest, receipts)
        except NotDurableError as error:
            self._enter(manifest)
            raise NotDurableError(
                f"{self.storage.url}/{attempt.name} is committed and can be loaded, but it may not outlive a crash of "
                f"this machine: {error} Look at the disk, then save again. Until a save succeeds, none of the "
                "checkpoints before it is removed."
            ) from error
        except StorageError:
            self._unsure[attempt.name] = manifest
            raise
        self._enter(manifest)

    def _enter(self, manifest: Manifest) -> None:
        """Take note of what was committed."""
        self._committed = [manifest, *(one for one in self._committed or () if one.name != manifest.name)]
        self.damaged.discard(manifest.name)
        self._has_saved = True
        if self.mirror is not None:
            self.mirror.enqueue(manifest)

    def _look_again(self) -> None:
        """A commit that failed may have taken effect all the same, where an answer was lost."""
        for name, manifest in list(self._unsure.items()):
            there = find(self.storage, name).manifest
            if there is not None and there.id == manifest.id:
                self._enter(manifest)
            del self._unsure[name]

    def manifests_of_run(self) -> list[Manifest]:
        """The committed checkpoints of this run, as the root lists them now."""
        found = (checkpoint.manifest for checkpoint in scan(self.storage))
        return [manifest for manifest in found if manifest is not None and manifest.run == self.run]

    def _retain(self) -> None:
        if self.keep is None or self._committed is None:
            return
        try:
            with self.ranks.working(job_wide=True):  # to remove much takes long, and others may be at the next save
                self._committed = cleanup.apply_retention(self.keep, self.storage, self._committed, self.damaged)
        except StorageError as error:  # the save stands; what could not be removed is tried again after the next one
            _log.warning("old checkpoints were not removed: %s", error)

    def _clean_up(self, name: str) -> None:
        """After a failure. What cannot be removed now is swept before a later save."""
        with suppress(StorageError):
            if self._committed is not None:
                cleanup.remove_uncommitted(self.storage, name)

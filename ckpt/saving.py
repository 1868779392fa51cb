"""A save, on all ranks together."""

from __future__ import annotations

import gc
import logging
import platform
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ckpt import commit
from ckpt.agreement import Outcome, agree, together
from ckpt.capture import Captured
from ckpt.catalog import find
from ckpt.commit import Attempt, Earlier, Stored
from ckpt.console import size
from ckpt.errors import ConfigError, ConflictError, RanksError, StorageError, VersionError
from ckpt.formats.documents import rank_document
from ckpt.formats.manifest import FILE_NAME, FileRecord, Manifest
from ckpt.formats.spread import Table, disagreements
from ckpt.formats.state import Image
from ckpt.hardware import device_name
from ckpt.hosts import Hosts
from ckpt.mirror import Mirror
from ckpt.ranks import MAIN, Ranks
from ckpt.retention import Keep
from ckpt.snapshot import Snapshot, Snapshots
from ckpt.storage import Staging, Storage
from ckpt.storage.background import Background
from ckpt.taking_over import is_foreign
from ckpt.version import __version__

_log = logging.getLogger("ckpt")


def try_out(storage: Storage) -> None:
    """Write a few bytes and remove them: what is wrong with a root shows before hours of training are lost."""
    key = f".try-{uuid.uuid4().hex}"
    if isinstance(storage, Staging):
        storage.stage(key, [b"ckpt"])  # which is never published
        return
    storage.write(key, [b"ckpt"])
    storage.delete([key])


@dataclass
class Saver:
    """Writes checkpoints into one root, for one manager.

    The main rank holds the root from `hold` or the first save until `close`, and knows the checkpoints that are there.
    """

    storage: Storage
    ranks: Ranks
    keep: Keep | None = None
    mirror: Mirror | None = None
    hosts: Hosts = field(default_factory=Hosts)
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    parent: str | None = None
    sequence: int = 0  # of what this run goes on from
    damaged: set[str] = field(default_factory=set)
    earlier: dict[str, Earlier] = field(default_factory=dict)  # files of the last checkpoint, on every rank its own
    goes_on: bool = False  # whether this run has seen what is there, or there was nothing
    host_memory: int | None = None
    _committed: list[Manifest] | None = None
    _unreadable: dict[str, VersionError] = field(default_factory=dict)  # written by a newer ckpt
    _held: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.snapshots = Snapshots(self.host_memory)
        self.talks = self.ranks.apart("saving")  # saves run beside whatever else the ranks talk about
        self._background = Background("ckpt-save")

    def hold(self) -> None:
        """Take the root for this run, and clear away what a crashed one left. Refused if another run has it."""
        together(self.ranks, "resume()", lambda: self._hold() if self.keeps else None)
        self.goes_on = True

    @property
    def keeps(self) -> bool:
        """Whether this rank takes care of a root: the main one of that which all see, or the first of its host."""
        return self.hosts.keeps(self.ranks.rank)

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._background.busy

    def wait(self) -> None:
        """Until no save is under way, and all are durable. Raises what went wrong, once."""
        self._background.wait()
        if self.ranks.rank == MAIN:
            self._settle()

    def check(self) -> None:
        """Raise what went wrong with the last save, if that is known and nobody has been told."""
        self._background.check()

    def save(
        self,
        name: str,
        take: Callable[[], Captured],
        optimized: Callable[[], frozenset[int]],
        facts: Mapping[str, Any],
        *,
        wait: bool,
    ) -> None:
        """Capture, write and commit on all ranks, or raise on all. Without `wait`, only the capture is waited for."""
        self._background.wait()
        save = _Save(self, name, facts)
        with _undisturbed():
            save.prepare(take, optimized, snapshot=not wait)
        if wait or not save.detached:
            self._carry_out(save)
        else:
            self._background.start(lambda: self._carry_out(save))
        if wait and isinstance(self.storage, Staging):
            self._settle_together(name)

    def _settle_together(self, name: str) -> None:
        with self.talks.working():
            agree(self.talks, f"save_state({name!r}) (durable)", Outcome(), lambda _: self._settle())

    def _settle(self) -> None:
        if isinstance(self.storage, Staging):
            self.storage.settle()

    def _carry_out(self, save: _Save) -> None:
        try:
            with self.talks.working():
                self.parent = save.run()
        except Exception as error:
            if self.keeps:
                self._clean_up(save.name)
            if self.ranks.rank == MAIN:
                _log.error("%s/%s was not saved: %s", self.storage.url, save.name, error)
            raise
        self._retain()

    def follow(self, manifest: Manifest, damaged: Iterable[str]) -> None:
        """What is saved from here on goes on from this checkpoint."""
        self.run, self.parent, self.sequence = manifest.run, manifest.id, manifest.sequence
        self.earlier = {file.name: Earlier(manifest.name, file) for file in manifest.files}
        self.goes_on = True
        self.damaged |= set(damaged)
        if self.hosts.apart and self.keeps:
            self._adopt(manifest)

    def _adopt(self, manifest: Manifest) -> None:
        """Write down what other hosts know to be committed, before its files here are taken for leftovers."""
        there = self.there(manifest.name)
        if FILE_NAME not in there and any(file.path in there for file in manifest.files):
            self.storage.write(f"{manifest.name}/{FILE_NAME}", [manifest.to_bytes()])

    def remove(self, name: str) -> None:
        """Remove a checkpoint, unless somebody is reading it. Nothing may be under way."""
        manifest = find(self.storage, name).manifest
        if manifest is not None and commit.remove(self.storage, manifest) and self._committed is not None:
            self._committed = [one for one in self._committed if one.name != name]

    def close(self) -> None:
        """Let go of the root and of memory, when all that waits has been copied. Nothing may be under way."""
        self.snapshots.close()
        if self.mirror is not None:
            self.mirror.close()
        self._held.close()
        self._committed = None

    def _hold(self) -> None:
        if self._committed is not None:
            return
        commit.take(self.storage, self._held)
        found = commit.sweep(self.storage)
        committed = [one.manifest for one in found if one.manifest is not None]
        self._unreadable = {one.name: one.problem for one in found if isinstance(one.problem, VersionError)}
        if self.mirror is not None:
            self.mirror.hold([one for one in committed if one.name not in self.damaged])
        self._committed = committed

    def begin(self, name: str, paths: list[str], elsewhere: Collection[str] = ()) -> Attempt:
        """Take the root, if that has not been done, and leave the mark of a save under way.

        `elsewhere` are files of that checkpoint's folder in the roots of other hosts.
        """
        self._check(name)
        there = {*self.there(name), *elsewhere}
        taken = tuple(path for path in paths if path in there or not self._is_free_there(name))
        return self._begin(Attempt(name, taken=taken), paths)

    def join(self, attempt: Attempt, paths: list[str]) -> Attempt:
        """The same in another host's root, for the names that the main rank has chosen."""
        self._check(attempt.name)
        return self._begin(attempt, paths)

    def there(self, name: str) -> list[str]:
        """The files in the folder of a checkpoint."""
        return [entry.key.removeprefix(f"{name}/") for entry in self.storage.list(name)]

    def _check(self, name: str) -> None:
        self._hold()
        self._refuse_to_overtake(name)
        if is_foreign(self.storage, name):
            raise ConfigError(
                f"{self.storage.url}/{name} was written by Accelerate, and stays as it is. Save under another name."
            )

    def _begin(self, attempt: Attempt, paths: list[str]) -> Attempt:
        older = next((one for one in self._committed or () if one.name == attempt.name), None)
        here = replace(
            attempt,
            replaces=tuple(file.path for file in older.files) if older else (),
            over=self._version(attempt.name, older),
        )
        here.begin(self.storage, paths)
        return here

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
        if newest is not None and not self.goes_on:
            raise ConfigError(
                f"{self.storage.url} has checkpoints ({newest.name} is the newest) that this run has not "
                "resumed from: saving now would put a fresh start before them. Call resume() or load_state() first, or "
                "give this run another root."
            )
        self.goes_on = True
        if name in self._unreadable:
            raise self._unreadable[name]

    def commit(self, attempt: Attempt, stored: list[Stored], facts: Mapping[str, Any]) -> Manifest:
        """Write the manifest, and return it."""
        assert self._committed is not None
        manifest = Manifest(
            name=attempt.name,
            id=attempt.id,
            sequence=1 + max(self.sequence, self._newest.sequence if self._newest else 0),
            created=commit.now(),
            run=self.run,
            parent=self.parent,
            files=tuple(sorted((one.file for one in stored), key=lambda file: file.path)),
            versions=versions(),
            hardware=device_name(),
            **{"world_size": self.ranks.world_size, **facts},
        )
        self.put(attempt, manifest, {one.file.path: one.receipt for one in stored if one.receipt is not None})
        seconds = facts["seconds"]
        _log.info(
            "saved %s/%s: %s, training waited %.2f s, durable after %.2f s",
            self.storage.url, attempt.name, size(manifest.size), seconds["blocked"], seconds["total"],
        )  # fmt: skip
        return manifest

    def put(self, attempt: Attempt, manifest: Manifest, receipts: Mapping[str, str]) -> None:
        """Commit in this root."""
        attempt.commit(self.storage, manifest, receipts)
        self._committed = [manifest, *(one for one in self._committed or () if one.name != attempt.name)]
        self.damaged.discard(attempt.name)
        if self.mirror is not None:
            self.mirror.offer(manifest)

    def _retain(self) -> None:
        if self.keep is None or self._committed is None:
            return
        try:
            self._committed = commit.retain(self.keep, self.storage, self._committed, self.damaged)
        except StorageError as error:  # the save stands; what could not be removed is tried again after the next one
            _log.warning("old checkpoints were not removed: %s", error)

    def _clean_up(self, name: str) -> None:
        """After a failure. What cannot be removed now is swept before a later save."""
        with suppress(StorageError):
            if self._committed is not None:
                commit.clean(self.storage, name)


@dataclass
class _Save:
    """One save: the ranks agree on it, write, and agree that it is written."""

    saver: Saver
    name: str
    facts: Mapping[str, Any]
    captured: Outcome = field(default_factory=Outcome)
    snapshot: Snapshot | None = None
    started: float = field(default_factory=time.monotonic)
    blocked: float | None = None  # seconds that training waited
    seconds: dict[str, float] = field(default_factory=dict)
    documents: list[Image] = field(default_factory=list)  # all that are JSON, on the main rank
    written: list[FileRecord] = field(default_factory=list)

    @property
    def detached(self) -> bool:
        """Whether training may go on: nothing that it changes is still needed."""
        return self.snapshot is not None

    def prepare(self, take: Callable[[], Captured], optimized: Callable[[], frozenset[int]], *, snapshot: bool) -> None:
        """Take the state as it is now."""
        self.captured = Outcome.of(take)
        captured = self.captured.value
        if captured is not None and not captured.gathered and (snapshot or captured.on_device):
            held = optimized()
            found = self.captured.then(lambda one: self.saver.snapshots.take(one.all_images, _in(held)))
            self.snapshot, self.captured = found.value, Outcome(captured, found.error)
        if self.snapshot is not None:
            self.blocked = time.monotonic() - self.started

    def run(self) -> str:
        if self.snapshot is not None:
            snapshot = self.snapshot
            self.captured = self.captured.then(lambda one: _arrived(one, snapshot))
        self.seconds["copied"] = time.monotonic() - self.started
        plan = self._agree(self.captured.then(self._hello), self._plan)
        if plan is None:
            self._agree(Outcome(self.captured.value.tables), self._complain, " (tensors compared)")
        begun = self._begun(Attempt(**plan["attempt"]), plan)
        written = Outcome.of(lambda: self._write(begun))
        done = self._agree(written, lambda files: self._commit(begun, files), " (files written)")
        if self._keeps_another_root:
            self._put(begun, Manifest.from_bytes(done["manifest"].encode(), self.name))
        self.saver.earlier = {file.name: Earlier(self.name, file) for file in self.written}
        identity: str = done["id"]
        return identity

    @property
    def _keeps_another_root(self) -> bool:
        return self.saver.keeps and self.saver.ranks.rank != MAIN

    def _begun(self, attempt: Attempt, plan: Mapping[str, Any]) -> Attempt:
        """Where hosts have roots of their own, the save is begun in all of them before any file is written."""
        if not self.saver.hosts.apart:
            return attempt
        if self._keeps_another_root:
            self.documents = [Image.of(path, text.encode()) for path, text in plan["documents"].items()]
        join = Outcome.of(lambda: self.saver.join(attempt, plan["paths"]) if self._keeps_another_root else attempt)
        self._agree(Outcome(error=join.error), lambda _: None, " (begun everywhere)")
        begun: Attempt = join.value
        return begun

    def _put(self, attempt: Attempt, manifest: Manifest) -> None:
        """The main rank has committed it already: a manifest that is missing here is made up for by the next load."""
        try:
            self.saver.put(attempt, manifest, {})
        except StorageError as error:
            _log.warning("%s was committed, but its manifest could not be written here: %s", self.name, error)

    def _hello(self, captured: Captured) -> dict[str, Any]:
        return {
            "document": captured.document.decode(),
            "paths": [image.path for image in captured.own_images],
            "tables": captured.tables_digest,
            "there": self.saver.there(self.name) if self._keeps_another_root else [],
        }

    def _agree(self, mine: Outcome, decide: Callable[[list[Any]], Any], phase: str = "") -> Any:
        return agree(self.saver.talks, f"save_state({self.name!r}){phase}", mine, decide)

    def _plan(self, hellos: list[Any]) -> dict[str, Any] | None:
        """On the main rank: how the files will be named; None if the ranks disagree about the tensors."""
        if len({one["tables"] for one in hellos}) > 1:
            return None
        own = [Image.of(rank_document(rank), one["document"].encode()) for rank, one in enumerate(hellos)]
        self.documents = [self.captured.value.values, *own]
        shared = [image.path for image in [*self.captured.value.images, *self.documents]]
        paths = [*shared, *(path for one in hellos for path in one["paths"])]
        attempt = self.saver.begin(self.name, paths, {path for one in hellos for path in one["there"]})
        plan: dict[str, Any] = {"attempt": asdict(attempt)}
        if self.saver.hosts.apart:
            texts = {one.path: b"".join(one.pieces()).decode() for one in self.documents}
            plan |= {"paths": paths, "documents": texts}
        return plan

    def _complain(self, tables: list[Any]) -> None:
        lines = [line for key in sorted({key for one in tables for key in one}) for line in _disagreements(key, tables)]
        listed = "\n  ".join(lines)
        raise RanksError(
            f"the ranks disagree, so nothing was saved:\n  {listed}\nBuild the same model on every rank, spread in the "
            "same way, and give every rank the same layout=."
        )

    def _write(self, attempt: Attempt) -> list[dict[str, Any]]:
        captured: Captured = self.captured.value
        if not captured.keeps:
            captured.help_to_gather()
        files = [*captured.all_images, *(self.documents if captured.keeps else ())]
        images = [self.snapshot.images.get(file.path, file) if self.snapshot else file for file in files]
        began = time.monotonic()
        stored = attempt.write(self.saver.storage, images, self.saver.earlier, show=captured.rank == MAIN)
        self.seconds["written"] = time.monotonic() - began
        self.written = [one.file for one in stored]
        return [asdict(one) for one in stored]

    def _commit(self, attempt: Attempt, reports: list[Any]) -> dict[str, str]:
        stored = self._stored(reports)
        total = time.monotonic() - self.started
        facts = {
            **self.facts,
            "layout": "sharded" if self.captured.value.spread else "full",
            "seconds": {"blocked": total if self.blocked is None else self.blocked, **self.seconds, "total": total},
        }
        manifest = self.saver.commit(attempt, stored, facts)
        return {"id": manifest.id, "manifest": manifest.to_bytes().decode() if self.saver.hosts.apart else ""}

    def _stored(self, reports: list[Any]) -> list[Stored]:
        """All files, once each. Where hosts have roots of their own, their copies must be the same."""
        stored: dict[str, Stored] = {}
        other: dict[str, int] = {}
        for rank, report in enumerate(reports):
            for one in report:
                record = FileRecord.from_json(one["file"])
                if stored.setdefault(record.name, Stored(record, one["receipt"])).file != record:
                    other.setdefault(record.name, rank)
        if other:
            listed = ", ".join(f"{name} on rank {rank}" for name, rank in other.items())
            raise RanksError(
                f"these are not the main rank's: {listed}. Hosts with roots of their own keep a copy each of what is "
                "not spread over ranks, so it must be the same on all of them. Make it so, or use a shared root."
            )
        return list(stored.values())


def versions() -> dict[str, str]:
    return {"ckpt": __version__, "torch": torch.__version__, "python": platform.python_version()}


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without the garbage collector: thousands of new objects would call it up just while training waits."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _in(held: frozenset[int]) -> Callable[[torch.Tensor], bool]:
    return lambda tensor: tensor.untyped_storage().data_ptr() in held


def _arrived(captured: Captured, snapshot: Snapshot) -> Captured:
    snapshot.wait()
    return captured


def _disagreements(key: str, tables: list[Any]) -> list[str]:
    """What ranks say differently about a part: how it is written, its tensors, or how those are spread."""
    written = [one[key]["written"] if key in one else "whole or not there" for one in tables]
    if len(set(written)) > 1:
        said = (
            f"{how} on rank {', '.join(str(r) for r, one in enumerate(written) if one == how)}"
            for how in dict.fromkeys(written)
        )
        return [f"{key}: {'; '.join(said)}"]
    seen = {rank: Table.from_json(one[key]) for rank, one in enumerate(tables)}
    lines = [f"{key}.{name}: {'; '.join(said)}" for name, said in disagreements(seen)]
    differs = any(one[key] != tables[0][key] for one in tables)
    return lines or ([f"{key}: how its tensors are spread over the ranks"] if differs else [])

"""Writes the checkpoints of a run into its root: locks it, begins and commits, applies retention, feeds the mirror."""

from __future__ import annotations

import logging
import platform
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ckpt.errors import CheckpointError, ConfigError, ConflictError, NotDurableError, StorageError, VersionError
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import FILE_NAME, LARGEST_SEQUENCE, FileRecord, Manifest
from ckpt.ranks.consensus import MAIN, Ranks, run_on_all_ranks
from ckpt.ranks.hosts import Hosts
from ckpt.root import deletion
from ckpt.root.catalog import Goodput, History, Index, Overview, PastAttempt, Summary, find
from ckpt.root.folder import ROOT_ITSELF, is_foreign
from ckpt.root.lock import lock_root
from ckpt.root.mirror import MirrorWorker
from ckpt.root.open import parent_instead
from ckpt.root.retention import Keep
from ckpt.root.signing import Head, Seal
from ckpt.root.write_link_commit import Attempt, EarlierFile, UnsureCommits, WrittenFile
from ckpt.shown import sentence, shown
from ckpt.storage import Staging, Storage
from ckpt.storage.base import LostError
from ckpt.storage.retry import within
from ckpt.util.console import format_size, utc_now
from ckpt.util.threads import OwnerProcess
from ckpt.version import __version__

if TYPE_CHECKING:
    from ckpt.storage.local.storage import OneFolder


@dataclass
class HeldRoot:
    """What the lock of a root makes certain: the checkpoints that are there, newest first."""

    storage: Storage
    committed: list[Summary]
    lost: Mapping[str, CheckpointError]  # by name: committed, with no manifest that this ckpt can read
    index: Index
    is_empty: bool = False  # nothing but files of ckpt's own was there when it was locked
    newest: Manifest | None = None  # that this run has committed
    staged: dict[str, Manifest] = field(default_factory=dict)  # by name: to read one would publish what waits for it
    replaced: bool = False  # whether the newest took the place of another, which the history must have
    history: History = field(init=False)

    def __post_init__(self) -> None:
        self.history = History(self.storage)

    def find(self, name: str) -> Manifest | None:
        """The committed manifest of that name, if there is one. Any but the newest is read."""
        known = next((summary for summary in self.committed if summary.name == name), None)
        if known is None:
            return None
        if self.newest is not None and self.newest.id == known.id:
            return self.newest
        manifest = find(self.storage, name).manifest
        if manifest is None or manifest.id != known.id:
            return None
        self.history.add(manifest)  # a save of its name may replace it
        return manifest

    def add(self, manifest: Manifest, version: str | None) -> None:
        """Record a commit. It replaces an older checkpoint of its name. `version`: of its manifest, if it is known."""
        summary = Summary.of(manifest)
        self.newest = manifest
        if isinstance(self.storage, Staging):
            self.staged[manifest.name] = manifest
        for replaced in (known for known in self.committed if known.name == manifest.name):
            self.history.add(replaced)
            self.replaced = True
        self.history.add(manifest)
        self.committed = [summary, *self._others(manifest.name)]
        self.index.add(version, summary)

    def discard(self, name: str) -> None:
        """Record a removal."""
        self.committed = self._others(name)

    def retain(self, keep: Keep | None, damaged: Collection[str]) -> None:
        """Remove what is not to be kept; now and then, store what is left for later listings."""
        if self.replaced:
            self.history.store(self.committed)
            self.replaced = False
        if keep is not None:
            self.committed = deletion.apply_retention(
                keep, self.storage, self.committed, damaged, self.staged, self.history
            )
            self.staged = {one.name: self.staged[one.name] for one in self.committed if one.name in self.staged}
        self.index.update(self.storage, {summary.name for summary in self.committed})

    def _others(self, name: str) -> list[Summary]:
        return [summary for summary in self.committed if summary.name != name]


class RootLock:
    """The lock of a root, and of its mirror, for one run: from `take` until `release`."""

    def __init__(self, storage: Storage, mirror: MirrorWorker | None, damaged: Collection[str]) -> None:
        """`damaged`: names of checkpoints that are not mirrored."""
        self.held: HeldRoot | None = None
        self._storage, self._mirror, self._damaged = storage, mirror, damaged
        self._lock = ExitStack()
        self._is_early = False  # locked before a load, and not taken yet
        self._listed: Overview | None = None  # what that load has listed: nobody else changes it
        self._on_taken: list[tuple[str, Callable[[], None]]] = []  # with the file that must be there
        self._guard = threading.Lock()

    @property
    def committed(self) -> list[Summary]:
        """The checkpoints in the root, newest first; none unless it is locked."""
        return self.held.committed if self.held is not None else []

    def call_when_taken(self, do: Callable[[], None], if_there: str = "") -> None:
        """Call this whenever the root is locked; with `if_there`, only if the root has that file then."""
        self._on_taken.append((if_there, do))

    def take(self) -> None:
        """Lock the root and its mirror, and remove what crashed saves left. Refused if another run holds either."""
        with self._guard:
            if self.held is not None:
                return
            listed, self._listed = self._listed, None
            is_locked, self._is_early = self._is_early, False
            with self._lock.pop_all() as lock:  # if anything below fails, the root is released
                if not is_locked:
                    lock_root(self._storage, lock)
                found = deletion.sweep(self._storage, listed=listed)
                found.index.update(self._storage, {summary.name for summary in found.committed})
                if self._mirror is not None:
                    self._mirror.start([known for known in found.committed if known.name not in self._damaged])
                for file, do in self._on_taken:
                    if not file or file in found.files:
                        do()
                self._lock = lock.pop_all()
            is_empty = all(name.startswith(".") for name in found.files)
            self.held = HeldRoot(self._storage, found.committed, found.lost, found.index, is_empty=is_empty)

    def take_early(self) -> None:
        """Raise where another run holds the root. A remote one stays locked, so that what a load lists there need not
        be listed again by `take`."""
        if self.held is None:
            with ExitStack() as lock:
                lock_root(self._storage, lock)
                if not self._storage.is_local:
                    self._lock, self._is_early = lock.pop_all(), True

    def note_listing(self, listed: Overview) -> None:
        """A load has listed the root: nothing changes there if it was locked before that."""
        self._listed = listed if self._is_early else None

    def end_early(self) -> None:
        """Release a root that was locked early, and that nobody has taken since."""
        if self._is_early:
            self._is_early, self._listed = False, None
            self._lock.close()

    def release(self) -> None:
        """Release the root. What is committed there must be listed again before the next save."""
        if self.held is not None:
            self.held = None
            self._lock.close()


def remove_checkpoint(storage: Storage, held: HeldRoot | None, name: str) -> None:
    """Remove a checkpoint, unless it is being read. The history of the root keeps what it was."""
    manifest = find(storage, name).manifest
    if manifest is not None:
        (held.history if held else History(storage)).store([manifest])
        why = deletion.remove(storage, manifest)
        if why:
            _log.warning("ckpt left %s/%s, which %s", storage.url, name, why)
        elif held:
            held.discard(name)


def files_of(storage: Storage, name: str) -> list[str]:
    """The paths of all files in the folder of a checkpoint."""
    return [entry.key.removeprefix(f"{name}/") for entry in storage.list(name)]


def adopt(storage: Storage, manifest: Manifest) -> None:
    """Write the manifest that other hosts have, before the sweep takes this host's files for leftovers."""
    present = files_of(storage, manifest.name)
    if FILE_NAME not in present and any(file.path in present for file in manifest.files):
        storage.write(f"{manifest.name}/{FILE_NAME}", [manifest.to_bytes()])


# The environment that manifests record: versions, and the accelerator or processor.


def device_name() -> str:
    """The accelerator if this process uses one, else the processor."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # asking for its name would initialise CUDA
        return str(torch.cuda.get_device_name())
    return _processor() or platform.machine()


@cache
def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = (line.partition(":") for line in file)
            return next((value.strip() for key, _, value in lines if key.strip() == "model name"), "")
    except OSError:
        return platform.processor()


def versions() -> dict[str, str]:
    return {"ckpt": __version__, "torch": torch.__version__, "python": platform.python_version()}


# What the first checkpoint after a load says of it: which one was loaded, and which newer ones were passed over.
MOST = 20  # checkpoints that were passed over; of more, the rest is counted
LONGEST = 400  # characters of a reason
_TIERS = {-1: "memory", 0: "root", 1: "mirror"}


def resumption(loaded: Manifest, tier: int, passed_over: Mapping[str, str]) -> dict[str, Any]:
    """The field `resumed` of a manifest. `passed_over`: the newer ones that could not be used, with the reasons."""
    some = list(passed_over.items())[:MOST]
    more = {"more": len(passed_over) - MOST} if len(passed_over) > MOST else {}
    return {
        "name": shown(loaded.name),
        "id": loaded.id,
        "step": loaded.step,
        "found_in": _TIERS.get(tier, "elsewhere"),
        "passed_over": {shown(name): _short(shown(why)) for name, why in some},
        **more,
    }


def _short(why: str) -> str:
    return why if len(why) <= LONGEST else f"{why[: LONGEST - 3]}..."


# What a save must not overtake, overwrite or mix with. Checked in the held root before anything is written.


def refuse_foreign(storage: Storage, name: str, held: HeldRoot | None, present: Collection[str]) -> None:
    """Nothing is saved into a folder that Accelerate wrote, be it the root or the checkpoint's own, in which there are
    these files."""
    if held is not None and not held.is_empty and not held.committed and is_foreign(storage, ROOT_ITSELF):
        raise ConfigError(
            f"Accelerate wrote {storage.url}, and ckpt does not write into it. {parent_instead(storage.url)}"
        )
    if present and is_foreign(storage, name):
        raise ConfigError(
            f"Accelerate wrote {storage.url}/{name}, and ckpt does not overwrite it. Save under another name."
        )


def version_to_replace(storage: Storage, name: str, known: Manifest | None) -> str | None:
    """The version of the manifest that a save replaces. Refused if another run has written it."""
    version = storage.version(f"{name}/{FILE_NAME}")
    present = find(storage, name).manifest if version is not None else None
    if present is not None and (known is None or present.id != known.id):
        raise ConflictError(
            f"another run has saved {storage.url}/{name} in the meantime, and ckpt does not overwrite it. Let only one "
            "run write there, then start this one again: it continues from the newest checkpoint."
        )
    return version


# Sequence numbers: one count for all checkpoints of a run, wherever they are written.


class Numbering:
    """Hands out sequence numbers in the order in which states are captured, though several saves may be under way."""

    def __init__(self) -> None:
        self._last = 0
        self._guard = threading.Lock()

    def note(self, known: int) -> None:
        """Record a number that is in use: those that are handed out from now on are above it."""
        with self._guard:
            self._last = max(self._last, known)

    def reserve(self, known: int) -> int:
        """The next number, above `known` and above all that were handed out."""
        with self._guard:
            self._last = next_sequence(max(self._last, known))
            return self._last


def next_sequence(known: int) -> int:
    """The number after `known`. At the end of all numbers it is `known` again, and the time of the commit decides."""
    return min(known + 1, LARGEST_SEQUENCE)


# What is said of a commit: the line of a save, and the error of one that may not outlive a crash.


def saved_line(manifest: Manifest, label: str, attempt: Attempt) -> str:
    done = "updated" if attempt.amends else "saved"  # at the end of the epoch
    waited, total = manifest.seconds["blocked"], manifest.seconds["total"]
    times = f"training waited {waited:.2f} s, durable after {total:.2f} s"
    return f"{done} {label}: {format_size(manifest.size)}, {times}"


def not_durable(manifest: Manifest, root: str, why: NotDurableError) -> NotDurableError:
    return NotDurableError(
        f"{root}/{manifest.name} is committed and can be loaded, but may not survive a crash of this machine: {why} "
        "Check the disk, then save again. Until a save succeeds, no older checkpoint is removed."
    )


_log = logging.getLogger("ckpt")


@dataclass
class Lineage:
    """Which run this is, and from which checkpoint its next one continues: every manifest says so.

    A run that has not resumed commits nothing beside older checkpoints, whole or not: it would be a fresh start before
    them. Nor does it while a load has failed, as there may be newer ones that it has not seen.
    """

    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    parent: str | None = None  # id of the checkpoint that the next one continues from
    sequence: int = 0  # the highest that this run has resumed from, or has written, or tried to
    resumed: Mapping[str, Any] = field(default_factory=dict)  # what the next checkpoint says of the last load
    has_resumed: bool = False
    failed_load: str = ""  # why the last load failed

    def follow(self, manifest: Manifest, tier: int, passed_over: Mapping[str, str]) -> None:
        """Continue from this checkpoint. A snapshot in memory (a negative tier) is no parent: the next checkpoint has
        the same one as the snapshot."""
        self.run, self.sequence = manifest.run, max(self.sequence, manifest.sequence)
        self.parent = manifest.id if tier >= 0 else manifest.parent
        self.resumed = resumption(manifest, tier, passed_over)
        self.has_resumed = True

    def note_failed_load(self, error: Exception) -> None:
        """What could not be read must not be overtaken by a save."""
        self.failed_load = str(error)

    def require_resumed(self, url: str, newest: Summary | None, lost: Mapping[str, object]) -> None:
        """Refuse a save that would be put before checkpoints that this run has not seen."""
        if not self.has_resumed:
            self._refuse_to_overtake(url, newest, lost)
        self.has_resumed = True

    def _refuse_to_overtake(self, url: str, newest: Summary | None, lost: Mapping[str, object]) -> None:
        if self.failed_load:
            raise ConfigError(
                f"ckpt saves nothing, because the last load failed: {self.failed_load} There may be newer checkpoints, "
                f"but a save to {url} now would count as the newest. Call resume() or load_state() again until it "
                "succeeds, or give this run another root and mirror."
            )
        if newest is not None:
            raise ConfigError(
                f"{url} has checkpoints ({newest.name} is the newest) that this run has not resumed from: a save "
                f"now would mix the checkpoints of a new run with the older ones. Call resume() or load_state() first, "
                f"or give this run another root."
            )
        if lost:
            raise ConfigError(
                f"{url} has committed checkpoints that ckpt can't read, so ckpt saves nothing next to them: "
                f"{' '.join(map(str, lost.values()))} Restore one from a backup, move them away, or give this run "
                "another root."
            )


_TO_TELL = 10.0  # seconds: a run that ends does not wait longer to tell the history of a root that is away


@dataclass
class AttemptLog:
    """What this process tells the history of its root: how far it got, its metrics by step, and how it ended.

    `step`: where training is; 0 if that is gone. `metrics`: the points of all steps so far.
    """

    step: Callable[[], int]
    metrics: Callable[[], dict[str, list[tuple[int, float]]]]
    since: int = 0  # the sequence number of its first checkpoint
    ended: str = ""
    reason: str = ""
    _seconds: dict[str, float] = field(default_factory=lambda: {"ready": 0.0, "waited": 0.0})
    _first: int = 0
    _last: int = 0
    _redone: int = 0
    _resumed: Mapping[str, Any] = field(default_factory=dict)
    _id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _began: str = field(default_factory=utc_now)
    _started: float = field(default_factory=time.monotonic)
    _owner: OwnerProcess = field(default_factory=OwnerProcess)
    _stored_in: tuple[History, str] | None = None  # with the run

    def loaded(self, before: int, resumed: Mapping[str, Any]) -> None:
        """A load is done, or has found nothing. `before`: the step before it."""
        if before == self._first:  # nothing was trained yet
            self._first, self._resumed, self._seconds["ready"] = self.step(), resumed, time.monotonic() - self._started
        else:
            self._redone += max(0, before - self.step())

    def slowed(self, seconds: float) -> None:
        """By so much each save has slowed down the steps beside it."""
        self._seconds["slowed"] = seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Training waits in this context for a save."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds["waited"] += time.monotonic() - began

    def end(self, error: BaseException | None, told: signal.Signals | None = None) -> None:
        """The process ends, after this exception if there is one. `told`: by a signal that it has answered."""
        if told is not None:
            self.ended, self.reason = "stopped", told.name
        elif error is None or (isinstance(error, SystemExit) and not error.code):
            self.ended = "finished"
        else:
            text = type(error).__name__
            with suppress(Exception):  # of the exception's own `__str__`
                text = f"{text}: {error}".removesuffix(": ")
            self.ended, self.reason = "failed", _short(sentence(text))

    def store(self, history: History, run: str) -> None:
        """Store it with what is known by now, unless nothing has happened."""
        said = self.so_far(run)
        if said.last == said.first and not self.since and not (self._resumed and self.ended == "failed"):
            return
        self._stored_in = history, run
        history.note(said)
        history.store(())

    def so_far(self, run: str) -> PastAttempt:
        """What is known of it now."""
        self._last = last = self.step() or self._last
        seconds = {**self._seconds, "total": time.monotonic() - self._started}
        seconds = {name: round(found, 3) for name, found in seconds.items()}
        steps: dict[str, Any] = {"since": self.since, "first": self._first, "last": last, "redone": self._redone}
        end: dict[str, Any] = {"ended": self.ended, "reason": self.reason, "resumed": self._resumed}
        return PastAttempt(self._id, run, self._began, **steps, **end, seconds=seconds, metrics=self.metrics())

    def dropped(self) -> None:
        """The manager is gone, and was not closed: the program is at its end, or has left it.

        A remote root is not told: a client would need threads, of which the end of a program allows none.
        """
        if self._stored_in is not None and not self.ended and self._owner.is_here:
            history, run = self._stored_in
            at_end = not threading.main_thread().is_alive() and not hasattr(sys, "ps1")  # in a notebook, it may be old
            error = getattr(sys, "last_value", None) if at_end else None
            if history.storage.is_local:
                self.end(error)
                self.ended = self.ended if error is not None else "exited"
                self.store(history, run)


@dataclass
class Links:
    """This rank's files of an earlier checkpoint in the root, by name: those that are unchanged are linked to."""

    files: dict[str, EarlierFile] = field(default_factory=dict)
    are_known: bool = False  # they are those that this run has read or written last

    @property
    def sizes(self) -> dict[str, int] | None:
        """The size of each file, if they are known."""
        return {name: earlier.file.size for name, earlier in self.files.items()} if self.are_known else None

    def follow(self, name: str, written: Iterable[FileRecord]) -> None:
        """Link to the files of a checkpoint that this run has read or written."""
        self.files, self.are_known = {file.name: EarlierFile(name, file) for file in written}, True

    def follow_unread(self, storage: Storage, name: str) -> None:
        """Link what is unchanged since a checkpoint that this run has not read: after a resume from memory, too, frozen
        weights are not written again."""
        with suppress(StorageError):  # then everything is written
            manifest = find(storage, name).manifest
            files = manifest.files if manifest is not None else ()
            self.files = {file.name: EarlierFile(name, file, was_read=False) for file in files}

    def clear(self) -> None:
        self.files, self.are_known = {}, False


@dataclass
class RootWriter:
    """The only writer of a root, for one run.

    The rank that owns the root holds its lock from `hold` or the first `begin` until `close`.
    """

    log_level: ClassVar[int] = logging.INFO  # of a commit
    storage: Storage
    ranks: Ranks
    keep: Keep | None = None
    mirror: MirrorWorker | None = None
    hosts: Hosts = field(default_factory=Hosts)
    numbering: Numbering = field(default_factory=Numbering)
    seal: Seal | None = None  # what manifests get beside the hashes that find damage
    head: Head | None = None  # what whoever loads remembers of this run
    lineage: Lineage = field(default_factory=Lineage)
    links: Links = field(default_factory=Links)
    damaged: set[str] = field(default_factory=set)
    attempt: AttemptLog | None = None  # on the main rank
    hands_over: bool = True  # whether ranks of a host may write together: on the main rank, until that has failed
    lock: RootLock = field(init=False)
    _unsure: UnsureCommits = field(default_factory=UnsureCommits)

    def __post_init__(self) -> None:
        self.lock = RootLock(self.storage, self.mirror, self.damaged)

    @property
    def owns_root(self) -> bool:
        """True on the rank that writes manifests: rank 0 of a shared root, the first rank of each host otherwise."""
        return self.hosts.owns_root(self.ranks.rank)

    @property
    def held(self) -> HeldRoot | None:
        """What is known of the root while this process has its lock."""
        return self.lock.held

    def hold(self, call: str = "resume()", *, resumed: bool = True) -> None:
        """Lock the root for this run and remove what a crashed run left. Every rank makes this call.

        Refused if another run holds it. Without `resumed`, what is there may not have been loaded."""
        run_on_all_ranks(self.ranks, call, self.hold_here)
        self.lineage.has_resumed |= resumed

    def hold_here(self) -> None:
        """What `hold` does on this rank. The caller lets all ranks know of its error."""
        if self.owns_root:
            self.lock.take()

    def follow(
        self, manifest: Manifest, damaged: Iterable[str], tier: int = 0, passed_over: Mapping[str, str] | None = None
    ) -> None:
        """Continue from this checkpoint, which was loaded: it is the parent of the next one.

        Files are linked from what was read. If it was read elsewhere, they are linked from the root's last checkpoint,
        and read before that: see `unread_newest`.
        """
        self.lineage.follow(manifest, tier, passed_over or {})
        if tier == 0:
            self.links.follow(manifest.name, manifest.files)
        else:
            self.links.clear()
        self.damaged |= set(damaged)
        if self.hosts.separate_roots and self.owns_root and tier >= 0:
            adopt(self.storage, manifest)

    def advance(self, name: str, id: str, written: Iterable[FileRecord]) -> None:
        """Continue from the checkpoint that all ranks have just committed, of which this rank wrote these files."""
        self.links.follow(name, written)
        self.lineage.parent = id

    @property
    def unread_newest(self) -> str | None:
        """On the main rank: the root's last checkpoint, if this run has neither read nor written it."""
        if self.links.are_known or isinstance(self.storage, Staging):
            return None
        return next((known.name for known in self.lock.committed if known.name not in self.damaged), None)

    @contextmanager
    def taking(self) -> Iterator[Callable[[], None]]:
        """The function that raises, on the rank that owns the root, where another run holds it or its lock is none:
        objects would hold what it cannot continue. The caller lets all ranks know of its error.

        A remote root stays locked, so that what a load lists there need not be listed again by `hold`. If that is not
        called in this context, the root is released.
        """
        try:
            yield lambda: self.lock.take_early() if self.owns_root else None
        finally:
            self.lock.end_early()

    def remove(self, name: str) -> None:
        """Remove a checkpoint, unless it is being read. No save may be under way."""
        remove_checkpoint(self.storage, self.held, name)

    def settle(self) -> None:
        """Wait until every commit is durable, where the storage publishes commits in the background."""
        if isinstance(self.storage, Staging):
            self.storage.settle()

    def close(self) -> None:
        """Finish the copies to the mirror, apply retention once more, and release the root."""
        if self.mirror is not None:
            with self.ranks.working(job_wide=True):
                self.mirror.close()
            has_committed = self.held is not None and self.held.newest is not None
            if has_committed and self.mirror.error is None:  # checkpoints to be copied were kept until now
                self.retain()
        try:
            with within(_TO_TELL):
                self.store_attempt()
        finally:
            self.lock.release()

    def store_attempt(self) -> None:
        """Store in the history of the root how far this attempt is, or how it has ended."""
        if self.held is not None and self.attempt is not None:
            self.attempt.store(self.held.history, self.lineage.run)

    def goodput(self) -> Goodput | None:
        """Report where the run's time went, including this attempt. Returns None if this rank doesn't know the
        history."""
        history = History.of(self.storage) if self.attempt is not None else None
        if self.attempt is None or history is None or not history.is_known:
            return None
        if not self.attempt.ended:  # otherwise the history has all of it
            history.note(self.attempt.so_far(self.lineage.run))
        return Goodput.of(history.attempts)

    def _in_held_root(self, do: Callable[[], Attempt]) -> Attempt:
        """Call `do` with the root held. If the root or its lock file was removed meanwhile, lock it and call again."""
        self.lock.take()
        try:
            return do()
        except LostError as lost:
            self._hold_again(lost)
            return do()

    def _hold_again(self, lost: LostError) -> None:
        """If others have committed there meanwhile, this run must resume from that before it saves."""
        known, resumed = {manifest.id: manifest.name for manifest in self.lock.committed}, self.lineage.has_resumed
        self.lock.release()
        self.lineage.has_resumed = False  # also if it cannot be locked now
        self.lock.take()
        left = {manifest.id for manifest in self.lock.committed}
        self.lineage.has_resumed = resumed and left <= known.keys()
        gone = ", ".join(name for key, name in known.items() if key not in left) or "none"
        _log.warning("%s ckpt created and locked the root again. These checkpoints are gone: %s.", lost, gone)

    def committed_as(self, name: str) -> Manifest | None:
        """The manifest that was committed under that name; None on a rank that does not own the root."""
        return self.held.find(name) if self.held is not None else None

    def reserve(self) -> int:
        """The sequence number of a state that is captured now, whenever it is written."""
        return self.numbering.reserve(self._highest)

    def begin(self, name: str, paths: list[str], elsewhere: Collection[str] = (), number: int = 0) -> Attempt:
        """Hold the root, refuse what must not be saved, and leave the marker of a save under way.

        `elsewhere`: files of that checkpoint in the roots of other hosts. `number`: what was reserved for it."""

        def begin() -> Attempt:
            present = self.files_of(name)
            self._refuse_unsafe(name, present)
            occupied = {*present, *elsewhere}
            taken = tuple(path for path in paths if path in occupied or not self._is_free_in_mirror(name))
            sha256 = self.seal is not None and self.seal.sha256
            return self._begin(Attempt(name, occupied_paths=taken, sha256=sha256), paths)

        begun = self._in_held_root(begin)
        return replace(begun, sequence=number or self.reserve())

    def join(self, attempt: Attempt, paths: list[str]) -> Attempt:
        """Begin, in another host's root, the attempt that the main rank has begun: its files are named alike."""

        def begin() -> Attempt:
            self._refuse_unsafe(attempt.name, self.files_of(attempt.name))
            return self._begin(attempt, paths)

        return self._in_held_root(begin)

    def files_of(self, name: str) -> list[str]:
        """The paths of all files in the folder of a checkpoint."""
        return files_of(self.storage, name)

    def _refuse_unsafe(self, name: str, present: Collection[str]) -> None:
        """Raise if a save under that name would overtake, overwrite or mix with what this run does not know."""
        for manifest in self._unsure.settle(self.storage):
            self._record(manifest)
        lost = self.held.lost if self.held is not None else {}
        if isinstance(newer := lost.get(name), VersionError):
            raise newer
        self.lineage.require_resumed(self.storage.url, self._newest, lost)
        if self.head is not None:
            self.head.refuse_other(self.lineage.run, self.storage.url)
        refuse_foreign(self.storage, name, self.held, present)

    def _begin(self, attempt: Attempt, paths: list[str]) -> Attempt:
        older = self.committed_as(attempt.name)
        here = replace(attempt, replaces=tuple(file.path for file in older.files) if older else ())
        here.begin(self.storage, paths)
        # only now: once the marker is there, no other process removes what is replaced, so that its version holds
        return replace(here, expected_version=version_to_replace(self.storage, attempt.name, older))

    def _is_free_in_mirror(self, name: str) -> bool:
        """Whether the mirror has nothing by that name: a path means the same bytes here and there, for good."""
        return self.mirror is None or self.mirror.is_free(name)

    @property
    def _newest(self) -> Summary | None:
        mirrored = self.mirror.newest if self.mirror is not None else None
        return max([*self.lock.committed, *filter(None, [mirrored])], key=lambda known: known.sequence, default=None)

    @property
    def _highest(self) -> int:
        remembered = self.head.number if self.head is not None else 0  # or what follows a loss would be refused, too
        return max(self.lineage.sequence, self._newest.sequence if self._newest else 0, remembered)

    def label(self, name: str) -> str:
        """A checkpoint in lines of the log: its name, as the root was named when the run began."""
        return name

    def commit(self, attempt: Attempt, stored: list[WrittenFile], facts: Mapping[str, Any]) -> Manifest:
        """Write the manifest, with the next sequence number, and return it."""
        assert self.held is not None
        unsealed = Manifest(
            name=attempt.name,
            id=attempt.id,
            sequence=max(attempt.sequence, next_sequence(self._highest)),
            created=utc_now(),
            run=self.lineage.run,
            parent=self.lineage.parent,
            resumed=self.lineage.resumed,
            files=tuple(sorted((record.file for record in stored), key=lambda file: file.path)),
            versions=versions(),
            hardware=device_name(),
            hosts=self.hosts.records() if self.hosts.separate_roots else (),
            **{"world_size": self.ranks.world_size, **facts},
        )
        receipts = {record.file.path: record.receipt for record in stored if record.receipt is not None}
        manifest = unsealed if self.seal is None else self.seal.sealed(unsealed)
        self.commit_manifest(attempt, manifest, receipts)
        is_news = not attempt.amends or any(file.file.name.endswith(SUFFIX) and not file.linked for file in stored)
        line = saved_line(manifest, self.label(manifest.name), attempt)
        _log.log(self.log_level if is_news else logging.DEBUG, "%s", line)
        return manifest

    def commit_manifest(self, attempt: Attempt, manifest: Manifest, receipts: Mapping[str, str]) -> None:
        """Commit a manifest in this root: the main rank's own, or that which the main rank has committed in its."""
        self.lineage.sequence = max(self.lineage.sequence, manifest.sequence)
        try:
            version = attempt.commit(self.storage, manifest, receipts)
        except NotDurableError as error:
            self._record(manifest)
            raise not_durable(manifest, self.storage.url, error) from error
        except StorageError:
            self._unsure.add(manifest)
            raise
        self._record(manifest, version)

    def _record(self, manifest: Manifest, version: str | None = None) -> None:
        assert self.held is not None
        self.held.add(manifest, version)
        if self.head is not None and manifest.signature is not None:
            self.head.advance(manifest)
        self.damaged.discard(manifest.name)
        self.lineage.resumed = {}
        if self.attempt is not None:
            self.attempt.since = self.attempt.since or manifest.sequence
        if self.mirror is not None:
            self.mirror.enqueue(manifest)

    def retain(self) -> None:
        """Remove the checkpoints that are not to be kept, and store the index of the others when it is time."""
        if (held := self.held) is None:
            return
        try:
            with self.ranks.working(job_wide=True):  # to remove much takes long, and others may be at the next save
                self.store_attempt()
                held.retain(self.keep, self.damaged)
        except StorageError as error:  # the save stands; what could not be removed is tried again after the next save
            _log.warning("ckpt could not remove old checkpoints: %s", error)

    def abandon(self, name: str, error: Exception) -> None:
        """After a save failed: remove its files, unless it is committed, or may be and cannot be asked about now.

        What cannot be removed now is swept before a later save.
        """
        is_mine = self.owns_root and self.held is not None and not isinstance(error, NotDurableError)
        if is_mine and (name not in self._unsure or self.storage.is_local):
            deletion.clean_up_failed(self.storage, name)


class ElsewhereWriter(RootWriter):
    """Writes one checkpoint of a run into a folder that is not directly below its root: counted by nobody.

    It holds the lock of that folder for as long only."""

    storage: OneFolder

    def label(self, name: str) -> str:
        return f"{self.storage.url}/{name}"

    def _refuse_unsafe(self, name: str, present: Collection[str]) -> None:
        """A fresh start replaces nothing but what this run has saved there itself."""
        self.lineage.has_resumed |= self._newest is not None and self._newest.run == self.lineage.run
        super()._refuse_unsafe(name, present)

    def _begin(self, attempt: Attempt, paths: list[str]) -> Attempt:
        older = self.committed_as(attempt.name)
        if older is not None and older.run != self.lineage.run:
            _log.warning("ckpt replaces %s/%s, a checkpoint of another run", self.storage.url, attempt.name)
        return super()._begin(attempt, paths)


@cache
def _say_outside(folder: str, root: str) -> None:
    """Once for a folder: a script may save an epoch's checkpoint there after every epoch."""
    _log.info("%s is outside %s, so resume() does not find that checkpoint and Keep does not count it", folder, root)


def writer_at(folder: str, root: RootWriter) -> ElsewhereWriter:
    """The writer of a checkpoint in a local folder that is not in the root. The next one there does not follow it."""
    if "://" in folder or root.hosts.separate_roots:
        why = "it is not a local folder" if "://" in folder else "every host has a root of its own"
        raise ConfigError(
            f"{folder} is not directly below the attached root, {root.storage.url}, and {why}. Give a plain name or a "
            "folder in that root, or attach to another root."
        )
    if root.ranks.rank == MAIN:
        _say_outside(folder.rpartition("/")[0], root.storage.url)
    from ckpt.storage.local.storage import OneFolder  # a run that saves into its root alone needs none of it

    return ElsewhereWriter(
        OneFolder(folder),
        root.ranks,
        hosts=root.hosts,
        numbering=root.numbering,
        seal=root.seal,
        lineage=replace(root.lineage, resumed={}),
    )

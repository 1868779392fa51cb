"""Which checkpoint to load: the newest that is intact on every rank, or the named one; the same on every rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ckpt.errors import DamagedError, LockedError, StorageError, UntrustedError, shows_damage
from ckpt.formats.native.manifest import Manifest
from ckpt.load.accelerate_reader import folder_of
from ckpt.load.candidates import MEMORY, Candidates, Listed, in_memory, join_listings, list_memory, list_tiers
from ckpt.load.choice import Choice
from ckpt.load.inspection import Inspection
from ckpt.load.two_copies import join_copies
from ckpt.ranks.consensus import Result, decide_together
from ckpt.ranks.group import MAIN, Ranks
from ckpt.ranks.hosts import ONE_SHARED_ROOT, Hosts
from ckpt.root.catalog import Overview
from ckpt.root.mirror import MirrorPatience
from ckpt.root.signing import Trust
from ckpt.shown import Lines
from ckpt.storage import Storage

_RESCANS = 5
_BUSY_RESCANS = 20  # while another process removes or cleans the newest one
_PAUSE = 0.25  # seconds between those
_log = logging.getLogger("ckpt")
T = TypeVar("T")


@dataclass(frozen=True)
class MemoryTier:
    """Snapshots in the memory of hosts: this host's storage, and which ranks share one."""

    storage: Storage
    hosts: Hosts


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that is complete as every rank sees it. Its lock, and what `prepare` adds, is in `held`.

    `or_afresh`: if it is damaged, there may be nothing else to load, and the run begins afresh.
    """

    storage: Storage
    manifest: Manifest
    held: ExitStack
    or_afresh: bool = False


@dataclass(frozen=True, kw_only=True)
class Selection(Generic[T]):
    """Where to look for a checkpoint, for which ranks, and how to find out that it is intact.

    `tiers`: the root, then the mirror; of two copies the lower tier's is tried first. `prepare`: reads a candidate, on
    all ranks together; an error that shows damage leads to the next candidate. `name`: that checkpoint alone. `hosts`:
    where they have roots of their own, a checkpoint that one of them knows to be committed is committed, and each rank
    must find what it needs in its own host's root, or in the tier behind it. `foreign`: where there is no checkpoint of
    ours, the newest that Accelerate wrote. `memory`: a tier before the root, of which nothing is ever an error.
    `trust`: whose signatures are believed; one that is refused is passed over like a damaged one.
    `patience`: how long to wait for a mirror that is away, as long as the root's newest is intact. `on_listed`:
    called with what the root has.
    """

    tiers: Sequence[Storage]
    ranks: Ranks
    prepare: Callable[[Candidate], T]
    name: str | None = None
    hosts: Hosts = ONE_SHARED_ROOT
    foreign: bool = False
    memory: MemoryTier | None = None
    trust: Trust = field(default_factory=Trust)
    patience: MirrorPatience | None = None
    on_listed: Callable[[Overview], None] = lambda root: None

    @property
    def call(self) -> str:
        return f"load_state({self.name!r})" if self.name else "load_state()"

    def candidates(self, *, patient: bool) -> Candidates:
        """What to try, as the main rank orders it from all ranks' listings. `patient`: wait for the mirror."""
        visible = self.tiers if self.ranks.rank == MAIN else self.tiers[: self.hosts.owns_root(self.ranks.rank)]
        listed = Result.capture(lambda: self._listed(visible, None if patient else self.patience))
        found: Candidates = decide_together(
            self.ranks,
            self.call,
            listed,
            lambda listings: join_listings(self.tiers[0], self.name, listings, foreign=self.foreign),
        )
        return found

    def _listed(self, tiers: Sequence[Storage], patience: MirrorPatience | None) -> tuple[list[Listed], bool]:
        in_memory = self._in_memory()
        found, unseen = list_tiers(tiers, self.name, patience, self.on_listed)
        return [*in_memory, *found], unseen

    def _in_memory(self) -> list[Listed]:
        memory = self.memory
        return list_memory(memory.storage) if memory and memory.hosts.owns_root(self.ranks.rank) else []

    def storage_of(self, tier: int) -> Storage:
        return self.memory.storage if tier == MEMORY and self.memory is not None else self.tiers[tier]


def choose(selection: Selection[T], held: ExitStack) -> Choice[T] | None:
    """The checkpoint to load, the same on every rank; None if none was ever committed.

    What was committed and cannot be used is an error, though nothing may be left of it but files without a manifest.
    An unreadable checkpoint is not damaged: the error is raised, or a lost permission or a failing mount would silently
    rewind the run. The same holds for a root that cannot be listed. The lock on the checkpoint, and what `prepare` has
    put into its candidate's `held`, is kept until `held` is closed.
    """
    rescans = busy_rescans = 0
    patient = False
    while rescans < _RESCANS:
        candidates = selection.candidates(patient=patient)
        search = _Search(selection, held, candidates)
        choice = search.first_intact(candidates["order"], only_newest=candidates["unseen"])
        if choice is not None:
            return choice
        if search.needs_mirror:  # it may have what the root has lost
            patient = True
            continue
        if all(tier == MEMORY for tier, _ in candidates["order"]) and not candidates["lost"]:
            search.warn_of_memory()
            return None
        if search.busy is not None:
            busy_rescans += 1
            if busy_rescans == _BUSY_RESCANS:
                raise search.busy
            time.sleep(_PAUSE)
        elif search.inspection.vanished:  # a run that continues meanwhile has newer ones by now
            rescans += 1
        else:
            break
    kind = UntrustedError if search.all_untrusted else DamagedError
    raise kind(_nothing_intact(selection, search.passed_over))


def _nothing_intact(selection: Selection[T], passed_over: Mapping[str, str]) -> str:
    if selection.name:
        why = passed_over[selection.name]
        return f"{why} Load another one, or load_state() without a name for the newest intact one."
    return Lines.listing(
        f"no checkpoint in {' or '.join(storage.url for storage in selection.tiers)} is intact, so nothing was loaded:",
        passed_over.values(),
        "Restore one from a backup, or start anew in another root.",
    )


class _Search(Generic[T]):
    """Tries candidates until one is intact on every rank."""

    def __init__(self, selection: Selection[T], held: ExitStack, candidates: Candidates) -> None:
        self.inspection = Inspection(selection.ranks, selection.call, selection.trust)
        self.passed_over = candidates["passed_over"]
        self.busy: LockedError | None = None  # another process is removing or cleaning the next candidate
        self._selection = selection
        self._held = held
        self._root_step = candidates["root_step"]
        self._unreached: dict[str, StorageError] = {}
        self._damaged = set(candidates["lost"])
        self._untrusted: set[str] = set()
        self._only_newest = False

    @property
    def all_untrusted(self) -> bool:
        """Whether nothing is wrong with any of them but who has signed it."""
        return self._untrusted >= self.passed_over.keys()

    def first_intact(self, order: list[tuple[int, str]], *, only_newest: bool) -> Choice[T] | None:
        """`only_newest`: take no older one in place of one that is damaged, because the mirror was not looked at."""
        self._only_newest = only_newest
        for tier, name in order:
            if self.needs_mirror:
                return None
            if self._unreached.keys() - {name}:
                break
            in_root = name in self.passed_over
            choice = self._tried(tier, name)
            if choice is None and in_root and self._may_join(tier, name):
                choice = self._attempted(tier, name, None, joined=True)
            if choice is not None or self.busy is not None:
                return choice
        for name, error in self._unreached.items():
            raise type(error)(
                f"{name} cannot be read now: {error} Nothing says that it is damaged, so no older one was taken in its "
                "place. Try again when it can be read; or, to go back on purpose, name an older one: load_state(name)."
            ) from error
        return None

    @property
    def needs_mirror(self) -> bool:
        """Whether what was not looked at in the mirror may take the place of what is damaged in the root."""
        return self._only_newest and bool(self._damaged or self._untrusted)

    def warn_of_memory(self) -> None:
        """Say what cannot be used in memory, where no checkpoint is taken in its place whose report would say it."""
        for name, why in self.passed_over.items() if self._selection.ranks.rank == MAIN else ():
            _log.warning("%s is passed over: %s", name, why)

    def _tried(self, tier: int, name: str) -> Choice[T] | None:
        """The choice, if all ranks could prepare this checkpoint. Otherwise the reason is recorded.

        From a remote storage, what does not match its hashes is read once more: an answer may have been altered on its
        way, and the checkpoint be whole.
        """
        storage, altered = self._selection.storage_of(tier), list[DamagedError]()
        if storage.is_local:
            return self._attempted(tier, name, None)
        choice = self._attempted(tier, name, altered)
        if not altered:
            return choice
        choice = self._attempted(tier, name, None)
        if choice is not None and self._selection.ranks.rank == MAIN:
            _log.warning(
                "%s: what was read of it first was altered on its way, and what was read then was right: %s",
                choice.url, altered[0],
            )  # fmt: skip
        return choice

    def _may_join(self, tier: int, name: str) -> bool:
        """Whether both copies are damaged, and each may have what the other lacks."""
        shared = not self._selection.hosts.separate_roots
        return shared and tier == 1 and name not in self._untrusted | self._unreached.keys() and self.busy is None

    def _attempted(
        self, tier: int, name: str, altered: list[DamagedError] | None, *, joined: bool = False
    ) -> Choice[T] | None:
        """One attempt. `altered`, if given, receives the error of hashes that do not match, which is not recorded.

        `joined`: with the files of both copies.
        """
        candidate: Candidate | None = None
        with ExitStack() as held:
            try:
                candidate = self._joined(name, held) if joined else self._candidate(tier, name, held)
                ready = self._selection.prepare(candidate)
            except LockedError as error:
                self._record_busy(tier, name, error)
            except (DamagedError, StorageError) as error:
                if altered is not None and type(error) is DamagedError and candidate is not None:
                    altered.append(error)
                    return None
                self._record(tier, name, error, was_found=candidate is not None)
            else:
                self._held.push(held.pop_all())
                url = folder_of(candidate.storage, candidate.manifest)
                damaged = frozenset(self._damaged)
                return Choice(candidate.manifest, url, tier, ready, self.passed_over, damaged, self._root_step)
        return None

    def _candidate(self, tier: int, name: str, held: ExitStack) -> Candidate:
        selection, storage = self._selection, self._selection.storage_of(tier)
        tiers, hosts = selection.tiers, selection.hosts
        if tier == MEMORY and selection.memory is not None:
            tiers, hosts = (storage,), selection.memory.hosts
        if tier <= 0 and hosts.separate_roots:
            manifest, storage = self.inspection.complete_per_host(tiers, hosts, name, held)
        else:
            manifest = self.inspection.complete(storage, name, held)
        return Candidate(storage, manifest, held, or_afresh=tier == MEMORY and self._root_step is None)

    def _joined(self, name: str, held: ExitStack) -> Candidate:
        chosen = self._selection
        manifest, storage = join_copies(chosen.tiers, name, chosen.ranks, chosen.call, chosen.trust, held)
        return Candidate(storage, manifest, held)

    def _record_busy(self, tier: int, name: str, error: LockedError) -> None:
        if tier == MEMORY:
            self.passed_over[in_memory(name)] = str(error)
        else:
            self.busy = error

    def _record(self, tier: int, name: str, error: DamagedError | StorageError, *, was_found: bool) -> None:
        """Why a checkpoint cannot be used. Where hosts have roots of their own, one that was not found may be complete
        on other hosts: it is not damaged. What is in memory is only passed over."""
        if tier == MEMORY:
            self.passed_over[in_memory(name)] = str(error)
            return
        if isinstance(error, StorageError) and not shows_damage(error):
            self._unreached[name] = error
        elif isinstance(error, UntrustedError):
            self._untrusted.add(name)  # its bytes may be as good as ever: retention does not take it for damaged
        elif tier == 0 and (was_found or not self._selection.hosts.separate_roots):
            self._damaged.add(name)
        why = f"in {self._selection.tiers[tier].url}: {error}" if tier else str(error)
        known = self.passed_over.get(name)
        self.passed_over[name] = f"{known} {why}" if known else why

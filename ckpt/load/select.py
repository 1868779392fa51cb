"""Which checkpoint to load: the newest that is intact on every rank, or the named one; the same on every rank.

The main rank joins the listings of all ranks into candidates, in their order. Of a checkpoint of which neither the
root's copy nor the mirror's is whole, each file is read where it is.

A candidate is complete as every rank sees it: its manifest, and the sizes of its files. Hashes are compared when
tensors are read. Where hosts have roots of their own, each has the files that its own ranks wrote, with every replica.
So after hosts have changed places, the pieces that a rank needs may still be on its disk, in another rank's file.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Generic, TypedDict, TypeVar

from ckpt.errors import (
    AbsentError,
    CheckpointError,
    CkptError,
    DamagedError,
    LockedError,
    MissingError,
    StorageError,
    TransientError,
    UntrustedError,
    VersionError,
    shows_damage,
)
from ckpt.formats.checkpoint_name import check_name
from ckpt.formats.native.documents import STATE
from ckpt.formats.native.manifest import FILE_NAME, FileRecord, Manifest
from ckpt.formats.native.shard_table import EVERY, ShardSpec, ShardTable
from ckpt.ranks.consensus import MAIN, Ranks, Result, decide_together, values_of
from ckpt.ranks.hosts import ONE_SHARED_ROOT, Hosts
from ckpt.root import catalog
from ckpt.root.catalog import FROZEN, Overview, manifest_bytes, part_of, rank_of, read_manifest, spread_file
from ckpt.root.folder import ROOT_ITSELF, is_foreign
from ckpt.root.mirror import MirrorPatience
from ckpt.root.signing import Trust
from ckpt.root.verify import find_whole_files, size_problems
from ckpt.shown import Lines, few
from ckpt.storage import Patched, Place, Storage, Tiers


def read_any(storage: Storage, name: str) -> Manifest:
    """The manifest of a checkpoint. One without files stands for a folder that Accelerate wrote."""
    if name:
        try:
            return read_manifest(storage, name)
        except DamagedError:
            if not is_foreign(storage, name):
                raise
    from ckpt.load.accelerate import foreign_manifest

    return foreign_manifest(storage, name)


@dataclass
class Replicas:
    """The replicas of a checkpoint's pieces, as far as their files can be read on this host."""

    storage: Storage
    manifest: Manifest
    is_here: Callable[[FileRecord], bool]

    def stand_in_for(self, file: FileRecord) -> bool:
        """Whether the files of other ranks on this host have every piece of a rank's missing file."""
        rank, table = rank_of(file.name), self._tables.get(part_of(file.name))
        if rank is None or table is None or not file.name.startswith(f"{part_of(file.name)}/"):
            return False
        return all(self._has_another(part_of(file.name), spec, rank) for spec in table.tensors.values())

    def _has_another(self, part: str, spec: ShardSpec, rank: int) -> bool:
        if not spec.layout.holds(rank):
            return True
        box = spec.layout.box(spec.shape, rank)
        if box.is_empty:
            return True
        holders = (other for other in spec.layout.ranks if spec.layout.box(spec.shape, other) == box)
        return spec.copy == EVERY and any(self._files_are_here(part, other) for other in holders)

    def _files_are_here(self, part: str, rank: int) -> bool:
        names = (spread_file(part, rank, aside=aside) for aside in ("", FROZEN))
        records = [self._records[name] for name in names if name in self._records]
        return bool(records) and all(map(self.is_here, records))

    @cached_property
    def _records(self) -> dict[str, FileRecord]:
        return {file.name: file for file in self.manifest.files}

    @cached_property
    def _tables(self) -> dict[str, ShardTable]:
        """The shard table of each part saved in pieces; none at all if they cannot be read."""
        try:
            text = self.storage.read(f"{self.manifest.name}/{self._records[STATE].path}")
            parts = json.loads(text)["parts"].items()
            return {key: ShardTable.from_json(part["spread"], self.manifest) for key, part in parts if "spread" in part}
        except (CkptError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return {}  # the load itself will say what is wrong


def storage_for_rank(
    tiers: Sequence[Storage], manifest: Manifest, ranks: Ranks, held: ExitStack
) -> Storage | list[str]:
    """The storage with all files that this rank needs: the root, or root and mirror. Otherwise the missing paths."""
    root, *mirror = tiers
    with suppress(AbsentError):  # a host that has lost its disk has no such folder
        held.enter_context(root.lock(manifest.name, shared=True))
    missing = _missing(root, manifest, ranks)
    if not missing or not mirror:
        return missing or root
    held.enter_context(mirror[0].lock(manifest.name, shared=True))
    both = Tiers(root, mirror[0])
    return _missing(both, manifest, ranks) or both


def _missing(storage: Storage, manifest: Manifest, ranks: Ranks) -> list[str]:
    there = {entry.key: entry.size for entry in storage.list(manifest.name)}

    def is_here(file: FileRecord) -> bool:
        return there.get(f"{manifest.name}/{file.path}") == file.size

    absent = [file for file in manifest.files if _is_needed(file, manifest, ranks) and not is_here(file)]
    if any(rank_of(file.name) is not None for file in absent):
        replicas = Replicas(storage, manifest, is_here)
        absent = [file for file in absent if not replicas.stand_in_for(file)]
    return [file.path for file in absent]


def _is_needed(file: FileRecord, manifest: Manifest, ranks: Ranks) -> bool:
    """Whether this rank may need a file. Another number of ranks may need every file."""
    return ranks.world_size != manifest.world_size or rank_of(file.name) in (None, ranks.rank)


def problem_on_hosts(name: str, hosts: Hosts, missing: list[list[str]]) -> str:
    """On the main rank: one message that says which host lacks which files; empty if none does."""
    by_root: dict[int, set[str]] = {}
    for rank, paths in enumerate(missing):
        by_root.setdefault(hosts.first[rank], set()).update(paths)
    listed = [f"{hosts.names[root]} lacks {', '.join(sorted(paths))}" for root, paths in by_root.items() if paths]
    if not listed:
        return ""
    return (
        f"{name} cannot be loaded on these hosts: {'; '.join(listed)}. Start the ranks on the hosts where they saved "
        "it, copy the files there, or give the manager a mirror=, to which every host copies."
    )


# Why a checkpoint cannot be used, in words, and what that is. The first of these on any rank decides: what one cannot
# read now, or cannot lock, is not damaged. `vanished`: gone since it was listed. `untrusted`: on every rank, or none.
Verdict = tuple[str, str]
MOST_LISTED = 900  # files of a checkpoint in an object store that are listed before they are read: one request
_KINDS = ("unreached", "busy", "vanished", "damaged", "untrusted")


@dataclass(frozen=True)
class Rider:
    """What ranks tell each other in an exchange that takes place anyway: each its own, which the main rank joins.

    Of thousands of ranks, each exchange takes its time: so what a load must know of all ranks rides on few of them.
    """

    mine: Callable[..., Any] = lambda *_: None
    join: Callable[[list[Any]], Any] = lambda said: None


@dataclass
class Inspection:
    """Inspects checkpoints on all ranks together. `vanished`: whether any was removed since it was listed."""

    ranks: Ranks
    call: str
    trust: Trust = field(default_factory=Trust)
    vanished: bool = field(default=False, init=False)

    def complete(
        self, storage: Storage, name: str, held: ExitStack, check: Rider | None = None
    ) -> tuple[Manifest, Result[Any]]:
        """The manifest of a checkpoint whose files are all there, with their sizes, as every rank sees it; and what
        came of its `check`, for which nothing was wrong here: an error of any rank is in it.

        `held` receives its lock, against removal.
        """
        found: list[Manifest] = []
        lists = storage.is_local or self.ranks.rank == MAIN  # an object store shows every rank the same
        rider = check or Rider()
        with self.ranks.working():
            verdict = Result.capture(lambda: _inspect(storage, name, held, found, self.trust, lists=lists))
            checked = verdict.then(lambda problem: None if problem else rider.mine(found[0]))
        mine = verdict.then(lambda problem: (problem, checked.to_json(self.call)))
        problems, joint = decide_together(self.ranks, self.call, mine, lambda said: self._joined(said, rider))
        if not problems:
            return found[0], Result.capture(lambda: checked.raise_joint(Result.from_json(joint), self.ranks.world_size))
        self.vanished = self.vanished or "vanished" in [kind for kind, _ in problems]
        errors = {"unreached": TransientError, "busy": LockedError, "untrusted": UntrustedError}
        kind, text = problems[0]
        raise errors.get(kind, DamagedError)(text)

    def _joined(self, said: list[tuple[Verdict | None, str]], check: Rider) -> tuple[list[Verdict], str]:
        """On the main rank: what is wrong with a checkpoint; if nothing is, what the ranks' checks came to."""
        problems = _sorted([problem for problem, _ in said])
        texts = [text for _, text in said]
        joint = Result.capture(lambda: None if problems else check.join(values_of(self.call, texts)))
        return problems, joint.to_json(self.call)

    def complete_per_host(
        self, tiers: Sequence[Storage], hosts: Hosts, name: str, held: ExitStack
    ) -> tuple[Manifest, Storage]:
        """A manifest that some host has, and the storage in which this rank finds the files that it needs."""
        keeps = hosts.owns_root(self.ranks.rank)
        text = Result.capture(lambda: _manifest_text(tiers[0], name) if keeps else None)
        manifest = Manifest.from_bytes(decide_together(self.ranks, self.call, text, _newest).encode(), name)
        checked = Result.capture(lambda: self.trust.checked(replace(manifest, name=name)))
        found = checked.then(lambda manifest: storage_for_rank(tiers, manifest, self.ranks, held))
        missing = found.then(lambda there: there if isinstance(there, list) else [])
        problem = decide_together(self.ranks, self.call, missing, lambda each: problem_on_hosts(name, hosts, each))
        storage = found.get()
        if problem or isinstance(storage, list):
            raise DamagedError(problem)
        return checked.get(), storage


def _inspect(
    storage: Storage, name: str, held: ExitStack, found: list[Manifest], trust: Trust, *, lists: bool
) -> Verdict | None:
    """What is wrong with a checkpoint, as this rank sees it; None if nothing is, and its manifest is in `found`."""
    try:
        if name:
            held.enter_context(storage.lock(name, shared=True))
        manifest = trust.checked(read_any(storage, name))
        few = storage.is_local or len(manifest.files) <= MOST_LISTED  # of many, reading finds what is missing
        wrong = size_problems(storage, manifest) if lists and few else []
    except LockedError as error:
        return "busy", f"{name} is being removed or cleaned up by another process: {error}"
    except UntrustedError as error:
        return "untrusted", str(error)
    except (MissingError, AbsentError) as error:
        return "vanished", str(error)
    except (DamagedError, StorageError) as error:
        return "damaged" if shows_damage(error) else "unreached", str(error)
    found.append(manifest)
    return ("damaged", f"{name} is damaged: {'; '.join(wrong)}.") if wrong else None


def _sorted(verdicts: list[Verdict | None]) -> list[Verdict]:
    """On the main rank: what is wrong, the decisive first."""
    return sorted((verdict for verdict in verdicts if verdict), key=lambda verdict: _KINDS.index(verdict[0]))


def _manifest_text(root: Storage, name: str) -> str | None:
    """The bytes of the manifest in this host's root, as text; None if there is none, or a damaged one."""
    try:
        return manifest_bytes(root, name).decode()
    except (CheckpointError, AbsentError):
        return None


def _newest(texts: list[str | None]) -> str:
    """On the main rank: of the manifests that hosts have, the newest."""
    there = [text for text in texts if text is not None]
    if not there:
        raise DamagedError("another process has just removed the manifest.")
    return max(there, key=lambda text: Manifest.from_bytes(text.encode(), FILE_NAME).sequence)


_log = logging.getLogger("ckpt")

MEMORY = -1  # the tier of snapshots in memory: before the root (0) and the mirror (1)
STRAY = "it continues from a checkpoint that is no longer in the root."  # why a snapshot in memory is left


class Listed(TypedDict):
    """A checkpoint in a rank's listing. `problem` says why it is not committed, if it is not, or, where it
    `was_committed`, why its manifest cannot be read: then nothing below is known."""

    tier: int
    name: str
    problem: str | None
    was_committed: bool
    sequence: int
    created: str
    step: int
    id: str
    parent: str | None


class Candidates(TypedDict):
    """The checkpoints to try, each as tier and name, the newest first; and those that need no trying, with reasons.

    `lost`: those of them that were committed, and whose manifest is whole nowhere: with them there is no fresh start.
    `root_step`: the step of the newest that is not in memory; None if there is none. `unseen`: whether the mirror was
    not looked at, because it was away, and the root has something to load.
    """

    order: list[tuple[int, str]]
    passed_over: dict[str, str]
    lost: list[str]
    root_step: int | None
    unseen: bool


class Opened(TypedDict):
    """The candidates, and what the ranks told each other beside their listings."""

    candidates: Candidates
    told: Any


def list_tiers(
    tiers: Sequence[Storage],
    name: str | None,
    patience: MirrorPatience | None = None,
    on_listed: Callable[[Overview], None] = lambda root: None,
) -> tuple[list[Listed], bool]:
    """The checkpoints of all tiers, or those of one name; and whether the mirror was not waited for.

    A root that cannot be read is an error, whatever the mirror has: the root's newest checkpoint may be newer. A mirror
    that cannot be read is skipped with a warning, unless the root has nothing: a fresh start must not replace the
    checkpoints that the mirror may have. It is waited for as long as `patience` says, if that is given and the root has
    something to load, and otherwise as long as its storage tries. `on_listed` is called with what the root has.
    """
    listed: list[Listed] = []
    unreadable: dict[int, StorageError] = {}
    for tier, storage in enumerate(tiers if name != ROOT_ITSELF else ()):
        try:
            if tier and patience is not None and _committed(listed):
                found = patience.reached(storage, partial(_found, storage, name))
            else:
                found = _found(storage, name, on_listed if tier == 0 else None)
        except StorageError as error:
            unreadable[tier] = error
        else:
            listed += [_listed(tier, checkpoint, name) for checkpoint in found]
    if 0 in unreadable and len(tiers) > 1:
        raise type(unreadable[0])(_root_unreadable(tiers, listed, unreadable)) from unreadable[0]
    for tier, why in unreadable.items():
        if all(checkpoint["problem"] is not None for checkpoint in listed):
            raise why
        _log.warning("ckpt could not list %s, which may have newer checkpoints: %s", tiers[tier].url, why)
    return listed, bool(unreadable) and patience is not None


def _found(
    storage: Storage, name: str | None, on_listed: Callable[[Overview], None] | None = None
) -> list[catalog.Checkpoint]:
    if name is not None:
        return [catalog.find(storage, check_name(name))]
    listed = Overview.of(storage)
    if on_listed is not None:
        on_listed(listed)
    return listed.checkpoints


def list_memory(storage: Storage) -> list[Listed]:
    """The snapshots in this host's memory that were committed, those with a damaged manifest too.

    A storage that cannot be read is as good as empty."""
    try:
        found = Overview.of(storage).checkpoints
        return [_listed(MEMORY, checkpoint, checkpoint.name) for checkpoint in found if checkpoint.was_committed]
    except StorageError as error:
        _log.warning("ckpt can't read %s: %s", storage.url, error)
        return []


def join_listings(
    root: Storage, name: str | None, listings: list[tuple[list[Listed], bool]], *, foreign: bool
) -> Candidates:
    """On the main rank: what to try, the newest first; of two copies the lower tier's first.

    With `foreign`, where there is no checkpoint of ours, the folders that Accelerate wrote.
    """
    listed, unseen = [checkpoint for listing, _ in listings for checkpoint in listing], any(un for _, un in listings)
    committed, strays = _without_strays(listed)
    committed.sort(key=lambda found: (found["sequence"], found["created"], -found["tier"]), reverse=True)
    order = list(dict.fromkeys((checkpoint["tier"], checkpoint["name"]) for checkpoint in committed))
    if name is not None:
        if not order:
            read_any(root, name)  # another tool wrote it; or there is none, which is raised
        return {"order": order or [(0, name)], "passed_over": {}, "lost": [], "root_step": None, "unseen": unseen}
    unusable = _unusable(listed, order)
    lost = {found["name"] for found in unusable if found["was_committed"] and found["tier"] != MEMORY}
    in_mirror = {} if any(tier != MEMORY for tier, _ in order) else _problems(unusable, 1)
    return {
        "order": order or [(0, folder) for folder in (_foreign_names(root) if foreign else [])],
        "passed_over": in_mirror | _problems(unusable, 0) | _problems(unusable, MEMORY) | strays,
        "lost": sorted(lost - {checkpoint for tier, checkpoint in order if tier == 0}),
        "root_step": next((found["step"] for found in committed if found["tier"] != MEMORY), None),
        "unseen": unseen,
    }


def _foreign_names(root: Storage) -> list[str]:
    from ckpt.load.accelerate import foreign_names

    return foreign_names(root)


def _without_strays(listed: list[Listed]) -> tuple[list[Listed], dict[str, str]]:
    """Without snapshots in memory that continue from what the root no longer has: somebody has removed it, to go back.

    A snapshot's parent is the root's checkpoint before it. If the root has a later one by now, that has the same
    parent, or is itself newer. One whose manifest is damaged may be the parent: nobody has removed it.
    """
    committed = _committed(listed)
    if any(found["was_committed"] and found["problem"] for found in listed if found["tier"] != MEMORY):
        return committed, {}
    stored = [found for found in committed if found["tier"] != MEMORY]
    known = {key for found in stored for key in (found["id"], found["parent"])} if stored else {None}
    strays = [found for found in committed if found["tier"] == MEMORY and found["parent"] not in known]
    return [found for found in committed if found not in strays], {in_memory(found["name"]): STRAY for found in strays}


def in_memory(name: str) -> str:
    """How a snapshot in memory is called beside the checkpoints of the root, which may have its name."""
    return f"{name} in memory"


def _committed(listed: list[Listed]) -> list[Listed]:
    return [checkpoint for checkpoint in listed if checkpoint["problem"] is None]


def _unusable(listed: list[Listed], order: list[tuple[int, str]]) -> list[Listed]:
    """What is not committed or has a damaged manifest, unless another host has it."""
    return [found for found in listed if found["problem"] is not None and (found["tier"], found["name"]) not in order]


def _problems(unusable: list[Listed], tier: int) -> dict[str, str]:
    """What is wrong in one tier, by name."""
    there = (found for found in unusable if found["tier"] == tier)
    return {in_memory(one["name"]) if tier == MEMORY else one["name"]: str(one["problem"]) for one in there}


def _root_unreadable(tiers: Sequence[Storage], listed: list[Listed], unreadable: Mapping[int, StorageError]) -> str:
    """Both facts: what is wrong with the root, and what the mirror has."""
    newest = max(_committed(listed), key=lambda found: (found["sequence"], found["created"]), default=None)
    root, mirror = tiers[0].url, tiers[1].url
    if 1 in unreadable:
        has = f"ckpt can't read the mirror either: {unreadable[1]}"
    elif newest is None:
        has = f"The mirror {mirror} has no such checkpoint."
    else:
        has = f"The mirror {mirror} has {newest['name']}, but the root may have a newer one, so ckpt did not take it."
    return (
        f"ckpt can't read {root}: {unreadable[0]} {has} Nothing was loaded. Try again later. To continue from the "
        f"mirror without this root, give StateManager another root and mirror={mirror!r}."
    )


def _listed(tier: int, checkpoint: catalog.Checkpoint, name: str | None) -> Listed:
    if isinstance(checkpoint.problem, VersionError) and name is None:
        raise checkpoint.problem
    manifest = checkpoint.summary
    return {
        "tier": tier,
        "name": checkpoint.name,
        "problem": str(checkpoint.problem) if checkpoint.problem else None,
        "was_committed": checkpoint.was_committed,
        "sequence": manifest.sequence if manifest else 0,
        "created": manifest.created if manifest else "",
        "step": manifest.step if manifest else 0,
        "id": manifest.id if manifest else "",
        "parent": manifest.parent if manifest else None,
    }


T = TypeVar("T")


@dataclass
class Choice(Generic[T]):
    """The checkpoint that all ranks will load, and the newer ones that cannot be used, with the reasons.

    `tier` is where it was found. The root may have another one by its name, which is damaged. `damaged` names those
    whose bytes in the root were shown to be missing or altered: not those that merely could not be read.
    """

    manifest: Manifest
    url: str
    tier: int
    ready: T
    passed_over: dict[str, str] = field(default_factory=dict)
    damaged: frozenset[str] = frozenset()
    root_step: int | None = None

    @property
    def in_memory(self) -> bool:
        return self.tier == MEMORY


_NAMED = 5  # files that a message lists


class _Pieces(TypedDict):
    """The tier whose manifest is whole, for each path the tier and the key to read, and the paths that are lost."""

    manifest: int
    places: dict[str, tuple[int, str]]
    lost: list[str]


def join_copies(
    tiers: Sequence[Storage], name: str, ranks: Ranks, call: str, trust: Trust, held: ExitStack
) -> tuple[Manifest, Storage]:
    """The manifest, and a storage in which every file is whole. Raises a `DamagedError` if one is whole nowhere.

    `held` receives the locks on both copies, against removal.
    """
    locked = Result.capture(lambda: [held.enter_context(tier.lock(name, shared=True)) for tier in tiers] and None)
    pieces = decide_together(ranks, call, locked, lambda _: _find(tiers, name, trust))
    if pieces["lost"]:
        where = " or in ".join(tier.url for tier in tiers)
        raise DamagedError(f"{name} has no intact copy of {few(pieces['lost'], _NAMED)} in {where}.")
    read = Result.capture(lambda: trust.checked(catalog.read_manifest(tiers[pieces["manifest"]], name)))
    decide_together(ranks, call, read.then(lambda _: None), lambda _: None)
    manifest: Manifest = read.get()
    sizes = {file.path: file.size for file in manifest.files}
    places = {f"{name}/{path}": Place(tiers[tier], key, sizes[path]) for path, (tier, key) in pieces["places"].items()}
    if ranks.rank == MAIN:
        _say(tiers, manifest, sorted(pieces["places"]))
    return manifest, Patched(tiers[0], places)


def _find(tiers: Sequence[Storage], name: str, trust: Trust) -> _Pieces:
    whole = find_whole_files(tiers, name, trust, links=False, show=True)
    places = {path: (place.home, place.key) for path, place in whole.elsewhere.items()}
    return {"manifest": whole.manifest_home, "places": places, "lost": list(whole.lost)}


def _say(tiers: Sequence[Storage], manifest: Manifest, elsewhere: list[str]) -> None:
    root, mirror = (tier.url for tier in tiers[:2])
    _log.warning(
        "%s has damaged files in %s and other damaged files in %s, so ckpt reads each file from an intact copy: %d "
        "of %d files come from the second place (%s). To repair the root: ckpt verify %s/%s --repair --from %s",
        manifest.name, root, mirror, len(elsewhere), len(manifest.files), few(elsewhere, _NAMED), root, manifest.name,
        mirror,
    )  # fmt: skip


_SHOWN = 3  # candidates that the log lists
_RESCANS = 5
_BUSY_RESCANS = 20  # while another process removes or cleans the newest one
_PAUSE = 0.25  # seconds between those


@dataclass(frozen=True)
class MemoryTier:
    """Snapshots in the memory of hosts: this host's storage, and which ranks share one."""

    storage: Storage
    hosts: Hosts


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that is complete as every rank sees it. Its lock, and what `prepare` adds, is in `held`.

    `or_afresh`: if it is damaged, there may be nothing else to load, and the run begins afresh. `told` and `checked`:
    what the ranks have told each other when they listed, and when they inspected it.
    """

    storage: Storage
    manifest: Manifest
    held: ExitStack
    or_afresh: bool = False
    told: Any = None
    checked: Any = None

    @property
    def folder(self) -> str:
        """Its path or URL."""
        if not self.manifest.is_foreign:
            return f"{self.storage.url}/{self.manifest.name}"
        from ckpt.load.accelerate import foreign_folder

        return foreign_folder(self.manifest)


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
    called with what the root has. `opening`: what each rank does before it lists, once, and tells the others. `check`:
    the same for each candidate that is complete here, before `prepare`: only what must not be seen by all ranks first.
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
    opening: Rider = field(default_factory=Rider)
    check: Rider = field(default_factory=Rider)

    @property
    def call(self) -> str:
        return f"load_state({self.name!r})" if self.name else "load_state()"

    def candidates(self, opening: Rider, *, patient: bool) -> Opened:
        """What to try, as the main rank orders it from all ranks' listings. `patient`: wait for the mirror."""
        visible = self.tiers if self.ranks.rank == MAIN else self.tiers[: self.hosts.owns_root(self.ranks.rank)]
        told = Result.capture(opening.mine)
        listed = told.then(lambda text: (text, *self._listed(visible, None if patient else self.patience)))

        def join(said: list[tuple[Any, list[Listed], bool]]) -> Opened:
            listings = [(found, unseen) for _, found, unseen in said]
            candidates = join_listings(self.tiers[0], self.name, listings, foreign=self.foreign)
            return {"candidates": candidates, "told": opening.join([text for text, _, _ in said])}

        return decide_together(self.ranks, self.call, listed, join)

    def _listed(self, tiers: Sequence[Storage], patience: MirrorPatience | None) -> tuple[list[Listed], bool]:
        in_memory = self._in_memory()
        found, unseen = list_tiers(tiers, self.name, patience, self.on_listed)
        return [*in_memory, *found], unseen

    def _in_memory(self) -> list[Listed]:
        memory = self.memory
        return list_memory(memory.storage) if memory and memory.hosts.owns_root(self.ranks.rank) else []

    def storage_of(self, tier: int) -> Storage:
        return self.memory.storage if tier == MEMORY and self.memory is not None else self.tiers[tier]

    def described(self, order: list[tuple[int, str]]) -> str:
        """Candidates in their order, for the log."""
        names = [f"{self.storage_of(tier).url}/{name}" for tier, name in order[:_SHOWN]]
        more = f" and {len(order) - _SHOWN} older ones" if len(order) > _SHOWN else ""
        return f"{', '.join(names)}{more}" if names else f"nothing in {self.tiers[0].url}"


def choose(selection: Selection[T], held: ExitStack) -> Choice[T] | None:
    """The checkpoint to load, the same on every rank; None if none was ever committed.

    What was committed and cannot be used is an error, though nothing may be left of it but files without a manifest.
    An unreadable checkpoint is not damaged: the error is raised, or a lost permission or a failing mount would silently
    rewind the run. The same holds for a root that cannot be listed. The lock on the checkpoint, and what `prepare` has
    put into its candidate's `held`, is kept until `held` is closed.
    """
    rescans = busy_rescans = 0
    patient, opening, told = False, selection.opening, None
    while rescans < _RESCANS:
        opened = selection.candidates(opening, patient=patient)
        opening, told, candidates = Rider(), told or opened["told"], opened["candidates"]
        if selection.ranks.rank == MAIN:
            _log.debug("%s: found %s", selection.call, selection.described(candidates["order"]))
        search = _Search(selection, held, candidates, told)
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
        return f"{why} Load another checkpoint, or call load_state() without a name for the newest intact one."
    return Lines.listing(
        f"no checkpoint in {' or '.join(storage.url for storage in selection.tiers)} is intact, so nothing was loaded:",
        passed_over.values(),
        "Restore one from a backup, or start from scratch in another root.",
    )


class _Search(Generic[T]):
    """Tries candidates until one is intact on every rank."""

    def __init__(self, selection: Selection[T], held: ExitStack, candidates: Candidates, told: Any = None) -> None:
        self.inspection = Inspection(selection.ranks, selection.call, selection.trust)
        self.passed_over = candidates["passed_over"]
        self.busy: LockedError | None = None  # another process is removing or cleaning the next candidate
        self._selection = selection
        self._told = told
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
                f"ckpt can't read {name} now: {error} The checkpoint may be intact, so ckpt did not load an older one "
                "instead. Try again later; or, to go back on purpose, load an older checkpoint: load_state(name)."
            ) from error
        return None

    @property
    def needs_mirror(self) -> bool:
        """Whether what was not looked at in the mirror may take the place of what is damaged in the root."""
        return self._only_newest and bool(self._damaged or self._untrusted)

    def warn_of_memory(self) -> None:
        """Say what cannot be used in memory, where no checkpoint is taken in its place whose report would say it."""
        for name, why in self.passed_over.items() if self._selection.ranks.rank == MAIN else ():
            _log.warning("ckpt skips %s: %s", name, why)

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
                "%s: the first read returned altered bytes, but a second read was correct: %s",
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
                candidate, checked = self._joined(name, held) if joined else self._candidate(tier, name, held)
                ready = self._selection.prepare(replace(candidate, checked=checked.get()))
            except LockedError as error:
                self._record_busy(tier, name, error)
            except (DamagedError, StorageError) as error:
                if altered is not None and type(error) is DamagedError and candidate is not None:
                    altered.append(error)
                    return None
                self._record(tier, name, error, was_found=candidate is not None)
            else:
                self._held.push(held.pop_all())
                url = candidate.folder
                damaged = frozenset(self._damaged)
                return Choice(candidate.manifest, url, tier, ready, self.passed_over, damaged, self._root_step)
        return None

    def _candidate(self, tier: int, name: str, held: ExitStack) -> tuple[Candidate, Result[Any]]:
        selection, storage = self._selection, self._selection.storage_of(tier)
        tiers, hosts = selection.tiers, selection.hosts
        if tier == MEMORY and selection.memory is not None:
            tiers, hosts = (storage,), selection.memory.hosts

        def candidate(storage: Storage, manifest: Manifest) -> Candidate:
            or_afresh = tier == MEMORY and self._root_step is None
            return Candidate(storage, manifest, held, or_afresh=or_afresh, told=self._told)

        if tier <= 0 and hosts.separate_roots:
            manifest, storage = self.inspection.complete_per_host(tiers, hosts, name, held)
            return self._checked(candidate(storage, manifest))
        check = replace(selection.check, mine=lambda manifest: selection.check.mine(candidate(storage, manifest)))
        manifest, checked = self.inspection.complete(storage, name, held, check)
        return candidate(storage, manifest), checked

    def _joined(self, name: str, held: ExitStack) -> tuple[Candidate, Result[Any]]:
        chosen = self._selection
        manifest, storage = join_copies(chosen.tiers, name, chosen.ranks, chosen.call, chosen.trust, held)
        return self._checked(Candidate(storage, manifest, held, told=self._told))

    def _checked(self, candidate: Candidate) -> tuple[Candidate, Result[Any]]:
        """A candidate that was inspected already, and what came of its check on all ranks."""
        ranks, call, check = self._selection.ranks, self._selection.call, self._selection.check
        mine = Result.capture(lambda: check.mine(candidate))
        return candidate, Result.capture(lambda: decide_together(ranks, call, mine, check.join))

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
        _log.debug("%s can't be used: %s", name, why)
        known = self.passed_over.get(name)
        self.passed_over[name] = f"{known} {why}" if known else why

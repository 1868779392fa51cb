"""Which checkpoint to load: the same on every rank, and intact on every rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import (
    AbsentError,
    CheckpointError,
    DamagedError,
    LockedError,
    MissingError,
    StorageError,
    TransientError,
    VersionError,
    shows_damage,
)
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.load import per_host
from ckpt.load.accelerate_reader import folder_of, foreign_names, read_any
from ckpt.ranks.consensus import Result, decide_together
from ckpt.ranks.group import MAIN, Ranks
from ckpt.ranks.hosts import ONE_SHARED_ROOT, Hosts
from ckpt.root import catalog
from ckpt.root.catalog import Checkpoint
from ckpt.root.folder import ROOT
from ckpt.root.verify import size_problems
from ckpt.storage import Storage

_log = logging.getLogger("ckpt")
_RESCANS = 5
_BUSY_RESCANS = 20  # while another process removes or cleans the newest one
_PAUSE = 0.25  # seconds between those


@dataclass
class Choice:
    """The checkpoint that all ranks will load, and the newer ones that were passed over, with the reasons.

    `tier` is where it was found. The root may have another one by its name, which is damaged. `damaged` names those
    whose bytes in the root were shown to be missing or altered: not those that merely could not be read.
    """

    manifest: Manifest
    url: str
    tier: int
    ready: Any
    passed_over: dict[str, str] = field(default_factory=dict)
    damaged: frozenset[str] = frozenset()


Prepare = Callable[[Storage, Manifest, ExitStack], Any]


def choose(
    tiers: Sequence[Storage],
    ranks: Ranks,
    name: str | None,
    prepare: Prepare,
    held: ExitStack,
    hosts: Hosts = ONE_SHARED_ROOT,
    *,
    foreign: bool = False,
) -> Choice | None:
    """The checkpoint to load, the same on every rank: the one by that name, or the newest that is intact everywhere.

    `tiers` are where they may be; of two copies the first tier's comes first. `prepare` reads it, on all ranks
    together; an error that shows damage means the next one. An unreadable checkpoint is not damaged: the error is
    raised, or a lost permission or a failing mount would silently rewind the run. The same holds for a root that cannot
    be listed. The checkpoint, and what `prepare` puts on its stack, is kept until `held` is left. None if nothing was
    ever committed. With `foreign`, where there is none of ours, the newest that Accelerate wrote.

    Where `hosts` have roots of their own, what one of them knows to be committed is, and each rank must find what it
    needs in its own host's root, or in the tier behind it.
    """
    call = f"load_state({name!r})" if name else "load_state()"
    rescans = busy_rescans = 0
    while rescans < _RESCANS:
        looking = tiers if ranks.rank == MAIN else tiers[: hosts.owns_root(ranks.rank)]
        looked = Result.capture(lambda: _look(looking, name))  # noqa: B023
        offer = decide_together(ranks, call, looked, lambda told: _offer(tiers[0], name, told, foreign=foreign))
        search = _Search(tiers, ranks, hosts, call, prepare, held, offer["passed_over"])
        choice = search.first_intact(offer["found"])
        if choice is not None:
            return choice
        if not offer["found"]:
            return None
        if search.busy is not None:
            busy_rescans += 1
            if busy_rescans == _BUSY_RESCANS:
                raise search.busy
            time.sleep(_PAUSE)
            continue
        if not search.vanished:  # a run that goes on meanwhile has newer ones by now
            break
        rescans += 1
    raise DamagedError(_nothing_intact(tiers, name, search.passed_over))


def _nothing_intact(tiers: Sequence[Storage], name: str | None, passed_over: Mapping[str, str]) -> str:
    if name:
        return f"{passed_over[name]} Load another one, or load_state() without a name for the newest intact one."
    lines = "\n  ".join(passed_over.values())
    return (
        f"no checkpoint in {' or '.join(one.url for one in tiers)} is intact, so nothing was loaded:\n  {lines}\n"
        "Restore one from a backup, or start anew in another root."
    )


@dataclass
class _Search:
    """Goes through checkpoints until one is intact on every rank."""

    tiers: Sequence[Storage]
    ranks: Ranks
    hosts: Hosts
    call: str
    prepare: Prepare
    held: ExitStack
    passed_over: dict[str, str]
    vanished: bool = False
    busy: LockedError | None = None  # another process is removing or cleaning the one that would be next
    damaged: set[str] = field(default_factory=set)

    def first_intact(self, found: list[tuple[int, str]]) -> Choice | None:
        unreached: dict[str, StorageError] = {}
        for tier, name in found:
            if unreached.keys() - {name}:
                break
            storage = self.tiers[tier]
            with ExitStack() as mine:
                found_all = not self.hosts.separate_roots  # a file that lies on another host is not damaged
                try:
                    if tier == 0 and self.hosts.separate_roots:
                        manifest, storage = self._found_apart(name, mine)
                        found_all = True
                    else:
                        manifest = self._inspected(storage, name, mine)
                    ready = self.prepare(storage, manifest, mine)
                except LockedError as error:
                    self.busy = error
                    return None
                except (DamagedError, StorageError) as error:
                    if isinstance(error, StorageError) and not shows_damage(error):
                        unreached[name] = error
                    elif tier == 0 and found_all:
                        self.damaged.add(name)
                    self._pass_over(name, f"in {storage.url}: {error}" if tier else str(error))
                    continue
                self.held.push(mine.pop_all())
                url = folder_of(storage, manifest)
                return Choice(manifest, url, tier, ready, self.passed_over, frozenset(self.damaged))
        for name, why in unreached.items():
            raise type(why)(
                f"{name} cannot be read now: {why} Nothing says that it is damaged, so no older one was taken in its "
                "place. Try again when it can be read; or, to go back on purpose, name an older one: load_state(name)."
            ) from why
        return None

    def _pass_over(self, name: str, why: str) -> None:
        known = self.passed_over.get(name)
        self.passed_over[name] = f"{known} {why}" if known else why

    def _inspected(self, storage: Storage, name: str, held: ExitStack) -> Manifest:
        """The manifest of a checkpoint whose files are all there, with their sizes, as every rank sees it."""
        found: list[Manifest] = []
        verdict = Result.capture(lambda: _inspect(storage, name, held, found))
        problem = decide_together(self.ranks, self.call, verdict, _joined)
        if problem:
            self.vanished = self.vanished or problem["vanished"]
            if problem["unreached"]:
                raise TransientError(problem["text"])
            raise (LockedError if problem["busy"] else DamagedError)(problem["text"])
        return found[0]

    def _found_apart(self, name: str, held: ExitStack) -> tuple[Manifest, Storage]:
        """A manifest that some host knows, and where this rank finds what it needs of that checkpoint."""
        keeps = self.hosts.owns_root(self.ranks.rank)
        mine = Result.capture(lambda: _text(self.tiers[0], name) if keeps else None)
        manifest = Manifest.from_bytes(decide_together(self.ranks, self.call, mine, _newest_of).encode(), name)
        source = Result.capture(lambda: per_host.source(self.tiers, manifest, self.ranks, held))
        missing = source.then(lambda found: found if isinstance(found, list) else [])
        problem = decide_together(self.ranks, self.call, missing, lambda told: per_host.problem(name, self.hosts, told))
        if problem:
            raise DamagedError(problem)
        return manifest, source.value


def _joined(verdicts: list[Any]) -> Any:
    bad = [verdict for verdict in verdicts if verdict]
    if not bad:
        return None
    told = {key: any(one[key] for one in bad) for key in ("vanished", "unreached", "busy")}
    decisive = max(bad, key=lambda one: (one["unreached"], one["busy"]))
    return {"text": decisive["text"], **told}


def _offer(root: Storage, name: str | None, told: list[Any], *, foreign: bool) -> dict[str, Any]:
    """On the main rank: what to try, in order, each with the number of its tier; and what needs no trying."""
    found = [one for of_rank in told for one in of_rank]
    committed = [one for one in found if one["problem"] is None]
    committed.sort(key=lambda one: (one["sequence"], one["created"], -one["tier"]), reverse=True)
    order = list(dict.fromkeys((one["tier"], one["name"]) for one in committed))
    if name is not None:
        if not order:
            read_any(root, name)  # another tool wrote it, or there is none
        return {"found": order or [(0, name)], "passed_over": {}}
    known = {one for tier, one in order if tier == 0}
    cut_off = {one["name"]: one["problem"] for one in found if one["problem"] is not None and one["tier"] == 0}
    return {
        "found": order or [(0, one) for one in (foreign_names(root) if foreign else [])],
        "passed_over": {one: why for one, why in cut_off.items() if one not in known},
    }


def _look(tiers: Sequence[Storage], name: str | None) -> list[dict[str, Any]]:
    """The checkpoints of all tiers, or those of one name.

    A root that cannot be read is an error, whatever the mirror has: the root's newest checkpoint may be newer. A mirror
    that cannot be reached is done without, unless the root has nothing: a fresh start must not come before what is
    there.
    """
    found: list[dict[str, Any]] = []
    unread: dict[int, StorageError] = {}
    for tier, storage in enumerate(tiers if name != ROOT else ()):
        try:
            here = catalog.scan(storage) if name is None else [catalog.find(storage, catalog.check_name(name))]
        except StorageError as error:
            unread[tier] = error
        else:
            found += [_described(tier, one, name) for one in here]
    if 0 in unread and len(tiers) > 1:
        raise type(unread[0])(_root_unread(tiers, found, unread)) from unread[0]
    for tier, why in unread.items():
        if all(one["problem"] is not None for one in found):
            raise why
        _log.warning("%s cannot be looked at, and may have newer checkpoints: %s", tiers[tier].url, why)
    return found


def _root_unread(tiers: Sequence[Storage], behind: list[dict[str, Any]], unread: Mapping[int, StorageError]) -> str:
    """Both facts: what is wrong with the root, and what the mirror has."""
    committed = [one for one in behind if one["problem"] is None]
    newest = max(committed, key=lambda one: (one["sequence"], one["created"]), default=None)
    root, mirror = tiers[0].url, tiers[1].url
    if 1 in unread:
        has = f"The mirror cannot be read either: {unread[1]}"
    elif newest is None:
        has = f"The mirror {mirror} has no such checkpoint."
    else:
        has = f"The mirror {mirror} has {newest['name']}, but the root may have a newer one, so it was not taken."
    return (
        f"{root} cannot be read: {unread[0]} {has} Nothing was loaded. Try again when the root can be read; to go on "
        f"from the mirror without it, give StateManager another root and mirror={mirror!r}."
    )


def _described(tier: int, one: Checkpoint, name: str | None) -> dict[str, Any]:
    if isinstance(one.problem, VersionError) and name is None:
        raise one.problem
    manifest = one.manifest
    age = {"sequence": manifest.sequence, "created": manifest.created} if manifest else {}
    return {"tier": tier, "name": one.name, "problem": str(one.problem) if one.problem else None, **age}


def _text(root: Storage, name: str) -> str | None:
    """The manifest as it lies here, if there is one that is whole."""
    try:
        catalog.read_manifest(root, name)
        return root.read(f"{name}/{FILE_NAME}").decode()
    except (CheckpointError, AbsentError):
        return None


def _newest_of(texts: list[str | None]) -> str:
    there = [text for text in texts if text is not None]
    if not there:
        raise DamagedError("its manifest was removed just now.")
    return max(there, key=lambda text: Manifest.from_bytes(text.encode(), FILE_NAME).sequence)


def _inspect(storage: Storage, name: str, held: ExitStack, found: list[Manifest]) -> Any:
    """What is wrong with a checkpoint, as this rank sees it without reading its files; None if nothing is."""
    try:
        if name:
            held.enter_context(storage.lock(name, shared=True))
        manifest = read_any(storage, name)
        wrong = size_problems(storage, manifest)
    except LockedError as error:
        return _verdict(f"{name} is being removed or cleaned up by another process: {error}", busy=True)
    except (DamagedError, StorageError) as error:
        gone = isinstance(error, AbsentError)  # removed since it was listed
        return _verdict(str(error), vanished=gone, unreached=not shows_damage(error))
    except MissingError as error:
        return _verdict(str(error), vanished=True)
    found.append(manifest)
    return _verdict(f"{name} is damaged: {'; '.join(wrong)}.") if wrong else None


def _verdict(text: str, *, vanished: bool = False, unreached: bool = False, busy: bool = False) -> dict[str, Any]:
    return {"text": text, "vanished": vanished, "unreached": unreached, "busy": busy}

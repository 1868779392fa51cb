"""Which checkpoint to load: the same on every rank, and intact on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ckpt import apart, catalog
from ckpt.agreement import Outcome, agree
from ckpt.catalog import Checkpoint
from ckpt.errors import (
    AbsentError,
    CheckpointError,
    DamagedError,
    DeniedError,
    LockedError,
    MissingError,
    StorageError,
    TransientError,
    VersionError,
)
from ckpt.formats.manifest import FILE_NAME, Manifest
from ckpt.hosts import EVERYWHERE, Hosts
from ckpt.ranks import MAIN, Ranks
from ckpt.storage import Storage
from ckpt.taking_over import ROOT, folder_of, foreign_names, read_any

_log = logging.getLogger("ckpt")
_RESCANS = 5
_UNREACHED = (TransientError, DeniedError)


@dataclass
class Choice:
    """The checkpoint that all ranks will load, and the newer ones that were passed over, with the reasons.

    `tier` is where it was found. The root may have another one by its name, which is damaged.
    """

    manifest: Manifest
    url: str
    tier: int
    ready: Any
    passed_over: dict[str, str] = field(default_factory=dict)


Prepare = Callable[[Storage, Manifest, ExitStack], Any]


def choose(
    tiers: Sequence[Storage],
    ranks: Ranks,
    name: str | None,
    prepare: Prepare,
    held: ExitStack,
    hosts: Hosts = EVERYWHERE,
    *,
    foreign: bool = False,
) -> Choice | None:
    """The checkpoint to load, the same on every rank: the one by that name, or the newest that is intact everywhere.

    `tiers` are where they may be; of two copies the first tier's comes first. `prepare` reads it, on all ranks
    together; a `DamagedError` from it means the next one. One that cannot be reached may be as whole as ever: no older
    one is taken in its place, but the error is raised. The checkpoint, and what `prepare` puts on its stack, is kept
    until `held` is left. None if nothing was ever committed. With `foreign`, where there is none of ours, the newest
    that Accelerate wrote.

    Where `hosts` have roots of their own, what one of them knows to be committed is, and each rank must find what it
    needs in its own host's root, or in the tier behind it.
    """
    call = f"load_state({name!r})" if name else "load_state()"
    for _ in range(_RESCANS):
        looking = tiers if ranks.rank == MAIN else tiers[: hosts.keeps(ranks.rank)]
        looked = Outcome.of(lambda: _look(looking, name))  # noqa: B023
        offer = agree(ranks, call, looked, lambda told: _offer(tiers[0], name, told, foreign=foreign))
        search = _Search(tiers, ranks, hosts, call, prepare, held, offer["passed_over"])
        choice = search.first_intact(offer["found"])
        if choice is not None:
            return choice
        if not offer["found"]:
            return None
        if not search.vanished:  # a run that goes on meanwhile has newer ones by now
            break
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

    def first_intact(self, found: list[tuple[int, str]]) -> Choice | None:
        unreached: dict[str, StorageError] = {}
        for tier, name in found:
            if unreached.keys() - {name}:
                break
            storage = self.tiers[tier]
            with ExitStack() as mine:
                try:
                    if tier == 0 and self.hosts.apart:
                        manifest, storage = self._found_apart(name, mine)
                    else:
                        manifest = self._inspected(storage, name, mine)
                    ready = self.prepare(storage, manifest, mine)
                except (DamagedError, StorageError) as error:
                    if isinstance(error, _UNREACHED):
                        unreached[name] = error
                    self._pass_over(name, f"in {storage.url}: {error}" if tier else str(error))
                    continue
                self.held.push(mine.pop_all())
                return Choice(manifest, folder_of(storage, manifest), tier, ready, self.passed_over)
        for name, why in unreached.items():
            raise type(why)(
                f"{name} cannot be read now: {why} Nothing says that it is damaged, so no older one was taken in its "
                "place. Try again, or name an older one: load_state(name)."
            ) from why
        return None

    def _pass_over(self, name: str, why: str) -> None:
        known = self.passed_over.get(name)
        self.passed_over[name] = f"{known} {why}" if known else why

    def _inspected(self, storage: Storage, name: str, held: ExitStack) -> Manifest:
        """The manifest of a checkpoint whose files are all there, with their sizes, as every rank sees it."""
        found: list[Manifest] = []
        verdict = Outcome.of(lambda: _inspect(storage, name, held, found))
        problem = agree(self.ranks, self.call, verdict, _joined)
        if problem:
            self.vanished = self.vanished or problem["vanished"]
            raise (TransientError if problem["unreached"] else DamagedError)(problem["text"])
        return found[0]

    def _found_apart(self, name: str, held: ExitStack) -> tuple[Manifest, Storage]:
        """A manifest that some host knows, and where this rank finds what it needs of that checkpoint."""
        keeps = self.hosts.keeps(self.ranks.rank)
        mine = Outcome.of(lambda: _text(self.tiers[0], name) if keeps else None)
        manifest = Manifest.from_bytes(agree(self.ranks, self.call, mine, _newest_of).encode(), name)
        source = Outcome.of(lambda: apart.source(self.tiers, manifest, self.ranks, held))
        missing = source.then(lambda found: found if isinstance(found, list) else [])
        problem = agree(self.ranks, self.call, missing, lambda told: apart.problem(name, self.hosts, told))
        if problem:
            raise DamagedError(problem)
        return manifest, source.value


def _joined(verdicts: list[Any]) -> Any:
    bad = [verdict for verdict in verdicts if verdict]
    if not bad:
        return None
    told = {key: any(one[key] for one in bad) for key in ("vanished", "unreached")}
    return {"text": bad[0]["text"], **told}


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
    """The checkpoints of all tiers, or those of one name. A tier that cannot be reached is done without, if it can be.

    Where no other has anything, that is an error: a fresh start must not come before what is there.
    """
    found: list[dict[str, Any]] = []
    for tier, storage in enumerate(tiers if name != ROOT else ()):
        try:
            here = catalog.scan(storage) if name is None else [catalog.find(storage, catalog.check_name(name))]
        except StorageError as error:
            if all(one["problem"] is not None for one in found):
                raise
            _log.warning("%s cannot be looked at, and may have newer checkpoints: %s", storage.url, error)
        else:
            found += [_described(tier, one, name) for one in here]
    return found


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
        wrong = catalog.size_problems(storage, manifest)
    except (DamagedError, StorageError) as error:
        gone = isinstance(error, AbsentError | LockedError)  # removed since it was listed, or just being
        return _verdict(str(error), vanished=gone, unreached=isinstance(error, _UNREACHED))
    except MissingError as error:
        return _verdict(str(error), vanished=True)
    found.append(manifest)
    return _verdict(f"{name} is damaged: {'; '.join(wrong)}.") if wrong else None


def _verdict(text: str, *, vanished: bool = False, unreached: bool = False) -> dict[str, Any]:
    return {"text": text, "vanished": vanished, "unreached": unreached}

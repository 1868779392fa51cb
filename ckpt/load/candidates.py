"""Which checkpoints a load may try, and in which order: the listings of all ranks, joined on the main rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypedDict

from ckpt.errors import StorageError, VersionError
from ckpt.load.accelerate_reader import foreign_names, read_any
from ckpt.root import catalog
from ckpt.root.catalog import Overview
from ckpt.root.folder import ROOT_ITSELF
from ckpt.root.mirror import MirrorPatience
from ckpt.storage import Storage

_log = logging.getLogger("ckpt")

MEMORY = -1  # the tier of snapshots in memory: before the root (0) and the mirror (1)
STRAY = "it continues from a checkpoint that is not in the root any more."  # why a snapshot in memory is left


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
    run: str
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
        _log.warning("%s was not looked at, and may have newer checkpoints: %s", tiers[tier].url, why)
    return listed, bool(unreadable) and patience is not None


def _found(
    storage: Storage, name: str | None, on_listed: Callable[[Overview], None] | None = None
) -> list[catalog.Checkpoint]:
    if name is not None:
        return [catalog.find(storage, catalog.check_name(name))]
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
        _log.warning("%s cannot be read: %s", storage.url, error)
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
        "order": order or [(0, folder) for folder in (foreign_names(root) if foreign else [])],
        "passed_over": in_mirror | _problems(unusable, 0) | _problems(unusable, MEMORY) | strays,
        "lost": sorted(lost - {checkpoint for tier, checkpoint in order if tier == 0}),
        "root_step": next((found["step"] for found in committed if found["tier"] != MEMORY), None),
        "unseen": unseen,
    }


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
        has = f"The mirror cannot be read either: {unreadable[1]}"
    elif newest is None:
        has = f"The mirror {mirror} has no such checkpoint."
    else:
        has = f"The mirror {mirror} has {newest['name']}, but the root may have a newer one, so it was not taken."
    return (
        f"{root} cannot be read: {unreadable[0]} {has} Nothing was loaded. Try again when the root can be read; to "
        f"continue from the mirror without it, give StateManager another root and mirror={mirror!r}."
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
        "run": manifest.run if manifest else "",
        "id": manifest.id if manifest else "",
        "parent": manifest.parent if manifest else None,
    }

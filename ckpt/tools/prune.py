"""A root is cleared up on demand: old checkpoints go by the rules of `Keep`, and so does what crashed saves left.

Imports no torch: a shell asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import LockedError, MetricError, MissingError
from ckpt.formats.native.manifest import Manifest
from ckpt.root import catalog, cleanup
from ckpt.root import verify as verifying
from ckpt.root.lock import lock_root
from ckpt.root.retention import Keep
from ckpt.root.save_marker import SaveMarker, marked_names, read_marker
from ckpt.root.verify import size_problems, without_other_hosts
from ckpt.storage import Entry, Staging, Storage, Unfinished, open_storage
from ckpt.util.console import format_duration

GRACE = 24 * 3600.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What was removed, or would be, in bytes by name; and what stays, with the reasons.

    `swept` and `spared` are leftovers: names of checkpoints whose saves were cut off, or keys of unfinished writes.
    """

    url: str
    removed: Mapping[str, int] = field(default_factory=dict)
    swept: Mapping[str, int] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)
    spared: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes in all that goes. Of files that checkpoints share on a disk, the last one frees them."""
        return sum(self.removed.values()) + sum(self.swept.values())


def prune(
    root: str | os.PathLike[str] | Storage,
    *,
    keep: Keep | None = None,
    grace: float = GRACE,
    verify: bool = True,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Pruned:
    """Remove the checkpoints that `keep` lets go, and what crashed saves left more than `grace` seconds ago.

    Without `keep` all checkpoints stay. The newest intact one always does, and so does one that is being read: before
    anything goes, every byte of the newest that stays is read (or with `verify=False` sizes alone are compared). If
    that one cannot be read, or if no checkpoint has the metric of `keep`, it is an error and nothing is removed. What a
    save under way writes or replaces is never touched. With `dry_run` nothing is removed. A run may go on meanwhile:
    leftovers then stay, and the next start of a run removes them.
    """
    plan = Plan.of(open_storage(root, **(storage_options or {})), keep, grace, verify=verify)
    return plan.outcome if dry_run else plan.carry_out()


@dataclass(frozen=True)
class Plan:
    """What is to go: checkpoints, and leftovers that are old enough."""

    storage: Storage
    grace: float
    going: tuple[Manifest, ...]
    leftovers: tuple[Leftover, ...]
    outcome: Pruned

    @classmethod
    def of(cls, storage: Storage, keep: Keep | None, grace: float, *, verify: bool = True) -> Plan:
        entries = list(storage.list())
        if not entries and not any(True for _ in storage.unfinished()):
            raise MissingError(f"there is nothing at {storage.url}.")
        found = catalog.scan(storage)
        manifests = [one.manifest for one in found if one.manifest is not None]
        damaged = {one.name: str(one.problem) for one in found if one.problem is not None}
        if keep is not None and (why := keep.cannot_rank(manifests)):
            raise MetricError(f"{storage.url}: {why}. Nothing was removed.")
        leftovers = _leftovers(storage, entries)
        old = tuple(one for one in leftovers if one.age >= grace)
        removable = _removable(storage, keep, manifests, damaged, verify=verify) if keep else []
        going = tuple(one for one in manifests if one.name in removable)
        outcome = Pruned(
            url=storage.url,
            removed={one.name: without_other_hosts(storage, one).size for one in going},
            swept={one.name: one.size for one in old},
            kept=tuple(one.name for one in manifests if one not in going),
            damaged={name: why for name, why in damaged.items() if name not in {one.name for one in leftovers}},
            spared={one.name: f"was left {format_duration(one.age)} ago" for one in leftovers if one.age < grace},
        )
        return cls(storage, grace, going, old, outcome)

    def carry_out(self) -> Pruned:
        """Remove what was planned, as far as it is still as it was."""
        spared = dict(self.outcome.spared)
        swept = self._sweep(spared)
        gone = {one.name: self.outcome.removed[one.name] for one in self.going if self._remove(one, spared)}
        if isinstance(self.storage, Staging):
            self.storage.settle()
        kept = (*self.outcome.kept, *(one.name for one in self.going if one.name not in gone))
        return Pruned(
            url=self.storage.url, removed=gone, swept=swept, kept=kept, damaged=self.outcome.damaged, spared=spared
        )

    def _sweep(self, spared: dict[str, str]) -> dict[str, int]:
        """Remove leftovers, and return those that are gone.

        Where a run has the root all of them stay: nobody else can tell what a crash left from what that run is writing.
        """
        if not self.leftovers:  # the root is not taken without need: a run that starts now would be refused
            return {}
        with ExitStack() as held:
            try:
                lock_root(self.storage, held, to_prune=True)
            except LockedError as error:
                spared.update({one.name: str(error) for one in self.leftovers})
                return {}
            for one in self.leftovers:
                self._clean(one, spared)
            self.storage.sweep(age=self.grace)
        left = {one.key for one in self.storage.unfinished()}
        spared.update({one.name: "is being written" for one in self.leftovers if one.name in left})
        return {one.name: one.size for one in self.leftovers if one.name not in spared}

    def _clean(self, one: Leftover, spared: dict[str, str]) -> None:
        mark = read_marker(self.storage, one.name) if one.marked else None
        if mark is None:
            return
        if mark.age < self.grace:
            spared[one.name] = "was written anew meanwhile"
            return
        cleanup.remove_uncommitted(self.storage, one.name)
        if read_marker(self.storage, one.name) is not None:
            spared[one.name] = "is being read"

    def _remove(self, manifest: Manifest, spared: dict[str, str]) -> bool:
        stays = cleanup.remove_or_explain(self.storage, manifest)
        if stays:
            spared[manifest.name] = stays
        return not stays


def _removable(
    storage: Storage, keep: Keep, manifests: list[Manifest], damaged: dict[str, str], *, verify: bool
) -> list[str]:
    """What may go. Checkpoints that are found to be damaged are added to `damaged`, and do not count."""
    for one in manifests:
        if wrong := size_problems(storage, without_other_hosts(storage, one)):
            damaged[one.name] = "; ".join(wrong)
    while names := keep.removable(manifests, damaged):
        newest = next(one.name for one in manifests if one.name not in damaged)
        wrong = _damage(storage, newest) if verify else []
        if not wrong:
            return names
        damaged[newest] = "; ".join(wrong)
    return []


def _damage(storage: Storage, name: str) -> list[str]:
    """Why a checkpoint does not count: what is wrong with it. One that cannot be read is an error: it may be intact."""
    found = verifying.verify_checkpoint(storage, name)
    if found.error is not None:
        raise type(found.error)(
            f"{name} cannot be read: {found.error} Nothing says that it is damaged, so nothing was removed. Try again "
            "when it can be read."
        ) from found.error
    return list(found.problems)


@dataclass(frozen=True)
class Leftover:
    """What a crashed save left: a checkpoint's folder with a mark, or an unfinished write elsewhere."""

    name: str
    size: int
    age: float
    marked: bool = False


def _leftovers(storage: Storage, entries: list[Entry]) -> list[Leftover]:
    unfinished = list(storage.unfinished())
    names = marked_names(entries)
    found = [_marked(storage, name, entries, unfinished) for name in names]
    outside = (one for one in unfinished if one.key.partition("/")[0] not in names)
    return [*found, *(Leftover(one.key, one.size, one.age) for one in outside)]


def _marked(storage: Storage, name: str, entries: list[Entry], unfinished: list[Unfinished]) -> Leftover:
    """A folder with a mark: the files that the mark names, and no manifest lists, and what is unfinished there."""
    mark = read_marker(storage, name) or SaveMarker(())
    manifest = catalog.find(storage, name).manifest
    listed = {f"{name}/{file.path}" for file in manifest.files} if manifest else set()
    stray = {f"{name}/{path}" for path in mark.files} - listed
    left = [entry.size for entry in entries if entry.key in stray]
    left += [one.size for one in unfinished if one.key.startswith(f"{name}/")]
    return Leftover(name, sum(left), mark.age, marked=True)

"""Prune a root on demand: remove old checkpoints by the rules of `Keep`, and the leftovers of crashed saves.

Imports no torch, for the command line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import CheckpointError, ConfigError, LockedError, MetricError, MissingError
from ckpt.root import catalog, deletion
from ckpt.root import verify as verifying
from ckpt.root.catalog import History, Overview, SaveMarker, Summary, marked_names, read_marker
from ckpt.root.lock import lock_root
from ckpt.root.retention import Keep
from ckpt.root.verify import size_problems, without_other_hosts
from ckpt.storage import Entry, Staging, Storage, Unfinished, open_storage
from ckpt.util.console import format_duration, format_size, html_table
from ckpt.util.option_values import is_number, said, settings

_log = logging.getLogger("ckpt")

GRACE = 24 * 3600.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """Lists what `prune` removed, or would remove, and what it kept.

    Attributes:
        url: The URL or path of the root.
        removed: The removed checkpoints, with their bytes.
        swept: The removed leftovers, with their bytes: names of checkpoints whose saves were interrupted, or keys of
            unfinished writes.
        kept: The checkpoints that `prune` kept, or would keep.
        damaged: The damaged checkpoints, with the reason.
        spared: The leftovers that `prune` kept, with the reason.
    """

    url: str
    removed: Mapping[str, int] = field(default_factory=dict)
    swept: Mapping[str, int] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)
    spared: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all that is removed. Files that checkpoints share on a disk are freed with the last of these."""
        return sum(self.removed.values()) + sum(self.swept.values())

    def rows(self) -> list[tuple[str, str, str, str]]:
        """What is done with each checkpoint and leftover, its name, the bytes that are removed, and why."""
        rows = [("remove", name, format_size(count), "") for name, count in self.removed.items()]
        rows += [
            ("sweep", name, format_size(count), "left by an interrupted save") for name, count in self.swept.items()
        ]
        rows += [("leave", name, "", why) for name, why in self.spared.items()]
        rows += [("keep", name, "", "") for name in self.kept if name not in self.damaged]
        damaged = {name: why for name, why in self.damaged.items() if name not in self.removed}
        return rows + [("keep", name, "", f"damaged, and not counted: {why}") for name, why in damaged.items()]

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html_table(self.url, self.rows(), ("", "name", "size", "why"), ("size",))


def prune(
    root: str | os.PathLike[str] | Storage,
    *,
    keep: Keep | None = None,
    grace: float = GRACE,
    verify: bool = True,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Pruned:
    """Remove checkpoints by the rules of `keep`, and the leftovers of crashed saves.

    `prune` always keeps the newest intact checkpoint, and any checkpoint that a process is reading. `prune` never
    touches files that a running save is writing or replacing. While a training run is using the root, `prune` does not
    touch the leftovers; the next training run removes them.

    Args:
        root: A path, a URL or a storage.
        keep: Rules for which checkpoints to keep; None keeps all.
        grace: Keep leftovers that are younger than this many seconds.
        verify: Before removing anything, read every byte of the newest checkpoint; False compares only sizes.
        dry_run: Remove nothing, and return what `prune` would remove.
        storage_options: As for the manager.

    Returns:
        What `prune` removed, or would remove, and what it kept and why.

    Raises:
        MissingError: The root does not exist.
        StorageError: ckpt can't read the newest checkpoint. Nothing was removed.
        MetricError: No checkpoint has the metric of `keep`. Nothing was removed.
    """
    _refuse_nonsense(keep, grace)
    plan = Plan.of(open_storage(root, **settings(storage_options)), keep, grace, verify=verify)
    return plan.outcome if dry_run else plan.carry_out()


def _refuse_nonsense(keep: Any, grace: Any) -> None:
    wrong = [] if keep is None or isinstance(keep, Keep) else [f"keep={said(keep)} must be a ckpt.Keep"]
    if not is_number(grace) and not (isinstance(grace, int | float) and grace == 0):
        wrong.append(f"grace={said(grace)} must be a number of seconds, 0 or more")
    if wrong:
        raise ConfigError(f"prune: {'; '.join(wrong)}.")


@dataclass(frozen=True)
class Plan:
    """What is to be removed: checkpoints, and leftovers that are older than the grace period."""

    storage: Storage
    grace: float
    going: tuple[Summary, ...]
    leftovers: tuple[Leftover, ...]
    outcome: Pruned

    @classmethod
    def of(cls, storage: Storage, keep: Keep | None, grace: float, *, verify: bool = True) -> Plan:
        entries = list(storage.list())
        if not entries and not any(True for _ in storage.unfinished()):
            raise MissingError(f"there is nothing at {storage.url}.")
        found = Overview.of(storage, entries)
        committed, problems = found.committed, {outline.name: outline.problem for outline in found.checkpoints}
        damaged = {name: str(problem) for name, problem in problems.items() if problem is not None}
        if keep is not None and (why := keep.cannot_rank(committed)):
            raise MetricError(f"{storage.url}: {why}. Nothing was removed.")
        leftovers = _leftovers(storage, entries)
        old = tuple(leftover for leftover in leftovers if leftover.age >= grace)
        removable = _removable(found, keep, damaged, verify=verify) if keep else []
        going = tuple(summary for summary in committed if summary.name in removable)
        outcome = Pruned(
            url=storage.url,
            removed={summary.name: _size_here(found, summary) for summary in going},
            swept={leftover.name: leftover.size for leftover in old},
            kept=tuple(summary.name for summary in committed if summary not in going),
            damaged={name: why for name, why in damaged.items() if name not in {left.name for left in leftovers}},
            spared={left.name: _too_young(left, grace) for left in leftovers if left.age < grace},
        )
        return cls(storage, grace, going, old, outcome)

    def carry_out(self) -> Pruned:
        """Remove what was planned, except what has changed since."""
        spared = dict(self.outcome.spared)
        swept = self._sweep(spared)
        if self.going:
            History(self.storage).store(self.going)
        reasons = deletion.remove_all(self.storage, self.going)
        spared |= {name: reason for name, reason in reasons.items() if reason}
        for name, why in spared.items():
            if why.startswith(deletion.FAILED):
                _log.warning("ckpt left %s/%s, which %s", self.storage.url, name, why)
        gone = {name: self.outcome.removed[name] for name, reason in reasons.items() if not reason}
        if isinstance(self.storage, Staging):
            self.storage.settle()
        kept = (*self.outcome.kept, *(summary.name for summary in self.going if summary.name not in gone))
        return Pruned(
            url=self.storage.url, removed=gone, swept=swept, kept=kept, damaged=self.outcome.damaged, spared=spared
        )

    def _sweep(self, spared: dict[str, str]) -> dict[str, int]:
        """Remove leftovers, and return those that were removed.

        While a run holds the root all are kept: only that run can tell leftovers from what it is writing.
        """
        if not self.leftovers:  # the root is not locked without need: a run that starts meanwhile would be refused
            return {}
        with ExitStack() as held:
            try:
                lock_root(self.storage, held, to_prune=True)
            except LockedError as error:
                spared.update({leftover.name: str(error) for leftover in self.leftovers})
                return {}
            for leftover in self.leftovers:
                self._clean(leftover, spared)
            self.storage.sweep(age=self.grace)
        unfinished = {write.key for write in self.storage.unfinished()}
        spared.update({leftover.name: "is being written" for leftover in self.leftovers if leftover.name in unfinished})
        return {leftover.name: leftover.size for leftover in self.leftovers if leftover.name not in spared}

    def _clean(self, leftover: Leftover, spared: dict[str, str]) -> None:
        if not leftover.marked:
            return
        mark = read_marker(self.storage, leftover.name)
        if mark is None:
            spared[leftover.name] = "has a save marker that ckpt cannot read, or was removed in the meantime"
            return
        if mark.age < self.grace:
            spared[leftover.name] = "was written again in the meantime"
            return
        why = deletion.remove_uncommitted(self.storage, leftover.name)
        if why:
            spared[leftover.name] = why


def _size_here(found: Overview, summary: Summary) -> int:
    """The bytes of a checkpoint, without the files that other hosts keep in separate roots."""
    if summary.contents:
        return summary.size
    manifest = catalog.find(found.storage, summary.name).manifest
    return without_other_hosts(found.storage, manifest).size if manifest else 0


def _wrong_sizes(found: Overview, summary: Summary) -> list[str]:
    """Files that are missing or have other sizes. The manifest is read only if the listing does not show all files."""
    if summary.has_all_of(found.sizes(summary.name)):
        return []
    try:
        manifest = catalog.read_manifest(found.storage, summary.name)
    except CheckpointError as error:
        return [str(error)]
    return size_problems(found.storage, without_other_hosts(found.storage, manifest))


def _removable(found: Overview, keep: Keep, damaged: dict[str, str], *, verify: bool) -> list[str]:
    """The checkpoints that may be removed. Those found to be damaged are added to `damaged`, and do not count."""
    committed = found.committed
    for summary in committed:
        if wrong := _wrong_sizes(found, summary):
            damaged[summary.name] = "; ".join(wrong)
    while names := keep.removable(committed, damaged):
        newest = next(summary.name for summary in committed if summary.name not in damaged)
        wrong = _damage(found.storage, newest) if verify else []
        if not wrong:
            return names
        damaged[newest] = "; ".join(wrong)
    return []


def _damage(storage: Storage, name: str) -> list[str]:
    """The problems of a damaged checkpoint. An unreadable one raises: it may be intact."""
    found = verifying.verify_checkpoint(storage, name)
    if found.error is not None:
        raise type(found.error)(
            f"ckpt can't read {name}: {found.error} The checkpoint may be intact, so nothing was removed. Try again "
            "later."
        ) from found.error
    return list(found.problems)


@dataclass(frozen=True)
class Leftover:
    """What a crashed save left: a checkpoint's folder with a save marker, or an unfinished write elsewhere."""

    name: str
    size: int
    age: float
    marked: bool = False


def _too_young(left: Leftover, grace: float) -> str:
    return f"was left {format_duration(left.age)} ago, which is less than {format_duration(grace)}"


def _leftovers(storage: Storage, entries: list[Entry]) -> list[Leftover]:
    unfinished = list(storage.unfinished())
    names = marked_names(entries)
    found = [_marked(storage, name, entries, unfinished) for name in names]
    outside = (write for write in unfinished if write.key.partition("/")[0] not in names)
    return [*found, *(Leftover(write.key, write.size, write.age) for write in outside)]


def _marked(storage: Storage, name: str, entries: list[Entry], unfinished: list[Unfinished]) -> Leftover:
    """A folder with a save marker: the files that it names and no manifest lists, and unfinished writes there."""
    mark = read_marker(storage, name) or SaveMarker(())
    manifest = catalog.find(storage, name).manifest
    listed = {f"{name}/{file.path}" for file in manifest.files} if manifest else set()
    stray = {f"{name}/{path}" for path in mark.files} - listed
    left = [entry.size for entry in entries if entry.key in stray]
    left += [write.size for write in unfinished if write.key.startswith(f"{name}/")]
    return Leftover(name, sum(left), mark.age, marked=True)

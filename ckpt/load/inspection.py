"""Whether a checkpoint is complete as every rank sees it: its manifest, and the sizes of its files.

No file but the manifest is read. Hashes are compared later, while tensors are read.

Where hosts have roots of their own, each has the files that its own ranks wrote, with every replica. So after hosts
have changed places, the pieces that a rank needs may still be on its disk, in the file of another rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypedDict

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
    shows_damage,
)
from ckpt.formats.native.documents import STATE
from ckpt.formats.native.manifest import FILE_NAME, FileRecord, Manifest
from ckpt.formats.native.shard_table import EVERY, ShardSpec, ShardTable
from ckpt.load.accelerate import read_any
from ckpt.ranks.consensus import MAIN, Ranks, Result, decide_together
from ckpt.ranks.hosts import Hosts
from ckpt.root.catalog import manifest_bytes, part_of, rank_of, spread_file
from ckpt.root.signing import Trust
from ckpt.root.verify import size_problems
from ckpt.storage import Storage, Tiers


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
        names = (spread_file(part, rank, frozen=frozen) for frozen in (False, True))
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
        except (
            CkptError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ):  # the load itself will say what is wrong
            return {}


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


class Verdict(TypedDict):
    """Why a checkpoint cannot be used: gone since it was listed, unreadable now, locked by another process, not signed
    by a key that is trusted, or, if none of these, damaged."""

    text: str
    vanished: bool
    unreached: bool
    busy: bool
    untrusted: bool


@dataclass
class Inspection:
    """Inspects checkpoints on all ranks together. `vanished`: whether any was removed since it was listed."""

    ranks: Ranks
    call: str
    trust: Trust = field(default_factory=Trust)
    vanished: bool = field(default=False, init=False)

    def complete(self, storage: Storage, name: str, held: ExitStack) -> Manifest:
        """The manifest of a checkpoint whose files are all there, with their sizes, as every rank sees it.

        `held` receives its lock, against removal.
        """
        found: list[Manifest] = []
        lists = storage.is_local or self.ranks.rank == MAIN  # an object store shows every rank the same
        verdict = Result.capture(lambda: _inspect(storage, name, held, found, self.trust, lists=lists))
        problem: Verdict | None = decide_together(self.ranks, self.call, verdict, _joined)
        if problem is None:
            return found[0]
        self.vanished = self.vanished or problem["vanished"]
        if problem["unreached"]:
            raise TransientError(problem["text"])
        damaged = UntrustedError if problem["untrusted"] else DamagedError
        raise (LockedError if problem["busy"] else damaged)(problem["text"])

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
        wrong = size_problems(storage, manifest) if lists else []
    except LockedError as error:
        return _verdict(f"{name} is being removed or cleaned up by another process: {error}", busy=True)
    except UntrustedError as error:
        return _verdict(str(error), untrusted=True)
    except (DamagedError, StorageError) as error:
        gone = isinstance(error, AbsentError)  # removed since it was listed
        return _verdict(str(error), vanished=gone, unreached=not shows_damage(error))
    except MissingError as error:
        return _verdict(str(error), vanished=True)
    found.append(manifest)
    return _verdict(f"{name} is damaged: {'; '.join(wrong)}.") if wrong else None


def _verdict(
    text: str, *, vanished: bool = False, unreached: bool = False, busy: bool = False, untrusted: bool = False
) -> Verdict:
    return {"text": text, "vanished": vanished, "unreached": unreached, "busy": busy, "untrusted": untrusted}


def _joined(verdicts: list[Verdict | None]) -> Verdict | None:
    """On the main rank: one verdict for all. What a rank cannot read, or cannot lock, decides over damage."""
    bad = [verdict for verdict in verdicts if verdict]
    if not bad:
        return None
    decisive = max(bad, key=lambda verdict: (verdict["unreached"], verdict["busy"]))
    return {
        "text": decisive["text"],
        "vanished": any(verdict["vanished"] for verdict in bad),
        "unreached": any(verdict["unreached"] for verdict in bad),
        "busy": any(verdict["busy"] for verdict in bad),
        "untrusted": all(verdict["untrusted"] for verdict in bad),
    }


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
        raise DamagedError("its manifest was removed just now.")
    return max(there, key=lambda text: Manifest.from_bytes(text.encode(), FILE_NAME).sequence)

"""Checkpoints whose files are on several hosts: each has the files that its own ranks wrote."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress

from ckpt.errors import AbsentError
from ckpt.formats.native.manifest import FileRecord, Manifest
from ckpt.load.replicas import Replicas
from ckpt.ranks.group import Ranks
from ckpt.ranks.hosts import Hosts
from ckpt.root.file_names import rank_of
from ckpt.storage import Storage, Tiers


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


def problem(name: str, hosts: Hosts, missing: list[list[str]]) -> str:
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

"""State of a part that has diverged from the main rank's: an entry in the rank's document, and a file of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt.formats.layout import among
from ckpt.formats.native.shard_table import ShardedState, ShardSpec, ShardTable
from ckpt.formats.sharded_tensors import is_sharded, own_layout
from ckpt.formats.tensors import FilePlan
from ckpt.root.file_names import own_key
from ckpt.save.captured_state import CapturedState


def with_diverged_state(
    captured: CapturedState,
    diverged: Mapping[str, Any],
    writes: Mapping[str, list[str]],
    snapshot: Mapping[str, FilePlan],
) -> CapturedState:
    """The same, with this rank's own state of these parts in its document, and the files of their tensors.

    `diverged`: by part, the verdict on this rank. `writes`: by part, further tensors that this rank writes for all.
    `snapshot`: the files of its snapshot, by path, if there is one.
    """
    own = dict(captured.rank_values["own"])
    for key, verdict in diverged.items():
        absent = "absent" in verdict
        own[own_key(key, captured.rank)] = {"absent": True} if absent else _entry(captured, key, verdict["tensors"])
    names = {key: {*diverged.get(key, {}).get("tensors", ()), *writes.get(key, ())} for key in {**diverged, **writes}}
    files = [file for key in names if (file := _file(captured, key, names[key], snapshot)) is not None]
    return replace(captured, rank_values={**captured.rank_values, "own": own}, diverged_files=files)


def _file(captured: CapturedState, key: str, names: set[str], snapshot: Mapping[str, FilePlan]) -> FilePlan | None:
    """The file with these tensors; those that are among the shards which this rank writes anyway are left out."""
    replicas = captured.replicas.get(key)
    mine = names.intersection(replicas.stored) if replicas else set()
    return replicas.file_of(mine, snapshot.get(replicas.path)) if replicas and mine else None


def _entry(captured: CapturedState, key: str, names: list[str]) -> dict[str, Any]:
    sharded: ShardedState | None = captured.sharded.get(key) or captured.gathered.get(key)
    replicas = captured.replicas.get(key)
    mine = set(replicas.stored).intersection(names) if replicas else set()
    found = replicas.names(mine) if replicas else []
    part = sharded or captured.parts[key]
    shards = {name for name in found if sharded and is_sharded(sharded.tensors[name])}
    entry = {"class": part.kind, "state": part.values, "plain": [name for name in found if name not in shards]}
    if sharded is None:
        return entry
    tensors = {name: _of_this_copy(sharded, name, captured.rank) for name in sorted(shards)}
    tensors |= {name: sharded.table.tensors[name] for name in names if name not in mine}  # among the shards it writes
    return {**entry, "spread": ShardTable(tensors, sharded.table.aliases).to_json()}


def _of_this_copy(part: ShardedState, name: str, rank: int) -> ShardSpec:
    """The tensor as the ranks hold it that have this rank's copy: those with other replicas have another."""
    entry = part.table.tensors[name]
    return ShardSpec(entry.dtype, entry.shape, among(own_layout(part.tensors[name]), part.members).copy_with(rank))

"""The state that one rank has to save, and the files that it is laid out in.

A rank keeps its replicas of tensors that another rank writes. If ranks find that they differ, it saves those too: an
entry in its document, and a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from ckpt.formats.layout import Layout, among
from ckpt.formats.native import documents, tensor_file
from ckpt.formats.native.manifest import digest
from ckpt.formats.native.shard_table import ShardedState, ShardSpec, ShardTable, written_by
from ckpt.formats.native.tensor_file import View, untie
from ckpt.formats.sharded_tensors import is_sharded, local_tensor, on_part_of_mesh, own_layout
from ckpt.formats.tensors import FilePlan, PartState, Shard
from ckpt.ranks.group import MAIN
from ckpt.root.manifest_files import own_key, spread_file, whole_file
from ckpt.state.parts import Replication

_WORTH_A_FILE = 1 << 20  # bytes of frozen tensors


@dataclass(frozen=True)
class ReplicaTensors:
    """Live replicas of a part's tensors, laid out as the file that would hold all of them."""

    path: str
    shards: Mapping[str, Shard]

    @classmethod
    def of(cls, key: str, rank: int, shards: Mapping[str, Shard]) -> ReplicaTensors:
        return cls(whole_file(own_key(key, rank)), shards)

    @cached_property
    def file(self) -> FilePlan:
        return tensor_file.plan_file(self.path, self.shards)

    @cached_property
    def stored(self) -> list[str]:
        """The names of tensors that have bytes of their own in the file, in the file's order."""
        return [content[0] for content in self.file.contents or () if isinstance(content, tuple)]

    @cached_property
    def views(self) -> dict[str, View]:
        """Tensors that are views of another tensor. Only that other one has bytes in the file."""
        return untie({name: shard.tensor for name, shard in self.shards.items()})[1]

    def names(self, stored: Collection[str]) -> list[str]:
        """The stored tensors, and all that are views of them."""
        return [name for name in self.shards if name in stored or self._base(name) in stored]

    def file_of(self, stored: Collection[str], snapshot: FilePlan | None) -> FilePlan:
        """The file with these tensors alone: out of the snapshot's file of all of them, or live."""
        if snapshot is None:
            return tensor_file.plan_file(self.path, {name: self.shards[name] for name in self.names(stored)})
        if set(self.stored) <= set(stored):
            return snapshot
        copied = dict(self._copied(snapshot))
        shards = {name: self._from(copied, name) for name in self.names(stored)}
        return tensor_file.plan_file(self.path, shards)

    def _base(self, name: str) -> str | None:
        return self.views[name].of if name in self.views else None

    def _from(self, copied: Mapping[str, torch.Tensor], name: str) -> Shard:
        view = self.views.get(name)
        tensor = view.on(copied[view.of]) if view else copied[name]
        return self.shards[name]._replace(tensor=tensor)

    def _copied(self, snapshot: FilePlan) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as they lie in the snapshot, by name."""
        data, start = bytearray(), 0
        for piece in snapshot.pieces():  # one at a time: a piece may be valid until the next is asked for
            data += piece
        for content in self.file.contents or ():
            if isinstance(content, bytes):
                start += len(content)
                continue
            name, tensor = content
            stop = start + tensor.nbytes
            view = memoryview(data)[start:stop]
            flat = torch.frombuffer(view, dtype=torch.uint8) if stop > start else torch.empty(0).byte()
            yield name, flat.view(tensor.dtype).view(tensor.shape)
            start = stop


def unsharded_replicas(part: PartState, is_uncertain: Callable[[str], bool]) -> dict[str, Shard]:
    """Of a part that the main rank writes: all tensors that are not guaranteed to be the same there."""
    return {name: shard for name, shard in part.tensors.items() if is_uncertain(name)}


@torch.no_grad()
def sharded_replicas(
    part: ShardedState, written: Collection[str], is_uncertain: Callable[[str], bool], rank: int, *, gathered: bool
) -> dict[str, Shard]:
    """Of a sharded part: plain tensors that another rank writes for all, and shards of which it writes a replica.

    `written`: the names that this rank writes itself.
    """
    found = {}
    for name, entry in part.table.tensors.items():
        tensor = part.tensors[name]
        if name in written or not entry.layout.holds(rank) or not is_uncertain(name):
            continue
        if not is_sharded(tensor):
            if not (gathered and rank == MAIN):
                found[name] = Shard.whole(tensor)
        elif not (gathered and _is_gathered(entry.layout, rank)):
            found[name] = Shard(local_tensor(tensor), entry.shape, entry.layout.box(entry.shape, rank).offsets)
    return found


def _is_gathered(layout: Layout, rank: int) -> bool:
    """Whether the main rank gathers this rank's shard."""
    return layout.holds(MAIN) and layout.copy_of(MAIN) == layout.copy_of(rank)


@dataclass(frozen=True)
class CapturedState:
    """What this rank has to save: the state of parts that all ranks have, its shards of others, and what is its own.

    Tensors are still the live ones. The file plans refer to them, and read them when the files are written.
    """

    rank: int
    rank_values: Mapping[str, Any]  # JSON: values of this rank, and of the parts that are its own
    parts: Mapping[str, PartState] = field(default_factory=dict)
    sharded: Mapping[str, ShardedState] = field(default_factory=dict)
    gathered: Mapping[str, ShardedState] = field(default_factory=dict)  # that the main rank writes whole, all take part
    rank_parts: Mapping[str, PartState] = field(default_factory=dict)  # parts that every rank saves for itself
    writes_common: bool = True  # whether this rank writes what all ranks have in common
    guarantees: Mapping[str, Replication] = field(default_factory=dict)
    trusted: bool = True  # what should be equal on several ranks always was
    fingerprints: Mapping[str, Callable[[], dict[str, str]]] = field(default_factory=dict)  # of what should be equal
    replicas: Mapping[str, ReplicaTensors] = field(default_factory=dict)
    diverged_files: Sequence[FilePlan] = ()  # with the replicas that differ from what another rank writes
    differs: Mapping[str, Any] = field(default_factory=dict)  # on the main rank, by part: what differs, on which ranks
    united: Mapping[str, Any] = field(default_factory=dict)  # on the main rank: parts of which ranks have other tensors
    divisible: frozenset[str] = frozenset()  # keys of parts whose tensors may be divided by name over the ranks
    announced: frozenset[str] = frozenset()  # keys of those that the user says are divided so: `ckpt.Joined`

    @cached_property
    def common_files(self) -> list[FilePlan]:
        """The files of tensors that all ranks have in common: the main rank writes them, or one rank of each host."""
        return [*self._gathered_files(), *_unsharded_files(self.parts)]

    @cached_property
    def values_file(self) -> FilePlan:
        """The file of all values that are no tensors. None of them is live: it may be built after the capture."""
        return FilePlan.of(documents.STATE, documents.to_json({"parts": self._values()}))

    @cached_property
    def document(self) -> bytes:
        """This rank's document. None of its values is live: it may be built after the capture."""
        return documents.to_json(self.rank_values)

    @cached_property
    def rank_files(self) -> list[FilePlan]:
        """The files that only this rank can write."""
        files = []
        for key, part in self.sharded.items():
            files += _tensor_files(partial(spread_file, key, self.rank), self.shards[key], part.frozen)
        return [*files, *_unsharded_files(self.rank_parts)]

    @cached_property
    def shards(self) -> dict[str, dict[str, Shard]]:
        """The shards that this rank writes, by part and name."""
        return {key: written_by(part.table, part.tensors, self.rank) for key, part in self.sharded.items()}

    @property
    def files(self) -> list[FilePlan]:
        """The files of tensors that this rank writes."""
        return [*(self.common_files if self.writes_common else ()), *self.rank_files]

    @property
    def unlinked_size(self) -> int:
        """Bytes of tensors that this rank writes in any case: what is likely unchanged may be linked."""
        return sum(file.size for file in (*self.files, *self.diverged_files) if not file.likely_unchanged)

    @property
    def snapshot_files(self) -> list[FilePlan]:
        """The same, and those of replicas: whether they are written is known only after ranks have compared them."""
        return [*self.files, *(replica.file for replica in self.replicas.values())]

    @cached_property
    def devices(self) -> frozenset[torch.device]:
        """The accelerators on which some of it lies."""
        contents = [content for file in self.snapshot_files for content in file.contents or ()]
        written = {content[1].device for content in contents if isinstance(content, tuple)}
        gathered = {tensor.device for part in self.gathered.values() for tensor in part.tensors.values()}
        return frozenset(device for device in written | gathered if device.type not in ("cpu", "meta"))

    def is_uncertain(self, key: str) -> Callable[[str], bool]:
        """Whether a tensor of a part, by its name, may differ from that of the rank which writes it."""
        guarantee, part = self.guarantees[key], self._divided.get(key)
        if part is None:
            return guarantee.is_uncertain

        def is_uncertain(name: str) -> bool:
            tensor = part.tensors.get(name)
            return self._may_differ(part, name) if is_sharded(tensor) else guarantee.is_uncertain(name)

        return is_uncertain

    def _may_differ(self, part: ShardedState, name: str) -> bool:
        """A shard of which other ranks hold replicas: on another part of the mesh, or, in doubt, along a dimension."""
        replicated = not self.trusted and part.table.tensors[name].layout.copies > 1
        return replicated or on_part_of_mesh(part.tensors[name], part.members)

    def should_be_equal(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """By part, what other ranks must have alike: plain tensors that are kept equal, and this rank's shards of
        tensors that a dimension of their mesh replicates."""
        for key, part in self.parts.items():
            is_equal = self.guarantees[key].is_equal
            yield key, {name: shard.tensor for name, shard in part.tensors.items() if is_equal(name)}
        for key, state in self._divided.items():
            is_equal, found = self.guarantees[key].is_equal, dict[str, torch.Tensor]()
            for name, spec in state.table.tensors.items():
                tensor = state.tensors[name]
                if not is_sharded(tensor):
                    found |= {name: tensor} if is_equal(name) else {}
                elif spec.layout.copies > 1 and spec.layout.holds(self.rank) and not self._may_differ(state, name):
                    found[name] = local_tensor(tensor)
            yield key, found

    @property
    def _divided(self) -> dict[str, ShardedState]:
        """The parts that are sharded, however they are written."""
        return {**self.sharded, **self.gathered}

    def join_gathers(self) -> None:
        """What the other ranks do while the main rank writes gathered files: take part in the gather of each tensor."""
        for part in self.gathered.values():
            for name in tensor_file.in_file_order(part.outlines):
                part.gather(name)

    @cached_property
    def tables(self) -> dict[str, Any]:
        """How tensors are sharded, and how they are written, as JSON: the same on every rank."""
        shards = {key: {"written": "in pieces", **part.table.to_json()} for key, part in self.sharded.items()}
        whole = {key: {"written": "whole", **part.table.to_json()} for key, part in self.gathered.items()}
        return {**shards, **whole}

    @property
    def tables_digest(self) -> str:
        return digest(documents.to_json(self.tables))

    def _gathered_files(self) -> list[FilePlan]:
        return [
            tensor_file.plan_gathered_file(whole_file(key), part.outlines, part.table.aliases, part.gather)
            for key, part in self.gathered.items()
            if part.table.tensors
        ]

    def _values(self) -> dict[str, Any]:
        values = {**part_values(self.parts), **part_values(self.gathered)}
        for key, part in self.sharded.items():
            table = {name: entry for name, entry in self.tables[key].items() if name != "written"}
            values[key] = {**_value(part), "spread": table}
        for key, united in self.united.items():
            values[key] = {**values.get(key, {}), **united}
        for key, differs in self.differs.items():
            if key in values:
                values[key]["differs"] = differs
        return values


def part_values(parts: Mapping[str, PartState | ShardedState]) -> dict[str, Any]:
    """The values of parts that are no tensors, as documents hold them."""
    return {key: _value(part) for key, part in parts.items()}


def _value(part: PartState | ShardedState) -> dict[str, Any]:
    about = {"about": part.about} if part.about else {}
    return {"class": part.kind, "state": part.values, **about}


def _unsharded_files(parts: Mapping[str, PartState]) -> list[FilePlan]:
    of_each = [_tensor_files(partial(whole_file, key), part.tensors, part.frozen) for key, part in parts.items()]
    return [file for files in of_each for file in files]


def _tensor_files(name: Callable[..., str], tensors: Mapping[str, Shard], frozen: frozenset[str]) -> list[FilePlan]:
    """One file, or two: frozen tensors, if they are large enough, have a file of their own that can be linked."""
    constant = {key: shard for key, shard in tensors.items() if key in frozen}
    trained = {key: shard for key, shard in tensors.items() if key not in frozen}
    if sum(shard.tensor.nbytes for shard in constant.values()) < _WORTH_A_FILE:
        return [tensor_file.plan_file(name(), tensors)] if tensors else []
    files = [tensor_file.plan_file(name(frozen=bool(trained)), constant, likely_unchanged=True)]
    return [tensor_file.plan_file(name(), trained), *files] if trained else files


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

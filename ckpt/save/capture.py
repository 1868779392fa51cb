"""Captures the state of live objects: asks every part for it, and divides it into what is sharded and what is not.

A part gives out a tree of values and live tensors. Trees of plain values get containers of their own at once, and are
encoded later, in the background, with copies in place of the tensors; all others are encoded before training continues.

What comes of it is the state that one rank has to save, and the files that it is laid out in. A rank keeps its replicas
of tensors that another rank writes. If ranks find that they differ, it saves those too: an entry in its document, and a
file of its own.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any

import torch

from ckpt.errors import CkptError, ConfigError, RanksError, UnsupportedError
from ckpt.formats.fingerprint import fingerprints
from ckpt.formats.layout import Layout, among
from ckpt.formats.native import documents, tensor_file
from ckpt.formats.native.documents import Substitute, refuse
from ckpt.formats.native.manifest import digest
from ckpt.formats.native.shard_table import ShardedState, ShardSpec, ShardTable, written_by
from ckpt.formats.native.tensor_file import View, untie
from ckpt.formats.sharded_tensors import ShardOutline, is_sharded, local_tensor, on_part_of_mesh, own_layout
from ckpt.formats.tensors import FilePlan, PartState, Shard, Unsharded
from ckpt.ranks.consensus import MAIN, Ranks
from ckpt.ranks.hosts import Hosts
from ckpt.root.catalog import FROZEN, own_key, part_of, spread_file, whole_file
from ckpt.save.snapshot.tensor_copies import Leaves, TensorCopies
from ckpt.state.model import ModelPart
from ckpt.state.parts import ObjectPart, Part, Replication
from ckpt.state.unwrap import JoinedModel

_WORTH_A_FILE = 1 << 20  # bytes of frozen tensors, or of an item of a list
_ITEM = re.compile(r"([\w.-]{0,100})\[(\d{1,9})\]", re.ASCII)  # how a tensor is named: `chunks[3].rewards`


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
        return [name for name, _ in _tensors_in(self.file)]

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


_OF_TENSORS = {"shards", "rank_files", "common_files", "_asides"}  # what is computed of the parts' tensors alone


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
    fingerprints: Callable[[], Mapping[tuple[str, str], str]] = dict  # by part and name, of what ranks compare
    replicas: Mapping[str, ReplicaTensors] = field(default_factory=dict)
    diverged_files: Sequence[FilePlan] = ()  # with the replicas that differ from what another rank writes
    differs: Mapping[str, Any] = field(default_factory=dict)  # on the main rank, by part: what differs, on which ranks
    united: Mapping[str, Any] = field(default_factory=dict)  # on the main rank: parts of which ranks have other tensors
    together: Mapping[str, int] = field(default_factory=dict)  # on the main rank, by part: ranks that write one file
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
        for key in self.sharded:
            files += _tensor_files(partial(spread_file, key, self.rank), self.shards[key], self._asides[key])
        return [*files, *_unsharded_files(self.rank_parts)]

    @cached_property
    def _asides(self) -> dict[str, Mapping[str, str]]:
        """By sharded part, what stands aside. All ranks come to the same, whatever shards they have."""
        found: dict[str, Mapping[str, str]] = {}
        for key, part in self.sharded.items():
            specs = part.table.tensors if part.frozen else {}
            found[key] = _asides({name: spec.size // max(1, spec.shards) for name, spec in specs.items()}, part.frozen)
        return found

    @cached_property
    def joinable(self) -> dict[str, ShardTable]:
        """The sharded parts that ranks of a host may write together, without what stands aside: each rank links it."""
        tables = {key: replace(part.table, aside=self.aside(key)).joined for key, part in self.sharded.items()}
        return {key: table for key, table in tables.items() if table.tensors}

    def aside(self, key: str) -> frozenset[str]:
        """The tensors of a sharded part that stand aside."""
        return frozenset(name for name, file in self._asides[key].items() if file)

    def but(self, **facts: Any) -> CapturedState:
        """The same tensors with other facts about them. What is known of their files stays known: it took long."""
        other = replace(self, **facts)
        vars(other).update({name: vars(self)[name] for name in _OF_TENSORS & vars(self).keys()})
        return other

    @cached_property
    def shards(self) -> dict[str, dict[str, Shard]]:
        """The shards that this rank writes, by part and name."""
        return {key: written_by(part.table, part.tensors, self.rank) for key, part in self.sharded.items()}

    @property
    def files(self) -> list[FilePlan]:
        """The files of tensors that this rank writes."""
        return [*(self.common_files if self.writes_common else ()), *self.rank_files]

    def unlinked_size(self, earlier: Mapping[str, int] | None) -> int:
        """Bytes of tensors that this rank writes in any case: what is likely unchanged may be linked.

        `earlier`: the sizes of the files that it could be linked to, if they are known.
        """

        def may_be_linked(file: FilePlan) -> bool:
            return file.likely_unchanged and (earlier is None or earlier.get(file.path) == file.size)

        return sum(file.size for file in (*self.files, *self.diverged_files) if not may_be_linked(file))

    @property
    def snapshot_files(self) -> list[FilePlan]:
        """The same, and those of replicas: whether they are written is known only after ranks have compared them."""
        return [*self.files, *(replica.file for replica in self.replicas.values())]

    @cached_property
    def devices(self) -> frozenset[torch.device]:
        """The accelerators on which some of it lies."""
        written = {tensor.device for file in self.snapshot_files for _, tensor in _tensors_in(file)}
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

    @property
    def compared(self) -> dict[tuple[str, str], torch.Tensor]:
        """By part and name, all that ranks compare: what should be equal, and what may differ."""
        found = {(key, name): tensor for key, name, tensor in self._may_be_other()}
        for key, part in self.parts.items():
            is_equal = self.guarantees[key].is_equal
            found |= {(key, name): shard.tensor for name, shard in part.tensors.items() if is_equal(name)}
        for key, state in self._divided.items():
            is_equal = self.guarantees[key].is_equal
            for name, spec in state.table.tensors.items():
                tensor = state.tensors[name]
                if not is_sharded(tensor):
                    found |= {(key, name): tensor} if is_equal(name) else {}
                elif spec.layout.copies > 1 and spec.layout.holds(self.rank) and not self._may_differ(state, name):
                    found[key, name] = local_tensor(tensor)
        return found

    def part_fingerprints(self) -> dict[str, str]:
        """By part, one of its values and of all tensors that this rank holds; and of what else is this rank's."""
        states: dict[str, PartState | ShardedState] = {**self.parts, **self._divided, **self.rank_parts}
        tensors = {(key, name): tensor for key, state in states.items() for name, tensor in _local_tensors(state)}
        found = fingerprints(tensors)()
        rows: dict[str, list[Any]] = {key: [state.kind, state.values] for key, state in states.items()}
        for (key, name), tensor in tensors.items():
            rows[key].append([name, tensor_file.dtype_name(tensor.dtype), list(tensor.shape), found[key, name]])
        values = self.rank_values["state"]
        rows |= {"rng": [values["rng"], values["generators"]], "data": [values["loaders"]]}
        rows |= {"values": [values["values"]]} if "values" in values else {}
        return {key: digest(documents.to_json(row)) for key, row in rows.items()}

    def _may_be_other(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """What is uncertain: in the files that this rank writes, in its replicas, and in what is gathered."""
        compared = {*self.parts, *self._divided}
        for file in self.files:
            key = part_of(file.path)
            if key in compared:
                is_uncertain = self.is_uncertain(key)
                yield from ((key, name, tensor) for name, tensor in _tensors_in(file) if is_uncertain(name))
        for key, replicas in self.replicas.items():
            yield from ((key, name, tensor) for name, tensor in _tensors_in(replicas.file))
        for key, part in self.gathered.items():
            is_uncertain = self.is_uncertain(key)
            for name in part.table.tensors:
                if is_uncertain(name):
                    tensor = part.tensors[name]
                    yield key, name, local_tensor(tensor)

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
            table = part.table
            if key in self.together:
                table = replace(table, together=self.together[key], aside=self.aside(key))
            values[key] = {**_value(part), "spread": table.to_json()}
        for key, united in self.united.items():
            together = {"together": self.together[key]} if key in self.together else {}
            values[key] = {**values.get(key, {}), **united, "spread": {**united["spread"], **together}}
        for key, differs in self.differs.items():
            if key in values:
                values[key]["differs"] = differs
        return values


def _tensors_in(file: FilePlan) -> Iterator[tuple[str, torch.Tensor]]:
    return (content for content in file.contents or () if isinstance(content, tuple))


def _local_tensors(part: PartState | ShardedState) -> Iterator[tuple[str, torch.Tensor]]:
    for name, held in sorted(part.tensors.items()):
        tensor = held.tensor if isinstance(held, Shard) else held
        yield name, local_tensor(tensor)


def part_values(parts: Mapping[str, PartState | ShardedState]) -> dict[str, Any]:
    """The values of parts that are no tensors, as documents hold them."""
    return {key: _value(part) for key, part in parts.items()}


def _value(part: PartState | ShardedState) -> dict[str, Any]:
    about = {"about": part.about} if part.about else {}
    return {"class": part.kind, "state": part.values, **about}


def _unsharded_files(parts: Mapping[str, PartState]) -> list[FilePlan]:
    files = []
    for key, part in parts.items():
        sizes = {name: shard.tensor.nbytes for name, shard in part.tensors.items()}
        asides = _asides(sizes, part.frozen, chunked=part.chunked)
        files += _tensor_files(partial(whole_file, key), part.tensors, asides)
    return files


def _asides(sizes: Mapping[str, int], frozen: frozenset[str], *, chunked: bool = False) -> dict[str, str]:
    """The file beside the main one in which each tensor stands; "" for the main one. There is one for all that are
    frozen, and, if `chunked`, one for each item of a list, where so many bytes are worth a file."""
    asides = {name: FROZEN if name in frozen else _item_of(name) if chunked else "" for name in sizes}
    bytes_of: Counter[str] = Counter()
    for name, aside in asides.items():
        bytes_of[aside] += sizes[name]
    return {name: aside if bytes_of[aside] >= _WORTH_A_FILE else "" for name, aside in asides.items()}


def _tensor_files(name: Callable[..., str], tensors: Mapping[str, Shard], asides: Mapping[str, str]) -> list[FilePlan]:
    """The main file, and those beside it, which can be linked. `asides`: of the whole part."""
    if tensors and {*asides.values()} == {FROZEN}:
        return [tensor_file.plan_file(name(), tensors, likely_unchanged=True)]
    by_file: dict[str, dict[str, Shard]] = {}
    for key, shard in tensors.items():
        by_file.setdefault(asides.get(key, ""), {})[key] = shard
    rest = by_file.pop("", {})
    files = [tensor_file.plan_file(name(aside=aside), found, likely_unchanged=True) for aside, found in by_file.items()]
    return [tensor_file.plan_file(name(), rest), *files] if rest else files


def _item_of(name: str) -> str:
    """The item of a list that a tensor is in, as a file name can say it: `chunks.3`; empty if it is in none."""
    found = _ITEM.match(name)
    return ".".join(filter(None, found.groups())) if found else ""


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
    return captured.but(rank_values={**captured.rank_values, "own": own}, diverged_files=files)


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


_log = logging.getLogger("ckpt")

LAYOUTS = ("auto", "full", "sharded")

# Trees of plain values and dense tensors: once containers and tensors have been copied, they can be encoded later.
_SCALARS = frozenset({bool, int, float, str, type(None)})
_KEYS = frozenset({str, int})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_TOO_DEEP = 50
_NEVER = tuple(map(attrgetter, ("is_nested", "is_quantized", "is_meta", "is_xla")))
_NO_LAZY_BITS = (torch.Tensor.is_conj, torch.Tensor.is_neg)


class NotPlainError(Exception):
    """A tree has something in it that only its encoding can judge."""


class PlainTrees:
    """Copies the containers of trees, and collects their tensors. Nothing in them can be refused when it is encoded."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []  # plain or sharded, as they are in the trees
        self.local: list[torch.Tensor] = []  # of each, this rank's shard or itself
        self.sharded: dict[int, ShardOutline] = {}  # by identity

    def copy(self, value: Any, depth: int = 0) -> Any:
        """The tree with containers of its own and the same tensors. Raises `NotPlainError` for anything else."""
        kind = type(value)
        if kind is dict or kind is OrderedDict:
            if depth > _TOO_DEEP or not _KEYS.issuperset(map(type, value)):
                raise NotPlainError
            return kind(zip(value, self._items(value.values(), depth), strict=True))
        if kind is list or kind is tuple:
            if depth > _TOO_DEEP:
                raise NotPlainError
            return kind(self._items(value, depth))
        return self._items((value,), depth)[0]

    def _items(self, values: Any, depth: int) -> list[Any]:
        items = list(values)
        for index, item in enumerate(items):  # most are tensors, and training waits
            kind = type(item)
            if kind in _TENSORS:
                self.tensors.append(item)
                self.local.append(item)
            elif kind not in _SCALARS:
                items[index] = self._container(item, depth + 1)
        return items

    def _container(self, value: Any, depth: int) -> Any:
        if type(value) in (dict, OrderedDict, list, tuple):
            return self.copy(value, depth)
        if type(value) is Unsharded:
            return Unsharded(*self._items(value, depth))
        if not is_sharded(value) or not hasattr(value, "device_mesh"):  # FSDP 1 has objects of its own
            raise NotPlainError
        local = local_tensor(value)
        if local.device.type != value.device_mesh.device_type:  # offloaded: PyTorch would build it on the device
            raise NotPlainError
        self.tensors.append(value)
        self.local.append(local)
        self.sharded[id(value)] = ShardOutline.of(value)
        return value

    def require_dense(self) -> None:
        """Raise `NotPlainError` if the memory of some tensor is not exactly its values, in order."""
        if not are_dense(self.local):
            raise NotPlainError


def are_dense(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are strided and contiguous, and their values are those in memory. In loops of C: training waits."""
    return (
        {torch.strided}.issuperset(map(attrgetter("layout"), tensors))
        and not any(any(map(has, tensors)) for has in _NEVER)
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not any(any(map(has, tensors)) for has in _NO_LAZY_BITS)
    )


@dataclass(frozen=True)
class LivePart:
    """The state of a part, with live tensors in it."""

    key: str
    kind: str
    tree: Any
    frozen: frozenset[str] = frozenset()
    chunked: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LiveState:
    """What this rank has to save, not encoded yet.

    `finish`: adds what is found out about the encoded state. `leaves`: the tensors in the trees, if these are plain and
    have containers of their own; None if the state must be encoded before training continues.
    """

    state: CapturedState  # without the state of parts
    parts: Sequence[LivePart]
    sharded: Sequence[LivePart]
    gathered: Sequence[LivePart]
    own: Sequence[LivePart]
    problems: list[str]
    encode_sharded: Callable[[LivePart, Substitute | None, list[str]], ShardedState]
    finish: Callable[[CapturedState], CapturedState]
    leaves: Leaves | None = None
    encoded: CapturedState | None = None

    def prepared(self) -> LiveState:
        """The same with trees that training cannot change, but for their tensors; encoded if that cannot be had."""
        trees = PlainTrees()

        def copied(parts: Sequence[LivePart]) -> list[LivePart]:
            return [replace(part, tree=trees.copy(part.tree)) for part in parts]

        try:
            if self.gathered or self.problems:
                raise NotPlainError
            parts, sharded, own = copied(self.parts), copied(self.sharded), copied(self.own)
            trees.require_dense()
        except NotPlainError:
            return replace(self, encoded=self.encode())
        return replace(
            self, parts=parts, sharded=sharded, own=own, leaves=Leaves.of(trees.tensors, trees.local, trees.sharded)
        )

    def encode(self, copies: TensorCopies | None = None) -> CapturedState:
        """The state as files hold it, copies in place of live tensors. Refuses all values that no file can hold."""
        if self.encoded is not None:
            return self.encoded
        substitute = None if copies is None else copies.of
        problems: list[str] = []
        parts = {part.key: _encoded(part, substitute, problems) for part in self.parts}
        own = {part.key: _encoded(part, substitute, problems) for part in self.own}
        sharded, gathered = (
            {part.key: self.encode_sharded(part, substitute, problems) for part in found}
            for found in (self.sharded, self.gathered)
        )
        refuse([*problems, *self.problems])
        values = {**self.state.rank_values, "own": part_values(own)}
        state = replace(self.state, parts=parts, sharded=sharded, gathered=gathered, rank_parts=own, rank_values=values)
        finished = self.finish(state)
        return finished if copies is None else _with_known_fingerprints(finished)


def _encoded(part: LivePart, substitute: Substitute | None, problems: list[str]) -> PartState:
    state = documents.encode_part(part.kind, part.tree, part.key, problems, substitute)
    return replace(state, frozen=part.frozen, chunked=part.chunked, about=part.about)


def _with_known_fingerprints(state: CapturedState) -> CapturedState:
    """Wait for them: the copies that they are of may be released before somebody asks for them."""
    state.fingerprints()
    return state


@dataclass
class ComparisonHistory:
    """The same on every rank. Once some of what should be equal has differed, each rank keeps its own."""

    trusted: bool = True
    differed: bool = False  # ranks had different state: each says at once what it has
    reported: set[str] = field(default_factory=set)  # parts whose differences have been logged

    def distrust(self) -> None:
        """Some of what should be equal differs."""
        self.trusted = False
        self.reported.clear()  # what differs now is more than was logged


@dataclass
class StateCapture:
    """One capture on one rank."""

    ranks: Ranks
    layout: str = "auto"
    hosts: Hosts = field(default_factory=Hosts)
    compared: ComparisonHistory = field(default_factory=ComparisonHistory)
    compares: bool = True  # with the other ranks
    _guarantees: dict[str, Replication] = field(default_factory=dict)
    _trusted: bool = True

    def capture(
        self, parts: Iterable[Part], rank_parts: Mapping[str, Part], rank_state: Mapping[str, Any]
    ) -> LiveState:
        """The state of parts that all ranks have, of parts that are this rank's alone, and values of this rank."""
        self._trusted = self.compared.trusted  # a later save may change it meanwhile
        parts = list(parts)
        known = ("loaders", "generators", "values", "source")
        has_none = not (parts or rank_parts or any(rank_state.get(key) for key in known))
        if has_none and self.ranks.world_size == 1:  # of several ranks, one may have nothing of its own
            raise ConfigError(
                "there is nothing to save. Give the manager your objects: StateManager(root, model=model, "
                "optimizer=optimizer)."
            )
        unsharded, sharded = self._divided(parts)
        gathered = sharded if self.layout == "full" else []
        own = [self._live(part) for part in rank_parts.values()]
        problems: list[str] = []
        values = {key: documents.encode_inline(value, key, problems) for key, value in rank_state.items()}
        state = CapturedState(
            rank=self.ranks.rank,
            rank_values={"state": values},
            writes_common=self._writes_common,
            guarantees=self._guarantees,
            trusted=self._trusted,
            divisible=frozenset(part.key for part in parts if part.can_be_sharded),
            announced=frozenset(part.key for part in parts if _is_joined(part)),
        )
        return LiveState(
            state,
            parts=unsharded,
            sharded=[] if gathered else sharded,
            gathered=gathered,
            own=own,
            problems=problems,
            encode_sharded=self._encoded_sharded,
            finish=self._compared,
        )

    def _compared(self, captured: CapturedState) -> CapturedState:
        """With what the ranks need to compare what they hold."""
        if self.ranks.world_size == 1 or not self.compares:
            return captured
        captured = captured.but(replicas=self._replicas(captured))
        return captured.but(fingerprints=fingerprints(captured.compared))

    def _replicas(self, captured: CapturedState) -> dict[str, ReplicaTensors]:
        """What this rank may hold with other bytes than the rank that writes it. Nothing is copied here."""
        rank, found = self.ranks.rank, {}
        for key, part in captured.parts.items() if not self._writes_common else ():
            found[key] = unsharded_replicas(part, captured.is_uncertain(key))
        for key, state in {**captured.sharded, **captured.gathered}.items():
            written, gathered = captured.shards.get(key, {}), key in captured.gathered
            found[key] = sharded_replicas(state, written, captured.is_uncertain(key), rank, gathered=gathered)
        return {key: ReplicaTensors.of(key, rank, shards) for key, shards in found.items() if shards}

    @property
    def _writes_common(self) -> bool:
        return self.hosts.owns_root(self.ranks.rank)

    def _divided(self, parts: Iterable[Part]) -> tuple[list[LivePart], list[LivePart]]:
        """The state of parts that one rank writes for all, and of parts that are sharded over all ranks."""
        unsharded, sharded = [], []
        for part in parts:
            is_sharded = part.is_sharded()
            if is_sharded and self.ranks.world_size == 1:
                _refuse_shards_of_others(part)
            if is_sharded or (self.layout == "sharded" and part.can_be_sharded and self.ranks.world_size > 1):
                sharded.append(self._live(part, described=True))
            elif self._writes_common or self.ranks.world_size > 1:  # other ranks compare theirs with it later
                unsharded.append(self._live(part))
        return unsharded, sharded

    def _live(self, part: Part, *, described: bool = False) -> LivePart:
        tree = _state_of(part)
        if self.ranks.world_size > 1:
            guarantee = part.replication(tree, self.ranks.members)
            self._guarantees[part.key] = guarantee if self._trusted else guarantee.distrusted()
        chunked = isinstance(part, ObjectPart) and part.chunked
        if not described and not self._writes_common:
            return LivePart(part.key, part.kind, tree, chunked=chunked)
        return LivePart(part.key, part.kind, tree, part.frozen(), chunked, _about(part, tree))

    def _encoded_sharded(
        self, part: LivePart, substitute: documents.Substitute | None, problems: list[str]
    ) -> ShardedState:
        size, members = self.ranks.world_size, self.ranks.members
        state = documents.encode_sharded(part.kind, part.tree, part.key, problems, size, substitute, members)
        table = state.table.with_every_copy() if self.hosts.separate_roots else state.table
        return replace(state, table=table, frozen=part.frozen, about=part.about)


def _refuse_shards_of_others(part: Part) -> None:
    """For a manager of one process: what it holds must be all there is."""
    others = {rank for layout in part.layouts(None) for rank in layout.ranks}
    if len(others) > 1:
        raise RanksError(
            f"{part.key} is sharded over {len(others)} ranks, but this manager would save only this rank's shard. "
            "Leave out ranks=ckpt.RankOptions(alone=True), and build the manager on every rank."
        )


def _is_joined(part: Part) -> bool:
    return isinstance(part, ModelPart) and isinstance(part.model, JoinedModel)


def _state_of(part: Part) -> Any:
    try:
        return part.capture()
    except CkptError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UnsupportedError(f"could not read the state of {part.key}: {why}") from error


def _about(part: Part, live: Any) -> dict[str, Any]:
    try:
        return part.about(live)
    except Exception as error:  # code of others, and the checkpoint is complete without it
        _warn_without_configuration(part.key, f"{type(error).__name__}: {error}")
        return {}


@cache
def _warn_without_configuration(key: str, why: str) -> None:
    """Once, and not at every save."""
    _log.warning(
        "could not read the configuration of %s (%s). ckpt saves the model, but can't publish checkpoints without "
        "their configuration.",
        key,
        why,
    )

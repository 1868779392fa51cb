"""Parts of which ranks hold different tensors, such as the stages of a pipeline: one state and one shard table.

The main rank builds the table from the descriptions of all ranks: where every tensor lies, and which ranks write it.
What several ranks hold under one name and not alike is the first such rank's in the table; the others save their own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckpt.formats.layout import Layout, layout_from_json
from ckpt.formats.native import tensor_file
from ckpt.formats.native.shard_table import EVERY, ShardSpec, ShardTable, balanced
from ckpt.ranks.group import MAIN
from ckpt.ranks.liveness import format_ranks
from ckpt.save.checksums import differ
from ckpt.state import division

Details = Mapping[str, Any]  # a rank's description
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Held:
    """A tensor as one rank holds it: its layout over the ranks that share it, or None if it is a plain one."""

    rank: int
    dtype: str
    shape: tuple[int, ...]
    layout: Layout | None
    checksum: str | None

    def is_like(self, other: Held) -> bool:
        """Whether this is the same tensor, or a copy of the same shard, as far as checksums are known."""
        same = (self.dtype, self.shape) == (other.dtype, other.shape)
        return same and not differ(self.checksum, other.checksum)


@dataclass
class UnitedPart:
    """A part that no rank has whole. `others`: by rank, the tensors that it has other than the table says.

    `by_main`: the main rank writes what it holds in one file, in any case.
    """

    key: str
    kind: str
    values: Any
    by_main: bool
    table: ShardTable = field(default_factory=lambda: ShardTable({}))
    others: dict[int, list[str]] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)  # by tensor, the first rank that has it

    def to_json(self) -> dict[str, Any]:
        """Its entry in `state.json`."""
        return {"class": self.kind, "state": self.values, "spread": self.table.to_json(), "united": True}

    @cached_property
    def _writers(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name, spec in self.table.tensors.items():
            for rank in spec.writers():
                found.setdefault(rank, []).append(name)
        return found

    def written_by(self, rank: int) -> list[str]:
        """The tensors of which a rank writes its shard."""
        return self._writers.get(rank, [])


def unite_parts(details: Sequence[Details]) -> dict[str, UnitedPart]:
    """The parts of which ranks hold different tensors, and whose states do not contradict each other."""
    keys = dict.fromkeys(key for rank in details for key in rank["parts"])
    found = (_united(key, details) for key in keys)
    return {part.key: part for part in found if part is not None}


def mistaken_names(details: Sequence[Details]) -> list[str]:
    """By part, the ranks that have some tensors under other names than the rest, in what is no other part of the model.

    The stages of a pipeline have few names in common, and experts differ by their numbers. A parameter that was renamed
    on one rank would pass for either: it is in the place of one that only the other ranks have, or under
    DistributedDataParallel, which all ranks have alike. `ckpt.Joined` says that the names are meant.
    """
    keys = dict.fromkeys(key for rank in details for key in rank["parts"])
    return [line for key in keys for line in _mistaken(key, details)]


def _mistaken(key: str, details: Sequence[Details]) -> Iterator[str]:
    having = {rank: described for rank, described in enumerate(details) if key in described["parts"]}
    names = {rank: division.names_in(described["trees"].get(key)) for rank, described in having.items()}
    if None in names.values() or any(key in described["announced"] for described in having.values()):
        return
    holders: dict[frozenset[str], list[int]] = {}
    for rank, found in names.items():
        holders.setdefault(found or frozenset(), []).append(rank)
    usual = max(holders, key=lambda found: len(holders[found]))  # the first of several
    equal = {name for described in having.values() for name in described["equal"].get(key, ())}
    shapes = {name: (held[0].dtype, held[0].shape) for name, held in _held(key, having).items()}
    for found, ranks in holders.items():
        here, there = sorted(found - usual), sorted(usual - found)
        if equal.intersection(here, there) or _is_renaming(here, there, len(found & usual), shapes):
            others = format_ranks(holders[usual])
            yield f"{key}: {_few(here)} on {format_ranks(ranks)}; {_few(there)} on {others}"


def _is_renaming(here: list[str], there: list[str], common: int, shapes: Mapping[str, Any]) -> bool:
    """Whether some tensors of a model are under other names, and most are not. Those of experts differ by numbers."""
    numbered = {_NUMBER.sub("#", name) for name in here} == {_NUMBER.sub("#", name) for name in there}
    if not here or numbered or len(here) > common or not shapes.keys() >= {*here, *there}:
        return False
    return Counter(shapes[name] for name in here) == Counter(shapes[name] for name in there)


def _few(names: list[str]) -> str:
    return ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])]) or "nothing"


def _united(key: str, details: Sequence[Details]) -> UnitedPart | None:
    having = {rank: described for rank, described in enumerate(details) if key in described["parts"]}
    first = details[min(having)]["parts"][key]
    if not _is_divided(key, having, len(details)) or len({_way(key, described) for described in having.values()}) > 1:
        return None
    values = division.united(_distinct([described["trees"][key] for described in having.values()]))
    tables = [described["tables"].get(key, {"aliases": {}}) for described in having.values()]
    aliases = {alias: stored for table in tables for alias, stored in table["aliases"].items()}
    held = _held(key, having)
    if values is None or aliases.keys() & held.keys() or division.has_nameless(values):
        return None
    part = UnitedPart(key, first["class"], values, by_main=_way(key, details[min(having)]) != ("spread", "in pieces"))
    specs = {name: spec for name, copies in held.items() if (spec := _spec(part, name, copies)) is not None}
    if len(specs) < len(held):
        return None
    part.table = ShardTable(balanced(specs), aliases)
    if any(_writes_every_copy(table) for table in tables):  # hosts with roots of their own
        part.table = part.table.with_every_copy()
    return part


def _is_divided(key: str, having: Mapping[int, Details], world_size: int) -> bool:
    """Whether some ranks have names that others have not. All of them must have described their states."""
    trees = [described["trees"].get(key) for described in having.values()]
    names = [division.names_in(tree) for tree in trees]
    return None not in names and (len(having) < world_size or len(set(names)) > 1)


def _way(key: str, described: Details) -> tuple[str, str | None]:
    return described["parts"][key]["how"], described["tables"].get(key, {}).get("written")


def _distinct(values: list[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _writes_every_copy(table: Mapping[str, Any]) -> bool:
    return any(row[3] == EVERY for row in table.get("tensors", {}).values())


def _held(key: str, having: Mapping[int, Details]) -> dict[str, list[Held]]:
    """Every tensor by name, as the ranks hold it, in their order."""
    found: dict[str, list[Held]] = {}
    for rank, described in having.items():
        rows = _sharded_rows if key in described["tables"] else _unsharded_rows
        for name, held in rows(key, rank, described):
            found.setdefault(name, []).append(held)
    return found


def _unsharded_rows(key: str, rank: int, described: Details) -> Iterator[tuple[str, Held]]:
    for name, (dtype, shape, checksum) in described["parts"][key]["tensors"].items():
        if dtype:  # else the memory that others are views of, which is no tensor of the state
            yield name, Held(rank, dtype, tuple(shape), None, checksum)


def _sharded_rows(key: str, rank: int, described: Details) -> Iterator[tuple[str, Held]]:
    table, part = ShardTable.from_json(described["tables"][key]), described["parts"][key]
    narrow = described["layouts"].get(key, {})
    for name, spec in table.tensors.items():
        layout = layout_from_json(narrow[name]) if name in narrow else spec.layout
        plain = spec.layout.is_replicated
        checksum = part["sums"].get(name, part["pieces"].get(name))
        yield name, Held(rank, tensor_file.dtype_name(spec.dtype), spec.shape, None if plain else layout, checksum)


def _spec(part: UnitedPart, name: str, copies: list[Held]) -> ShardSpec | None:
    """Where a tensor lies. None if not all ranks of a mesh hold their shards of it."""
    first, by_rank = copies[0], {held.rank: held for held in copies}
    if first.layout is None:
        alike = [held.rank for held in copies if held.layout is None and held.is_like(first)]
        layout = Layout((len(alike),), tuple(alike), ("R",))
    else:
        layout = first.layout
        if any(not _shares(first, by_rank.get(rank)) for rank in layout.ranks):
            return None
        alike = [held.rank for held in copies if _is_copy(held, first, by_rank)]
        if not set(layout.ranks) <= set(alike):  # some of its replicas differ
            layout = layout.copy_with(first.rank)
    part.first[name] = first.rank
    for rank in by_rank.keys() - set(alike):
        part.others.setdefault(rank, []).append(name)
    if part.by_main and first.rank == MAIN:
        layout = Layout.of_one(MAIN)
    return ShardSpec(tensor_file.dtype_of(first.dtype), first.shape, layout)


def _shares(first: Held, held: Held | None) -> bool:
    """Whether a rank holds a shard of the same tensor on the same mesh."""
    return held is not None and (held.dtype, held.shape, held.layout) == (first.dtype, first.shape, first.layout)


def _is_copy(held: Held, first: Held, by_rank: Mapping[int, Held]) -> bool:
    """Whether all shards of a rank's copy are those of the first one's."""
    if held.layout is None or first.layout is None:
        return False
    mine, theirs = held.layout.copy_with(held.rank), first.layout.copy_with(first.rank)
    if (mine.mesh, mine.placements) != (theirs.mesh, theirs.placements):
        return False
    pairs = zip(mine.ranks, theirs.ranks, strict=True)
    return all(rank in by_rank and by_rank[rank].is_like(by_rank[other]) for rank, other in pairs)

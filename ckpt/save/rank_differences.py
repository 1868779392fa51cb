"""What ranks hold differently: the main rank compares their descriptions, and decides which rank saves what.

What all ranks hold alike is written once. Tensors that only some ranks have (those of a pipeline stage) are written by
one of these, and any ranks load them. State that ranks have differently (experts, running statistics) each of them
saves in a file of its own, and has it back when as many ranks load it.

Parts of which ranks hold different tensors are united in one state with one shard table: where every tensor lies, and
which ranks write it. What several ranks hold under one name and not alike is the first such rank's in the table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckpt.errors import RanksError
from ckpt.formats.layout import Layout, layout_from_json
from ckpt.formats.native import tensor_file
from ckpt.formats.native.shard_table import EVERY, ShardSpec, ShardTable, balanced
from ckpt.ranks.consensus import MAIN
from ckpt.ranks.store_and_heartbeats import format_ranks
from ckpt.save.rank_description import TIED
from ckpt.shown import Lines
from ckpt.state import division

Details = Mapping[str, Any]  # a rank's description
_NUMBER = re.compile(r"\d+")


def judge(details: list[dict[str, Any]]) -> Verdict:
    """On the main rank: the verdict on the descriptions of all ranks. Different shardings and names are refused."""
    refuse_other_names(mistaken_names(details))
    ways = [{key: _way(key, rank) for key in rank["parts"]} for rank in details]
    mixed = sorted({key for way_of in ways for key, way in way_of.items() if ways[MAIN].get(key, way) != way})
    if mixed:
        tables = [rank["tables"] for rank in details]
        refuse_to_mix([_ways_to_write(key, tables) for key in mixed])
    return Verdict.on(details)


@dataclass
class Verdict:
    """Which rank saves what as its own, by part and tensor. What differs and cannot be saved so is a problem.

    `united`: the parts of which ranks hold different tensors. `writes`: by rank and part, the tensors of these that it
    writes for all.
    """

    details: list[dict[str, Any]]
    united: dict[str, UnitedPart] = field(default_factory=dict)
    own: list[dict[str, Any]] = field(default_factory=list)
    writes: list[dict[str, list[str]]] = field(default_factory=list)
    differs: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    doubted: dict[tuple[str, str, int], list[int]] = field(default_factory=dict)  # should be equal, and is not: ranks
    _savable: dict[tuple[int, str], frozenset[str]] = field(default_factory=dict)

    @classmethod
    def on(cls, details: list[dict[str, Any]]) -> Verdict:
        verdict = cls(details, unite_parts(details))
        for rank in range(len(details)):
            verdict._compare(rank)
            verdict.writes.append(verdict._writes_for_all(rank))
        verdict._include_copies()
        if len({rank["trusted"] for rank in details}) > 1:
            verdict.problems.append("some ranks have captured this before they knew that replicas differ: save again")
        return verdict

    def to_json(self) -> dict[str, Any]:
        """What every rank must know. The states of united parts are for the main rank alone, which writes them."""
        return {
            "own": self.own,
            "writes": self.writes,
            "differs": self.differs,
            "problems": self.problems,
            "drifted": [*self._drifted()],
            "doubted": self._is_news,
            "attended": all(rank["attended"] for rank in self.details),
        }

    @cached_property
    def _tables(self) -> list[dict[str, ShardTable]]:
        known: dict[int, ShardTable] = {}  # what ranks have alike is one object, and is parsed once
        for table in (table for rank in self.details for table in rank["tables"].values()):
            if id(table) not in known:
                known[id(table)] = ShardTable.from_json(table)
        return [{key: known[id(table)] for key, table in rank["tables"].items()} for rank in self.details]

    @property
    def _is_news(self) -> bool:
        """Whether some rank relied on what is not equal, when it captured its state."""
        trusting = [rank["trusted"] for rank in self.details]
        return any(trusting) and (bool(self.doubted) or not all(trusting))

    def _drifted(self) -> Iterator[str]:
        """What should be equal and is not, with the ranks that have it otherwise than the one that writes it."""
        for (key, name, writer), ranks in self.doubted.items():
            yield f"{key}.{name}: differs between {format_ranks(ranks)} and {format_ranks([writer])}"

    def _compare(self, rank: int) -> None:
        parts, main = self.details[rank]["parts"], self.details[MAIN]["parts"]
        own: dict[str, Any] = {}
        for key, mine in parts.items():
            if key in self.united:
                self._compare_united(rank, key, own)
                continue
            theirs = main.get(key)
            names = self._unsharded(rank, key) if mine["how"] == "whole" else self._sharded(rank, key)
            values = theirs is None or [mine["values"], mine["class"]] != [theirs["values"], theirs["class"]]
            if names or values:
                own[key] = {"tensors": names}
                self._record(key, rank, names, values=values)
        for key in main.keys() - parts.keys() - self.united.keys():
            own[key] = {"absent": True}
            self._record(key, rank, [], values=True)
        self.own.append(own)

    def _compare_united(self, rank: int, key: str, own: dict[str, Any]) -> None:
        others = self.united[key].others.get(rank, ())
        names = [name for name in others if self._can_save(rank, key, name, self.united[key].first[name])]
        if names:
            own[key] = {"tensors": names}
            self._record(key, rank, names, values=False)

    def _writes_for_all(self, rank: int) -> dict[str, list[str]]:
        """The tensors of united parts that a rank writes, unless they are in a file that it writes anyway."""
        found = {}
        for key, part in self.united.items():
            whole = self.details[rank]["parts"].get(key, {}).get("how") == "whole"
            gathered = self.details[rank]["tables"].get(key, {}).get("written") == "whole"
            if not (rank == MAIN and (whole or gathered)) and (names := part.written_by(rank)):
                names = self._with_tied(rank, key, names) if whole else names
                found[key] = [name for name in names if self._can_save(rank, key, name, MAIN)]
        return found

    def _with_tied(self, rank: int, key: str, names: list[str]) -> list[str]:
        """A tied tensor has its bytes in another one, which may be any that the rank can save."""
        tensors = self.details[rank]["parts"][key]["tensors"]
        return list(self._savable_of(rank, key)) if any(tensors[name][2] == TIED for name in names) else names

    def _record(self, key: str, rank: int, names: list[str], *, values: bool) -> None:
        differs = self.differs.setdefault(key, {"tensors": {}, "values": []})
        for name in names:
            differs["tensors"].setdefault(name, []).append(rank)
        if values:
            differs["values"].append(rank)

    def _unsharded(self, rank: int, key: str) -> list[str]:
        """The tensors of an unsharded part that a rank saves as its own."""
        mine, theirs = (self.details[r]["parts"].get(key, {}).get("tensors", {}) for r in (rank, MAIN))
        other = [name for name, described in mine.items() if _is_other(described, theirs.get(name))]
        if any(mine[name][2] == TIED for name in other):  # tied differently: saved with what they are tied to
            return list(self._savable_of(rank, key))
        return [name for name in other if self._can_save(rank, key, name, MAIN)]

    def _sharded(self, rank: int, key: str) -> list[str]:
        """The tensors of a sharded part that a rank saves as its own."""
        mine, theirs = self._tables[rank].get(key), self._tables[MAIN].get(key)
        if mine is None:
            return []
        found = []
        for name, entry in mine.tensors.items():
            same = theirs is not None and theirs.tensors.get(name) == entry
            is_other = not same or self._is_written_otherwise(rank, key, name, entry)
            if is_other and self._can_save(rank, key, name, self._writer_of(rank, key, entry)):
                found.append(name)
                self._check_mesh(rank, key, name, entry)
        return found

    def _is_written_otherwise(self, rank: int, key: str, name: str, entry: ShardSpec) -> bool:
        """Whether the rank that is to write this rank's shard has other bytes, or no such tensor."""
        writer = self._writer_of(rank, key, entry)
        if self._tables[writer].get(key, ShardTable({})).tensors.get(name) != entry:
            return True
        return _differ(self._checksum(rank, key, name), self._checksum(writer, key, name))

    def _writer_of(self, rank: int, key: str, entry: ShardSpec) -> int:
        """The rank that writes the bytes which this rank will read."""
        whole = self.details[MAIN]["tables"].get(key, {}).get("written") == "whole"
        return _writer(entry, rank, whole=whole)

    def _checksum(self, rank: int, key: str, name: str) -> str | None:
        part = self.details[rank]["parts"].get(key, {"sums": {}, "pieces": {}})
        found: str | None = part["sums"].get(name, part["pieces"].get(name))
        return found

    def _can_save(self, rank: int, key: str, name: str, writer: int) -> bool:
        """Whether a rank has kept a tensor that differs from the writer's. It has not if the two should be equal."""
        if name in self._savable_of(rank, key):
            return True
        self.doubted.setdefault((key, name, writer), []).append(rank)
        return False

    def _savable_of(self, rank: int, key: str) -> frozenset[str]:
        if (rank, key) not in self._savable:
            self._savable[rank, key] = frozenset(self.details[rank]["kept"].get(key, ()))
        return self._savable[rank, key]

    def _include_copies(self) -> None:
        """If one rank saves its shard of a tensor, all ranks do that hold the same copy: a load with another sharding
        needs all of them."""
        for rank, own in enumerate(list(self.own)):
            for key, verdict in list(own.items()):
                for name in verdict.get("tensors", ()):
                    narrow = self.details[rank]["layouts"].get(key, {}).get(name)
                    for other in layout_from_json(narrow).copy_with(rank).ranks if narrow else ():
                        names = self.own[other].setdefault(key, {"tensors": []}).setdefault("tensors", [])
                        if name not in names and name in self._savable_of(other, key):
                            names.append(name)

    def _check_mesh(self, rank: int, key: str, name: str, entry: ShardSpec) -> None:
        """A tensor may be another on other submeshes, but on all ranks of its own it has one dtype and shape."""
        layout = self._submesh_layout(rank, key, name, entry)
        for other in layout.ranks if layout is not None else ():
            theirs = self._tables[other].get(key, ShardTable({})).tensors.get(name)
            if theirs is None or (theirs.dtype, theirs.shape) != (entry.dtype, entry.shape):
                both = [f"{_dtype_and_shape(entry)} on rank {rank}", f"{_dtype_and_shape(theirs)} on rank {other}"]
                self.problems.append(f"{key}.{name}: {'; '.join(both if rank < other else both[::-1])}")

    def _submesh_layout(self, rank: int, key: str, name: str, entry: ShardSpec) -> Layout | None:
        """The layout of a tensor on the ranks that it is sharded over; None if it is a plain one."""
        narrow = self.details[rank]["layouts"].get(key, {}).get(name)
        if narrow is not None:
            return layout_from_json(narrow)
        return None if entry.layout.is_replicated else entry.layout


def _differ(one: str | None, other: str | None) -> bool:
    """Whether two fingerprints show that tensors differ. Without one of them nothing is known."""
    return one is not None and other is not None and one != other


def _is_other(mine: list[Any], theirs: list[Any] | None) -> bool:
    if theirs is None or mine[:2] != theirs[:2]:
        return True
    return _differ(mine[2], theirs[2])


def _dtype_and_shape(entry: ShardSpec | None) -> str:
    return f"{tensor_file.dtype_name(entry.dtype)}{list(entry.shape)}" if entry else "nothing"


def _writer(entry: ShardSpec, rank: int, *, whole: bool) -> int:
    """The rank that writes the bytes which this rank will read."""
    layout = entry.layout
    if not layout.holds(rank) or (entry.copy == EVERY and not whole):
        return rank
    copy = (layout.copy_of(MAIN) if layout.holds(MAIN) else 0) if whole else entry.copy
    box = layout.box(entry.shape, rank)
    return next((holder for holder, held in layout.holders(entry.shape, copy).items() if held == box), rank)


def refuse_other_names(lines: list[str]) -> None:
    """Raise if some ranks have tensors of one model under other names than the rest."""
    if lines:
        advice = (
            "Build the same model on every rank. If each rank should have a part of one model, give "
            "model=ckpt.Joined([model])."
        )
        head = "nothing was saved, because parameters of one model have different names on different ranks:"
        raise RanksError(Lines.listing(head, lines, advice))


def refuse_to_mix(problems: list[str], drifted: Sequence[str] = ()) -> None:
    """Raise if there are problems, or replicas that should be equal and are not. At most a few are listed."""
    if problems:
        advice = (
            "Build the same model on every rank, sharded in the same way, and give every rank the same "
            "saving=ckpt.SaveOptions(layout=...)."
        )
        head = "nothing was saved, because the ranks disagree:"
        raise RanksError(Lines.listing(head, dict.fromkeys([*problems, *drifted]), advice))
    if drifted:
        advice = (
            "DistributedDataParallel, or the mesh of a DTensor, should keep them equal. If they should differ (local "
            "SGD), save with wait=True or SaveOptions(background=False): ckpt then saves each rank's own, unless hosts "
            "have separate roots. Otherwise load the last checkpoint, which makes them equal, and look for gradients "
            "that are not reduced (no_sync()) or a faulty device."
        )
        head = "nothing was saved, because replicas that should be equal have drifted apart:"
        raise RanksError(Lines.listing(head, drifted, advice))


def _ways_to_write(key: str, tables: list[dict[str, Any]]) -> str:
    """How each rank writes a part that they write in different ways."""
    written = [table[key]["written"] if key in table else "whole or not there" for table in tables]
    ways = (
        f"{way} on rank {', '.join(str(rank) for rank, other in enumerate(written) if other == way)}"
        for way in dict.fromkeys(written)
    )
    return f"{key}: {'; '.join(ways)}"


# Parts of which ranks hold different tensors: one state and one shard table.


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
        return same and not _differ(self.checksum, other.checksum)


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

    @property
    def by_others(self) -> ShardTable:
        """Its table without what the main rank writes in one file, in any case."""
        alone = Layout.of_one(MAIN)
        rest = {name: spec for name, spec in self.table.tensors.items() if not (self.by_main and spec.layout == alone)}
        return ShardTable(rest)

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
        if not equal.isdisjoint([*here, *there]) or _is_renaming(here, there, len(found & usual), shapes):
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
    """Every tensor by name, as the ranks hold it, in their order.

    Thousands of ranks have few different tables, of as many ranks each: what they have alike is parsed once.
    """
    found: dict[str, list[Held]] = {}
    known: dict[tuple[int, int], _Rows] = {}  # by the identity of a table, and of the layouts beside it
    for rank, described in having.items():
        part, table, narrow = described["parts"][key], described["tables"].get(key), described["layouts"].get(key)
        same, sums = (id(table), id(narrow)), {**part["pieces"], **part["sums"]}
        if table is None:
            rows = _unsharded_rows(part)
        else:
            rows = known[same] if same in known else _sharded_rows(table, narrow or {})
            known[same] = rows
        for name, dtype, shape, layout, checksum in rows:
            found.setdefault(name, []).append(Held(rank, dtype, shape, layout, sums.get(name, checksum)))
    return found


# name, dtype, shape, layout and checksum of every tensor
_Rows = Sequence[tuple[str, str, tuple[int, ...], Layout | None, str | None]]


def _unsharded_rows(part: Mapping[str, Any]) -> _Rows:
    # without a dtype it is the memory that others are views of, which is no tensor of the state
    rows = part["tensors"].items()
    return [(name, dtype, tuple(shape), None, checksum) for name, (dtype, shape, checksum) in rows if dtype]


def _sharded_rows(fields: Mapping[str, Any], narrow: Mapping[str, Any]) -> _Rows:
    rows = []
    for name, spec in ShardTable.from_json(fields).tensors.items():
        layout = layout_from_json(narrow[name]) if name in narrow else spec.layout
        plain = spec.layout.is_replicated
        rows.append((name, tensor_file.dtype_name(spec.dtype), spec.shape, None if plain else layout, None))
    return rows


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
        alike = [*_copies_of(first, copies, by_rank)]
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


def _copies_of(first: Held, copies: list[Held], by_rank: Mapping[int, Held]) -> Iterator[int]:
    """The ranks of whose copy all shards are those of the first one's. Each copy is compared once, not by each rank."""
    known: dict[Layout, bool] = {}
    for held in copies:
        if held.layout is not None and first.layout is not None:
            mine, theirs = held.layout.copy_with(held.rank), first.layout.copy_with(first.rank)
            if mine not in known:
                known[mine] = _is_copy(mine, theirs, by_rank)
            if known[mine]:
                yield held.rank


def _is_copy(mine: Layout, theirs: Layout, by_rank: Mapping[int, Held]) -> bool:
    if (mine.mesh, mine.placements) != (theirs.mesh, theirs.placements):
        return False
    pairs = zip(mine.ranks, theirs.ranks, strict=True)
    return all(rank in by_rank and by_rank[rank].is_like(by_rank[other]) for rank, other in pairs)

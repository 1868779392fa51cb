"""What ranks hold differently: the main rank compares their descriptions, and decides which rank saves what.

What all ranks hold alike is written once. Tensors that only some ranks have (those of a pipeline stage) are written by
one of these, and any ranks load them. State that ranks have differently (experts, running statistics) each of them
saves in a file of its own, and has it back when as many ranks load it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckpt.errors import RanksError
from ckpt.formats.layout import Layout, layout_from_json
from ckpt.formats.native import tensor_file
from ckpt.formats.native.shard_table import EVERY, ShardSpec, ShardTable, disagreements
from ckpt.ranks.group import MAIN
from ckpt.ranks.liveness import format_ranks
from ckpt.save.checksums import differ
from ckpt.save.rank_description import TIED
from ckpt.save.united_parts import UnitedPart, mistaken_names, unite_parts
from ckpt.shown import Lines


def judge(details: list[dict[str, Any]]) -> Verdict:
    """On the main rank: the verdict on the descriptions of all ranks. Different shardings and names are refused."""
    refuse_other_names(mistaken_names(details))
    ways = [{key: _way(rank, key) for key in rank["parts"]} for rank in details]
    mixed = sorted({key for way_of in ways for key, way in way_of.items() if ways[MAIN].get(key, way) != way})
    if mixed:
        tables = [rank["tables"] for rank in details]
        refuse_to_mix([line for key in mixed for line in _disagreements(key, tables)])
    return Verdict.on(details)


def _way(details: dict[str, Any], key: str) -> tuple[str, str | None]:
    return details["parts"][key]["how"], details["tables"].get(key, {}).get("written")


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
        tables = (rank["tables"] for rank in self.details)
        return [{key: ShardTable.from_json(table) for key, table in named.items()} for named in tables]

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
        return differ(self._checksum(rank, key, name), self._checksum(writer, key, name))

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


def _is_other(mine: list[Any], theirs: list[Any] | None) -> bool:
    if theirs is None or mine[:2] != theirs[:2]:
        return True
    return differ(mine[2], theirs[2])


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
            "Build the same model on every rank. If each rank has a part of one model on purpose, say so: "
            "model=ckpt.Joined([model])."
        )
        raise RanksError(Lines.listing("ranks have different names in one model, so nothing was saved:", lines, advice))


def refuse_to_mix(problems: list[str], drifted: Sequence[str] = ()) -> None:
    """Raise if there are problems, or replicas that should be equal and are not. At most a few are listed."""
    if problems:
        advice = (
            "Build the same model on every rank, sharded in the same way, and give every rank the same "
            "saving=ckpt.SaveOptions(layout=...)."
        )
        head = "the ranks disagree, so nothing was saved:"
        raise RanksError(Lines.listing(head, dict.fromkeys([*problems, *drifted]), advice))
    if drifted:
        advice = (
            "DistributedDataParallel, or the mesh of a DTensor, should keep them equal. If they are meant to differ "
            "(local SGD), save with wait=True or SaveOptions(background=False): each rank then keeps its own (not "
            "where hosts have roots of their own). Otherwise load the last checkpoint, which makes them equal, and "
            "look for gradients that are not reduced (no_sync()) or a faulty device."
        )
        raise RanksError(Lines.listing("replicas have drifted apart, so nothing was saved:", drifted, advice))


def _disagreements(key: str, tables: list[dict[str, Any]]) -> list[str]:
    """How a part differs between ranks: how it is written, its tensors, or how those are sharded."""
    written = [table[key]["written"] if key in table else "whole or not there" for table in tables]
    if len(set(written)) > 1:
        ways = (
            f"{way} on rank {', '.join(str(rank) for rank, other in enumerate(written) if other == way)}"
            for way in dict.fromkeys(written)
        )
        return [f"{key}: {'; '.join(ways)}"]
    seen = {rank: ShardTable.from_json(table[key]) for rank, table in enumerate(tables)}
    lines = [f"{key}.{name}: {'; '.join(described)}" for name, described in disagreements(seen)]
    differs = any(table[key] != tables[0][key] for table in tables)
    return lines or ([f"{key}: how its tensors are sharded over the ranks"] if differs else [])

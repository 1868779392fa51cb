"""What ranks hold differently: every rank describes its state, the main rank compares, and says who keeps what.

What all ranks hold alike is written once. Whatever else a rank has (a stage of a pipeline, its own experts, running
statistics) it keeps in a file of its own, and finds again when as many ranks load it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckpt.formats.layout import Layout, is_sharded, local_tensor, on_part_of_mesh, own_layout
from ckpt.formats.native import documents, dtypes
from ckpt.formats.native.block_hash import digest
from ckpt.formats.native.shard_table import EVERY, ShardedState, ShardSpec, ShardTable
from ckpt.formats.state import FilePlan
from ckpt.ranks.group import MAIN
from ckpt.root.file_names import part_of
from ckpt.save.capture import CapturedState
from ckpt.save.checksums import checksum, checksums

_TIED = "tied"  # in place of a checksum: the bytes are another tensor's
_LINES = 8


@dataclass
class Description:
    """One rank's state as the others can compare it. `copies` are the files as they were copied, if they were."""

    captured: CapturedState
    copies: Mapping[str, FilePlan]

    @property
    def outline(self) -> dict[str, Any]:
        """A few digests: those of `state` must be the same on all ranks, those of `pieces` under the same key."""
        parts = {key: {**one, "pieces": None} for key, one in self.parts.items()}
        held = {key: one["pieces"] for key, one in self.parts.items() if one["pieces"]}
        return {
            "state": _digest([parts, self.captured.tables_digest]),
            "pieces": {_digest(self._boxes()): _digest(held)},
        }

    @property
    def details(self) -> dict[str, Any]:
        own = {key: {name: one.to_json() for name, one in self._own_layouts(key)} for key in self._spread}
        return {"parts": self.parts, "tables": self.captured.tables, "layouts": own, "kept": self._kept()}

    @cached_property
    def parts(self) -> dict[str, Any]:
        compared = {key: one for key, one in self.captured.parts.items() if not self.captured.guarantees[key].of_main}
        whole = {key: self._part(key, "whole", one, self._whole(key)) for key, one in compared.items()}
        return whole | {key: self._part(key, "spread", one, {}) for key, one in self._spread.items()}

    @property
    def _spread(self) -> dict[str, ShardedState]:
        return {**self.captured.spread, **self.captured.gathered}

    def _part(self, key: str, how: str, part: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        plain, pieces = ({}, {}) if how == "whole" else self._divided(key)
        told = {"class": part.kind, "values": _digest(part.values), "how": how}
        return {**told, "tensors": tensors, "sums": plain, "pieces": pieces}

    def _whole(self, key: str) -> dict[str, Any]:
        """Every tensor of a part that is written whole: dtype, shape, and a checksum where it may differ."""
        guarantee, found = self.captured.guarantees[key], {**self._written[key], **self._once(key)}
        described = {}
        for name, shard in self.captured.parts[key].tensors.items():
            sum_ = found.get(name, _TIED if guarantee.is_uncertain(name) else None)
            described[name] = [dtypes.name_of(shard.tensor.dtype), list(shard.shape), sum_]
        bare = {name: ["", [], one] for name, one in found.items() if name not in described}  # below overlapping ones
        return described | bare

    def _divided(self, key: str) -> tuple[dict[str, str], dict[str, str]]:
        """The checksums of plain tensors of a spread part, and those of pieces on a part of the mesh."""
        part, found = self._spread[key], {**self._written[key], **self._once(key)}
        plain = {name: one for name, one in found.items() if not is_sharded(part.tensors.get(name))}
        return plain, {name: one for name, one in found.items() if name not in plain}

    def _once(self, key: str) -> dict[str, str]:
        return {name: sum_() for name, sum_ in self.captured.sums.get(key, {}).items()}

    @cached_property
    def _written(self) -> dict[str, dict[str, str]]:
        """By part, the checksums of all that is uncertain: in the files that this rank writes, and in its spares."""
        found: dict[str, dict[str, str]] = {key: {} for key in (*self.captured.parts, *self._spread)}
        for image in self.captured.all_images:
            key = part_of(image.path)
            if key in found:
                found[key] |= checksums(image, self.copies.get(image.path), self._wanted(key))
        for key, spare in self.captured.spares.items():
            found[key] |= checksums(spare.image, self.copies.get(spare.path), lambda _: True)
        for key, part in self.captured.gathered.items():  # which has no copy: training waits for it
            wanted = self._wanted(key)
            for name in part.table.tensors:
                if wanted(name) and name not in found[key]:
                    tensor = part.tensors[name]
                    found[key][name] = checksum(local_tensor(tensor) if is_sharded(tensor) else tensor)()
        return found

    def _wanted(self, key: str) -> Any:
        guarantee, part = self.captured.guarantees[key], self._spread.get(key)
        if part is None:
            return guarantee.is_uncertain
        tensors = part.tensors

        def wanted(name: str) -> bool:
            tensor = tensors.get(name)
            return on_part_of_mesh(tensor) if is_sharded(tensor) else guarantee.is_uncertain(name)

        return wanted

    def _boxes(self) -> dict[str, Any]:
        """Which piece this rank holds of what lies on a part of the mesh."""
        rank, found = self.captured.rank, {}
        for key, part in self._spread.items():
            for name in self.parts[key]["pieces"]:
                entry = part.table.tensors[name]
                found[f"{key}/{name}"] = list(entry.layout.box(entry.shape, rank).offsets)
        return found

    def _own_layouts(self, key: str) -> Iterator[tuple[str, Layout]]:
        tensors = self._spread[key].tensors
        for name in self._spread[key].table.tensors:
            if is_sharded(tensors[name]) and on_part_of_mesh(tensors[name]):
                yield name, own_layout(tensors[name])

    def _kept(self) -> dict[str, list[str]]:
        """What this rank could keep for itself: its spares, and what it writes anyway."""
        found = {key: [name for name, _ in _stored(one.image)] for key, one in self.captured.spares.items()}
        for key, pieces in self.captured.pieces.items():
            found[key] = [*found.get(key, ()), *pieces]
        return found


def _stored(image: FilePlan) -> Iterator[tuple[str, Any]]:
    return (content for content in image.contents or () if not isinstance(content, bytes))


def _digest(value: Any) -> str:
    return digest(documents.to_json(value))


def agree_outlines(outlines: list[dict[str, Any]]) -> bool:
    """Whether all ranks hold the same."""
    pieces: dict[str, str] = {}
    same = all(pieces.setdefault(key, one) == one for told in outlines for key, one in told["pieces"].items())
    return same and len({one["state"] for one in outlines}) == 1


@dataclass
class Verdict:
    """Who keeps what: for each rank, by part, the tensors that are its own. What cannot be kept is a problem."""

    details: list[dict[str, Any]]
    own: list[dict[str, Any]] = field(default_factory=list)
    differs: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    doubted: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def on(cls, details: list[dict[str, Any]]) -> Verdict:
        verdict = cls(details)
        for rank in range(len(details)):
            verdict._look_at(rank)
        verdict._include_meshes()
        return verdict

    def to_json(self) -> dict[str, Any]:
        return {"own": self.own, "differs": self.differs, "problems": self.problems, "doubted": self.doubted}

    @cached_property
    def _tables(self) -> list[dict[str, ShardTable]]:
        return [{key: ShardTable.from_json(one) for key, one in told["tables"].items()} for told in self.details]

    def _look_at(self, rank: int) -> None:
        parts, main = self.details[rank]["parts"], self.details[MAIN]["parts"]
        own: dict[str, Any] = {}
        for key, mine in parts.items():
            theirs = main.get(key)
            names = self._whole(rank, key) if mine["how"] == "whole" else self._spread(rank, key)
            values = theirs is None or [mine["values"], mine["class"]] != [theirs["values"], theirs["class"]]
            if names or values:
                own[key] = {"tensors": names}
                self._note(key, rank, names, values=values)
        for key in main.keys() - parts.keys():
            own[key] = {"absent": True}
            self._note(key, rank, [], values=True)
        self.own.append(own)

    def _note(self, key: str, rank: int, names: list[str], *, values: bool) -> None:
        told = self.differs.setdefault(key, {"tensors": {}, "values": []})
        for name in names:
            told["tensors"].setdefault(name, []).append(rank)
        if values:
            told["values"].append(rank)

    def _whole(self, rank: int, key: str) -> list[str]:
        mine, theirs = (self.details[one]["parts"].get(key, {}).get("tensors", {}) for one in (rank, MAIN))
        other = [name for name, told in mine.items() if _is_other(told, theirs.get(name))]
        if any(mine[name][2] == _TIED for name in other):  # ties of its own: they come with what they are tied to
            return list(self._kept(rank, key))
        return [name for name in other if self._is_kept(rank, key, name)]

    def _spread(self, rank: int, key: str) -> list[str]:
        mine, theirs = self._tables[rank].get(key), self._tables[MAIN].get(key)
        if mine is None:
            return []
        found = []
        for name, entry in mine.tensors.items():
            same = theirs is not None and theirs.tensors.get(name) == entry
            if (not same or self._has_other_bytes(rank, key, name, entry)) and self._is_kept(rank, key, name):
                found.append(name)
                self._check_mesh(rank, key, name, entry)
        return found

    def _has_other_bytes(self, rank: int, key: str, name: str, entry: ShardSpec) -> bool:
        whole = self.details[MAIN]["tables"][key]["written"] == "whole"
        writer = _writer(entry, rank, whole=whole)
        mine, theirs = (self._sum(one, key, name) for one in (rank, writer))
        return mine is not None and theirs is not None and mine != theirs

    def _sum(self, rank: int, key: str, name: str) -> str | None:
        told = self.details[rank]["parts"].get(key, {"sums": {}, "pieces": {}})
        found: str | None = told["sums"].get(name, told["pieces"].get(name))
        return found

    def _is_kept(self, rank: int, key: str, name: str) -> bool:
        if name in self._kept(rank, key):
            return True
        self.problems.append(f"{key}.{name}: rank {rank} has another one than rank {MAIN}")
        self.doubted.append((key, name))
        return False

    def _kept(self, rank: int, key: str) -> frozenset[str]:
        known: dict[tuple[int, str], frozenset[str]] = vars(self).setdefault("_kept_names", {})
        if (rank, key) not in known:
            known[rank, key] = frozenset(self.details[rank]["kept"].get(key, ()))
        return known[rank, key]

    def _include_meshes(self) -> None:
        """Of a tensor that is another one on a part of the mesh, all ranks there keep their pieces: whoever loads it
        spread in another way needs all of them."""
        for rank, own in enumerate(list(self.own)):
            for key, told in list(own.items()):
                for name in told.get("tensors", ()):
                    narrow = self.details[rank]["layouts"].get(key, {}).get(name)
                    for other in narrow["ranks"] if narrow else ():
                        names = self.own[other].setdefault(key, {"tensors": []}).setdefault("tensors", [])
                        if name not in names and name in self._kept(other, key):
                            names.append(name)

    def _check_mesh(self, rank: int, key: str, name: str, entry: ShardSpec) -> None:
        """A tensor may be another one on other ranks, but not on those that it is spread over."""
        layout = self._own_layout(rank, key, name, entry)
        for other in layout.ranks if layout is not None else ():
            there = self._tables[other].get(key, ShardTable({})).tensors.get(name)
            if there is None or (there.dtype, there.shape) != (entry.dtype, entry.shape):
                said = [f"{_spelled(entry)} on rank {rank}", f"{_spelled(there)} on rank {other}"]
                self.problems.append(f"{key}.{name}: {'; '.join(said if rank < other else said[::-1])}")

    def _own_layout(self, rank: int, key: str, name: str, entry: ShardSpec) -> Layout | None:
        """The ranks that a tensor is spread over; none if it is a plain one."""
        narrow = self.details[rank]["layouts"].get(key, {}).get(name)
        if narrow is not None:
            return Layout.from_json(narrow)
        return None if entry.layout.is_replicated else entry.layout


def _is_other(mine: list[Any], theirs: list[Any] | None) -> bool:
    if theirs is None or mine[:2] != theirs[:2]:
        return True
    return None not in (mine[2], theirs[2]) and mine[2] != theirs[2]


def _spelled(entry: ShardSpec | None) -> str:
    return f"{dtypes.name_of(entry.dtype)}{list(entry.shape)}" if entry else "nothing"


def _writer(entry: ShardSpec, rank: int, *, whole: bool) -> int:
    """The rank whose bytes a rank will read."""
    layout = entry.layout
    if not layout.holds(rank) or (entry.copy == EVERY and not whole):
        return rank
    copy = (layout.copy_of(MAIN) if layout.holds(MAIN) else 0) if whole else entry.copy
    box = layout.box(entry.shape, rank)
    return next((one for one, held in layout.holders(entry.shape, copy).items() if held == box), rank)


def listed(problems: list[str]) -> str:
    """At most a few lines."""
    lines = list(dict.fromkeys(problems))
    more = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
    return "\n  ".join(lines[:_LINES] + more)

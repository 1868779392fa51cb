"""Describes the state of a rank by checksums, so that the main rank can find out what ranks hold differently.

Thousands of ranks have few different descriptions, apart from the checksums of what each holds. So of the ranks with
the same description one sends it, and every rank its checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckpt.formats.layout import Layout, among
from ckpt.formats.native import documents, tensor_file
from ckpt.formats.native.manifest import digest
from ckpt.formats.native.shard_table import ShardedState
from ckpt.formats.sharded_tensors import is_sharded, own_layout
from ckpt.formats.tensors import PartState
from ckpt.save.capture import CapturedState

TIED = "tied"  # in place of a checksum: the bytes are another tensor's
_FIELDS = ("sums", "pieces")  # of a part: checksums by name


@dataclass
class RankDescription:
    """The state of a rank as fingerprints, shapes and layouts."""

    captured: CapturedState

    @property
    def outline(self) -> dict[str, Any]:
        """A few digests: those of `state` must be the same on all ranks, those of `pieces` under the same key."""
        parts = {key: {**part, "pieces": None} for key, part in self.parts.items()}
        pieces = {_digest(boxes): _digest(checksums) for boxes, checksums in self._pieces()}
        return {"state": _digest([parts, self.captured.tables_digest]), "pieces": pieces}

    @property
    def details(self) -> dict[str, Any]:
        """All that the main rank needs to find out what differs, and which ranks can save their own."""
        own = {key: {name: layout.to_json() for name, layout in self._own_layouts(key)} for key in self._sharded}
        parts: dict[str, PartState | ShardedState] = {**self.captured.parts, **self._sharded}
        trees = {key: parts[key].values for key in self.parts if key in self.captured.divisible}
        return {
            "parts": self.parts,
            "tables": self.captured.tables,
            "layouts": own,
            "kept": self._savable(),
            "trees": trees,
            "announced": sorted(self.captured.announced),
            "trusted": self.captured.trusted,
            "equal": {key: sorted(self.captured.guarantees[key].equal) for key in trees},
        }

    @cached_property
    def parts(self) -> dict[str, Any]:
        guarantees = self.captured.guarantees
        compared = {key: part for key, part in self.captured.parts.items() if not guarantees[key].of_main}
        whole = {key: self._part(key, "whole", part, self._unsharded(key)) for key, part in compared.items()}
        return whole | {key: self._part(key, "spread", part, {}) for key, part in self._sharded.items()}

    @property
    def _sharded(self) -> dict[str, ShardedState]:
        return {**self.captured.sharded, **self.captured.gathered}

    def _part(self, key: str, how: str, part: PartState | ShardedState, tensors: dict[str, Any]) -> dict[str, Any]:
        plain, pieces = ({}, {}) if how == "whole" else self._shard_checksums(key)
        fields = {"class": part.kind, "values": _digest(part.values), "how": how}
        return {**fields, "tensors": tensors, "sums": plain, "pieces": pieces}

    def _unsharded(self, key: str) -> dict[str, Any]:
        """Every tensor of an unsharded part: dtype, shape, and a checksum where it may differ."""
        guarantee, found = self.captured.guarantees[key], self._checksums(key)
        described = {}
        for name, shard in self.captured.parts[key].tensors.items():
            value = found.get(name, TIED if guarantee.is_uncertain(name) else None)
            described[name] = [tensor_file.dtype_name(shard.tensor.dtype), list(shard.shape), value]
        bases = {
            name: ["", [], value] for name, value in found.items() if name not in described
        }  # of overlapping views
        return described | bases

    def _shard_checksums(self, key: str) -> tuple[dict[str, str], dict[str, str]]:
        """The checksums of plain tensors of a sharded part, and those of shards that other ranks hold too."""
        part, found = self._sharded[key], self._checksums(key)
        plain = {name: value for name, value in found.items() if not is_sharded(part.tensors.get(name))}
        return plain, {name: value for name, value in found.items() if name not in plain}

    def _checksums(self, key: str) -> dict[str, str]:
        return self._fingerprints.get(key, {})

    @cached_property
    def _fingerprints(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        for (key, name), value in self.captured.fingerprints().items():
            found.setdefault(key, {})[name] = value
        return found

    def _pieces(self) -> Iterable[tuple[dict[str, Any], dict[str, str]]]:
        """The offsets of the shards that this rank holds, and their checksums: those that lie on the same ranks
        together, as ranks that hold the same ones of one layout may hold others of another."""
        rank, found = self.captured.rank, dict[Layout, tuple[dict[str, Any], dict[str, str]]]()
        for key, part in self._sharded.items():
            for name, value in self.parts[key]["pieces"].items():
                entry = part.table.tensors[name]
                boxes, values = found.setdefault(entry.layout, ({}, {}))
                boxes[f"{key}/{name}"] = list(entry.layout.box(entry.shape, rank).offsets)
                values[f"{key}/{name}"] = value
        return found.values()

    def _own_layouts(self, key: str) -> Iterator[tuple[str, Layout]]:
        """Those of shards that may differ from their replicas, over the ranks of their own mesh."""
        part, is_uncertain = self._sharded[key], self.captured.is_uncertain(key)
        for name in part.table.tensors:
            tensor = part.tensors[name]
            if is_sharded(tensor) and is_uncertain(name):
                yield name, among(own_layout(tensor), part.members)

    def _savable(self) -> dict[str, list[str]]:
        """What this rank could save as its own: its replicas, and the shards that it writes anyway."""
        found = {key: [*replicas.stored] for key, replicas in self.captured.replicas.items()}
        for key, shards in self.captured.shards.items():
            found[key] = [*found.get(key, ()), *shards]
        return found


def _digest(value: Any) -> str:
    return digest(documents.to_json(value))


def outlines_match(outlines: list[dict[str, Any]]) -> bool:
    """Whether all ranks hold the same state, and the same bytes of every shard."""
    known: dict[str, str] = {}
    shards = [item for outline in outlines for item in outline["pieces"].items()]
    same = all(known.setdefault(boxes, value) == value for boxes, value in shards)
    return same and len({outline["state"] for outline in outlines}) == 1


@dataclass(frozen=True)
class SplitDetails:
    """The description of a rank: what others may have just like it, and its checksums, part by part."""

    frame: dict[str, Any]
    checksums: dict[str, list[list[str | None]]]
    digest: str

    @classmethod
    def of(cls, details: Mapping[str, Any]) -> SplitDetails:
        parts = details["parts"]
        frame = {**details, "parts": {key: _without_checksums(part) for key, part in parts.items()}}
        return cls(frame, {key: _checksums(part) for key, part in parts.items()}, _digest(frame))

    def answer(self, *, speaks: bool, attended: bool) -> dict[str, Any]:
        """What the main rank is sent: the description only by the first rank that has it."""
        frame = {"frame": self.frame} if speaks else {}
        return {**frame, "digest": self.digest, "checksums": self.checksums, "attended": attended}


def join_details(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """On the main rank: the descriptions of all ranks. What several have alike is one object."""
    frames = {answer["digest"]: answer["frame"] for answer in answers if "frame" in answer}
    return [_joined(frames[answer["digest"]], answer) for answer in answers]


def _joined(frame: dict[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    parts = {key: _with_checksums(part, answer["checksums"][key]) for key, part in frame["parts"].items()}
    return {**frame, "parts": parts, "attended": answer["attended"]}


def _checksums(part: Mapping[str, Any]) -> list[list[str | None]]:
    """In the order of names: those of the tensors of an unsharded part, and those of a sharded one."""
    return [[row[2] for row in part["tensors"].values()], *([*part[field].values()] for field in _FIELDS)]


def _without_checksums(part: Mapping[str, Any]) -> dict[str, Any]:
    tensors = {name: row[:2] for name, row in part["tensors"].items()}
    return {**part, "tensors": tensors, **{field: list(part[field]) for field in _FIELDS}}


def _with_checksums(part: Mapping[str, Any], checksums: list[list[str | None]]) -> dict[str, Any]:
    values = zip(part["tensors"].items(), checksums[0], strict=True)
    tensors = {name: [*row, checksum] for (name, row), checksum in values}
    of_shards = zip(_FIELDS, checksums[1:], strict=True)
    return {
        **part,
        "tensors": tensors,
        **{field: dict(zip(part[field], sums, strict=True)) for field, sums in of_shards},
    }

"""Describes the state of a rank by checksums, so that the main rank can find out what ranks hold differently."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckpt.formats.layout import Layout, among
from ckpt.formats.native import documents, tensor_file
from ckpt.formats.native.manifest import digest
from ckpt.formats.native.shard_table import ShardedState
from ckpt.formats.sharded_tensors import is_sharded, local_tensor, own_layout
from ckpt.formats.tensors import FilePlan, PartState
from ckpt.root.file_names import part_of
from ckpt.save.captured_state import CapturedState
from ckpt.save.checksums import checksum, checksums

TIED = "tied"  # in place of a checksum: the bytes are another tensor's


@dataclass
class RankDescription:
    """The state of a rank as checksums, shapes and layouts. `snapshot`: the files of its snapshot, if there is one."""

    captured: CapturedState
    snapshot: Mapping[str, FilePlan]

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
        """Of all that is uncertain, and of what should be equal."""
        read = self.captured.fingerprints.get(key)
        return {**self._uncertain[key], **(read() if read else {})}

    @cached_property
    def _uncertain(self) -> dict[str, dict[str, str]]:
        """By part, the checksums of all that is uncertain: in the files that this rank writes, and in its replicas."""
        found: dict[str, dict[str, str]] = {key: {} for key in (*self.captured.parts, *self._sharded)}
        for file in self.captured.files:
            key = part_of(file.path)
            if key in found:
                found[key] |= checksums(file, self.snapshot.get(file.path), self.captured.is_uncertain(key))
        for key, replicas in self.captured.replicas.items():
            found[key] |= checksums(replicas.file, self.snapshot.get(replicas.path), lambda _: True)
        for key, part in self.captured.gathered.items():  # not in a snapshot: training waits while they are gathered
            is_uncertain = self.captured.is_uncertain(key)
            for name in part.table.tensors:
                if is_uncertain(name) and name not in found[key]:
                    tensor = part.tensors[name]
                    found[key][name] = checksum(local_tensor(tensor) if is_sharded(tensor) else tensor)
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

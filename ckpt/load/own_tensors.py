"""What a rank alone has of a part, in its own document and file; and the part as that rank finds it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.formats.layout import Box, is_sharded, own_layout
from ckpt.formats.native import documents
from ckpt.formats.native.shard_table import Spread, SpreadState, SpreadTensors, Table
from ckpt.formats.native.tensor_file import TensorFile
from ckpt.formats.state import Image
from ckpt.save.capture import Captured
from ckpt.save.spare_tensors import own_key


def with_own_state(
    captured: Captured, own: Mapping[str, Any], copies: Mapping[str, Image]
) -> tuple[bytes, list[Image]]:
    """The document of a rank with its own state of these parts, and the files for their tensors."""
    document, images = documents.from_json(captured.document, "the rank's document"), []
    for key, told in own.items():
        entry, image = ({"absent": True}, None) if "absent" in told else _own(captured, key, told["tensors"], copies)
        document["own"][own_key(key, captured.rank)] = entry
        images += [image] if image else []
    return documents.to_json(document), images


def _own(
    captured: Captured, key: str, names: list[str], copies: Mapping[str, Image]
) -> tuple[dict[str, Any], Image | None]:
    spread: SpreadState | None = captured.spread.get(key) or captured.gathered.get(key)
    spare = captured.spares.get(key)
    stored = {content[0] for content in spare.image.contents or () if isinstance(content, tuple)} if spare else set()
    mine = stored.intersection(names)
    image = spare.chosen(mine, copies.get(spare.path)) if spare and mine else None
    found = spare.names(mine) if spare else []
    part = spread or captured.parts[key]
    pieces = {name for name in found if spread and is_sharded(spread.tensors[name])}
    entry = {"class": part.kind, "state": part.values, "plain": [name for name in found if name not in pieces]}
    if spread is None:
        return entry, image
    tensors = {name: _narrow(spread, name) for name in sorted(pieces)}
    tensors |= {name: spread.table.tensors[name] for name in names if name not in mine}  # among the pieces it writes
    return {**entry, "spread": Table(tensors, spread.table.aliases).to_json()}, image


def _narrow(part: SpreadState, name: str) -> Spread:
    entry = part.table.tensors[name]
    return Spread(entry.dtype, entry.shape, own_layout(part.tensors[name]))


@dataclass
class OwnTensors:
    """The tensors of a part as one rank had them: its own, and for all others those that all ranks have."""

    plain: frozenset[str]
    files: list[TensorFile]
    pieces: SpreadTensors
    common: Callable[[], Any]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        entry: Mapping[str, Any],
        rank: int,
        own_files: Callable[[int], list[TensorFile]],
        piece_files: Callable[[int], list[TensorFile]],
        common: Callable[[], Any],
    ) -> OwnTensors:
        """`own_files` and `piece_files` open those of a rank; `common` has the tensors of all."""
        table = Table.from_json(entry["spread"]) if "spread" in entry else Table({})
        pieces = SpreadTensors(table, lambda one: [*own_files(one), *piece_files(one)], rank)
        files = own_files(rank) if entry["plain"] else []
        return cls(frozenset(entry["plain"]), files, pieces, common, table.aliases)

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        found: tuple[torch.dtype, tuple[int, ...]] = self._holder(name).about(self._name(name))
        return found

    def tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._holder(name).tensor(self._name(name))
        return found

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None:
        self._holder(name).fill(self._name(name), target, box)

    def _name(self, name: str) -> str:
        return name if name in self.plain else self.aliases.get(name, name)

    def _holder(self, name: str) -> Any:
        name = self._name(name)
        if name in self.plain:
            return next((file for file in self.files if name in file), None) or self.common()
        return self.pieces if name in self.pieces.table.tensors else self.common()

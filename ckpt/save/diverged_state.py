"""A rank's own state of a part, where it differs from the main rank's: an entry in the rank's document, and a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt.formats.layout import is_sharded, own_layout
from ckpt.formats.native import documents
from ckpt.formats.native.shard_table import ShardedState, ShardSpec, ShardTable
from ckpt.formats.state import FilePlan
from ckpt.root.file_names import own_key
from ckpt.save.capture import CapturedState


def with_own_state(
    captured: CapturedState, own: Mapping[str, Any], copies: Mapping[str, FilePlan]
) -> tuple[bytes, list[FilePlan]]:
    """The document of a rank with its own state of these parts, and the files for their tensors."""
    document, images = documents.from_json(captured.document, "the rank's document"), []
    for key, told in own.items():
        entry, image = ({"absent": True}, None) if "absent" in told else _own(captured, key, told["tensors"], copies)
        document["own"][own_key(key, captured.rank)] = entry
        images += [image] if image else []
    return documents.to_json(document), images


def _own(
    captured: CapturedState, key: str, names: list[str], copies: Mapping[str, FilePlan]
) -> tuple[dict[str, Any], FilePlan | None]:
    spread: ShardedState | None = captured.spread.get(key) or captured.gathered.get(key)
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
    return {**entry, "spread": ShardTable(tensors, spread.table.aliases).to_json()}, image


def _narrow(part: ShardedState, name: str) -> ShardSpec:
    entry = part.table.tensors[name]
    return ShardSpec(entry.dtype, entry.shape, own_layout(part.tensors[name]))

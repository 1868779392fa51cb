"""Which names of a part other ranks have: the ranks of a pipeline have different layers, and each loads its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.formats.native import documents
from ckpt.formats.native.block_hash import digest
from ckpt.ranks.consensus import Result, decide_together, first_of_each
from ckpt.ranks.group import Ranks
from ckpt.state.parts import Part


@dataclass(frozen=True)
class Elsewhere:
    """What only other ranks have: by part the names of tensors or parameters, and the keys of parts."""

    names: Mapping[str, frozenset[str]] = field(default_factory=dict)
    parts: frozenset[str] = frozenset()


def find_elsewhere(ranks: Ranks, call: str, parts: Mapping[str, Part]) -> Elsewhere:
    """Compare what the ranks have, by digests; only where these differ, by names. Every rank makes this call."""
    if ranks.world_size == 1:
        return Elsewhere()
    mine = Result.capture(lambda: _names(parts))
    digests = mine.then(lambda names: digest(documents.to_json(names)))
    speakers = decide_together(ranks, f"{call} (names)", digests, first_of_each)
    if len(speakers) == 1:
        return Elsewhere()
    said = Result(mine.value if ranks.rank in speakers else {})
    everywhere = decide_together(ranks, f"{call} (all names)", said, _together)
    return Elsewhere(
        {key: frozenset(names).difference(mine.value.get(key, ())) for key, names in everywhere.items()},
        frozenset(everywhere) - mine.value.keys(),
    )


def _names(parts: Mapping[str, Part]) -> dict[str, list[str]]:
    found = {key: part.names() for key, part in parts.items()}
    return {key: sorted(names) for key, names in found.items() if names is not None}


def _together(said: list[dict[str, list[str]]]) -> dict[str, list[str]]:
    found: dict[str, dict[str, Any]] = {}
    for names_of in said:
        for key, names in names_of.items():
            found.setdefault(key, {}).update(dict.fromkeys(names))
    return {key: list(names) for key, names in found.items()}

"""What a listing says of a committed checkpoint: all that a manifest has, except its files.

Imports no torch: the command `ckpt` starts without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpt.formats.native.block_hash import digest
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, Manifest
from ckpt.root.save_marker import MARKER
from ckpt.util.checked_json import Rule, broken_rules, is_count, is_finite, is_mapping, is_moment, is_text

_NOT_JSON = ("nan", "inf", "-inf")  # numbers that JSON has not
_COUNT = Rule(is_count, "a count")
_TEXT = Rule(is_text, "text")
_RULES = {
    "id": _TEXT,
    "sequence": _COUNT,
    "created": Rule(is_moment, "a time with its zone, in ISO 8601"),
    "run": _TEXT,
    "parent": Rule(lambda value: value is None or is_text(value), "text or null"),
    "step": _COUNT,
    "metrics": Rule(is_mapping(lambda value: value in _NOT_JSON or is_finite(value)), "numbers by name"),
    "world_size": _COUNT,
    "size": _COUNT,
    "contents": _TEXT,
}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A committed checkpoint without the list of its files. `contents` is a digest of their paths and sizes."""

    name: str
    id: str
    sequence: int
    created: str
    run: str
    parent: str | None = None
    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    world_size: int = 1
    size: int = 0
    contents: str = ""

    @classmethod
    def of(cls, manifest: Manifest) -> Summary:
        return cls(
            name=manifest.name,
            id=manifest.id,
            sequence=manifest.sequence,
            created=manifest.created,
            run=manifest.run,
            parent=manifest.parent,
            step=manifest.step,
            metrics=manifest.metrics,
            world_size=manifest.world_size,
            size=manifest.size,
            contents="" if manifest.hosts else contents_digest({file.path: file.size for file in manifest.files}),
        )

    def has_all_of(self, sizes: Mapping[str, int]) -> bool:
        """Whether a folder has just the files of the checkpoint, by path and size. If not, its manifest says more."""
        return self.contents == contents_digest(sizes)

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["name"]
        metrics = {key: value if value - value == 0 else str(value) for key, value in self.metrics.items()}
        return {**fields, "metrics": metrics}

    @classmethod
    def from_json(cls, name: str, fields: Any) -> Summary | None:
        """None if any field is not what it must be."""
        if broken_rules(fields, _RULES):
            return None
        known = {key: fields[key] for key in _RULES}
        return cls(name=name, **{**known, "metrics": {key: float(value) for key, value in known["metrics"].items()}})


def contents_digest(sizes: Mapping[str, int]) -> str:
    """A digest of the paths and sizes of a checkpoint's files; the manifest, its copy and a save marker are none."""
    files = sorted((path, size) for path, size in sizes.items() if path not in (FILE_NAME, COPY_NAME, MARKER))
    return digest(json.dumps(files).encode())

"""The descriptions of all ranks, each distinct one sent once.

Thousands of ranks have few different descriptions, apart from the checksums of what each holds. So a rank sends a
digest of its description first; the first rank with each digest sends the description, and every rank its checksums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.formats.native import documents
from ckpt.formats.native.manifest import digest as digest_of

_FIELDS = ("sums", "pieces")  # of a part: checksums by name


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
        return cls(frame, {key: _checksums(part) for key, part in parts.items()}, digest_of(documents.to_json(frame)))

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

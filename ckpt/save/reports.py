"""The reports of all ranks on the files that they have written, joined on the main rank."""

from __future__ import annotations

from typing import Any

from ckpt.errors import RanksError
from ckpt.formats.native.manifest import FileRecord
from ckpt.root.commit import WrittenFile
from ckpt.util.checked_json import joined


def merge_reports(reports: list[list[dict[str, Any]]]) -> list[WrittenFile]:
    """The files that ranks report, each once. Where hosts have roots of their own, their copies must be the same."""
    stored: dict[str, WrittenFile] = {}
    other: dict[str, int] = {}
    for rank, report in enumerate(reports):
        for entry in report:
            record = FileRecord.from_json(entry["file"])
            written = WrittenFile(record, entry["receipt"], entry.get("linked", False))
            if stored.setdefault(record.name, written).file != record:
                other.setdefault(record.name, rank)
    if other:
        named = joined([f"{name} on rank {rank}" for name, rank in other.items()])
        raise RanksError(
            f"these files differ from the main rank's: {named}. Hosts with roots of their own keep a copy each of what "
            "is not sharded over ranks, so it must be the same on all of them. Make it so, or use a shared root."
        )
    return list(stored.values())

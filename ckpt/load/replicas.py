"""Which pieces of a sharded checkpoint another rank has written as well, as under HSDP and DDP.

Hosts with roots of their own write every copy. So after hosts have changed places, what a rank needs may lie on its
disk all the same, in the file of another rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ckpt.errors import CkptError
from ckpt.formats.native.documents import STATE
from ckpt.formats.native.manifest import FileRecord, Manifest
from ckpt.formats.native.shard_table import EVERY, ShardSpec, ShardTable
from ckpt.root.file_names import part_of, rank_of, spread_file
from ckpt.storage import Storage


@dataclass
class Replicas:
    """The copies of a checkpoint's pieces, as far as their files can be read here."""

    storage: Storage
    manifest: Manifest
    is_here: Callable[[FileRecord], bool]

    def stand_in_for(self, file: FileRecord) -> bool:
        """Whether files of other ranks, which are here, have every piece that a rank's missing file holds."""
        rank, table = rank_of(file.name), self._tables.get(part_of(file.name))
        if rank is None or table is None or not file.name.startswith(f"{part_of(file.name)}/"):
            return False
        return all(self._has_another(part_of(file.name), one, rank) for one in table.tensors.values())

    def _has_another(self, part: str, one: ShardSpec, rank: int) -> bool:
        if not one.layout.holds(rank):
            return True
        box = one.layout.box(one.shape, rank)
        if box.is_empty:
            return True
        holders = (other for other in one.layout.ranks if one.layout.box(one.shape, other) == box)
        return one.copy == EVERY and any(self._files_are_here(part, other) for other in holders)

    def _files_are_here(self, part: str, rank: int) -> bool:
        names = (spread_file(part, rank, frozen=frozen) for frozen in (False, True))
        records = [self._records[name] for name in names if name in self._records]
        return bool(records) and all(map(self.is_here, records))

    @cached_property
    def _records(self) -> dict[str, FileRecord]:
        return {file.name: file for file in self.manifest.files}

    @cached_property
    def _tables(self) -> dict[str, ShardTable]:
        """For each part that is spread over ranks, its tensors; nothing if that cannot be read."""
        try:
            text = self.storage.read(f"{self.manifest.name}/{self._records[STATE].path}")
            parts = json.loads(text)["parts"].items()
            return {key: ShardTable.from_json(part["spread"]) for key, part in parts if "spread" in part}
        except (CkptError, ValueError, LookupError, TypeError):  # whoever reads it for the load says what is wrong
            return {}

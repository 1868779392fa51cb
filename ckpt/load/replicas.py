"""Which pieces of a sharded checkpoint another rank has written as well, as under HSDP and DDP.

Hosts with roots of their own write every replica. So after hosts have changed places, the pieces that a rank needs may
still be on its disk, in the file of another rank.
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
    """The replicas of a checkpoint's pieces, as far as their files can be read on this host."""

    storage: Storage
    manifest: Manifest
    is_here: Callable[[FileRecord], bool]

    def stand_in_for(self, file: FileRecord) -> bool:
        """Whether the files of other ranks on this host have every piece of a rank's missing file."""
        rank, table = rank_of(file.name), self._tables.get(part_of(file.name))
        if rank is None or table is None or not file.name.startswith(f"{part_of(file.name)}/"):
            return False
        return all(self._has_another(part_of(file.name), spec, rank) for spec in table.tensors.values())

    def _has_another(self, part: str, spec: ShardSpec, rank: int) -> bool:
        if not spec.layout.holds(rank):
            return True
        box = spec.layout.box(spec.shape, rank)
        if box.is_empty:
            return True
        holders = (other for other in spec.layout.ranks if spec.layout.box(spec.shape, other) == box)
        return spec.copy == EVERY and any(self._files_are_here(part, other) for other in holders)

    def _files_are_here(self, part: str, rank: int) -> bool:
        names = (spread_file(part, rank, frozen=frozen) for frozen in (False, True))
        records = [self._records[name] for name in names if name in self._records]
        return bool(records) and all(map(self.is_here, records))

    @cached_property
    def _records(self) -> dict[str, FileRecord]:
        return {file.name: file for file in self.manifest.files}

    @cached_property
    def _tables(self) -> dict[str, ShardTable]:
        """The shard table of each part saved in pieces; none at all if they cannot be read."""
        try:
            text = self.storage.read(f"{self.manifest.name}/{self._records[STATE].path}")
            parts = json.loads(text)["parts"].items()
            return {key: ShardTable.from_json(part["spread"], self.manifest) for key, part in parts if "spread" in part}
        except (
            CkptError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ):  # the load itself will say what is wrong
            return {}

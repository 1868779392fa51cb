"""The index of a root in an object store: what its manifests say, by their versions, so that a listing reads none.

A listing says the version of every manifest. What the index says counts only for that version; any other manifest is
read. So an index that is old, damaged or gone costs time, and nothing else. Roots with few checkpoints have none.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt.errors import DamagedError, StorageError
from ckpt.formats.native.block_hash import digest
from ckpt.root.summary import Summary
from ckpt.storage import Storage
from ckpt.storage.base import read_document
from ckpt.util.checked_json import is_text, parse_json

INDEX = ".index.json"
UNINDEXED = 16  # manifests that a listing may have to read: the index is written again when there are more
_VERSION = 1
_log = logging.getLogger("ckpt")


@dataclass
class Index:
    """Summaries by name, each with the version of the manifest that it was made of."""

    entries: dict[str, tuple[str, Summary]] = field(default_factory=dict)
    unwritten: set[str] = field(default_factory=set)  # names of entries that the stored index has not

    @classmethod
    def read(cls, storage: Storage) -> Index:
        """The stored index. One that cannot be read is as good as none."""
        try:
            return cls(_parsed(read_document(storage, INDEX)))
        except (StorageError, DamagedError, ValueError) as error:
            _log.debug("%s/%s is not used, and manifests are read instead: %s", storage.url, INDEX, error)
            return cls()

    def find(self, name: str, version: str | None) -> Summary | None:
        """What the manifest of a checkpoint says, if it has this version."""
        known, summary = self.entries.get(name, (None, None))
        return summary if version is not None and version == known else None

    def add(self, version: str | None, summary: Summary) -> None:
        """Record what a manifest of that version says; nothing if the version is not known."""
        self.entries.pop(summary.name, None)
        if version is not None:
            self.entries[summary.name] = (version, summary)
            self.unwritten.add(summary.name)

    def update(self, storage: Storage, names: set[str]) -> None:
        """Store it for the checkpoints of these names, if a listing would have to read many manifests without it.

        Only the holder of the root's lock calls this."""
        self.entries = {name: entry for name, entry in self.entries.items() if name in names}
        self.unwritten &= names
        if len(self.unwritten) <= UNINDEXED:
            return
        try:
            storage.write(INDEX, [_encoded(self.entries)])
            self.unwritten.clear()
        except StorageError as error:
            _log.debug("%s/%s was not written: %s", storage.url, INDEX, error)


def _encoded(entries: Mapping[str, tuple[str, Summary]]) -> bytes:
    found = {name: {"version": version, **summary.to_json()} for name, (version, summary) in entries.items()}
    text = json.dumps({"format": "ckpt index", "version": _VERSION, "checkpoints": found}).encode()
    return digest(text).encode() + b"\n" + text


def _parsed(data: bytes) -> dict[str, tuple[str, Summary]]:
    claimed, _, text = data.partition(b"\n")
    if digest(text).encode() != claimed:
        raise ValueError("its bytes do not match its digest")
    fields = parse_json(text)
    if not isinstance(fields, dict) or fields.get("version") != _VERSION:
        raise ValueError("it is of another version of ckpt")
    listed = fields.get("checkpoints")
    found = {}
    for name, entry in listed.items() if isinstance(listed, dict) else ():
        summary = Summary.from_json(name, entry)
        if summary is not None and is_text(entry.get("version")):
            found[name] = (entry["version"], summary)
    return found

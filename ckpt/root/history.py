"""The history of a root: what every save's manifest said, also of checkpoints that retention has removed since.

One small file, written before anything is removed: until then the manifests say all of it. It is only for people to
read: nothing is loaded or removed by what it says. Each line has its digest; a line that does not match it is named and
passed over. Roots on the Hub have none. Imports no torch: the command `ckpt` starts without it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import DamagedError, StorageError
from ckpt.formats.native.manifest import Manifest, digest, is_resumed
from ckpt.root.catalog import Summary
from ckpt.storage import Staging, Storage
from ckpt.storage.base import read_document
from ckpt.util.checked_json import Rule, broken_rules, is_count, is_finite, is_mapping, is_text, parse_json

HISTORY = ".history.jsonl"
MOST = 5_000  # checkpoints: of more, the oldest are left out, and counted
_LARGEST = 16 << 20  # bytes
_VERSION = 1
_NUMBERS = is_mapping(is_finite)
_RULES = {
    "name": Rule(is_text, "text"),
    "seconds": Rule(_NUMBERS, "numbers by name"),
    "memory": Rule(_NUMBERS, "numbers by name", required=False),
    "resumed": Rule(is_resumed, "what was loaded, and what was passed over", required=False),
}
_log = logging.getLogger("ckpt")


@dataclass(frozen=True)
class PastSave:
    """A checkpoint that was committed in the root once, and what its manifest said of its save, where that is known."""

    summary: Summary
    seconds: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int | float] = field(default_factory=dict)
    resumed: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Manifest | Summary) -> PastSave:
        if isinstance(checkpoint, Manifest):
            return cls(Summary.of(checkpoint), checkpoint.seconds, checkpoint.memory, checkpoint.resumed)
        return cls(checkpoint)


@dataclass
class History:
    """What is known of a root's saves, by their ids: as stored, and what this process has learned since."""

    storage: Storage
    left_out: int = 0  # older ones than the file has room for
    _saves: dict[str, PastSave] = field(default_factory=dict)
    _lines: dict[str, bytes] = field(default_factory=dict)  # of the file, by id
    _is_read: bool = False
    _is_ours: bool = True  # not of a newer version of ckpt

    @classmethod
    def of(cls, storage: Storage) -> History:
        """As stored. What cannot be read is named in the log."""
        history = cls(storage)
        history._read()
        return history

    @property
    def saves(self) -> list[PastSave]:
        """Oldest first."""
        return sorted(self._saves.values(), key=lambda save: (save.summary.created, save.summary.sequence))

    def without(self, present: Iterable[Manifest | Summary]) -> list[PastSave]:
        """Those that are not in the root any more, oldest first. `present`: the checkpoints that are."""
        there = {checkpoint.id for checkpoint in present}
        return [save for save in self.saves if save.summary.id not in there]

    def add(self, checkpoint: Manifest | Summary) -> None:
        """Remember a checkpoint. It is stored with the next `store`."""
        save, known = PastSave.of(checkpoint), self._saves.get(checkpoint.id)
        if known is None or (save.seconds and not known.seconds):
            self._saves[checkpoint.id] = save
            self._lines[checkpoint.id] = _line(_fields(save))

    def lacks_save(self, checkpoint: Manifest | Summary) -> bool:
        """Whether nothing is known of how the checkpoint was saved: an earlier process did, and it was only listed."""
        if isinstance(self.storage, Staging):
            return False
        self._read()
        known = self._saves.get(checkpoint.id)
        return known is None or not known.seconds

    def store(self, checkpoints: Iterable[Manifest | Summary]) -> None:
        """Store all that is known, with these checkpoints, before some are removed. A failure is one warning."""
        if isinstance(self.storage, Staging):
            return
        self._read()
        for checkpoint in checkpoints:
            self.add(checkpoint)
        if not self._is_ours or not self._is_read:
            return
        try:
            self.storage.write(HISTORY, [self._encoded()])
        except StorageError as error:  # a disk may be full, and the removal makes room
            _log.warning("%s/%s was not written: %s", self.storage.url, HISTORY, error)

    def _read(self) -> None:
        if self._is_read:
            return
        try:
            if self.storage.version(HISTORY) is not None:
                self._parse(read_document(self.storage, HISTORY, _LARGEST))
        except StorageError as error:  # nothing says that it is damaged: it is not written over, and read again later
            _log.warning("%s/%s cannot be read now, and is left as it is: %s", self.storage.url, HISTORY, error)
            return
        except (DamagedError, ValueError) as error:
            _log.warning("%s/%s: saves before these are not known: %s", self.storage.url, HISTORY, error)
        self._is_read = True

    def _parse(self, data: bytes) -> None:
        first, *lines = data.splitlines() or [b""]
        head = _checked(first)
        if not isinstance(head, dict) or not is_count(head.get("version")) or not is_count(head.get("left_out")):
            raise ValueError("its first line is damaged")
        if head["version"] != _VERSION:
            self._is_ours = False
            raise ValueError("it is of a newer version of ckpt, and is left as it is")
        self.left_out = head["left_out"]
        damaged = 0
        for line in lines:
            save = _save_of(_checked(line))
            if save is None:
                damaged += 1
            elif save.summary.id not in self._saves:
                self._saves[save.summary.id] = save
                self._lines[save.summary.id] = line + b"\n"
        if damaged:
            _log.warning("%s/%s: %d of its lines are damaged, and left out", self.storage.url, HISTORY, damaged)

    def _encoded(self) -> bytes:
        lines = [self._lines[save.summary.id] for save in self.saves]
        kept, room = [], _LARGEST // 2
        for line in reversed(lines[-MOST:]):
            room -= len(line)
            if room < 0:
                break
            kept.append(line)
        left_out = self.left_out + len(lines) - len(kept)
        return b"".join([_line({"format": "ckpt history", "version": _VERSION, "left_out": left_out}), *reversed(kept)])


def _fields(save: PastSave) -> dict[str, Any]:
    known = {"memory": dict(save.memory), "resumed": dict(save.resumed)}
    found = {key: value for key, value in known.items() if value}
    return {"name": save.summary.name, **save.summary.to_json(), "seconds": dict(save.seconds), **found}


def _line(fields: Mapping[str, Any]) -> bytes:
    text = json.dumps(fields)
    return json.dumps([digest(text.encode()), text]).encode() + b"\n"


def _checked(line: bytes) -> Any:
    """What a line holds; None if it is not what its digest was made of."""
    try:
        claimed, text = parse_json(line)
        return parse_json(text.encode()) if digest(text.encode()) == claimed else None
    except (ValueError, TypeError, AttributeError):
        return None


def _save_of(fields: Any) -> PastSave | None:
    if broken_rules(fields, _RULES):
        return None
    summary = Summary.from_json(fields["name"], fields)
    if summary is None:
        return None
    return PastSave(summary, fields["seconds"], fields.get("memory", {}), fields.get("resumed", {}))

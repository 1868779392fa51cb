"""The object that represents a lease: where it is stored, what it contains, and whether its holder has ended."""

from __future__ import annotations

import os
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, TypedDict
from urllib.parse import quote

from ckpt.errors import LockedError
from ckpt.util.checked_json import Rule, broken_rules, is_text, parse_json
from ckpt.util.process_identity import Identity, is_identity, process_identity, start_time

FOLDER = ".locks"
LARGEST = 64 << 10  # bytes of a record

holders_here: set[str] = set()  # ids of the leases that this process holds or acquires


class Record(TypedDict):
    """The JSON in a lease's object."""

    note: str  # about the holder, for whoever is refused
    process: Identity
    holder: str  # id of the lease
    sign: str  # random, so that every renewal is a new version of the object


_RULES = {
    "note": Rule(is_text, "text"),
    "process": Rule(is_identity, "the identity of a process"),
    "holder": Rule(is_text, "text"),
}


def parse_record(data: bytes) -> Record | None:
    """The record in an object; None if it is anything else, which no holder has written."""
    try:
        record: Any = parse_json(data) if len(data) <= LARGEST else None
    except ValueError:
        return None
    valid: Record | None = None if broken_rules(record, _RULES) else record
    return valid


@dataclass
class Lease:
    """A lease that this process holds or acquires."""

    key: str
    path: str
    note: str
    exclusive: bool
    version: str | None = None
    renewed: float = field(default_factory=lambda: time.monotonic())  # looked up late: tests replace the clock
    lost: bool = False
    holder: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: int = field(default_factory=os.getpid)
    writing: threading.Lock = field(default_factory=lambda: threading.Lock())

    def new_record(self) -> Record:
        """A sign of life."""
        identity = process_identity(os.getpid())
        return Record(note=self.note, process=identity, holder=self.holder, sign=uuid.uuid4().hex)

    @property
    def age(self) -> float:
        """Seconds since the last renewal."""
        return time.monotonic() - self.renewed


class Sightings:
    """For how long this process has known the same version of each object."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[str | None, float]] = {}  # by path: the version last seen, and since when

    def age(self, path: str, version: str | None) -> float:
        """Seconds since this version of an object was first seen, which is now if another was seen last."""
        if path not in self._first or self._first[path][0] != version:
            self._first[path] = (version, time.monotonic())
        return time.monotonic() - self._first[path][1]


def exclusive_path(key: str) -> str:
    """The object of whoever holds `key` exclusively: there is one path, so conditional writes decide who that is."""
    return f"{FOLDER}/alone/{quote(key, safe='')}"


def shared_folder(key: str) -> str:
    """The prefix of the objects of those who hold `key` shared: each has its own."""
    return f"{FOLDER}/shared/{quote(key, safe='')}/"


def new_shared_path(key: str) -> str:
    return shared_folder(key) + uuid.uuid4().hex


def refusal(url: str, key: str, record: Record) -> LockedError:
    """The error for whoever wants what a holder has."""
    return LockedError(f"{url}/{key} is held: {record['note'] or 'by somebody else.'}")


def has_ended(record: Record) -> bool | None:
    """Whether a holder has ended. None if that cannot be known: it runs on another machine or in another container."""
    here = process_identity(os.getpid())
    if record["process"] == here:
        return record["holder"] not in holders_here
    if record["process"][:2] != here[:2]:
        return None
    _, _, process, started = record["process"]
    return start_time(int(process or 0)) != started

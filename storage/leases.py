"""Locks for object stores, which have none: objects that name their holder and are rewritten while it lives.

An exclusive holder writes the only object of its key, conditionally. Every shared holder writes an object of its own.
Each checks for conflicting holders after it has written its object, so of two that arrive at the same time at least one
sees the other.

Clocks of different machines are never compared: a holder on this machine is looked up in the process table, and one on
another machine has expired when its object has not changed for `EXPIRY` seconds of the observer's clock.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypedDict
from urllib.parse import quote

from ckpt.errors import AbsentError, ConflictError, DeniedError, LockedError, StorageError
from ckpt.storage.base import Objects
from ckpt.storage.retry import within
from ckpt.util.checked_json import Rule, broken_rules, is_text, parse_json
from ckpt.util.threads import Identity, is_identity, process_identity, start_time

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


_log = logging.getLogger("ckpt")

RENEWAL = 10.0  # seconds between two renewals
EXPIRY = 60.0  # seconds without a renewal after which a holder is taken for dead
_POLL = 1.0  # seconds
_TO_REMOVE = 10.0  # seconds: who ends does not wait longer for a store that is away. What is left expires


class Leases:
    """The leases of one storage that this process holds, renewed by a daemon thread."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._held: list[Lease] = []
        self._seen = Sightings()
        self._wake = threading.Event()
        self._renewing = False
        self._to_remove: list[Lease] = []  # their objects could not be removed yet
        self._guard = threading.Lock()

    @contextmanager
    def exclusive(self, key: str, note: str) -> Iterator[None]:
        lease = Lease(key, exclusive_path(key), note, exclusive=True)
        self._claim(lease)
        try:
            self._refuse_if_shared(key)
        except BaseException:
            self._remove(lease)
            raise
        with self._kept_alive(lease):
            yield

    @contextmanager
    def shared(self, key: str, note: str) -> Iterator[None]:
        lease = Lease(key, new_shared_path(key), note, exclusive=False)
        holders_here.add(lease.holder)
        try:
            self._write_shared(lease)
        except DeniedError:  # a reader without write access cannot protect what it reads
            holders_here.discard(lease.holder)
            yield
            return
        except BaseException:  # the write may have taken effect
            self._remove_later(lease)
            raise
        with self._kept_alive(lease):  # also while a holder is waited for, or this one would be taken for dead
            self._refuse_if_held(key, exclusive_path(key))
            while lease.age > EXPIRY / 2:  # this process was frozen: others may have removed the object
                self._renew(lease)
                self._refuse_if_held(key, exclusive_path(key))
            yield

    def confirm(self) -> None:
        """Raise if another process has taken over a key that this one held exclusively."""
        for lease in [lease for lease in self._held if lease.exclusive]:
            if lease.age > EXPIRY / 2 and not lease.lost:
                self._renew(lease)
            if lease.lost:
                raise LockedError(
                    f"another run took over the lock {self._objects.url}/{lease.key}, because this run gave no sign of "
                    f"life for {EXPIRY:g} s: {self._note(lease.path)} This run writes nothing more. Stop one of the "
                    "two runs, and start this one again if needed: it continues from the newest checkpoint."
                )

    def _claim(self, lease: Lease) -> None:
        """Write the object of an exclusive holder, over that of one that has ended. Raises if the holder is alive."""
        holders_here.add(lease.holder)
        try:
            while not self._write_exclusive(lease):
                lease.version = self._refuse_if_held(lease.key, lease.path)
        except BaseException:
            holders_here.discard(lease.holder)  # or a write that took effect after all would lock this process out
            raise

    def _write_exclusive(self, lease: Lease) -> bool:
        """Write a new record over the version that is known. Returns whether this lease owns the object now.

        A write that was refused or has failed may have taken effect: its answer was lost, and the client has sent it
        again. So the object itself decides. A lease counts as renewed from before the write: observers count from then
        on at the earliest.
        """
        began, record = time.monotonic(), lease.new_record()
        try:
            lease.version = self._objects.put(lease.path, [json.dumps(record).encode()], over=lease.version)
        except ConflictError:
            found = self._read_own(lease)
            if found != record:  # another's, or that of an earlier write whose answer was lost
                return found is not None and self._write_exclusive(lease)
        except StorageError:
            with suppress(StorageError):
                if self._read_own(lease) == record:
                    lease.renewed = began
                    return True
            raise
        lease.renewed = began
        return True

    def _write_shared(self, lease: Lease) -> None:
        began = time.monotonic()
        self._objects.put(lease.path, [json.dumps(lease.new_record()).encode()])
        lease.renewed = began

    def _read_own(self, lease: Lease) -> Record | None:
        """The record in the object if it belongs to this lease; then its version is the known one from now on."""
        version, record = self._read(lease.path)
        if record is None or record.get("holder") != lease.holder:
            return None
        lease.version = version
        return record

    def _refuse_if_shared(self, key: str) -> None:
        """Raise if a shared holder is alive. Objects of those that are not are removed."""
        for entry in self._objects.entries(shared_folder(key)):
            version, record = self._read(entry.key)
            if version is None:
                continue
            if record is None or has_ended(record) or self._seen.age(entry.key, version) > EXPIRY:
                self._objects.remove([entry.key])
            else:
                raise refusal(self._objects.url, key, record)

    def _refuse_if_held(self, key: str, path: str) -> str | None:
        """Raise if the exclusive holder is alive. Returns the version of a dead one's object; None if there is none.

        Whether a holder on another machine is alive shows when its object changes, or does not for `EXPIRY` seconds.
        """
        first: str | None = None
        while True:
            version, record = self._read(path)
            if record is None:
                return version
            ended = has_ended(record)
            if ended or self._seen.age(path, version) > EXPIRY:
                return version
            if ended is False or version != (first or version):
                raise refusal(self._objects.url, key, record)
            if first is None:
                _log.warning(
                    "%s/%s is locked: %s Waiting up to %g s to see whether that run is still alive.",
                    self._objects.url, key, record["note"], EXPIRY,
                )  # fmt: skip
            first = version
            time.sleep(_POLL)

    def _read(self, path: str) -> tuple[str | None, Record | None]:
        """Version and content of a holder's object; no version if there is none.

        An object without valid content belongs to nobody: a holder has written all of its own.
        """
        version = self._objects.version(path)
        try:
            return version, parse_record(self._objects.get(path, 0, LARGEST + 1))
        except AbsentError:
            return None, None

    def _note(self, path: str) -> str:
        with suppress(StorageError):
            record = self._read(path)[1]
            return record["note"] if record else ""
        return ""

    @contextmanager
    def _kept_alive(self, lease: Lease) -> Iterator[None]:
        with self._guard:
            self._held.append(lease)
            self._start_renewing()
        try:
            yield
        except GeneratorExit:
            # The context was never left and is being garbage-collected, in any thread and with any locks held, so that
            # nothing may block. The renewing thread removes the object.
            if os.getpid() == lease.process:
                holders_here.discard(lease.holder)
                self._to_remove.append(lease)
                self._held.remove(lease)
            raise
        except BaseException:
            self._release(lease)
            raise
        self._release(lease)

    def _release(self, lease: Lease) -> None:
        if os.getpid() == lease.process:  # a forked child leaves the lease to its parent
            with self._guard:
                self._held.remove(lease)
                self._wake.set()
            self._remove(lease)

    def _remove(self, lease: Lease) -> None:
        """Remove the object if it is certainly this lease's. Until that succeeds, the renewing thread tries again."""
        holders_here.discard(lease.holder)
        with within(_TO_REMOVE):
            if not lease.writing.acquire(timeout=_TO_REMOVE):  # it is being renewed, and the store does not answer
                return self._remove_later(lease)
            try:
                if not lease.lost and lease.age > EXPIRY / 2:
                    with suppress(StorageError):
                        self._write_renewal(lease)
                if not lease.lost and lease.age <= EXPIRY:
                    self._remove_before_expiry(lease)
            except StorageError:
                self._remove_later(lease)
            finally:
                lease.writing.release()

    def _remove_before_expiry(self, lease: Lease) -> None:
        """Remove the object of a lease while it is its own: later, whoever has taken over may have written it."""
        with within(EXPIRY - lease.age):
            self._objects.remove([lease.path])

    def _remove_later(self, lease: Lease) -> None:
        holders_here.discard(lease.holder)
        with self._guard:
            self._to_remove.append(lease)
            self._start_renewing()

    def _start_renewing(self) -> None:
        if not self._renewing:
            self._renewing = True
            threading.Thread(target=self._renew_until_idle, name="ckpt-lease", daemon=True).start()

    def _renew_until_idle(self) -> None:
        while True:
            self._wake.wait(RENEWAL)
            with self._guard:
                self._wake.clear()
                due = [lease for lease in self._held if lease.age > RENEWAL / 2]
                self._renewing = bool(self._held or self._to_remove)
                if not self._renewing:
                    return
            self._renew_and_remove(due)

    def _renew_and_remove(self, due: Iterable[Lease]) -> None:
        """Renew leases and remove objects that are due. What fails is tried again after the next interval."""
        for lease in due:
            with suppress(StorageError), within(EXPIRY / 2):
                self._renew(lease)
        while self._to_remove:
            try:
                self._remove_if_owned(self._to_remove[0])
            except StorageError:
                return
            self._to_remove.pop(0)

    def _remove_if_owned(self, lease: Lease) -> None:
        """Remove an object that may be gone, and another holder's be in its place: a conditional write decides."""
        if not lease.exclusive:
            self._objects.remove([lease.path])
        elif self._write_exclusive(lease):
            self._remove_before_expiry(lease)

    def _renew(self, lease: Lease) -> None:
        with lease.writing:
            if lease in self._held:
                self._write_renewal(lease)

    def _write_renewal(self, lease: Lease) -> None:
        if not lease.exclusive:
            self._write_shared(lease)
        elif not self._write_exclusive(lease):
            lease.lost = True
            _log.error("another run took over the lock %s/%s", self._objects.url, lease.key)

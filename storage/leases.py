"""Locks for a place that has none: objects that say who holds what, written again and again while he lives.

Whoever holds a key alone has an object that only one can write. Every reader has one of his own. Each looks for the
others' after it has written its own, so of two who come at the same time at least one sees the other.

No clock is compared with another's: a holder on this machine is looked up in the system, and one elsewhere is taken for
gone when his object has not changed for a while.
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
from typing import Any

from ckpt.errors import AbsentError, ConflictError, DeniedError, LockedError, StorageError
from ckpt.storage.base import Objects
from ckpt.storage.lease_record import FOLDER, Held, held_here, is_gone, quoted

_log = logging.getLogger("ckpt")

BEAT = 10.0  # seconds from one sign of life to the next
LIFE = 60.0  # without one, a holder is gone
_LOOK = 1.0


class Leases:
    """The locks of one storage that this process holds."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._held: list[Held] = []
        self._seen: dict[str, tuple[str, float]] = {}  # versions of others' objects, and since when they are known
        self._changed = threading.Event()
        self._beating = False
        self._left: list[str] = []  # objects that could not be removed yet
        self._guard = threading.Lock()

    @contextmanager
    def alone(self, key: str, note: str) -> Iterator[None]:
        held = Held(key, f"{FOLDER}/alone/{quoted(key)}", note, alone=True)
        self._claim(held)
        try:
            self._refuse_readers(key)
        except BaseException:
            self._drop(held)
            raise
        with self._kept(held):
            yield

    @contextmanager
    def shared(self, key: str, note: str) -> Iterator[None]:
        held = Held(key, f"{FOLDER}/shared/{quoted(key)}/{uuid.uuid4().hex}", note, alone=False)
        held_here.add(held.holder)
        try:
            self._objects.put(held.path, [held.text()])
        except DeniedError:  # who may only read can keep nobody from removing what he reads
            held_here.discard(held.holder)
            yield
            return
        except BaseException:  # it may have taken effect all the same
            self._leave(held)
            raise
        try:
            self._refuse_if_held(key, f"{FOLDER}/alone/{quoted(key)}")
        except BaseException:
            self._drop(held)
            raise
        with self._kept(held):
            yield

    def confirm(self) -> None:
        """Refuse to go on if somebody has taken over what this process held alone."""
        for held in [one for one in self._held if one.alone]:
            if time.monotonic() - held.renewed > LIFE / 2 and not held.lost:
                self._renew(held)
            if held.lost:
                raise LockedError(
                    f"{self._objects.url}/{held.key} was taken over by another run, because this one gave no sign of "
                    f"life for {LIFE:g} s: {self._note(held.path)} Nothing is written any more. Stop one of the two, "
                    "then start again: it goes on from the newest checkpoint."
                )

    def _claim(self, held: Held) -> None:
        """Write the object that only one can write; over that of a holder who is gone."""
        held_here.add(held.holder)
        try:
            while not self._put_alone(held):
                held.version = self._refuse_if_held(held.key, held.path)
        except BaseException:
            held_here.discard(held.holder)  # or what may have taken effect would lock this process out
            raise
        held.renewed = time.monotonic()

    def _put_alone(self, held: Held) -> bool:
        """Write the object over the version that is known. Returns whether it is this holder's now.

        A write that was refused or has failed may have taken effect: its answer was lost, and the client has tried it
        again. So what is there decides.
        """
        try:
            held.version = self._objects.put(held.path, [held.text()], over=held.version)
        except ConflictError:
            return self._is_mine(held)
        except StorageError:
            with suppress(StorageError):
                if self._is_mine(held):
                    return True
            raise
        return True

    def _is_mine(self, held: Held) -> bool:
        """Whether the object that is there now is this holder's; if so, its version is the known one."""
        version, sign = self._look(held.path)
        if sign is None or sign.get("holder") != held.holder:
            return False
        held.version = version
        return True

    def _refuse_readers(self, key: str) -> None:
        for entry in self._objects.entries(f"{FOLDER}/shared/{quoted(key)}/"):
            version, sign = self._look(entry.key)
            if version is None:
                continue
            if sign is None or is_gone(sign) or self._is_stale(entry.key, version):
                self._objects.remove([entry.key])
            else:
                raise self._refusal(key, sign)

    def _refuse_if_held(self, key: str, path: str) -> str | None:
        """Raise if the holder is alive. Returns the version of what is left of one who is gone; none if nothing is."""
        first: str | None = None
        while True:
            version, sign = self._look(path)
            if version is None or sign is None:
                return version
            gone = is_gone(sign)
            if gone or self._is_stale(path, version):
                return version
            if gone is False or version != (first or version):
                raise self._refusal(key, sign)
            if first is None:
                _log.warning(
                    "%s/%s is held: %s Waiting for up to %g s to see whether it is still alive.",
                    self._objects.url, key, sign["note"], LIFE,
                )  # fmt: skip
            first = version
            time.sleep(_LOOK)

    def _look(self, path: str) -> tuple[str | None, dict[str, Any] | None]:
        """The version of a holder's object, and what it says; no version if there is none.

        One that says nothing is nobody's: whoever holds something has written all of his.
        """
        version = self._objects.version(path)
        try:
            sign = json.loads(self._objects.get(path))
        except AbsentError:
            return None, None
        except ValueError:
            return version, None
        return version, sign

    def _is_stale(self, path: str, version: str | None) -> bool:
        known, since = self._seen.get(path, (None, 0.0))
        if known != version:
            since = time.monotonic()
            self._seen[path] = (str(version), since)
        return time.monotonic() - since > LIFE

    def _refusal(self, key: str, sign: dict[str, Any]) -> LockedError:
        return LockedError(f"{self._objects.url}/{key} is held: {sign['note'] or 'by somebody else.'}")

    def _note(self, path: str) -> str:
        with suppress(StorageError):
            return str((self._look(path)[1] or {}).get("note", ""))
        return ""

    @contextmanager
    def _kept(self, held: Held) -> Iterator[None]:
        with self._guard:
            self._held.append(held)
            self._begin_to_beat()
        try:
            yield
        except GeneratorExit:
            # Nobody has closed it, and it is being collected, in whatever thread and with whatever locks held: nothing
            # may be waited for. The next beat removes the object.
            if os.getpid() == held.process:
                held_here.discard(held.holder)
                self._left.append(held.path)
                self._held.remove(held)
            raise
        except BaseException:
            self._let_go(held)
            raise
        self._let_go(held)

    def _let_go(self, held: Held) -> None:
        if os.getpid() == held.process:  # a forked child lets its parent hold on
            with self._guard:
                self._held.remove(held)
                self._changed.set()
            self._drop(held)

    def _drop(self, held: Held) -> None:
        """Remove the object, if it is certainly ours. What is left refuses others as long as this process lives."""
        held_here.discard(held.holder)
        with held.turn:
            if not held.lost and time.monotonic() - held.renewed > LIFE / 2:
                with suppress(StorageError):
                    self._sign(held)
            if held.lost or time.monotonic() - held.renewed > LIFE:
                return
            try:
                self._objects.remove([held.path])
            except StorageError:
                self._leave(held)

    def _leave(self, held: Held) -> None:
        """Let the next beat remove the object."""
        held_here.discard(held.holder)
        with self._guard:
            self._left.append(held.path)
            self._begin_to_beat()

    def _begin_to_beat(self) -> None:
        if not self._beating:
            self._beating = True
            threading.Thread(target=self._beat, name="ckpt-lease", daemon=True).start()

    def _beat(self) -> None:
        while True:
            self._changed.wait(BEAT)
            with self._guard:
                self._changed.clear()
                due = [one for one in self._held if time.monotonic() - one.renewed > BEAT / 2]
                self._beating = bool(self._held or self._left)
                if not self._beating:
                    return
            self._catch_up(due)

    def _catch_up(self, due: Iterable[Held]) -> None:
        """Give signs of life, and remove what is left. Where that fails, the next beat tries again."""
        for held in due:
            with suppress(StorageError):
                self._renew(held)
        while self._left:
            try:
                self._objects.remove(self._left[:1])
            except StorageError:
                return
            self._left.pop(0)

    def _renew(self, held: Held) -> None:
        with held.turn:
            if held in self._held:
                self._sign(held)

    def _sign(self, held: Held) -> None:
        if held.alone:
            held.lost = not self._put_alone(held)
        else:
            self._objects.put(held.path, [held.text()])
        if held.lost:
            _log.error("%s/%s was taken over by another run", self._objects.url, held.key)
        else:
            held.renewed = time.monotonic()

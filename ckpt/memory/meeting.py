"""How the ranks of a job meet in memory: which share a host's, and which folder, with its keeper, is theirs there."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import CkptError, StorageError
from ckpt.memory import room
from ckpt.memory.keeper_process import KeeperError, living_keeper, require_keeper, start_keeper
from ckpt.memory.place import (
    MemoryPlace,
    PlaceError,
    identity_of,
    memory_directory,
    read_token,
    remove_token,
    write_token,
)
from ckpt.memory.slot_storage import hold_memory, is_held, replica_storage, slot_storage
from ckpt.ranks.consensus import MAIN, Ranks, Result, decide_together
from ckpt.ranks.hosts import ONE_SHARED_ROOT, Hosts, host_name
from ckpt.storage import Storage, place_of
from ckpt.util.threads import boot_id

_log = logging.getLogger("ckpt")
_CALL = "StateManager(..., memory=...)"


@dataclass
class Meeting:
    """Finds or makes the folder in memory that the ranks of a host share. Every rank makes the same calls.

    A root has a token while a run uses it with a memory tier. A root that was removed and made anew has another one, so
    that its run does not resume from the memory of the run before.
    """

    ranks: Ranks
    root: Storage
    place: MemoryPlace | None = None
    hosts: Hosts = ONE_SHARED_ROOT
    complete: bool = False  # every host has a folder
    _token: str = field(default="", init=False)
    _is_found: bool = field(default=False, init=False)
    _taken: int = field(default=0, init=False)  # bytes of snapshots, when they were last counted

    @property
    def owns_place(self) -> bool:
        """True on the first rank of each host, which makes and removes the folder."""
        return self.hosts.owns_root(self.ranks.rank)

    def find(self) -> None:
        """Find the folders that a run before this one has left, once."""
        if self._is_found:
            return
        self._is_found = True
        mine = Result.capture(lambda: (host_identity(), host_name()))
        self._token, seen = decide_together(self.ranks, _CALL, mine, lambda each: (read_token(self.root), each))
        ids = [identity for identity, _ in seen]
        hosts = Hosts(tuple(map(ids.index, ids)), tuple(name for _, name in seen))
        self.hosts = hosts if hosts.separate_roots else ONE_SHARED_ROOT
        problem = self._enter(lambda: self._find_place() if self._token else None)
        if problem and self.ranks.rank == MAIN:
            _log.warning("this run can't use the snapshots in memory: %s", problem)

    def settle(self) -> None:
        """The root is locked, and this run continues from the snapshots that were found: they have a keeper."""
        if self.place is not None and self.owns_place:
            start_keeper(self.place)

    def forget(self) -> None:
        """The root is locked, and what was found, here or on other hosts, is not what this run continues from.

        The token goes first: without it no host's folder is the root's, however many of them a kill leaves behind.
        """
        if self._token:
            decide_together(self.ranks, _CALL, Result(), lambda _: remove_token(self.root))
        self.remove()
        self._token = ""

    def make(self, small: Collection[int] = ()) -> str:
        """Make the folders that are missing. Returns why that failed, if it did.

        `small`: the owners whose hosts have too small a tmpfs.
        """
        self._token = decide_together(self.ranks, _CALL, Result(), lambda _: self._token or write_token(self.root))
        had, held = self.place, self.ranks.rank in small
        problem = self._enter(lambda: self.place or self._make_place(held=held))
        if problem and had is None and self.place is not None:
            self.remove()
        return problem

    def renew_token(self) -> None:
        """On the main rank: write the token again where it is gone. A later run would not find the snapshots."""
        if self._token and read_token(self.root) != self._token:
            write_token(self.root, self._token)

    def note_life(self) -> None:
        """Note that this run lives in its folder."""
        if self.place is not None:
            self.place.note_life()

    def measure_room(self) -> room.Room:
        """The room for snapshots on this host, of which its folder has taken some."""
        place = self.place
        if place is None:
            return room.measure(memory_directory(), 0, held=True)
        if not place.is_there:
            raise PlaceError(f"{place.path} was removed.")
        with suppress(StorageError):  # as many as before, where a file goes while they are counted
            stored = (slot_storage(place), replica_storage(place))
            self._taken = sum(entry.size for found in stored for entry in found.list())
            self._taken += sum(found.unused() for found in stored)
        return room.measure(place.path, self._taken, held=is_held(place))

    def remove(self) -> None:
        """Remove this host's folder. Ranks that do not own it only leave."""
        place, self.place, self.complete, self._taken = self.place, None, False, 0
        if place is not None:
            place.remove() if self.owns_place else place.release()

    def leave(self) -> None:
        """Stop living in the folder, and leave it for a restart. Whoever needs it again must find it again."""
        place, self.place, self.complete, self._is_found = self.place, None, False, False
        if place is not None:
            place.release()

    def end(self) -> None:
        """Remove the folder, and the root's token: this run needs no restart."""
        self.remove()
        if self.ranks.rank == MAIN and self._token:
            with suppress(StorageError):
                remove_token(self.root)
        self.leave()

    def _find_place(self) -> MemoryPlace | None:
        """The folder that a killed run has left. Where its keeper has ended, so has what it held: it is removed."""
        place = MemoryPlace.find(self._identity)
        if place is not None and is_held(place) and living_keeper(place) is None:
            place.remove_if_deserted()
            return None
        return place

    def _make_place(self, *, held: bool) -> MemoryPlace:
        """A new folder, with a keeper, which with `held` holds the snapshots' memory: then there is none without it."""
        place = MemoryPlace.create(self._identity, root_shown=place_of(self.root))
        if not held:
            start_keeper(place)
            return place
        try:
            hold_memory(place)
            require_keeper(place)
        except KeeperError as error:
            place.remove()
            raise PlaceError(
                f"{memory_directory()} is too small, and ckpt could not start a keeper process: {error}"
            ) from error
        return place

    def _enter(self, find: Callable[[], MemoryPlace | None]) -> str:
        """Owners find their folders, and the other ranks of their hosts enter them. Returns what went wrong."""
        mine: dict[str, Any] = {"path": None, "problem": ""}
        if self.owns_place:
            mine = self._entered(find)
        announced = decide_together(self.ranks, _CALL, Result(mine), lambda each: each)
        if not self.owns_place:
            path = announced[self.hosts.first[self.ranks.rank] if self.hosts.separate_roots else MAIN]["path"]
            mine = self._entered(lambda: self.place or (MemoryPlace.open(path) if path else None))
        views = decide_together(self.ranks, _CALL, Result(mine), lambda each: each)
        self.complete = all(view["path"] for view in views)
        problems = dict.fromkeys(view["problem"] for view in [*announced, *views] if view["problem"])
        return "; ".join(problems)

    def _entered(self, find: Callable[[], MemoryPlace | None]) -> dict[str, Any]:
        try:
            place = find()
            if place is not None:
                place.hold()
        except (CkptError, OSError) as error:
            return {"path": None, "problem": str(error)}
        self.place = place
        return {"path": str(place.path) if place is not None else None, "problem": ""}

    @property
    def _identity(self) -> str:
        return identity_of(self.root, self._token)


def host_identity() -> str:
    """Equal for processes that see the same folder of memory, whatever their containers and host names are."""
    if sys.platform != "linux":
        raise PlaceError("only Linux has the shared memory that ckpt uses. ckpt saves to the root as usual.")
    try:
        seen = os.stat(memory_directory())
    except OSError as error:
        raise PlaceError(f"{memory_directory()} cannot be used: {error.strerror or error}.") from error
    return f"{boot_id()}-{seen.st_dev:x}-{seen.st_ino:x}"

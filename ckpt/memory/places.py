"""Finds and makes the folder of a run in a host's memory, together with its keeper."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import ConfigError
from ckpt.memory.keeper_process import (
    KEEPER_VARIABLE,
    KeeperError,
    is_turned_off,
    living_keeper,
    require_keeper,
    start_keeper,
)
from ckpt.memory.place import MemoryPlace, PlaceError, memory_directory
from ckpt.memory.rescue import rescue_settings
from ckpt.memory.slot_storage import MEMFD, TMPFS, is_in_memfds
from ckpt.storage import MemoryStorage, Storage, place_of

_log = logging.getLogger("ckpt")


@dataclass
class Places:
    """The folders of a run whose root this is. Used by the first rank of each host.

    `rescue`: whether the keeper saves the newest snapshot to the root when the run has died; `options`: those of the
    root's storage; `separate_roots`: whether every host has a root of its own.
    """

    root: Storage = field(default_factory=lambda: MemoryStorage("none"))
    rescue: bool = False
    options: Mapping[str, Any] | None = None
    separate_roots: bool = False
    _said: bool = field(default=False, init=False)

    def find(self, identity: str) -> MemoryPlace | None:
        """The folder that a killed run has left. Where its keeper has ended, so have memfds: it is removed."""
        place = MemoryPlace.find(identity)
        if place is None:
            return None
        if is_in_memfds(place) and living_keeper(place) is None:
            place.remove_if_deserted()
            return None
        return place

    def settle(self, place: MemoryPlace) -> None:
        """Make a folder that was found this run's own: with its settings, and a keeper."""
        try:
            place.record(rescue=self._settings())
        except OSError as error:
            _log.warning("%s cannot be written: %s. Its snapshots are used all the same.", place.path, error.strerror)
        start_keeper(place)

    def make(self, identity: str, *, memfd: bool = False) -> MemoryPlace:
        """A new folder, with a keeper, which with `memfd` holds the snapshots too: then there is none without it."""
        kind = MEMFD if memfd else TMPFS
        place = MemoryPlace.create(identity, root_shown=place_of(self.root), rescue=self._settings(), storage=kind)
        if not memfd:
            start_keeper(place)
            return place
        try:
            require_keeper(place, memfd=True)
        except KeeperError as error:
            place.remove()
            raise PlaceError(f"{memory_directory()} is too small, and there is no keeper process: {error}") from error
        return place

    def _settings(self) -> dict[str, Any] | None:
        if not self.rescue:
            return None
        if is_turned_off() and not self._said:
            self._said = True
            _log.warning("Memory(rescue=True) has no effect: %s=off, and nobody else rescues.", KEEPER_VARIABLE)
        try:
            return rescue_settings(self.root, self.options, separate_roots=self.separate_roots)
        except ConfigError as error:
            if not self._said:
                _log.warning("%s", error)
            self._said = True
            return None

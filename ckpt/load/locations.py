"""Where a checkpoint may be: in the root, in the mirror behind it, or, by its path, in a folder of Accelerate's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckpt.errors import ConfigError
from ckpt.formats.registry import ACCELERATE, CKPT, claims
from ckpt.load.select import MemoryTier
from ckpt.ranks.consensus import Result, decide_together
from ckpt.ranks.group import Ranks
from ckpt.ranks.hosts import ONE_SHARED_ROOT, Hosts
from ckpt.root.catalog import Overview, check_name
from ckpt.root.folder import ROOT_ITSELF, Folder, open_url
from ckpt.root.mirror import MirrorPatience
from ckpt.storage import LocalStorage, Storage, place_of
from ckpt.storage.local.storage import OneFolder

_OURS, _THEIRS, _NOBODYS = CKPT.name, ACCELERATE.name, ""


@dataclass(frozen=True)
class Locations:
    """The root, then the mirror; which hosts share the root; and the storage options for a folder elsewhere.

    `patience`: how long a load waits for a mirror that is away, if the root has what it looks for. `on_listed`: called
    with what the root has.

    `memory` finds the snapshots in the hosts' memory, on all ranks together; None if there is no such tier.
    """

    tiers: tuple[Storage, ...]
    hosts: Hosts = ONE_SHARED_ROOT
    options: Mapping[str, Any] | None = None
    patience: MirrorPatience | None = None
    memory: Callable[[], MemoryTier | None] = lambda: None
    on_listed: Callable[[Overview], None] = lambda root: None

    def resolve(self, name: str | None, ranks: Ranks) -> tuple[Locations, str | None]:
        """Where a checkpoint may be, and its name there. A name with a slash is a path.

        A path into the root, however it is spelled, names a checkpoint there. Elsewhere, a folder of Accelerate is a
        root itself, and one of ckpt a checkpoint in a root where nothing else is looked at.
        """
        if not isinstance(name, str) or "/" not in name:
            return self, None if name is None else check_name(name)
        inside = self._name_in_root(name)
        if inside is not None:
            return self, check_name(inside)
        folder = open_url(name, self.options)
        kind = decide_together(ranks, f"load_state({name!r})", Result(), lambda _: _kind(folder))
        if kind == _OURS and isinstance(folder, LocalStorage):
            one = OneFolder(name)
            return Locations((one,)), check_name(one.name)
        if kind != _THEIRS:
            raise ConfigError(
                f"{name!r} cannot name a checkpoint in {self.tiers[0].url}, and is no folder that Accelerate "
                "saved. Give a plain name; for a checkpoint of ckpt in another root, give StateManager that root."
            )
        return Locations((folder,)), ROOT_ITSELF

    def _name_in_root(self, path: str) -> str | None:
        root, _, name = path.rstrip("/").rpartition("/")
        with suppress(ConfigError):  # what is above a URL need not be one
            if place_of(open_url(root or "/", self.options)) == place_of(self.tiers[0]):
                return name
        return None


def _kind(folder: Storage) -> str:
    """Whose checkpoint a folder is."""
    found = claims(Folder.of_checkpoint(folder, ROOT_ITSELF).files)
    return next((kind for kind in (_OURS, _THEIRS) if kind in found), _NOBODYS)

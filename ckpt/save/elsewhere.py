"""A save to a folder that is not directly below the root: committed like any other, and counted by nobody."""

from __future__ import annotations

import logging

from ckpt.errors import ConfigError
from ckpt.ranks.group import MAIN
from ckpt.root.commit import Attempt
from ckpt.save.root_writer import RootWriter
from ckpt.storage.local.one_folder import OneFolder

_log = logging.getLogger("ckpt")


class ElsewhereWriter(RootWriter):
    """Writes one checkpoint of a run into a folder elsewhere, and holds its lock for that long only."""

    storage: OneFolder

    def _refuse_unsafe(self, name: str) -> None:
        """A fresh start replaces nothing but what this run has saved there itself."""
        self.has_resumed = self.has_resumed or (self._newest is not None and self._newest.run == self.run)
        super()._refuse_unsafe(name)

    def _begin(self, attempt: Attempt, paths: list[str]) -> Attempt:
        older = self.committed_as(attempt.name)
        if older is not None and older.run != self.run:
            _log.warning("%s/%s, a checkpoint of another run, is replaced", self.storage.url, attempt.name)
        return super()._begin(attempt, paths)


def writer_at(folder: str, root: RootWriter) -> ElsewhereWriter:
    """The writer of a checkpoint in a local folder that is not in the root. The next one there does not follow it."""
    if "://" in folder or root.hosts.separate_roots:
        why = "it is no local folder" if "://" in folder else "every host has a root of its own"
        raise ConfigError(
            f"{folder} is not directly below {root.storage.url}, the root that was attached, and {why}. Give a plain "
            "name or a folder there, or attach to another root."
        )
    if root.ranks.rank == MAIN:
        _log.info(
            "%s is outside %s: resume() does not look there, and Keep does not count it", folder, root.storage.url
        )
    return ElsewhereWriter(
        OneFolder(folder),
        root.ranks,
        hosts=root.hosts,
        numbering=root.numbering,
        seal=root.seal,
        run=root.run,
        parent=root.parent,
        sequence=root.sequence,
        has_resumed=root.has_resumed,
        failed_load=root.failed_load,
    )

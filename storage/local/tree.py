"""The paths below a folder: where keys lead, what may be followed, and what is there."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from ckpt.errors import AbsentError, ConfigError
from ckpt.storage.base import ROOT_LOCK, check_key
from ckpt.storage.local.system_errors import is_nothing_there

_SNAPSHOT = re.compile(r"((.*)/models--[^/]+)/snapshots/[0-9a-f]{40}(?:/.*)?")


class OutsideError(AbsentError, ConfigError):
    """A symbolic link leads out of the root: for whoever reads the root, nothing is there."""


class Tree:
    """The folder of a storage. Symbolic links in it are followed only where they do not lead out of it."""

    def __init__(self, root: Path, shown: str) -> None:
        self._root = root
        self._shown = shown
        # a snapshot in Hugging Face's cache is made of links to the blobs of its repository, or to those that all share
        snapshot = _SNAPSHOT.fullmatch(str(root))
        self._bounds = (snapshot.group(1), f"{snapshot.group(2)}/blobs") if snapshot else (str(root),)
        self._follows = snapshot is not None

    def path(self, key: str, *, followed: bool = False) -> Path:
        """The path of `key`. Unless it is `followed`, a symbolic link of that name is itself replaced or removed."""
        path = self._root / check_key(key)
        words = key.split("/") if followed else key.split("/")[:-1]
        if self._has_links(words) and not self._is_below(os.path.realpath(path if followed else path.parent)):
            raise OutsideError(f"{self._shown}/{key} leads out of the root through a symbolic link. It is not touched.")
        return path

    def walk(self, prefix: str, *, other_roots: bool = True) -> Iterator[tuple[str, Iterable[str]]]:
        """The folders below `prefix`, with the names of what is in them and is no folder. Links are not followed.

        A folder that cannot be read is an error. Deeper than the longest path of the system nothing is seen.
        `other_roots`: whether to go into folders that are the root of another run.
        """
        left = [str(self.path(prefix, followed=True) if prefix else self._root)]
        while left:
            folder = left.pop()
            try:
                with os.scandir(folder) as found:
                    entries = list(found)
            except OSError as error:
                if not is_nothing_there(error):  # or a run would start anew beside its checkpoints
                    raise
                continue
            if not other_roots and folder != str(self._root) and any(entry.name == ROOT_LOCK for entry in entries):
                continue
            left += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
            yield folder, [entry.name for entry in entries if not _is_folder(entry)]

    def status(self, path: str) -> os.stat_result:
        """What is at a path: of a link that may be followed what it leads to, else the link itself."""
        try:
            status = os.stat(path) if self._follows else os.lstat(path)
            if stat.S_ISLNK(status.st_mode) and self._is_below(os.path.realpath(path)):
                with suppress(OSError):  # or it leads nowhere
                    return os.stat(path)
            return status
        except OSError as error:
            raise FileNotFoundError(path) if is_nothing_there(error) else error from None

    def _has_links(self, words: Iterable[str]) -> bool:
        return any(os.path.islink(path) for path in accumulate(words, "{}/{}".format, initial=str(self._root)))

    def _is_below(self, real: str) -> bool:
        roots = map(os.path.realpath, self._bounds)
        return any(os.path.commonpath([root, real]) == root for root in roots)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder, or a link to one. A link that leads nowhere is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False

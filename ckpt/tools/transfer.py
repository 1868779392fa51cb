"""Checkpoints, or plain files, are copied from any storage to any other, a little at a time.

Imports no torch: a shell asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from ckpt.errors import ConfigError, DamagedError, MissingError
from ckpt.export.folders import atomic_folder
from ckpt.formats.native.manifest import Manifest
from ckpt.root import catalog, cleanup
from ckpt.root.copy import Copies
from ckpt.root.folder import Folder, open_url
from ckpt.root.verified_file import WINDOW
from ckpt.root.verify import reading
from ckpt.storage import LocalStorage, Staging, Storage
from ckpt.util.console import bar, one_line, say

_RESCANS = 5

Place = str | os.PathLike[str]
Options = Mapping[str, Any] | None


def bring(source: Place, destination: Place, *, step: int | None = None, options: Options = None) -> str:
    """Copy a checkpoint into the root `destination`, or all of a root, or the files of a folder; return where it is."""
    far = open_url(destination, options)
    if isinstance(far, Staging):
        raise ConfigError(f"{far.url} takes no copies of files: publish a model there with 'ckpt push'.")
    own_options = options if "://" in os.fspath(source) else None
    near, names, pointed_at = catalog.located(source, own_options)
    if not names and step is None:
        return _bring_files(Folder.at(source, options), destination, far)
    copied: list[str] = []
    with closing(Copies(near, far)) as copies:
        for _ in range(_RESCANS):
            chosen = _chosen(near, names, step)
            copied = _bring_all(copies, chosen) if chosen else []
            if copied or pointed_at:
                break
            names = [one.name for one in catalog.scan(near)]  # a run may have let all go, and have newer ones
    if not copied:
        gone = f"{chosen[0].name} was removed from there while it was to be copied" if chosen else "none was committed"
        raise MissingError(f"there is no checkpoint to copy in {near.url}: {gone}.")
    say(f"copied {', '.join(copied)} to {far.url}")
    return f"{far.url.rstrip('/')}/{copied[0]}" if len(names) == 1 or step is not None else far.url


def _chosen(storage: Storage, names: list[str], step: int | None) -> list[Manifest]:
    """The checkpoints to copy, the oldest first. Of two of a step the newer one: it is of the end of its epoch."""
    found = [catalog.find(storage, name) for name in names]
    if step is not None:
        of_step = [one for one in found if one.step == step]
        if not of_step:
            known = ", ".join(f"{one.name} (step {one.step})" for one in found if one.committed) or "none"
            raise MissingError(f"{storage.url} has no checkpoint of step {step}. There are: {known}.")
        found = of_step[:1]
    if len(found) == 1 and found[0].problem is not None and not isinstance(found[0].problem, MissingError):
        raise found[0].problem
    return [one.manifest for one in reversed(found) if one.manifest is not None]


def _bring_all(copies: Copies, manifests: list[Manifest]) -> list[str]:
    """Copy what is intact, and return the names. What is not is named at the end, and nothing is left of it.

    What a run has removed since it was listed is left out, and said.
    """
    for manifest in manifests:
        _refuse_another(copies.far, manifest)
    copied, damaged = [], []
    copies.look([one.name for one in manifests if _has_begun(copies.far, one)])
    with ExitStack() as held:
        held.enter_context(reading(copies.near, manifests[-1].name))  # so that the newest is still there in the end
        for manifest in manifests:
            try:
                if _bring_one(copies, manifest.name):
                    copied.append(manifest.name)
                else:
                    say(f"{manifest.name} is not copied: it was removed from {copies.near.url} meanwhile")
            except DamagedError as error:
                damaged.append(one_line(str(error)))
                cleanup.clean(copies.far, manifest.name)
    if damaged:
        raise DamagedError(f"not all of {copies.near.url} was copied: {' '.join(damaged)}")
    return copied


def _bring_one(copies: Copies, name: str) -> bool:
    """Copy a checkpoint as it is now: it may have been saved anew since it was listed. False if it is gone."""
    with reading(copies.near, name) as manifest:
        if manifest is None:
            return False
        _refuse_another(copies.far, manifest)
        if not _has_begun(copies.far, manifest):
            _refuse_strange(copies.far, manifest)
        copies.copy(manifest)
        return True


def _has_begun(far: Storage, manifest: Manifest) -> bool:
    """Whether there is a copy already, or one that was cut off: files that are there are then the right ones."""
    known = catalog.find(far, manifest.name).manifest
    mark = cleanup.read_mark(far, manifest.name)
    return (known is not None and known.id == manifest.id) or (mark is not None and mark.id == manifest.id)


def _refuse_another(far: Storage, manifest: Manifest) -> None:
    known = catalog.find(far, manifest.name).manifest
    if known is not None and known.id != manifest.id:
        raise ConfigError(
            f"{far.url} has another checkpoint {manifest.name!r}, which stays as it is. Choose another destination."
        )


def _refuse_strange(far: Storage, manifest: Manifest) -> None:
    """Files of the same name and size would be taken for the checkpoint's own."""
    if any(True for _ in far.list(manifest.name)):
        raise ConfigError(
            f"{far.url}/{manifest.name} has files that are no copy of this checkpoint. Remove them, or choose another "
            "destination."
        )


def _bring_files(folder: Folder, destination: Place, far: Storage) -> str:
    """Copy files as they are. Into a directory they come together, elsewhere one after the other."""
    if not folder.files:
        raise MissingError(f"there is nothing to pull at {folder.where}.")
    if isinstance(far, LocalStorage):
        directory = Path(os.fspath(destination).removeprefix("file://"))
        with atomic_folder(directory) as new:
            _copy_files(folder, LocalStorage(new))
    else:
        _copy_files(folder, far)
    say(f"copied {len(folder.files)} files to {far.url}; there was no manifest to verify them by")
    return far.url


def _copy_files(folder: Folder, far: Storage) -> None:
    with bar(f"copying {folder.name}", sum(folder.files.values()), in_bytes=True) as advance:
        for path in sorted(folder.files):
            far.write(path, _streamed(folder, path, advance))


def _streamed(folder: Folder, path: str, advance: Callable[[float], None]) -> Iterator[memoryview]:
    file, size, start = folder.opened(path), folder.files[path], 0
    buffer = memoryview(bytearray(min(WINDOW, size)))
    while start < size:
        piece = buffer[: size - start]
        file.read_into(start, piece)
        yield piece
        start += len(piece)
        advance(len(piece))

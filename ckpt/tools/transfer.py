"""Copy checkpoints, or plain files, between any two storages, in bounded memory.

What `pull` does for every source but the Hub. Imports no torch, for the command line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any

from ckpt.errors import ConfigError, DamagedError, MissingError
from ckpt.export.folders import atomic_folder
from ckpt.formats.native.manifest import Manifest
from ckpt.root import catalog, deletion
from ckpt.root.copy import Copies
from ckpt.root.folder import Folder, open_url
from ckpt.root.save_marker import read_marker
from ckpt.root.trust import BELIEVES_ALL, Trust
from ckpt.root.verified_file import WINDOW
from ckpt.root.verify import reading, verify_checkpoint
from ckpt.storage import HubStorage, LocalStorage, Staging, Storage
from ckpt.tools.publish_copies import another_by_that_name, publish_copies
from ckpt.util.console import one_line, progress_bar, say
from ckpt.util.option_values import settings

_RESCANS = 5

Place = str | os.PathLike[str]
Options = Mapping[str, Any] | None


def transfer(
    source: Place,
    destination: Place,
    *,
    step: int | None = None,
    options: Options = None,
    token: str | None = None,
    trust: Trust = BELIEVES_ALL,
) -> str:
    """Copy a checkpoint, all of a root, or the files of a folder into `destination`; return the URL of the copy.

    `token` is for a destination on the Hub.
    """
    own_options = options if "://" in os.fspath(source) else None
    target = open_url(destination, _target_options(destination, own_options, options, token))
    origin, names, pointed_at = catalog.resolve(source, own_options)
    if not names and step is None:
        if isinstance(target, Staging):
            raise ConfigError(
                f"{os.fspath(source)} has no checkpoints, and {target.url} takes no copies of other files: publish a "
                "model there with 'ckpt push'."
            )
        trust.refuse_unsigned(os.fspath(source))
        return _copy_folder(Folder.at(source, options), destination, target)
    copied: list[str] = []
    with closing(Copies(origin, target)) as copies:
        for _ in range(_RESCANS):
            selected = _select(origin, names, step)
            if isinstance(target, HubStorage):
                copied = publish_copies(origin, target, selected, trust)
            else:
                copied = _copy_intact(copies, selected, trust) if selected else []
            if copied or pointed_at:
                break
            names = [found.name for found in catalog.scan(origin)]  # retention may have replaced them by newer ones
    if not copied:
        gone = (
            f"{selected[0].name} was removed from there while it was to be copied" if selected else "none was committed"
        )
        raise MissingError(f"there is no checkpoint to copy in {origin.url}: {gone}.")
    say(f"copied {', '.join(copied)} to {target.url}")
    return f"{target.url.rstrip('/')}/{copied[0]}" if len(names) == 1 or step is not None else target.url


def _target_options(destination: Place, of_source: Options, options: Options, token: str | None) -> Options:
    """Of the options of two URLs, those of the Hub are its own: it takes no credentials of S3, nor the other way."""
    if not os.fspath(destination).startswith("hub://"):
        return options
    given = settings(options)
    if of_source is not None:
        given = {name: value for name, value in given.items() if name == "deadline"}
    return given if token is None else {**given, "token": token}


def _select(storage: Storage, names: list[str], step: int | None) -> list[Manifest]:
    """The checkpoints to copy, the oldest first. Of two of a step the newer: it was saved at the end of the epoch."""
    found = [catalog.find(storage, name) for name in names]
    if step is not None:
        of_step = [checkpoint for checkpoint in found if checkpoint.step == step]
        if not of_step:
            committed = [checkpoint for checkpoint in found if checkpoint.committed]
            known = ", ".join(f"{checkpoint.name} (step {checkpoint.step})" for checkpoint in committed) or "none"
            raise MissingError(f"{storage.url} has no checkpoint of step {step}. There are: {known}.")
        found = of_step[:1]
    if len(found) == 1 and found[0].problem is not None and not isinstance(found[0].problem, MissingError):
        raise found[0].problem
    return [checkpoint.manifest for checkpoint in reversed(found) if checkpoint.manifest is not None]


def _copy_intact(copies: Copies, manifests: list[Manifest], trust: Trust) -> list[str]:
    """Copy the intact checkpoints, and return their names. An error names the damaged ones, whose copies are removed.

    Checkpoints that a run has removed since they were listed are skipped, with a message.
    """
    for manifest in manifests:
        _refuse_other_checkpoint(copies.target, manifest)
    copied, damaged = [], []
    copies.open_target([manifest.name for manifest in manifests if _has_begun(copies.target, manifest)])
    with ExitStack() as held:
        held.enter_context(reading(copies.source, manifests[-1].name))  # retention must not remove the newest meanwhile
        for manifest in manifests:
            try:
                if _copy_checkpoint(copies, manifest.name, trust):
                    copied.append(manifest.name)
                else:
                    say(f"{manifest.name} is not copied: it was removed from {copies.source.url} meanwhile")
            except DamagedError as error:
                damaged.append(one_line(str(error)))
                deletion.remove_uncommitted(copies.target, manifest.name)
    if damaged:
        raise DamagedError(f"not all of {copies.source.url} was copied: {' '.join(damaged)}")
    return copied


def _copy_checkpoint(copies: Copies, name: str, trust: Trust) -> bool:
    """Copy a checkpoint as it is now: it may have been replaced since it was listed. False if it was removed."""
    with reading(copies.source, name) as manifest:
        if manifest is None:
            return False
        manifest = trust.checked(manifest)
        _refuse_other_checkpoint(copies.target, manifest)
        has_begun = _has_begun(copies.target, manifest)
        if not has_begun:
            _refuse_other_files(copies.target, manifest)
        copies.copy(manifest)
    if has_begun and manifest.is_authentic:
        _verify_copy(copies.target, manifest.name, trust)
    return True


def _verify_copy(target: Storage, name: str, trust: Trust) -> None:
    """Read a signed copy of which a part was there before: it may have been altered since."""
    found = verify_checkpoint(target, name, trust)
    if found.is_fault:
        raise DamagedError(f"{target.url}/{name}, which was there before, is damaged: {'; '.join(found.problems)}.")


def _has_begun(target: Storage, manifest: Manifest) -> bool:
    """Whether a copy is complete or was interrupted: the files that exist there are then the checkpoint's own."""
    known = catalog.find(target, manifest.name).manifest
    mark = read_marker(target, manifest.name)
    return (known is not None and known.id == manifest.id) or (mark is not None and mark.id == manifest.id)


def _refuse_other_checkpoint(target: Storage, manifest: Manifest) -> None:
    known = catalog.find(target, manifest.name).manifest
    if known is not None and known.id != manifest.id:
        raise another_by_that_name(target, manifest.name)


def _refuse_other_files(target: Storage, manifest: Manifest) -> None:
    """Refuse a folder with files that are no copy: those of the same name and size would count as copied."""
    if any(True for _ in target.list(manifest.name)):
        raise ConfigError(
            f"{target.url}/{manifest.name} has files that are no copy of this checkpoint. Remove them, or choose "
            "another destination."
        )


def _copy_folder(folder: Folder, destination: Place, target: Storage) -> str:
    """Copy files as they are. On a local disk they appear together, elsewhere one by one."""
    if not folder.files:
        raise MissingError(f"there is nothing to pull at {folder.where}.")
    if isinstance(target, LocalStorage):
        with atomic_folder(destination) as new:
            _copy_files(folder, LocalStorage(new))
    else:
        _copy_files(folder, target)
    say(f"copied {len(folder.files)} files to {target.url}; there was no manifest to verify them by")
    return target.url


def _copy_files(folder: Folder, target: Storage) -> None:
    with progress_bar(f"copying {folder.name}", sum(folder.files.values()), in_bytes=True) as advance:
        for path in sorted(folder.files):
            target.write(path, _stream(folder, path, advance))


def _stream(folder: Folder, path: str, advance: Callable[[float], None]) -> Iterator[memoryview]:
    file, size, start = folder.opened(path), folder.files[path], 0
    buffer = memoryview(bytearray(min(WINDOW, size)))
    while start < size:
        piece = buffer[: size - start]
        file.read_into(start, piece)
        yield piece
        start += len(piece)
        advance(len(piece))

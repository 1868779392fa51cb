"""`pull`: copies checkpoints, roots or plain files between any two storages, in bounded memory.

What comes from the Hub comes through Hugging Face's cache. To a storage in which objects appear by commits, each
checkpoint is one commit: of an interrupted copy nothing is visible, and the large files that it has sent are not sent
again. Imports no torch, for the command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ckpt.errors import CheckpointError, ConfigError, DamagedError, MissingError, TransientError
from ckpt.export.folders import atomic_folder
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.formats.registry import INDEX_SUFFIX
from ckpt.root import catalog, deletion
from ckpt.root.catalog import read_marker
from ckpt.root.folder import Folder, open_url, single_file
from ckpt.root.mirror import Copies
from ckpt.root.signing import BELIEVES_ALL, KeySource, Trust, open_trust
from ckpt.root.verify import WINDOW, reading, verify_checkpoint
from ckpt.storage import HubStorage, LocalStorage, Staging, Storage, disk_path
from ckpt.storage.base import LARGEST_DOCUMENT
from ckpt.storage.hub.download import fetched, unreachable
from ckpt.storage.hub.repo import HubRepo
from ckpt.storage.urls import refuse_broken_url
from ckpt.util.console import one_line, progress_bar, say
from ckpt.util.option_values import path_text, settings

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
    shown: str = "",
    over: bool = False,
) -> str:
    """Copy a checkpoint, all of a root, or the files of a folder into `destination`; return the URL of the copy.

    `token` is for a destination on the Hub. `shown`: what errors call the source. `over`: plain files may go into a
    folder that is there.
    """
    own_options = options if "://" in os.fspath(source) else None
    target = open_url(destination, _target_options(destination, own_options, options, token))
    alone = single_file(source, own_options) if step is None else None
    if alone is not None:
        trust.refuse_unsigned(os.fspath(source))
        return _copy_folder(_with_shards(*alone), destination, target, over=over)
    origin, names, pointed_at = catalog.resolve(source, own_options)
    if not names and step is None:
        if isinstance(target, Staging):
            raise ConfigError(
                f"{os.fspath(source)} has no checkpoints, and ckpt does not copy other files to {target.url}. Publish "
                "a model there with 'ckpt push'."
            )
        trust.refuse_unsigned(os.fspath(source))
        return _copy_folder(Folder.at(source, options), destination, target, over=over)
    copied: list[str] = []
    with closing(Copies(origin, target)) as copies:
        for _ in range(_RESCANS):
            selected = _select(origin, names, step)
            for manifest in selected:
                _refuse_other_checkpoint(target, manifest)
            copied = _copy_intact(copies, selected, trust, shown or origin.url) if selected else []
            if copied or pointed_at:
                break
            names = [found.name for found in catalog.scan(origin)]  # retention may have replaced them by newer ones
    if not copied:
        gone = (
            f"another process removed {selected[0].name} before ckpt could copy it"
            if selected
            else "none was committed"
        )
        raise MissingError(f"{origin.url} has no checkpoint to copy: {gone}.")
    say(f"copied {', '.join(copied)} to {target.url}")
    return f"{target.url.rstrip('/')}/{copied[0]}" if len(names) == 1 or step is not None else target.url


def _with_shards(folder: Folder, file: str) -> Folder:
    """The folder with this file alone; of an index, with its shards too."""
    shard = re.compile(re.escape(file.removesuffix(f"{SUFFIX}{INDEX_SUFFIX}")) + rf"-\d+-of-\d+{re.escape(SUFFIX)}")
    found = {path: size for path, size in folder.files.items() if path == file or shard.fullmatch(path)}
    return replace(folder, files=found)


def _target_options(destination: Place, of_source: Options, options: Options, token: str | None) -> Options:
    """Of the options of two URLs, those of the Hub are its own: it takes no credentials of S3, nor the other way."""
    if not os.fspath(destination).startswith("hub://"):
        return options
    given = settings(options)
    if of_source is not None:
        given = {name: value for name, value in given.items() if name == "deadline"}
    return given if token is None else {**given, "token": token}


def _select(storage: Storage, names: list[str], step: int | None) -> list[Manifest]:
    """The checkpoints to copy, the oldest first. Of two of a step, the newer."""
    found = [catalog.find(storage, name) for name in names]
    if step is not None:
        of_step = [checkpoint for checkpoint in found if checkpoint.step == step]
        if not of_step:
            committed = [checkpoint for checkpoint in found if checkpoint.committed]
            known = ", ".join(f"{checkpoint.name} (step {checkpoint.step})" for checkpoint in committed) or "none"
            raise MissingError(f"{storage.url} has no checkpoint for step {step}. It has: {known}.")
        found = of_step[:1]
    if len(found) == 1 and found[0].problem is not None and not isinstance(found[0].problem, MissingError):
        raise found[0].problem
    return [checkpoint.manifest for checkpoint in reversed(found) if checkpoint.manifest is not None]


def _copy_intact(copies: Copies, manifests: list[Manifest], trust: Trust, shown: str) -> list[str]:
    """Copy checkpoints, and return their names. What was copied of a damaged one is removed; an error names them all.

    Those that a run has removed since they were listed are skipped, with a message.
    """
    copies.open_target([manifest.name for manifest in manifests if _has_begun(copies.target, manifest)])
    copied, damaged, kind = [], [], DamagedError
    with reading(copies.source, manifests[-1].name):  # retention must not remove the newest meanwhile
        for name in [manifest.name for manifest in manifests]:
            try:
                if _copied(copies, name, trust):
                    copied.append(name)
                else:
                    say(f"skipped {name}: another process has removed it from {shown} in the meantime")
            except DamagedError as error:
                why = deletion.remove_uncommitted(copies.target, name)
                left = f" What was copied of it {why}" if why else ""
                damaged.append(one_line(f"{error}{left}"))
                kind = type(error)
    if damaged:
        raise kind(f"ckpt could not copy all of {shown}: {' '.join(damaged)}")
    return copied


def _copied(copies: Copies, name: str, trust: Trust) -> bool:
    with reading(copies.source, name) as manifest:
        if manifest is None:
            return False
        manifest = trust.accepted(manifest)
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
        raise DamagedError(f"an earlier copy, {target.url}/{name}, is damaged: {'; '.join(found.problems)}.")


def _has_begun(target: Storage, manifest: Manifest) -> bool:
    """Whether a copy is there, complete, interrupted or older: the files there are then the checkpoint's own."""
    known = catalog.find(target, manifest.name).manifest
    mark = read_marker(target, manifest.name)
    return known is not None or (mark is not None and mark.id == manifest.id)


def _refuse_other_checkpoint(target: Storage, manifest: Manifest) -> None:
    """Refuse to copy over another run's checkpoint. One that this run has replaced since is brought up to date."""
    known = catalog.find(target, manifest.name).manifest
    is_older = known is not None and known.run == manifest.run and known.sequence < manifest.sequence
    if known is not None and known.id != manifest.id and not is_older:
        raise ConfigError(
            f"{target.url} already has a different checkpoint named {manifest.name!r}, which ckpt does not overwrite. "
            "Choose another destination."
        )


def _refuse_other_files(target: Storage, manifest: Manifest) -> None:
    """Refuse a folder with files that are no copy: those of the same name and size would count as copied."""
    if any(True for _ in target.list(manifest.name)):
        raise ConfigError(
            f"{target.url}/{manifest.name} has files that do not belong to this checkpoint. Remove the files, or "
            "choose another destination."
        )


def _copy_folder(folder: Folder, destination: Place, target: Storage, *, over: bool) -> str:
    """Copy files as they are. On a local disk they appear together, elsewhere one by one."""
    if not folder.files:
        raise MissingError(f"there is nothing to pull at {folder.where}.")
    if isinstance(target, LocalStorage):
        with atomic_folder(destination, over=over) as new:
            _copy_plain_files(folder, LocalStorage(new))
    else:
        _copy_plain_files(folder, target)
    files = "1 file" if len(folder.files) == 1 else f"{len(folder.files)} files"
    say(f"copied {files} to {target.url}, without verifying: there was no manifest")
    return target.url


def _copy_plain_files(folder: Folder, target: Storage) -> None:
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


_HUB = "hub://"


def pull(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    step: int | None = None,
    revision: str | None = None,
    token: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    verify_key: KeySource | None = None,
    require_signed: bool | str = False,
) -> str:
    """Copy a checkpoint, a root, a folder or a Hub repository to another place.

    `pull` copies each checkpoint into its own folder below `destination`, and a run can resume from the copy. The
    folder appears only when the copy is complete and matches its hashes. If a copy is interrupted, the next `pull`
    continues it. ckpt copies files that don't belong to a checkpoint unchanged. `pull` needs little memory.

    ckpt reads the Hub through Hugging Face's cache. ckpt does not fetch cached files again, and uses the cache alone if
    it can't reach the Hub.

    Args:
        source: `user/repo`, unless that is a folder on this machine; `hub://user/repo@revision/path`; or any other path
            or URL of a checkpoint, a root with all its checkpoints, another folder, or a file.
        destination: A path or URL. Other files there stay unchanged.
        step: From a root, copy only the checkpoint of this step; None: all.
        revision: A branch, tag or commit on the Hub.
        token: A token for the Hub, on either side; None: `HF_TOKEN` or a login.
        storage_options: For URLs on both sides; if one side is on the Hub, for the other side.
        verify_key: As in `Signing`.
        require_signed: Don't copy checkpoints that none of these keys has signed, or files without a manifest.

    Returns:
        The URL of the copy.

    Raises:
        MissingError: The source has nothing to copy, or no such step.
        DamagedError: Some files do not match their hashes, in the source or in the copy.
        LockedError: A run is writing to the destination.
    """
    trust = open_trust(verify_key, required=require_signed)
    where, destination = path_text(source, "the source"), path_text(destination, "the destination")
    if _is_on_the_hub(where):
        storage = HubStorage(_with_revision(where, revision), token=token)
        return _pull_from_hub(storage, destination, step, storage_options, trust, token)
    if revision or (token and not destination.startswith(_HUB)):
        raise ConfigError(f"revision= and token= are for the Hub: write hub://user/repo, not {where}.")
    return transfer(where, destination, step=step, options=storage_options, token=token, trust=trust)


def _is_on_the_hub(where: str) -> bool:
    """`user/repo` is a repository, unless it is a folder here; a path may also begin with a slash or a dot."""
    if where.startswith(_HUB):
        return True
    if "://" in where or "::" in where or where.startswith(("/", ".")) or os.path.exists(where):
        return False
    refuse_broken_url(where)
    return True


def _pull_from_hub(
    storage: HubStorage,
    destination: str,
    step: int | None,
    options: Mapping[str, Any] | None,
    trust: Trust,
    token: str | None,
) -> str:
    if "://" not in destination:
        destination = disk_path(destination, "the copy")
    offline = unreachable(storage.repo)
    top = f"{storage.folder}/" if storage.folder else ""
    if step is None:
        found = fetched(storage.repo, [f"{top}*"] if top else None, offline) / top
    else:
        found = _checkpoint(storage.repo, top, step, offline)
    if not any(path.is_file() for path in found.rglob("*")):
        raise MissingError(f"there is nothing to pull at {storage.url}.")
    copied = transfer(found, destination, options=options, token=token, trust=trust, shown=storage.url, over=True)
    others = _others(found) if "://" not in destination and not trust.required else None
    if others is not None and others.files and step is None:
        with atomic_folder(destination, over=True) as folder:
            _copy_plain_files(others, LocalStorage(folder))
    return copied


def _others(folder: Path) -> Folder:
    """The files of a repository that belong to no checkpoint in it: its card, for example."""
    top = Folder.at(folder)
    own = {os.path.dirname(path) for path in top.files if path.endswith(f"/{FILE_NAME}") or path == FILE_NAME}
    rest = {path: size for path, size in top.files.items() if os.path.dirname(path) not in own}
    return replace(top, files=rest if own else {})


def _with_revision(repo_id: str, revision: str | None) -> str:
    user, *words = repo_id.removeprefix("hub://").split("/")
    if revision and words:
        words[0] = f"{words[0].partition('@')[0]}@{quote(revision, safe='')}"
    return "/".join([user, *words])


def _checkpoint(repo: HubRepo, top: str, step: int, offline: TransientError | None) -> Path:
    """The checkpoint of a step in the cache, found by its manifest, whatever its folder is named.

    Of two of a step, the newer.
    """
    folder = fetched(repo, [f"{top}*{FILE_NAME}"], offline)
    found = {path.parent: _manifest(path) for path in sorted((folder / top).rglob(f"*/{FILE_NAME}"))}
    of_step = {path: manifest for path, manifest in found.items() if manifest is not None and manifest.step == step}
    if not of_step:
        there = {path.relative_to(folder).as_posix(): manifest.step for path, manifest in found.items() if manifest}
        known = ", ".join(f"{name} (step {number})" for name, number in there.items()) or "none"
        raise MissingError(f"{repo.url} has no checkpoint for step {step}. It has: {known}.")
    chosen = max(of_step, key=lambda path: (of_step[path].sequence, of_step[path].created))
    return fetched(repo, [f"{chosen.relative_to(folder).as_posix()}/*"], offline) / chosen.relative_to(folder)


def _manifest(path: Path) -> Manifest | None:
    """The manifest at a path; None if there is none, or it is another tool's file of that name, or damaged."""
    try:
        with path.open("rb") as file:
            return Manifest.from_bytes(file.read(LARGEST_DOCUMENT), path.as_posix())
    except (CheckpointError, OSError):
        return None

"""`pull`: copy a repository of the Hub through Hugging Face's cache, or anything else with `transfer`.

Imports no torch, for the command line.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ckpt.errors import CheckpointError, ConfigError, DamagedError, LockedError, MissingError, TransientError
from ckpt.export.folders import atomic_folder
from ckpt.formats.native.manifest import FILE_NAME, STATE, Manifest
from ckpt.root import catalog
from ckpt.root.keys import KeySource
from ckpt.root.trust import Trust, open_trust
from ckpt.root.verify import verify_checkpoint
from ckpt.storage import HubStorage, disk_path, open_storage
from ckpt.storage.base import LARGEST_DOCUMENT
from ckpt.storage.hub.download import fetched, unreachable
from ckpt.storage.hub.repo import HubRepo
from ckpt.storage.urls import refuse_broken_url
from ckpt.tools.publish_copies import another_by_that_name
from ckpt.tools.transfer import transfer
from ckpt.util.console import say
from ckpt.util.option_values import path_text

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
    require_signed: bool = False,
) -> str:
    """Copy a repository, or what is at a URL or in a folder, to another place.

    A checkpoint becomes a folder below `destination`, from which a run can resume. Each appears when it is complete and
    matches its hashes; an interrupted copy is continued. Other files are copied as they are. Little is held in memory.

    Files of the Hub come through Hugging Face's cache: those in it are not fetched again, and are used where the Hub
    cannot be reached.

    Args:
        source: `user/repo`, unless that is a folder here; `hub://user/repo@revision/path`; any other path or URL. A
            checkpoint, or a root.
        destination: A path or URL. Other files there are kept.
        step: Of a root, the checkpoint of this step alone; None: all.
        revision: Of the Hub: a branch, tag or commit.
        token: Of the Hub, on either side; None: `HF_TOKEN` or a login.
        storage_options: For URLs on both sides; where one is on the Hub, for the other.
        verify_key: As for the manager.
        require_signed: Copy neither checkpoints that no such key has signed, nor files without a manifest.

    Returns:
        The URL of the copy.

    Raises:
        MissingError: There is nothing to copy, or no such step.
        DamagedError: Some of it does not match its hashes, there or here.
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
    if "://" in destination or trust.required:  # what is signed is copied by its manifest, and no file more
        return transfer(found, destination, options=options, token=token, trust=trust)
    target, root, names = Path(destination), found, _checkpoint_names(found)
    if (found / FILE_NAME).is_file() and (top or step is not None):
        target, root, names = target / found.name, found.parent, [found.name]
    damaged = _damaged(root, names, trust)
    if target.name in damaged and root != found:
        raise DamagedError(f"{found.name} is damaged in {storage.url} already: {damaged[found.name]}.")
    with _refuse_if_in_use(Path(destination)):
        _refuse_others(root, Path(destination), [name for name in names if name not in damaged])
        _copy_files(found, target, storage.url, without=[root / name for name in damaged])
    if damaged:
        said = "; ".join(f"{name} is damaged: {why}" for name, why in damaged.items())
        raise DamagedError(f"not all of {storage.url} was copied: {said}.")
    return str(target)


def _checkpoint_names(root: Path) -> list[str]:
    """The checkpoints in a folder, also those whose manifest is damaged; not folders with another tool's manifest."""
    found = sorted(path.parent for path in root.glob(f"*/{FILE_NAME}"))
    return [path.name for path in found if _manifest(path / FILE_NAME) or (path / STATE).exists()]


def _damaged(root: Path, names: list[str], trust: Trust) -> dict[str, str]:
    """Those that are not as their manifests say, and why."""
    found = [verify_checkpoint(open_storage(root), name, trust) for name in names]
    return {each.name: "; ".join(each.problems) for each in found if each.is_fault}


def _refuse_others(root: Path, destination: Path, names: list[str]) -> None:
    """Refuse to copy over another run's checkpoint. One that this run has replaced since is brought up to date."""
    for name in names:
        new, old = _manifest(root / name / FILE_NAME), _manifest(destination / name / FILE_NAME)
        is_newer = new is not None and old is not None and new.run == old.run and new.sequence > old.sequence
        if new is not None and old is not None and new.id != old.id and not is_newer:
            raise another_by_that_name(open_storage(destination), name)


def _with_revision(repo_id: str, revision: str | None) -> str:
    user, *words = repo_id.removeprefix("hub://").split("/")
    if revision and words:
        words[0] = f"{words[0].partition('@')[0]}@{quote(revision, safe='')}"
    return "/".join([user, *words])


def _checkpoint(repo: HubRepo, top: str, step: int, offline: TransientError | None) -> Path:
    """The checkpoint of a step in the cache, found by its manifest, whatever its folder is named.

    Of two of a step, the newer: it was saved at the end of the epoch.
    """
    folder = fetched(repo, [f"{top}*{FILE_NAME}"], offline)
    found = {path.parent: _manifest(path) for path in sorted((folder / top).rglob(f"*/{FILE_NAME}"))}
    of_step = {path: manifest for path, manifest in found.items() if manifest is not None and manifest.step == step}
    if not of_step:
        there = {path.relative_to(folder).as_posix(): manifest.step for path, manifest in found.items() if manifest}
        known = ", ".join(f"{name} (step {number})" for name, number in there.items()) or "none"
        raise MissingError(f"{repo.url} has no checkpoint of step {step}. There are: {known}.")
    chosen = max(of_step, key=lambda path: (of_step[path].sequence, of_step[path].created))
    return fetched(repo, [f"{chosen.relative_to(folder).as_posix()}/*"], offline) / chosen.relative_to(folder)


def _manifest(path: Path) -> Manifest | None:
    """The manifest at a path; None if there is none, or it is another tool's file of that name, or damaged."""
    try:
        with path.open("rb") as file:
            return Manifest.from_bytes(file.read(LARGEST_DOCUMENT), path.as_posix())
    except (CheckpointError, OSError):
        return None


@contextmanager
def _refuse_if_in_use(directory: Path) -> Iterator[None]:
    """Hold a root, or refuse one that a run writes to: what it saved while files are copied would be lost."""
    with ExitStack() as held:
        if any(directory.glob(f"*/{FILE_NAME}")):
            try:
                held.enter_context(open_storage(directory).lock(catalog.LOCK))
            except LockedError as error:
                raise LockedError(
                    f"a run writes to {directory}: {error} Pull into another folder, or wait until it has ended."
                ) from None
        yield


def _copy_files(source: Path, directory: Path, where: str, without: Collection[Path] = ()) -> None:
    files = [path for path in sorted(source.rglob("*")) if path.is_file() and path.parent not in without]
    if not files:
        raise MissingError(f"there is nothing to pull at {where}.")
    with atomic_folder(directory, over=True) as folder:
        for path in files:
            target = folder / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    say(f"pulled {len(files)} files into {directory}")

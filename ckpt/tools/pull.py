"""What lies elsewhere, on the Hub or at any URL, is brought into a folder or to another URL.

Imports no torch: a shell asks for it too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ckpt.errors import CheckpointError, ConfigError, DamagedError, LockedError, MissingError, TransientError
from ckpt.export.folders import atomic_folder
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.root import catalog
from ckpt.root.verify import verify
from ckpt.storage import HubStorage, open_storage
from ckpt.storage.hub.download import fetched, unreachable
from ckpt.storage.hub.repo import HubRepo
from ckpt.tools.transfer import bring
from ckpt.util.console import say


def pull(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    step: int | None = None,
    revision: str | None = None,
    token: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Copy a repository (`user/repo`), or what is at a URL, to a folder or another URL, and return where it is.

    A checkpoint becomes a folder below `destination`, from which a run can resume: the one that `source` names, or of a
    root that of `step`, or all. Each appears when all of it is there and matches its hashes; one that was cut off is
    gone on with. Other files are copied as they are. Little is held in memory. `storage_options` are for URLs on both
    sides.

    What comes from the Hub (`hub://user/repo@revision/path`) comes through Hugging Face's cache: what is in it is not
    fetched again, and where the Hub cannot be reached it is taken from there. Other files in a folder stay; a root that
    a run is writing to is refused.
    """
    where = os.fspath(source)
    if _is_on_the_hub(where):
        return _pull_from_hub(HubStorage(_rest(where, revision), token=token), destination, step, storage_options)
    if revision or token:
        raise ConfigError(f"revision= and token= are for the Hub, and {where} is not there.")
    return bring(where, destination, step=step, options=storage_options)


def _is_on_the_hub(where: str) -> bool:
    """Plain words are the name of a repository; a path begins with a slash or a dot."""
    return where.startswith("hub://") or not ("://" in where or where.startswith(("/", ".")))


def _pull_from_hub(
    storage: HubStorage, destination: str | os.PathLike[str], step: int | None, options: Mapping[str, Any] | None
) -> str:
    offline = unreachable(storage.repo)
    top = f"{storage.folder}/" if storage.folder else ""
    if step is None:
        found = fetched(storage.repo, [f"{top}*"] if top else None, offline) / top
    else:
        found = _checkpoint(storage.repo, top, step, offline)
    if "://" in os.fspath(destination):
        return bring(found, destination, options=options)
    target = Path(destination)
    if (found / FILE_NAME).is_file() and (top or step is not None):
        target = Path(destination, found.name)
        if wrong := verify(found)[found.name]:
            raise DamagedError(f"{found.name} is damaged in {storage.url} already: {'; '.join(wrong)}.")
    with _unused(Path(destination)):
        _copy(found, target, storage.url)
    return str(target)


def _rest(repo_id: str, revision: str | None) -> str:
    user, *words = repo_id.removeprefix("hub://").split("/")
    if revision and words:
        words[0] = f"{words[0].partition('@')[0]}@{quote(revision, safe='')}"
    return "/".join([user, *words])


def _checkpoint(repo: HubRepo, top: str, step: int, offline: TransientError | None) -> Path:
    """The checkpoint of a step in the cache, by what the manifests say, whatever the folders are called.

    Of two of a step, the newer one: it is of the end of its epoch.
    """
    folder = fetched(repo, [f"{top}*{FILE_NAME}"], offline)
    found = {path.parent: _manifest(path) for path in sorted((folder / top).rglob(f"*/{FILE_NAME}"))}
    of_step = {path: one for path, one in found.items() if one is not None and one.step == step}
    if not of_step:
        there = {path.relative_to(folder).as_posix(): one.step for path, one in found.items() if one}
        known = ", ".join(f"{name} (step {number})" for name, number in there.items()) or "none"
        raise MissingError(f"{repo.url} has no checkpoint of step {step}. There are: {known}.")
    chosen = max(of_step, key=lambda path: (of_step[path].sequence, of_step[path].created))
    return fetched(repo, [f"{chosen.relative_to(folder).as_posix()}/*"], offline) / chosen.relative_to(folder)


def _manifest(path: Path) -> Manifest | None:
    """The manifest at a path; none if it is another tool's file of that name, or damaged."""
    try:
        return Manifest.from_bytes(path.read_bytes(), path.as_posix())
    except CheckpointError:
        return None


@contextmanager
def _unused(directory: Path) -> Iterator[None]:
    """Refuse a root that a run writes to: what it saves while files are copied would be lost."""
    with ExitStack() as held:
        if any(directory.glob(f"*/{FILE_NAME}")):
            try:
                held.enter_context(open_storage(directory).lock(catalog.LOCK))
            except LockedError as error:
                raise LockedError(
                    f"a run writes to {directory}: {error} Pull into another folder, or wait until it has ended."
                ) from None
        yield


def _copy(source: Path, directory: Path, where: str) -> None:
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    if not files:
        raise MissingError(f"there is nothing to pull at {where}.")
    with atomic_folder(directory, over=True) as folder:
        for path in files:
            target = folder / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    say(f"pulled {len(files)} files into {directory}")

"""Downloads into Hugging Face's cache: verified by their hashes, and usable without the network.

Does not import torch: shell commands use it too.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ckpt.errors import DamagedError, TransientError
from ckpt.storage.hub.repo import SLACK, HubFile, HubRepo, bounded_answers, client_bars, hashed_like, pieces_of
from ckpt.util.checked_json import is_relative
from ckpt.util.console import progress_bar
from ckpt.util.threads import in_parallel

_HASHED = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # the names of blobs: git's hash, or sha256 of large files
_AT_ONCE = 8
_AGAIN = 2  # as often a file is received, where a connection failed in the middle and the server knows no ranges
_log = logging.getLogger("ckpt")


def unreachable(repo: HubRepo) -> TransientError | None:
    """Why the Hub cannot be reached; None if it can. Raises if there is no such repository or revision."""
    try:
        repo.head()
    except TransientError as error:
        return error
    return None


def fetched(repo: HubRepo, patterns: Sequence[str] | None, offline: TransientError | None) -> Path:
    """The folder in the cache with the files that match, all of them intact. If none match, it may not exist.

    Missing files are downloaded. If the Hub cannot be reached, the cached files are used, with a message.
    """
    if offline is None:
        return _downloaded(repo, patterns)
    folder = _cached(repo, patterns, offline)
    _log.warning("can't reach the Hub, so ckpt uses commit %s of %s from the cache", folder.name[:8], repo.url)
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    _verify({folder / name: _named_hash(folder / name) for name in _matching(names, patterns)}, folder.name)
    return folder


def _downloaded(repo: HubRepo, patterns: Sequence[str] | None) -> Path:
    """Files of one commit: the first is asked for by the branch, so that the cache knows where that stands."""
    from huggingface_hub import constants

    while True:
        commit = repo.head()
        files = repo.files(commit)
        if odd := [path for path in files if not is_relative(path)]:
            raise DamagedError(
                f"ckpt does not read {repo.url}, because a file's name points outside the repository: {odd[0]!r}."
            )
        chosen = [files[path] for path in _matching(files, patterns)]
        with client_bars(show=sys.stderr.isatty()):
            found = [_download(repo, file, repo.revision) for file in chosen[:1]]
            folder = _snapshot(found[0], chosen[0].path) if chosen else Path(constants.HF_HUB_CACHE, commit)
            if folder.name == commit:
                rest = [(file, commit) for file in chosen[1:]]
                found += in_parallel(lambda one: _download(repo, *one), rest, _AT_ONCE, "ckpt-download")
                break  # or somebody has committed meanwhile
    _verify(dict(zip(found, chosen, strict=True)), commit)
    return folder


def _download(repo: HubRepo, file: HubFile, revision: str) -> Path:
    """A file in the cache; not asked for again if it is there.

    The Hub cannot fill the disk with more than it has listed. Xet checks what it gets by a hash of its own.
    """
    from huggingface_hub import hf_hub_download

    def ask() -> str:
        with bounded_answers(_AGAIN * file.size + SLACK):
            return hf_hub_download(repo.id, file.path, revision=revision, token=repo.token, endpoint=repo.api.endpoint)

    return Path(repo.ask("download", ask, f"{repo.url}/{file.path}"))


def _snapshot(path: Path, name: str) -> Path:
    """The folder of a commit in the cache that has a file by this name."""
    return path.parents[name.count("/")]


def _matching(names: Iterable[str], patterns: Sequence[str] | None) -> list[str]:
    from huggingface_hub.utils import filter_repo_objects

    return list(filter_repo_objects(names, allow_patterns=None if patterns is None else [*patterns]))


def _cached(repo: HubRepo, patterns: Sequence[str] | None, unreachable: TransientError) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            repo.id,
            revision=repo.revision,
            allow_patterns=None if patterns is None else [*patterns],
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        raise TransientError(f"{unreachable} The cache has no complete copy of {repo.url} either.") from None
    return Path(found)


def _named_hash(path: Path) -> HubFile | None:
    """What the cache itself says about a file: it links to a blob that is named by the hash that the Hub lists.

    That blob may link further, to where repositories share large files, by names of another kind.
    """
    name = os.path.basename(os.readlink(path)) if path.is_symlink() else ""
    return HubFile(path.name, path.stat().st_size, name) if _HASHED.fullmatch(name) else None


def _verify(files: Mapping[Path, HubFile | None], commit: str) -> None:
    """Compare files with their sizes and hashes on the Hub; those that have none are named."""
    known = {path: file for path, file in files.items() if file is not None}
    with progress_bar(f"verifying {commit[:8]}", sum(file.size for file in known.values()), in_bytes=True) as advance:
        altered = [path for path, file in known.items() if not _is_intact(path, file, advance)]
    if altered:
        names = "; ".join(os.path.realpath(path) for path in altered)
        raise DamagedError(
            f"these files do not match their hashes: {names}. Remove these files, and ckpt fetches them again."
        )
    if unknown := [str(path) for path in files if path not in known]:
        _log.warning(
            "ckpt could not verify these files, because the cache has no hashes for them: %s", ", ".join(unknown)
        )


def _is_intact(path: Path, file: HubFile, advance: Callable[[float], None]) -> bool:
    size = path.stat().st_size
    return size == file.size and hashed_like(file.oid, pieces_of(path, advance), size) == file.oid

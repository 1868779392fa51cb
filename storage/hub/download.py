"""Downloads into Hugging Face's cache: verified by their hashes, and usable without the network.

Does not import torch: shell commands use it too.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ckpt.errors import DamagedError, TransientError
from ckpt.storage.hub.errors import translated_errors
from ckpt.storage.hub.guard import bounded_progress, guarded_lists
from ckpt.storage.hub.repo import HubRepo, client_bars
from ckpt.util.checked_json import is_relative
from ckpt.util.console import progress_bar

_log = logging.getLogger("ckpt")

_HASHED = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # the names of blobs: git's hash, or sha256 of large files
_PIECE = 8 << 20


def unreachable(repo: HubRepo) -> TransientError | None:
    """Why the Hub cannot be reached; None if it can. Raises if there is no such repository or revision."""
    try:
        repo.head()
    except TransientError as error:
        return error
    return None


def fetched(repo: HubRepo, patterns: Sequence[str] | None, offline: TransientError | None) -> Path:
    """The folder in the cache with the files that match, all of them intact.

    Missing files are downloaded. If the Hub cannot be reached, the cached files are used, with a message.
    """
    if offline is None:
        folder = _downloaded(repo, patterns)
    else:
        folder = _cached(repo, patterns, offline)
        _log.warning(
            "the Hub cannot be reached: %s is taken from the cache, as it was at commit %s", repo.url, folder.name[:8]
        )
    verify(folder, patterns)
    return folder


def _downloaded(repo: HubRepo, patterns: Sequence[str] | None) -> Path:
    from huggingface_hub import snapshot_download

    listed = _listed(repo, patterns)
    with translated_errors("download", repo.url), client_bars(show=sys.stderr.isatty()), guarded_lists():
        endpoint = repo.api.endpoint
        found = snapshot_download(
            repo.id,
            revision=repo.revision,
            allow_patterns=None if patterns is None else [*patterns],
            token=repo.token,
            endpoint=endpoint,
            tqdm_class=bounded_progress(sum(listed.values()), repo.url),
        )
    return Path(found)


def _listed(repo: HubRepo, patterns: Sequence[str] | None) -> dict[str, int]:
    """The sizes of the files that match, as the Hub lists them. Paths that lead out of a folder are refused."""
    from huggingface_hub.utils import filter_repo_objects

    files = repo.files(repo.head())
    if odd := [path for path in files if not is_relative(path)]:
        raise DamagedError(f"{repo.url} has files whose names lead out of it, and is not read: {odd[0]!r}.")
    chosen = filter_repo_objects(files, allow_patterns=None if patterns is None else [*patterns])
    return {path: files[path].size for path in chosen}


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


def verify(folder: Path, patterns: Sequence[str] | None = None) -> None:
    """Compare the matching files of a snapshot with the hashes in the names of their blobs."""
    from huggingface_hub.utils import filter_repo_objects

    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    chosen = filter_repo_objects(files, allow_patterns=None if patterns is None else [*patterns])
    blobs = dict.fromkeys(Path(os.path.realpath(folder / path)) for path in chosen)
    hashed = [blob for blob in blobs if _HASHED.fullmatch(blob.name)]
    with progress_bar(
        f"verifying {folder.name[:8]}", sum(blob.stat().st_size for blob in hashed), in_bytes=True
    ) as advance:
        altered = [blob for blob in hashed if _hash(blob, advance) != blob.name]
    if altered:
        names = "; ".join(str(blob) for blob in altered)
        raise DamagedError(f"these files do not match their hashes: {names}. Remove them, and they are fetched again.")


def _hash(blob: Path, advance: Callable[[float], None]) -> str:
    size = blob.stat().st_size
    hasher = hashlib.sha256() if len(blob.name) == 64 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with open(blob, "rb") as file:
        while piece := file.read(_PIECE):
            hasher.update(piece)
            advance(len(piece))
    return hasher.hexdigest()

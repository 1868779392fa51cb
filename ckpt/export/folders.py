"""Folders with the files of a model, which appear when they are complete."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt.errors import ConfigError, LockedError, StorageError
from ckpt.formats.native.manifest import FILE_NAME
from ckpt.storage import LocalStorage
from ckpt.storage.local.durable_directories import sync_directory
from ckpt.storage.local.storage import TEMPORARY
from ckpt.util.fork_safety import Owner

_WEIGHTS = re.compile(r"((?:adapter_)?model)(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index\.json)?")

_NOT_BESIDE = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
_PREFIX, _NOT_YET_HELD = "ckpt-push-", ".ckpt-push-"


def belongs_beside(name: str) -> bool:
    """Whether a file goes along with other weights: a tokenizer, a configuration, but no weights and no index."""
    return "/" not in name and not name.startswith(".") and not name.endswith(_NOT_BESIDE)


@contextmanager
def appearing(path: str | os.PathLike[str], *, over: bool = False) -> Iterator[Path]:
    """A folder to write into, which takes its place when the context ends well; if anything fails, it is removed.

    One that is there already is refused or, with `over`, replaced, and files of the user's own in it stay. What a
    killed process leaves beside it begins with a dot, and is cleared away by the next try.
    """
    final = Path(os.path.abspath(path))
    if os.path.lexists(final) and not over:
        raise ConfigError(f"{os.fspath(path)} is there already, and stays as it is. Choose another destination.")
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        raise ConfigError(f"{os.fspath(path)} is not a directory of its own. Choose another place for the model.")
    new = final.with_name(f".{final.name}{TEMPORARY}")
    with _explained(final):
        new.mkdir(parents=True, exist_ok=True)
        with _alone(new):
            try:
                _recover(final)
                _clear(new)
                yield new
                _carry_over(final, new)
                sync_directory(new)
                _take_place(new, final)
                sync_directory(final.parent)
            finally:
                shutil.rmtree(new, ignore_errors=True)


def refuse_checkpoints(directory: Path) -> None:
    """Refuse a folder whose files a run may be using."""
    if (directory / FILE_NAME).exists() or any(directory.glob(f"*/{FILE_NAME}")):
        raise ConfigError(f"{directory} holds checkpoints, and stays as it is. Choose another place for the model.")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}.") from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two at once would clear each other away."""
    try:
        with LocalStorage(folder.parent).lock(folder.name):
            yield
    except LockedError:
        raise LockedError(f"another process is writing {folder}. Wait until it has ended.") from None


def _clear(folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _replaced(final: Path) -> Path:
    """Where a folder is while another takes its place."""
    return final.with_name(f".{final.name}.old{TEMPORARY}")


def _recover(final: Path) -> None:
    """Whoever was killed while one folder took the place of another has left the older one aside."""
    old = _replaced(final)
    if old.exists() and not os.path.lexists(final):
        os.rename(old, final)
    shutil.rmtree(old, ignore_errors=True)


def _take_place(new: Path, final: Path) -> None:
    """Put one folder into the place of another, which is removed when that is done."""
    old = _replaced(final)
    try:
        os.rename(final, old)
    except FileNotFoundError:
        os.rename(new, final)
        return
    try:
        os.rename(new, final)
    except BaseException:
        os.rename(old, final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _carry_over(directory: Path, new: Path) -> None:
    """What was there stays, but for what is replaced."""
    old, fresh = ({path.relative_to(top).as_posix() for path in _files(top)} for top in (directory, new))
    for name in old - fresh - outdated(old, fresh):
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(directory / name, new / name, follow_symlinks=False)


def _files(folder: Path) -> Iterator[Path]:
    """Files, and links to whatever they lead to."""
    return (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())


def outdated(old: Collection[str], new: Collection[str]) -> set[str]:
    """Files that would be mixed up with new ones: shards and indexes of an older model of the same kind."""
    kinds = {match.group(1) for path in new if (match := _WEIGHTS.fullmatch(path))}
    found = {path: _WEIGHTS.fullmatch(path) for path in old if path not in new}
    return {path for path, match in found.items() if match and match.group(1) in kinds}


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder among the temporary files, until the context is left. What killed processes left there is removed."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    new = Path(tempfile.mkdtemp(prefix=_NOT_YET_HELD))
    held = _try_lock(new)
    owner = Owner()
    folder = new.with_name(_PREFIX + new.name.removeprefix(_NOT_YET_HELD))
    try:
        os.rename(new, folder)
        yield folder
    finally:
        if owner.is_here:  # a forked child leaves it to its parent
            shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            os.close(held)


def _try_lock(folder: Path) -> int | None:
    """Hold it until the descriptor is closed or this process is gone. None where somebody has it, or locks are not."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(top: Path) -> None:
    """A model is large, and nobody else would remove it."""
    for folder in top.glob(f"{_PREFIX}*"):
        try:
            held = _try_lock(folder)
        except OSError:  # somebody else's, or gone meanwhile
            continue
        if held is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)

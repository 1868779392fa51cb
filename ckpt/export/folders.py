"""Directories for the files of a model: output that appears only when it is complete, and scratch directories."""

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
from ckpt.util.fork_safety import OwnerProcess

_WEIGHTS = re.compile(r"((?:adapter_)?model)(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index\.json)?")

_WEIGHT_SUFFIXES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
_PREFIX, _UNLOCKED_PREFIX = "ckpt-push-", ".ckpt-push-"


def belongs_beside(name: str) -> bool:
    """True for files that accompany weights, such as a tokenizer or a configuration; False for weights and indexes."""
    return "/" not in name and not name.startswith(".") and not name.endswith(_WEIGHT_SUFFIXES)


@contextmanager
def atomic_folder(path: str | os.PathLike[str], *, over: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` on success, and removed on an error.

    An existing folder is refused or, with `over`, replaced; files in it that the new one does not have are kept, except
    weights of an older model. The name of the temporary folder begins with a dot: the next call removes what a killed
    process left.
    """
    final = Path(os.path.abspath(path))
    if os.path.lexists(final) and not over:
        raise ConfigError(f"{os.fspath(path)} is there already, and is kept as it is. Choose another destination.")
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        raise ConfigError(f"{os.fspath(path)} is not a directory of its own. Choose another place for the model.")
    new = final.with_name(f".{final.name}{TEMPORARY}")
    with _as_storage_error(final):
        new.mkdir(parents=True, exist_ok=True)
        with _locked(new):
            try:
                _recover(final)
                _empty(new)
                yield new
                _carry_over(final, new)
                sync_directory(new)
                _swap_in(new, final)
                sync_directory(final.parent)
            finally:
                shutil.rmtree(new, ignore_errors=True)


def refuse_checkpoints(directory: Path) -> None:
    """Refuse a folder whose files a run may be using."""
    if (directory / FILE_NAME).exists() or any(directory.glob(f"*/{FILE_NAME}")):
        raise ConfigError(f"{directory} holds checkpoints, and is kept as it is. Choose another place for the model.")


@contextmanager
def _as_storage_error(path: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}.") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder: two processes would remove each other's files."""
    try:
        with LocalStorage(folder.parent).lock(folder.name):
            yield
    except LockedError:
        raise LockedError(f"another process is writing {folder}. Wait until it has ended.") from None


def _empty(folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _set_aside_path(final: Path) -> Path:
    """The path to which a folder is renamed while another replaces it."""
    return final.with_name(f".{final.name}.old{TEMPORARY}")


def _recover(final: Path) -> None:
    """Undo a replacement that a kill interrupted between its two renames."""
    old = _set_aside_path(final)
    if old.exists() and not os.path.lexists(final):
        os.rename(old, final)
    shutil.rmtree(old, ignore_errors=True)


def _swap_in(new: Path, final: Path) -> None:
    """Rename `new` to `final`; a folder that was there is removed afterwards."""
    old = _set_aside_path(final)
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
    """Link the files of the old folder into the new one, except those that are replaced or outdated."""
    old, fresh = ({path.relative_to(top).as_posix() for path in _files(top)} for top in (directory, new))
    for name in old - fresh - outdated_weights(old, fresh):
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(directory / name, new / name, follow_symlinks=False)


def _files(folder: Path) -> Iterator[Path]:
    """Files and symbolic links, also links to directories."""
    return (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())


def outdated_weights(old: Collection[str], new: Collection[str]) -> set[str]:
    """Files that readers would mix up with the new ones: shards and indexes of an older model of the same kind."""
    kinds = {match.group(1) for path in new if (match := _WEIGHTS.fullmatch(path))}
    found = {path: _WEIGHTS.fullmatch(path) for path in old if path not in new}
    return {path for path, match in found.items() if match and match.group(1) in kinds}


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary directory, removed when the context ends. Those that killed processes left are removed, too."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    new = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX))
    held = _try_lock(new)
    owner = OwnerProcess()
    folder = new.with_name(_PREFIX + new.name.removeprefix(_UNLOCKED_PREFIX))
    try:
        os.rename(new, folder)
        yield folder
    finally:
        if owner.is_here:  # a forked child leaves the removal to its parent
            shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            os.close(held)


def _try_lock(folder: Path) -> int | None:
    """Lock a directory until the descriptor is closed or this process ends. None if it is locked, or cannot be."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(top: Path) -> None:
    """Remove the scratch directories of processes that were killed: models are large, and nothing else removes them."""
    for folder in top.glob(f"{_PREFIX}*"):
        try:
            held = _try_lock(folder)
        except OSError:  # another user's, or removed meanwhile
            continue
        if held is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)

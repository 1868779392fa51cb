"""Directories for the files of a model: output that appears only when it is complete, and scratch directories."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ckpt.errors import ConfigError, LockedError, StorageError
from ckpt.formats.native.manifest import FILE_NAME
from ckpt.storage import disk_path
from ckpt.storage.local.files import TEMPORARY, sync_directory
from ckpt.util.threads import OwnerProcess

_WEIGHTS = re.compile(r"((?:adapter_)?model)(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index\.json)?")

_WEIGHT_SUFFIXES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
_OLD = ".old"  # in the name of a folder while another one replaces it
_PREFIX, _UNLOCKED_PREFIX = "ckpt-push-", ".ckpt-push-"


def belongs_beside(name: str) -> bool:
    """True for files that accompany weights, such as a tokenizer or a configuration; False for weights and indexes."""
    return "/" not in name and not name.startswith(".") and not name.endswith(_WEIGHT_SUFFIXES)


@contextmanager
def atomic_folder(path: str | os.PathLike[str], *, over: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` on success, and removed on an error.

    An existing folder is refused or, with `over`, replaced; files in it that the new one does not have are kept, except
    weights of an older model. The temporary folder has a name that nobody can guess, which begins with a dot; the next
    call removes what a killed process left.
    """
    final = Path(os.path.abspath(disk_path(path, "the folder")))
    with as_storage_error(final):
        _refuse_place(final, os.fspath(path), over=over)
        final.parent.mkdir(parents=True, exist_ok=True)
        with _new_sibling(final) as new:
            _clear_up(final, new, recover=over)
            yield new
            _carry_over(final, new)
            sync_directory(new)
            _swap_in(new, final)
            sync_directory(final.parent)


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a new file, which gets the name `path` on success, and is removed on an error.

    What is there already is refused, also what another process has written meanwhile.
    """
    final = Path(os.path.abspath(disk_path(path, "the file")))
    if os.path.lexists(final):
        raise ConfigError(
            f"{os.fspath(path)} already exists, and ckpt does not overwrite it. Choose another destination."
        )
    with as_storage_error(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        with _new_sibling(final) as folder:
            _clear_up(final, folder, recover=False)
            yield folder / final.name
            os.link(folder / final.name, final)
            sync_directory(final.parent)


def _refuse_place(final: Path, shown: str, *, over: bool) -> None:
    if os.path.lexists(final) and not over:
        raise ConfigError(f"{shown} already exists, and ckpt does not overwrite it. Choose another destination.")
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        raise ConfigError(f"{shown} is a link, or is not a folder. Choose another place for the model.")
    if os.path.commonpath([final, os.getcwd()]) == str(final):  # the process would be left in a folder that is gone
        raise ConfigError(
            f"{shown} is or contains the current folder, so ckpt can't replace it. Name a new folder "
            "inside the current one."
        )


def refuse_checkpoints(directory: Path) -> None:
    """Refuse a folder whose files a run may be using."""
    if (directory / FILE_NAME).exists() or any(directory.glob(f"*/{FILE_NAME}")):
        raise ConfigError(
            f"{directory} contains checkpoints, which ckpt does not overwrite. Choose another place for the model."
        )


@contextmanager
def as_storage_error(path: Path) -> Iterator[None]:
    """Errors of the system while a folder is written, as a StorageError."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}.") from error


def _sibling(final: Path, kind: str = "") -> Path:
    """A path beside a folder that nobody can guess, and that `_siblings` finds."""
    return final.with_name(f".{final.name}{kind}.{secrets.token_hex(6)}{TEMPORARY}")


def _siblings(final: Path, kind: str = "") -> list[Path]:
    """The directories that earlier calls of this user made beside a folder; whatever else has such a name is not ours.

    The oldest comes first.
    """
    name = re.compile(rf"\.{re.escape(final.name + kind)}\.[0-9a-f]{{12}}{re.escape(TEMPORARY)}")
    with os.scandir(final.parent) as entries:
        named = [entry for entry in entries if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]
    found = [(entry.stat(follow_symlinks=False), Path(entry.path)) for entry in named]
    return [path for status, path in sorted(found, key=lambda each: each[0].st_mtime) if status.st_uid == os.geteuid()]


@contextmanager
def _new_sibling(final: Path) -> Iterator[Path]:
    """A new directory beside a folder, locked while it is used, and removed unless it gets another name."""
    new = _sibling(final)
    os.mkdir(new)  # never what is there already
    with ExitStack() as held:
        held.callback(shutil.rmtree, new, ignore_errors=True)
        with suppress(OSError):  # without locks, nobody removes it either
            descriptor = _try_lock(new)
            if descriptor is None:
                raise _written_by_another(final)
            held.callback(os.close, descriptor)
        yield new


def _clear_up(final: Path, own: Path, *, recover: bool) -> None:
    """Remove what killed processes left beside a folder. Two at work on it would remove each other's files."""
    for left in _siblings(final):
        if left != own and not _remove_unlocked(left):
            raise _written_by_another(final)
    for old in reversed(_siblings(final, _OLD)) if recover else ():
        if not os.path.lexists(final):  # killed between the two renames that replace it
            os.rename(old, final)
        shutil.rmtree(old, ignore_errors=True)


def _written_by_another(final: Path) -> LockedError:
    return LockedError(f"another process is writing {final}. Wait until it has ended.")


def _remove_unlocked(folder: Path) -> bool:
    """Remove a directory unless somebody holds it. Returns whether nobody does."""
    try:
        held = _try_lock(folder)
    except FileNotFoundError:
        return True
    except OSError:  # without locks, nobody can tell: it is left
        return True
    if held is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)
    return held is not None


def _swap_in(new: Path, final: Path) -> None:
    """Rename `new` to `final`; a folder that is there is renamed before, and removed afterwards."""
    aside: list[Path] = []
    try:
        while not _is_renamed(new, final):
            aside.append(_sibling(final, _OLD))
            os.rename(final, aside[-1])
    except BaseException:
        if aside and not os.path.lexists(final):
            os.rename(aside[-1], final)
        raise
    for old in aside:
        shutil.rmtree(old, ignore_errors=True)


def _is_renamed(new: Path, final: Path) -> bool:
    try:
        os.rename(new, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


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
    held = None
    with suppress(OSError):  # without locks, nobody removes it either
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
    """Lock a directory until the descriptor is closed or this process ends. None if it is locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_abandoned(top: Path) -> None:
    """Remove the scratch directories of processes that were killed: models are large, and nothing else removes them."""
    for folder in top.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # removed meanwhile, or there are no locks
            if os.lstat(folder).st_uid == os.geteuid():
                _remove_unlocked(folder)

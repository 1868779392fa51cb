"""A folder that appears when all of it is there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.errors import ConfigError, LockedError, StorageError
from ckpt.storage import open_storage
from ckpt.storage.local import TEMPORARY, sync_directory


@contextmanager
def whole_folder(path: str | os.PathLike[str]) -> Iterator[str]:
    """A folder to write to. When the context is left it gets its name; if anything fails, it is removed.

    What a killed process leaves has a name that begins with a dot, and is cleared away by the next try.
    """
    final = os.path.abspath(os.fspath(path))
    if os.path.lexists(final):
        raise ConfigError(f"{os.fspath(path)} is there already, and stays as it is. Choose another destination.")
    parent, name = os.path.split(final)
    temporary = f".{name}{TEMPORARY}"
    with _explained(final):
        os.makedirs(os.path.join(parent, temporary), exist_ok=True)
    with _alone(parent, temporary):
        folder = os.path.join(parent, temporary)
        try:
            with _explained(final):
                _clear(folder)
            yield folder
            with _explained(final):
                sync_directory(folder)
                os.rename(folder, final)
                sync_directory(parent)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def _alone(parent: str, name: str) -> Iterator[None]:
    """Two at once would clear each other away."""
    try:
        with open_storage(parent).lock(name):
            yield
    except LockedError:
        raise LockedError(f"another process is writing {parent}/{name}. Wait until it has ended.") from None


@contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from error


def _clear(folder: str) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)

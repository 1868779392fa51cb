"""Folders with the files of a model, which appear when they are complete."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt.errors import ConfigError, StorageError
from ckpt.formats.manifest import FILE_NAME

_WEIGHTS = re.compile(r"((?:adapter_)?model)(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index\.json)?")


@contextmanager
def appearing(directory: Path) -> Iterator[Path]:
    """A folder to write into, which takes its place when the context ends well. Files of the user's own in it stay."""
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise ConfigError(f"{directory} is not a directory of its own. Choose another place for the model.")
    new = _beside(directory, "new")
    try:
        new.mkdir(parents=True)
        yield new
        _carry_over(directory, new)
        _take_place(new, directory)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"could not write {directory}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def refuse_checkpoints(directory: Path) -> None:
    """Refuse a folder whose files a run may be using."""
    if (directory / FILE_NAME).exists() or any(directory.glob(f"*/{FILE_NAME}")):
        raise ConfigError(f"{directory} holds checkpoints, and stays as it is. Choose another place for the model.")


def _beside(directory: Path, word: str) -> Path:
    return directory.absolute().with_name(f".{directory.name}.{secrets.token_hex(4)}.{word}.ckpt-tmp")


def _take_place(new: Path, directory: Path) -> None:
    """Put one folder into the place of another, which is removed when that is done."""
    old = _beside(directory, "old")
    try:
        os.rename(directory, old)
    except FileNotFoundError:
        os.rename(new, directory)
        return
    try:
        os.rename(new, directory)
    except BaseException:
        os.rename(old, directory)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _carry_over(directory: Path, new: Path) -> None:
    """What was there stays, but for what is replaced."""
    old = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    fresh = {path.relative_to(new).as_posix() for path in new.rglob("*") if path.is_file()}
    for name in old - fresh - outdated(old, fresh):
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(directory / name, new / name)


def outdated(old: Collection[str], new: Collection[str]) -> set[str]:
    """Files that would be mixed up with new ones: shards and indexes of an older model of the same kind."""
    kinds = {match.group(1) for path in new if (match := _WEIGHTS.fullmatch(path))}
    found = {path: _WEIGHTS.fullmatch(path) for path in old if path not in new}
    return {path for path, match in found.items() if match and match.group(1) in kinds}

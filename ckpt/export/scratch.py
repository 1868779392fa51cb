"""A folder for files that are needed only for a while."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt.util.fork_safety import OwnerProcess

_PREFIX, _NOT_YET_HELD = "ckpt-push-", ".ckpt-push-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder among the temporary files, until the context is left. What killed processes left there is removed."""
    _clear(Path(tempfile.gettempdir()))
    new = Path(tempfile.mkdtemp(prefix=_NOT_YET_HELD))
    held = _hold(new)
    owner = OwnerProcess()
    folder = new.with_name(_PREFIX + new.name.removeprefix(_NOT_YET_HELD))
    try:
        os.rename(new, folder)
        yield folder
    finally:
        if owner.is_here:  # a forked child leaves it to its parent
            shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            os.close(held)


def _hold(folder: Path) -> int | None:
    """Hold it until the descriptor is closed or this process is gone. None where somebody has it, or locks are not."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _clear(top: Path) -> None:
    """A model is large, and nobody else would remove it."""
    for folder in top.glob(f"{_PREFIX}*"):
        try:
            held = _hold(folder)
        except OSError:  # somebody else's, or gone meanwhile
            continue
        if held is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)

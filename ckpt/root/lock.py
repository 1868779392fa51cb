"""The lock on a root: one run at a time writes to it.

Imports no torch: `ckpt prune` takes it too.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from contextlib import ExitStack

from ckpt.errors import LockedError
from ckpt.root.catalog import LOCK
from ckpt.storage import Storage
from ckpt.util.console import utc_now

_PATIENCE = 60.0  # seconds that a run waits for `ckpt prune`
_PAUSE = 0.05
_UNTIL_WRITTEN = 10.0  # seconds that a run waits for the saves of managers that nobody uses any more
_SAVING = "ckpt-save"  # the thread of a save in the background
_PRUNE = "ckpt prune, "  # marks the note of a holder that a run waits for


def lock_root(storage: Storage, held: ExitStack, *, to_prune: bool = False) -> None:
    """Lock the root until the stack is closed. Refused while another run has it.

    A run waits for `ckpt prune`, which holds the lock only for a moment: a job that starts just then must not fail. A
    manager of this process that nobody uses any more, such as that of a notebook's cell that is run again, gives the
    root up.
    """
    kind = _PRUNE if to_prune else ""
    process = f"process {os.getpid()} on {socket.gethostname()}"
    note, patience = f"{kind}{process}, since {utc_now()}.", 0.0 if kind else _PATIENCE
    try:
        try:
            _lock(storage, held, note, patience)
        except LockedError as error:
            if kind or f"{process}, since" not in str(error):
                raise
            _collect_managers()
            _lock(storage, held, note, patience)
    except LockedError as error:
        here = f"{process}, since" in str(error)
        remedy = "That is a StateManager of this process: close() it first" if here else "Wait until it ends or stop it"
        raise LockedError(
            f"another run writes to {storage.url}: {error} {remedy}, or give this run another root."
        ) from None


def _collect_managers() -> None:
    """Let managers that nobody refers to release their locks, when the saves under way are written.

    A manager is in reference cycles, and would be collected some time later.
    """
    deadline = time.monotonic() + _UNTIL_WRITTEN
    saving = [thread for thread in threading.enumerate() if thread.name == _SAVING]
    for thread in saving:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
    gc.collect()


def _lock(storage: Storage, held: ExitStack, note: str, patience: float) -> None:
    deadline = time.monotonic() + patience
    while True:
        try:
            held.enter_context(storage.lock(LOCK, note=note))
            return
        except LockedError as error:
            if _PRUNE not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE)

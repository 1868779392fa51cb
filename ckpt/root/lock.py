"""The lock on a root: one run writes to it at a time.

Imports no torch: a shell takes it too.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack

from ckpt.errors import LockedError
from ckpt.root.catalog import LOCK
from ckpt.storage import Storage
from ckpt.util.clock import utc_now

_PATIENCE = 60.0  # seconds that a run waits for `ckpt prune`
_PAUSE = 0.05
_PRUNE = "ckpt prune, "  # in the note of the lock on a root


def lock_root(storage: Storage, held: ExitStack, *, to_prune: bool = False) -> None:
    """Hold a root for this run until the stack is closed. Refused if another run has it.

    A run waits for `ckpt prune`, which holds a root for a moment only, and must not make a job fail that starts then.
    """
    note = f"{_PRUNE if to_prune else ''}process {os.getpid()} on {socket.gethostname()}, since {utc_now()}."
    deadline = time.monotonic() + (0.0 if to_prune else _PATIENCE)
    try:
        while True:
            try:
                held.enter_context(storage.lock(LOCK, note=note))
                return
            except LockedError as error:
                if _PRUNE not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)
    except LockedError as error:
        raise LockedError(
            f"another run writes to {storage.url}: {error} Wait until it has ended or stop it, or give this run "
            "another root. Within one process, close() the other StateManager first."
        ) from None

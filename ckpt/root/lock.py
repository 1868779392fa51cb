"""The lock on a root: one run at a time writes to it.

Imports no torch: `ckpt prune` takes it too.
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
_PRUNE = "ckpt prune, "  # marks the lock's note, by which a run recognises a holder that it waits for


def lock_root(storage: Storage, held: ExitStack, *, to_prune: bool = False) -> None:
    """Lock the root until the stack is closed. Refused while another run has it.

    A run waits for `ckpt prune`, which holds the lock only for a moment: a job that starts just then must not fail.
    """
    note = f"{_PRUNE if to_prune else ''}process {os.getpid()} on {socket.gethostname()}, since {utc_now()}."
    try:
        _lock(storage, held, note, patience=0.0 if to_prune else _PATIENCE)
    except LockedError as error:
        raise LockedError(
            f"another run writes to {storage.url}: {error} Wait until it has ended or stop it, or give this run "
            "another root. Within one process, close() the other StateManager first."
        ) from None


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

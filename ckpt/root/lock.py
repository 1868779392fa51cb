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

_PATIENCE = 60.0  # seconds that a run waits for `ckpt prune`, or for a rescue that gives way to it
_PAUSE = 0.05
_PRUNE, _RESCUE = "ckpt prune, ", "ckpt rescue, "  # mark the note of a holder that a run waits for


def lock_root(storage: Storage, held: ExitStack, *, to_prune: bool = False, to_rescue: bool = False) -> None:
    """Lock the root until the stack is closed. Refused while another run has it.

    A run waits for `ckpt prune`, which holds the lock only for a moment, and for the rescue of a snapshot in memory,
    which gives way to it: a job that starts just then must not fail.
    """
    kind = _PRUNE if to_prune else _RESCUE if to_rescue else ""
    note = f"{kind}process {os.getpid()} on {socket.gethostname()}, since {utc_now()}."
    try:
        _lock(storage, held, note, patience=0.0 if kind else _PATIENCE)
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
            if not _is_brief(str(error)) or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE)


def _is_brief(held: str) -> bool:
    return _PRUNE in held or _RESCUE in held

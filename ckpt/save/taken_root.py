"""Whether a root can be this run's: asked before a resume changes anything."""

from __future__ import annotations

from contextlib import ExitStack

from ckpt.ranks.consensus import run_on_all_ranks
from ckpt.root.lock import lock_root
from ckpt.save.root_writer import RootWriter


def refuse_taken(writer: RootWriter) -> None:
    """Raise where another run holds a local root, or its lock is none: objects would hold what it cannot continue.

    Every rank makes this call.
    """

    def try_out() -> None:
        if writer.owns_root and not writer.is_held and writer.storage.is_local:
            with ExitStack() as lock:
                lock_root(writer.storage, lock)

    run_on_all_ranks(writer.ranks, "resume() (root)", try_out)

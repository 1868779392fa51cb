"""Takes a root for this run: asked before a resume changes anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ckpt.ranks.consensus import run_on_all_ranks
from ckpt.root.lock import lock_root
from ckpt.save.held_root import EarlyLock
from ckpt.save.root_writer import RootWriter


@contextmanager
def taking(writer: RootWriter) -> Iterator[None]:
    """Raise where another run holds the root, or its lock is none: objects would hold what it cannot continue.

    A remote root stays locked, so that what a load lists there need not be listed again by `RootWriter.hold`. If that
    is not called in this context, the root is released. Every rank makes this call.
    """

    def lock() -> None:
        if not writer.owns_root or writer.is_held:
            return
        with ExitStack() as held:
            lock_root(writer.storage, held)
            if not writer.storage.is_local:
                writer.early = EarlyLock(held.pop_all())

    try:
        run_on_all_ranks(writer.ranks, "resume() (root)", lock)
        yield
    finally:
        early, writer.early = writer.early, None
        if early is not None:
            early.lock.close()

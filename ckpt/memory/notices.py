"""What the memory tier says: snapshots left out, a tier that gives way, and what is lost at the end of a run."""

from __future__ import annotations

import logging
from contextlib import suppress

from ckpt.errors import StorageError
from ckpt.root.catalog import manifests_of_run
from ckpt.save.root_writer import RootWriter

_log = logging.getLogger("ckpt")


def warn_of_unsaved(root: RootWriter, taken_at: int) -> None:
    """Warn if no checkpoint of the run is as new as the snapshot of this step. What cannot be listed is not judged."""
    with suppress(StorageError):
        found = manifests_of_run(root.storage, root.run)
        steps = [int(manifest.progress.get("step", 0)) for manifest in found]
        if max(steps, default=0) < taken_at:
            there = f"step {max(steps):,}" if steps else "none"
            _log.warning(
                "the run ends with step %s in memory alone, which is removed: the newest checkpoint in %s is %s. Call "
                "save_state() at the end of the training.", f"{taken_at:,}", root.storage.url, there,
            )  # fmt: skip


def warn_left_out(every: int) -> None:
    """Once: the snapshot before is still being written, or copied to the next host."""
    _log.warning(
        "a snapshot in memory is left out, as the one before is still being written: Memory(every=%d) is more often "
        "than this machine can. Further ones are counted.", every,
    )  # fmt: skip


def report_off_until(step: int, why: str, *, again: bool) -> None:
    """The tier gives way to the training. A warning the first time."""
    text = "the memory tier is off until step %d: %s. Training and the root are not affected."
    _log.log(logging.INFO if again else logging.WARNING, text, step, why.rstrip("."))

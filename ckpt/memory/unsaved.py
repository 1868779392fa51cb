"""Says what is lost when a run ends with snapshots in memory that are newer than its last checkpoint."""

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

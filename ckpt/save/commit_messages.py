"""What is said of a commit: the line of a save, and the error of one that may not outlive a crash."""

from __future__ import annotations

from ckpt.errors import NotDurableError
from ckpt.formats.native.manifest import Manifest
from ckpt.util.console import format_size


def saved_line(manifest: Manifest, root: str) -> str:
    waited, total = manifest.seconds["blocked"], manifest.seconds["total"]
    times = f"training waited {waited:.2f} s, durable after {total:.2f} s"
    return f"saved {root}/{manifest.name}: {format_size(manifest.size)}, {times}"


def not_durable(manifest: Manifest, root: str, why: NotDurableError) -> NotDurableError:
    return NotDurableError(
        f"{root}/{manifest.name} is committed and can be loaded, but it may not outlive a crash of this machine: {why} "
        "Check the disk, then save again. Until a save succeeds, no older checkpoint is removed."
    )

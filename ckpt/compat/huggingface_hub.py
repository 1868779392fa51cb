"""Private names of huggingface_hub: how a file of a commit has been, or is to be, uploaded."""

from __future__ import annotations

from typing import Any

from ckpt.compat.private import Private

_OPERATION = "huggingface_hub.CommitOperationAdd"
MODE = Private(
    f"{_OPERATION}._upload_mode",
    since="0.34",
    use="whether a file was uploaded by itself (as LFS or Xet object), or goes with the commit",
    without="ckpt cannot tell which files the Hub has already, and sends all with the commit: use small files there.",
)
IGNORED = Private(
    f"{_OPERATION}._should_ignore",
    since="0.34",
    use="whether the repository's .gitignore excludes a file",
    without="A file that the repository's .gitignore excludes is missing from the commit without an error.",
)
UPLOADED = Private(
    f"{_OPERATION}._is_uploaded",
    since="0.34",
    use="a commit of a file that another process has uploaded",
    without="A commit of files that another process has uploaded fails; save again.",
)


def is_separate(addition: Any) -> bool:
    """Whether the Hub has the file as an object of its own."""
    return bool(MODE.of(addition) == "lfs")


def is_ignored(addition: Any) -> bool:
    return bool(IGNORED.of(addition, False))


def mark_uploaded(addition: Any) -> None:
    """As `preupload_lfs_files(free_memory=True)` leaves it, perhaps in another process."""
    for name, value in ((MODE, "lfs"), (IGNORED, False), (UPLOADED, True)):
        name.of(addition)  # names it where it is gone
        setattr(addition, name.name, value)

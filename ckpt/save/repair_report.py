"""What the log says of a file that the disk does not return after the commit of its checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

from ckpt.errors import CkptError
from ckpt.formats.native.manifest import FileRecord
from ckpt.root.catalog import scan
from ckpt.save.committed_files import CommittedFiles, DiskProblem
from ckpt.save.root_writer import RootWriter
from ckpt.storage.base import PageCached
from ckpt.util.filesystem import count_names

_log = logging.getLogger("ckpt")


class Repair(NamedTuple):
    """How a repair has ended. `why`: why the file is not known to be intact now; "" if it is.

    `is_unproven`: it was written again, and nothing is known to be wrong since. `is_damage`: bytes differ or are
    missing.
    """

    why: str = ""
    is_unproven: bool = False
    is_damage: bool = False


@dataclass(frozen=True)
class RepairReport:
    """The messages about one file. To be made before the repair, which gives a linked file an inode of its own."""

    storage: PageCached
    files: CommittedFiles
    record: FileRecord
    is_shared: bool

    @classmethod
    def begin(
        cls, storage: PageCached, files: CommittedFiles, record: FileRecord, problem: DiskProblem
    ) -> RepairReport:
        """Log what was found."""
        place = getattr(storage, "place", None)
        is_shared = place is not None and count_names(f"{place}/{files.key(record)}") > 1
        report = cls(storage, files, record, is_shared)
        _log.error(
            "%s: the disk does not return what was written: %s. Found by reading the checkpoint back after its commit.",
            report._url, problem.text,
        )  # fmt: skip
        return report

    @property
    def _url(self) -> str:
        return f"{self.storage.url}/{self.files.checkpoint}"

    def end(self, repair: Repair, root: RootWriter | None) -> None:
        """Log how the repair has ended."""
        where = f"{self._url}/{self.record.path}"
        if not repair.why:
            _log.warning("%s was written again, and is intact now. Check the disk.%s", where, self._shared())
        elif repair.is_unproven:
            _log.warning(
                "%s was written again, not yet read back: %s. Check the disk, and run `ckpt verify %s`.%s",
                where, repair.why, self._url, self._shared(),
            )  # fmt: skip
        else:
            advice = self._advice(repair, root)
            _log.error("%s is not repaired: %s. %s%s", where, repair.why, advice, self._shared())

    def _shared(self) -> str:
        if not self.is_shared:
            return ""
        return (
            " Older checkpoints share the file that the disk did not return, and are as damaged as before: run "
            f"`ckpt verify {self.storage.url}`."
        )

    def _advice(self, repair: Repair, root: RootWriter | None) -> str:
        """What a resume will do, and what the user should do."""
        if not repair.is_damage:
            return (
                f"A resume that comes to {self._url} stops while it cannot be read: save again, check the disk, or "
                "move that folder away."
            )
        is_mirrored = root is not None and root.mirror is not None and root.mirror.newest is not None
        if is_mirrored or self._has_other_checkpoint(root.damaged if root is not None else set()):
            return f"A resume skips {self._url} and takes the newest intact checkpoint: save again, and check the disk."
        return "No other checkpoint is known to this process: save again now, and check the disk."

    def _has_other_checkpoint(self, damaged: set[str]) -> bool:
        """Whether the root has another one that is not known to be damaged."""
        try:
            names = {checkpoint.name for checkpoint in scan(self.storage) if checkpoint.committed}
        except CkptError:  # there may be some that cannot be read now
            return True
        return bool(names - damaged - {self.files.checkpoint})


def text_of(error: Exception) -> str:
    """The message of an error, with its type if it is none of ckpt's."""
    return str(error) if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"

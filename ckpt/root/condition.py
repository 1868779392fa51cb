"""The condition of a checkpoint, as `ckpt ls` and `ckpt report` say it: one verdict, by what was read. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt.errors import CheckpointError, StorageError, shows_damage
from ckpt.formats.native.manifest import Manifest
from ckpt.root import catalog
from ckpt.root.catalog import Checkpoint, Overview
from ckpt.root.manifest_files import COPY_IS_USED, copy_problems
from ckpt.root.verify import (
    DAMAGED,
    INTACT,
    UNREADABLE,
    files_on_other_hosts,
    problems,
    size_problems,
    without_other_hosts,
)
from ckpt.storage import Storage
from ckpt.util.console import one_line

UNCOMMITTED = "uncommitted"
COMPLETE = "complete"  # all files are there, by size: no byte of them was read


@dataclass(frozen=True)
class Condition:
    """`intact` where every byte was read, `complete` where sizes were compared, `DAMAGED`, `UNREADABLE` or
    `uncommitted`; what is wrong; and the files that other hosts keep, with their hosts."""

    state: str
    problems: tuple[str, ...] = ()
    other_hosts: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong, as far as it was read."""
        return self.state in (COMPLETE, INTACT)


def condition(found: Overview, checkpoint: Checkpoint, *, verify: bool = False) -> Condition:
    """What the listing says, if it has just the files of the checkpoint; else what the manifest says.

    With `verify` every byte is read.
    """
    storage, summary = found.storage, checkpoint.summary
    if summary is None:
        state = DAMAGED if checkpoint.was_committed else UNCOMMITTED
        return Condition(state, (one_line(str(checkpoint.problem)),))
    if checkpoint.flaw and not verify:
        return Condition(DAMAGED, (f"{one_line(checkpoint.flaw)} {COPY_IS_USED}",))
    if not verify and summary.has_all_of(found.sizes(summary.name)):
        return Condition(COMPLETE)
    find_problems = _every_byte if verify else size_problems
    try:
        manifest = catalog.read_manifest(storage, summary.name)
        others = files_on_other_hosts(storage, manifest)
        wrong = find_problems(storage, without_other_hosts(storage, manifest))
    except (StorageError, CheckpointError) as error:
        gone = isinstance(error, CheckpointError) or shows_damage(error)
        return Condition(DAMAGED if gone else UNREADABLE, (one_line(str(error)),))
    return Condition(DAMAGED if wrong else INTACT if verify else COMPLETE, tuple(wrong), others)


def _every_byte(storage: Storage, manifest: Manifest) -> list[str]:
    return copy_problems(storage, manifest.name) + problems(storage, manifest, show=True)

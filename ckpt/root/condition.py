"""The condition of a committed checkpoint, as `ckpt ls` and `ckpt report` say it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from ckpt.errors import CheckpointError, StorageError, shows_damage
from ckpt.root import catalog
from ckpt.root.summary import Summary
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


@dataclass(frozen=True)
class Condition:
    """`intact`, `DAMAGED` or `UNREADABLE`, what is wrong, and the files that other hosts keep, with their hosts."""

    state: str
    problems: tuple[str, ...] = ()
    other_hosts: Mapping[str, str] = field(default_factory=dict)


def condition(storage: Storage, summary: Summary, sizes: Mapping[str, int], *, verify: bool = False) -> Condition:
    """What the listing says (`sizes`), if it has just the files of the checkpoint; else what the manifest says.

    With `verify` every byte is read.
    """
    if not verify and summary.has_all_of(sizes):
        return Condition(INTACT)
    find_problems = partial(problems, show=True) if verify else size_problems
    try:
        manifest = catalog.read_manifest(storage, summary.name)
        others = files_on_other_hosts(storage, manifest)
        wrong = find_problems(storage, without_other_hosts(storage, manifest))
    except (StorageError, CheckpointError) as error:
        gone = isinstance(error, CheckpointError) or shows_damage(error)
        return Condition(DAMAGED if gone else UNREADABLE, (one_line(str(error)),))
    return Condition(DAMAGED if wrong else INTACT, tuple(wrong), others)

"""Everything that a root holds, from one listing: which checkpoints, in which order, and with which files.

Manifests that the index knows are not read. Imports no torch: the command `ckpt` starts without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpt.errors import CheckpointError
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, Manifest
from ckpt.formats.registry import is_checkpoint
from ckpt.root.catalog import by_folder, commit_order, find_listed
from ckpt.root.index import INDEX, Index
from ckpt.root.manifest_files import was_committed
from ckpt.root.summary import Summary
from ckpt.storage import Entry, Storage


@dataclass(frozen=True)
class Outline:
    """A checkpoint as the listing shows it. Without a summary it is not committed or not readable: see `problem`.

    `flaw`: what is wrong with its manifest, if the copy was read in its place."""

    name: str
    summary: Summary | None = None
    problem: CheckpointError | None = None
    flaw: str = ""

    @property
    def was_committed(self) -> bool:
        """Whether it was committed, though its manifest may be damaged or lost."""
        return was_committed(self.problem)


@dataclass(frozen=True)
class Overview:
    """The checkpoints of a root, newest first; those without a readable manifest come last.

    `manifests`: by name, those that were read because the index has not what they say."""

    storage: Storage
    checkpoints: list[Outline]
    index: Index
    files: Mapping[str, Mapping[str, Entry]]  # by folder and path
    manifests: Mapping[str, Manifest] = field(default_factory=dict)

    @classmethod
    def of(cls, storage: Storage, entries: Iterable[Entry] | None = None, known: Index | None = None) -> Overview:
        """`entries`: what `storage.list()` has just returned, if it was called already. `known`: an index of this
        root that was made a moment ago."""
        files = by_folder(storage.list() if entries is None else entries)
        names = [name for name, inside in files.items() if is_checkpoint(name, inside)]
        index = known or (Index.read(storage) if INDEX in files else Index())
        summaries = {name: index.find(name, _manifest_version(files[name])) for name in names}
        read = find_listed(storage, {name: files[name] for name in names if summaries[name] is None})
        outlines = [Outline(name, summary) for name, summary in summaries.items() if summary is not None]
        for checkpoint in read:
            summary = Summary.of(checkpoint.manifest) if checkpoint.manifest else None
            outlines.append(Outline(checkpoint.name, summary, checkpoint.problem, checkpoint.flaw))
            if summary is not None and not checkpoint.flaw:
                index.add(_manifest_version(files[checkpoint.name]), summary)  # listed before it was read
        found = sorted(outlines, key=lambda outline: commit_order(outline.name, outline.summary), reverse=True)
        return cls(storage, found, index, files, {one.name: one.manifest for one in read if one.manifest is not None})

    @property
    def entries(self) -> list[Entry]:
        return [entry for inside in self.files.values() for entry in inside.values()]

    @property
    def committed(self) -> list[Summary]:
        return [outline.summary for outline in self.checkpoints if outline.summary is not None]

    @property
    def lost(self) -> dict[str, CheckpointError]:
        """What was committed and cannot be used, since neither the manifest nor its copy is whole; with the reason."""
        lost = (outline for outline in self.checkpoints if outline.summary is None and outline.was_committed)
        return {outline.name: outline.problem for outline in lost if outline.problem is not None}

    @property
    def to_mend(self) -> list[str]:
        """Names of checkpoints whose manifest is damaged, or whose copy of it is missing or was cut short."""
        readable = (outline for outline in self.checkpoints if outline.summary is not None)
        return [outline.name for outline in readable if outline.flaw or self._lacks_copy(outline.name)]

    def _lacks_copy(self, name: str) -> bool:
        first, second = (self.files.get(name, {}).get(file) for file in (FILE_NAME, COPY_NAME))
        return second is None or first is None or first.size != second.size

    def sizes(self, name: str) -> dict[str, int]:
        """The sizes of the files in a checkpoint's folder, by path."""
        return {path: entry.size for path, entry in self.files.get(name, {}).items()}


def _manifest_version(inside: Mapping[str, Entry]) -> str | None:
    entry = inside.get(FILE_NAME)
    return entry.version if entry is not None else None

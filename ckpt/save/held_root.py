"""A root that this process has locked, with the checkpoints that are committed in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from ckpt.errors import CheckpointError
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.root import deletion
from ckpt.root.catalog import Index, Overview, Summary, find
from ckpt.root.history import History
from ckpt.root.lock import lock_root
from ckpt.root.mirror import MirrorWorker
from ckpt.root.retention import Keep
from ckpt.storage import Staging, Storage


@dataclass
class EarlyLock:
    """The lock of a root that is taken before a load, and what the load has listed there: nobody else changes it."""

    lock: ExitStack
    listed: Overview | None = None


@dataclass
class HeldRoot:
    """The lock of a root, and what the lock makes certain: the checkpoints that are there, newest first."""

    storage: Storage
    lock: ExitStack
    committed: list[Summary]
    lost: Mapping[str, CheckpointError]  # by name: committed, with no manifest that this ckpt can read
    index: Index
    newest: Manifest | None = None  # that this run has committed
    staged: dict[str, Manifest] = field(default_factory=dict)  # by name: to read one would publish what waits for it
    replaced: bool = False  # whether the newest took the place of another, which the history must have
    history: History = field(init=False)

    def __post_init__(self) -> None:
        self.history = History(self.storage)

    @classmethod
    def acquire(
        cls,
        storage: Storage,
        mirror: MirrorWorker | None,
        damaged: Collection[str],
        on_hold: Callable[[], None] | None = None,
        early: EarlyLock | None = None,
    ) -> HeldRoot:
        """Lock the root and its mirror, and remove what crashed saves left. `damaged` checkpoints are not mirrored.

        Refused if another run holds either of them. `on_hold` is called when both are locked. `early`: the root is
        locked already.
        """
        with early.lock if early else ExitStack() as lock:  # if anything below fails, the root is released
            if early is None:
                lock_root(storage, lock)
            found = deletion.sweep(storage, listed=early.listed if early else None)
            found.index.update(storage, {summary.name for summary in found.committed})
            if mirror is not None:
                mirror.start([summary for summary in found.committed if summary.name not in damaged])
            if on_hold is not None:
                on_hold()
            return cls(storage, lock.pop_all(), found.committed, found.lost, found.index)

    def find(self, name: str) -> Manifest | None:
        """The committed manifest of that name, if there is one. Any but the newest is read."""
        known = next((summary for summary in self.committed if summary.name == name), None)
        if known is None:
            return None
        if self.newest is not None and self.newest.id == known.id:
            return self.newest
        manifest = find(self.storage, name).manifest
        if manifest is None or manifest.id != known.id:
            return None
        self.history.add(manifest)  # a save of its name may replace it
        return manifest

    def add(self, manifest: Manifest, version: str | None) -> None:
        """Record a commit. It replaces an older checkpoint of its name. `version`: of its manifest, if it is known."""
        summary = Summary.of(manifest)
        self.newest = manifest
        if isinstance(self.storage, Staging):
            self.staged[manifest.name] = manifest
        for replaced in (known for known in self.committed if known.name == manifest.name):
            self.history.add(replaced)
            self.replaced = True
        self.history.add(manifest)
        self.committed = [summary, *self._others(manifest.name)]
        self.index.add(version, summary)

    def discard(self, name: str) -> None:
        """Record a removal."""
        self.committed = self._others(name)

    def retain(self, keep: Keep | None, damaged: Collection[str]) -> None:
        """Remove what is not to be kept; now and then, store what is left for later listings."""
        if self.replaced:
            self.history.store(self.committed)
            self.replaced = False
        if keep is not None:
            self.committed = deletion.apply_retention(
                keep, self.storage, self.committed, damaged, self.staged, self.history
            )
            self.staged = {one.name: self.staged[one.name] for one in self.committed if one.name in self.staged}
        self.index.update(self.storage, {summary.name for summary in self.committed})

    def _others(self, name: str) -> list[Summary]:
        return [summary for summary in self.committed if summary.name != name]


def remove_checkpoint(storage: Storage, held: HeldRoot | None, name: str) -> None:
    """Remove a checkpoint, unless it is being read. The history of the root keeps what it was."""
    manifest = find(storage, name).manifest
    if manifest is not None:
        (held.history if held else History(storage)).store([manifest])
        if deletion.remove(storage, manifest) and held:
            held.discard(name)


def files_of(storage: Storage, name: str) -> list[str]:
    """The paths of all files in the folder of a checkpoint."""
    return [entry.key.removeprefix(f"{name}/") for entry in storage.list(name)]


def adopt(storage: Storage, manifest: Manifest) -> None:
    """Write the manifest that other hosts have, before the sweep takes this host's files for leftovers."""
    present = files_of(storage, manifest.name)
    if FILE_NAME not in present and any(file.path in present for file in manifest.files):
        storage.write(f"{manifest.name}/{FILE_NAME}", [manifest.to_bytes()])

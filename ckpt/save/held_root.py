"""A root that this process has locked, with the checkpoints that are committed in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from ckpt.errors import VersionError
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.root import deletion
from ckpt.root.lock import lock_root
from ckpt.root.mirror import MirrorWorker
from ckpt.storage import Storage


@dataclass
class HeldRoot:
    """The lock of a root, and what the lock makes certain: the manifests that are there, newest first."""

    lock: ExitStack
    committed: list[Manifest]
    unreadable: Mapping[str, VersionError]  # by name: manifests of a newer version of ckpt

    @classmethod
    def acquire(
        cls,
        storage: Storage,
        mirror: MirrorWorker | None,
        damaged: Collection[str],
        on_hold: Callable[[], None] | None = None,
    ) -> HeldRoot:
        """Lock the root and its mirror, and remove what crashed saves left. `damaged` checkpoints are not mirrored.

        Refused if another run holds either of them. `on_hold` is called when both are locked.
        """
        with ExitStack() as lock:  # if anything below fails, the root is released
            lock_root(storage, lock)
            found = deletion.sweep(storage)
            committed = [checkpoint.manifest for checkpoint in found if checkpoint.manifest is not None]
            problems = {checkpoint.name: checkpoint.problem for checkpoint in found}
            unreadable = {name: problem for name, problem in problems.items() if isinstance(problem, VersionError)}
            if mirror is not None:
                mirror.start([manifest for manifest in committed if manifest.name not in damaged])
            if on_hold is not None:
                on_hold()
            return cls(lock.pop_all(), committed, unreadable)

    def find(self, name: str) -> Manifest | None:
        """The committed manifest of that name, if there is one."""
        return next((manifest for manifest in self.committed if manifest.name == name), None)

    def add(self, manifest: Manifest) -> None:
        """Record a commit. It replaces an older checkpoint of its name."""
        self.committed = [manifest, *self._others(manifest.name)]

    def discard(self, name: str) -> None:
        """Record a removal."""
        self.committed = self._others(name)

    def _others(self, name: str) -> list[Manifest]:
        return [manifest for manifest in self.committed if manifest.name != name]


def files_of(storage: Storage, name: str) -> list[str]:
    """The paths of all files in the folder of a checkpoint."""
    return [entry.key.removeprefix(f"{name}/") for entry in storage.list(name)]


def adopt(storage: Storage, manifest: Manifest) -> None:
    """Write the manifest that other hosts have, before the sweep takes this host's files for leftovers."""
    present = files_of(storage, manifest.name)
    if FILE_NAME not in present and any(file.path in present for file in manifest.files):
        storage.write(f"{manifest.name}/{FILE_NAME}", [manifest.to_bytes()])

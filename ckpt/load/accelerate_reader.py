"""Reads folders that Accelerate wrote like checkpoints: with a manifest, under the keys of a manager's parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.data.progress import Progress
from ckpt.errors import ConfigError, DamagedError
from ckpt.formats.foreign import accelerate
from ckpt.formats.layout import Box
from ckpt.formats.native.manifest import Manifest, digest
from ckpt.formats.registry import ACCELERATE, claims
from ckpt.formats.tensors import copy_into
from ckpt.load.accelerate_state import AccelerateState, ForeignPart, split_name
from ckpt.load.part_tensors import PartTensors
from ckpt.load.reader import CheckpointReader
from ckpt.root.catalog import read_manifest
from ckpt.root.folder import ROOT_ITSELF, Folder, is_foreign
from ckpt.storage import Storage


@dataclass(frozen=True, kw_only=True)
class ForeignManifest(Manifest):
    """Stands for the manifest of a folder that has none."""

    folder: Folder


def read_any(storage: Storage, name: str) -> Manifest:
    """The manifest of a checkpoint, or a `ForeignManifest` where Accelerate wrote it; the root itself has no name."""
    if name:
        try:
            return read_manifest(storage, name)
        except DamagedError:
            if not is_foreign(storage, name):
                raise
    folder = Folder.of_checkpoint(storage, name)
    return ForeignManifest(
        name=folder.name,
        id=f"{ACCELERATE.name}:{folder.name}",
        run=digest(folder.where.encode()),
        sequence=0,
        created="",
        files=(),
        world_size=accelerate.AccelerateCheckpoint(folder).world_size,
        progress=Progress().to_json(),
        origin=ACCELERATE.name,
        folder=folder,
    )


def folder_of(storage: Storage, manifest: Manifest) -> str:
    """The path or URL of a checkpoint."""
    return manifest.folder.where if isinstance(manifest, ForeignManifest) else f"{storage.url}/{manifest.name}"


def foreign_names(storage: Storage) -> list[str]:
    """The folders in the root that Accelerate wrote, the newest first; the name of the root itself is empty."""
    files: dict[str, list[str]] = defaultdict(list)
    for entry in storage.list():
        name, _, rest = entry.key.partition("/")
        files[ROOT_ITSELF].append(entry.key)
        files[name].append(rest)
    if ACCELERATE.name in claims(files[ROOT_ITSELF]):
        return [ROOT_ITSELF]
    found = sorted(name for name, inside in files.items() if ACCELERATE.name in claims(inside))
    if len({split_name(name)[0] for name in found}) > 1:
        raise ConfigError(
            f"{storage.url} holds what Accelerate saved as {', '.join(found)}, and no name says which is the newest. "
            f"Say which: load_state({found[-1]!r})."
        )
    return sorted(found, key=lambda name: split_name(name)[1] or 0, reverse=True)


def open_any(storage: Storage, manifest: Manifest, rank: int, live: Iterable[str]) -> CheckpointReader:
    """The reader of a checkpoint, whoever wrote it. `live` are the keys of the parts to load it into."""
    if isinstance(manifest, ForeignManifest):
        return _AccelerateReader(AccelerateState(manifest.folder, live), manifest, rank)
    return CheckpointReader(storage, manifest, rank)


@dataclass(frozen=True)
class _DeferredRead:
    """A tensor to be read when all have been asked for."""

    size: int
    read: Callable[[], Any]


@dataclass(frozen=True)
class _ForeignTensors:
    """The tensors of a part, read from foreign files straight into their targets."""

    part: ForeignPart
    want: Callable[[_DeferredRead], None]
    ties: Mapping[str, str] = field(default_factory=dict)  # such folders do not say which are tied

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self.part.about(name)

    def tensor(self, name: str) -> torch.Tensor:
        dtype, shape = self.about(name)
        target = torch.empty(shape, dtype=dtype)
        self.fill(name, target, Box((0,) * len(shape), shape))
        return target

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None:
        self.want(_DeferredRead(target.nbytes, lambda: copy_into(self.part.read(name, box), target.detach())))


class _AccelerateReader(CheckpointReader):
    """Reads a folder of Accelerate, which has no hashes to verify."""

    def __init__(self, foreign: AccelerateState, manifest: ForeignManifest, rank: int) -> None:
        self._foreign = foreign
        super().__init__(manifest.folder.storage, manifest, rank)

    def _read_documents(self) -> None:
        self.parts = {key: {"class": "", "state": part.values} for key, part in self._foreign.parts.items()}
        self.own = {}
        self.state = self.rank_state(self.rank if self.rank < self.manifest.world_size else 0)

    def rank_state(self, rank: int) -> dict[str, Any]:
        return self._foreign.rank_state(rank)

    def has_tensors(self, key: str) -> bool:
        return bool(self._foreign.parts[key].tensors)

    @property
    def wanted(self) -> tuple[list[Any], list[Any]]:
        """No transfers: ranks do not read for each other here."""
        return [], []

    def verify_live(self) -> None:
        """There are no hashes to compare with."""

    def _open(self, key: str) -> PartTensors:
        return _ForeignTensors(self._foreign.parts[key], self._asked.append)

    def _read(self, transfers: list[Any], how: Callable[..., None]) -> None:
        with self._bar("loading", transfers) as advance, torch.no_grad():
            for deferred in transfers:
                deferred.read()
                advance(deferred.size)

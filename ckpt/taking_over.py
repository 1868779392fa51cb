"""Checkpoints that Accelerate wrote, as a manager reads its own: under the keys of its parts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.catalog import MARKER, read_manifest
from ckpt.errors import ConfigError, DamagedError
from ckpt.folder import Folder
from ckpt.formats import accelerate
from ckpt.formats.accelerate_random import from_accelerate
from ckpt.formats.blocks import digest
from ckpt.formats.manifest import FILE_NAME, Manifest
from ckpt.formats.native import copy_into, narrowed
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.sharding import Box
from ckpt.formats.values import Encoder, refuse
from ckpt.managed import KINDS
from ckpt.opened import Opened, Tensors
from ckpt.optimizer_names import by_name
from ckpt.progress import Progress
from ckpt.storage import Storage

CUSTOM = "custom"  # objects of the user's own
UNKNOWN_PROGRESS = (
    "Accelerate does not save how many epochs, batches and steps were done: counting begins at 0. Set manager.progress "
    "before the loop if they matter"
)
_NUMBER = re.compile(r"(.*?)(\d+)\D*")


@dataclass(frozen=True, kw_only=True)
class ForeignManifest(Manifest):
    """What a manifest would say of a folder that has none."""

    folder: Folder


@dataclass(frozen=True)
class ForeignPart:
    """The state of a part: values in which tensors stand as references, and the tensors, not read yet."""

    values: Any
    tensors: Mapping[str, PiecedTensor | torch.Tensor]

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self.tensors[name].dtype, tuple(self.tensors[name].shape)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A tensor, or a box of it."""
        tensor = self.tensors[name]
        if isinstance(tensor, PiecedTensor):
            return tensor.read(box or tensor.box)
        return narrowed(tensor, box.ranges) if box else tensor


class Foreign:
    """The state in a folder of Accelerate. `live` are the keys of a manager's parts: the first model of the folder is
    its first model, and so on. Without them parts go by `model`, or `model.0`, `model.1` where there are several."""

    def __init__(self, folder: Folder, live: Iterable[str] = ()) -> None:
        self.saved = accelerate.Saved(folder)
        self.name = os.path.basename(folder.where)
        found = _keyed(self.saved.parts(), list(live))
        with _explained(folder.where, "an optimizer"):
            _name_parameters(found)
        problems: list[str] = []
        self.parts = {key: _encoded(key, tree, problems) for key, tree in found.items()}
        refuse(problems)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """What is a rank's own, as a manager saves it."""
        states = self.saved.random_states(rank)
        with _explained(self.name, "random generators"):
            rng = from_accelerate(states)
        saves = 1 + _number(self.name) if _NUMBER.fullmatch(self.name) else 0
        source = {"step": states.get("step", 0), "sync_gradients": True, "saves": saves, "loaders": {}}
        return {"rng": rng, "generators": {}, "loaders": {}, "source": source}


def kind_of(key: str) -> str:
    """`model` of `model.0`. What was registered by a name of its own is custom."""
    head = key.partition(".")[0]
    return head if head in KINDS else CUSTOM


def _keyed(found: Mapping[str, Mapping[int, Any]], live: list[str]) -> dict[str, Any]:
    parts = {}
    for kind, trees in found.items():
        here = dict(enumerate(key for key in live if kind_of(key) == kind))
        several = len(trees) > 1 or kind in (CUSTOM, "dataloader")
        for number, tree in trees.items():
            parts[here.get(number, f"{kind}.{number}" if several else kind)] = tree
    return parts


def _name_parameters(parts: dict[str, Any]) -> None:
    """Let the state of optimizers be by name. Under FSDP each has a model, and of several that is told by a prefix."""
    models = [key for key in parts if kind_of(key) == "model"]
    optimizers = [key for key in parts if kind_of(key) == "optimizer"]
    for number, key in enumerate(optimizers):
        prefix = f"{models[number].partition('.')[2]}." if 1 < len(models) > number else ""
        parts[key] = by_name(parts[key], prefix)


@contextmanager
def _explained(where: str, what: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{where} does not hold the state of {what}: {type(error).__name__}: {error}.") from error


def _encoded(key: str, tree: Any, problems: list[str]) -> ForeignPart:
    encoder = Encoder(prefix=key, problems=problems)
    return ForeignPart(encoder.encode(tree), encoder.tensors)


def read_any(storage: Storage, name: str) -> Manifest:
    """The manifest of a checkpoint, or what stands for it where Accelerate wrote one; the root itself has no name."""
    if name:
        try:
            return read_manifest(storage, name)
        except DamagedError:
            if not is_foreign(storage, name):
                raise
    folder = _folder(storage, name)
    return ForeignManifest(
        name=os.path.basename(folder.where),
        id=f"{accelerate.NAME}:{os.path.basename(folder.where)}",
        run=digest(folder.where.encode()),
        sequence=0,
        created="",
        files=(),
        world_size=accelerate.Saved(folder).world_size,
        progress=Progress().to_json(),
        origin=accelerate.NAME,
        folder=folder,
    )


def is_foreign(storage: Storage, name: str) -> bool:
    """Whether a folder of the root, or the root itself if it has no name, was written by Accelerate."""
    files = _folder(storage, name).files
    return FILE_NAME not in files and MARKER not in files and accelerate.is_one(files)


def foreign_names(storage: Storage) -> list[str]:
    """The folders in the root that Accelerate wrote, the newest first; the root itself is the one without a name."""
    names = {entry.key.partition("/")[0] for entry in storage.list() if "/" in entry.key}
    if is_foreign(storage, ""):
        return [""]
    found = sorted(name for name in names if is_foreign(storage, name))
    stems = {match.group(1) if (match := _NUMBER.fullmatch(name)) else name for name in found}
    if len(stems) > 1:
        raise ConfigError(
            f"{storage.url} holds what Accelerate saved as {', '.join(found)}, and no name says which is the newest. "
            f"Say which: load_state({found[-1]!r})."
        )
    return sorted(found, key=_number, reverse=True)


def _number(name: str) -> int:
    match = _NUMBER.fullmatch(name)
    return int(match.group(2)) if match else 0


def _folder(storage: Storage, name: str) -> Folder:
    return Folder.listed(storage, f"{name}/" if name else "", f"{storage.url}/{name}".rstrip("/"))


def open_any(storage: Storage, manifest: Manifest, rank: int, live: Iterable[str]) -> Opened:
    """A checkpoint, for the parts of a manager."""
    if isinstance(manifest, ForeignManifest):
        return _TakenOver(Foreign(manifest.folder, live), manifest, rank)
    return Opened(storage, manifest, rank)


@dataclass(frozen=True)
class _Later:
    """A tensor that will be read when all have been asked for."""

    size: int
    read: Callable[[], Any]


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a part that are read from foreign files, straight to where they go."""

    part: ForeignPart
    want: Callable[[_Later], None]

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self.part.about(name)

    def tensor(self, name: str) -> torch.Tensor:
        dtype, shape = self.about(name)
        target = torch.empty(shape, dtype=dtype)
        self.fill(name, target, Box((0,) * len(shape), shape))
        return target

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None:
        self.want(_Later(target.nbytes, lambda: copy_into(self.part.read(name, box), target.detach())))


class _TakenOver(Opened):
    """A folder of Accelerate that is being read. There are no hashes in it that could be compared."""

    def __init__(self, foreign: Foreign, manifest: ForeignManifest, rank: int) -> None:
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
    def wanted(self) -> list[Any]:
        """Nothing that ranks could read for each other."""
        return []

    def verify_live(self) -> None:
        """Nothing to compare with."""

    def _open(self, key: str) -> Tensors:
        return _Tensors(self._foreign.parts[key], self._asked.append)

    def _read(self, transfers: list[Any], how: Callable[..., None]) -> None:
        showing: AbstractContextManager[Callable[[float], None]] = self._bar("loading", transfers)
        with showing as advance, torch.no_grad():
            for one in transfers:
                one.read()
                advance(one.size)

"""A checkpoint that is being read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from ckpt.errors import DamagedError
from ckpt.formats.layout import Box, Layout, is_sharded, layout_of, local_tensor
from ckpt.formats.native.documents import STATE, decode_inline, from_json, rank_document
from ckpt.formats.native.json_values import Decoder
from ckpt.formats.native.manifest import Manifest
from ckpt.formats.native.shard_table import ShardedTensors, ShardTable
from ckpt.formats.native.tensor_file import TensorFile
from ckpt.formats.transfers import Transfer
from ckpt.load.broadcast import Sharing
from ckpt.load.own_tensors import OwnTensors
from ckpt.load.verified_read import read, read_verified, verify
from ckpt.ranks.group import MAIN
from ckpt.root.file_names import own_key, spread_file, whole_file
from ckpt.root.verified_file import VerifiedFile
from ckpt.state.parts import LEFT, Place, SavedTensor
from ckpt.storage import Storage
from ckpt.util.console import PROGRESS_MIN_BYTES, progress_bar


class Tensors(Protocol):
    """The tensors of a part: in one file, or spread over many."""

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]: ...

    def tensor(self, name: str) -> torch.Tensor: ...

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None: ...


@dataclass(frozen=True)
class _WholeTensors:
    """Tensors that lie whole in files."""

    files: list[TensorFile]
    where: str

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self._file(name).about(name)

    def tensor(self, name: str) -> torch.Tensor:
        return self._file(name).tensor(name)

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None:
        self._file(name).fill(name, target, box)

    def _file(self, name: str) -> TensorFile:
        for file in self.files:
            if name in file:
                return file
        raise DamagedError(f"{self.where} refers to tensor {name!r}, but has no file with it.")


class CheckpointReader:
    """A checkpoint that is being read: the values of its parts, and the tensors that were asked for.

    Those are read by `read_tensors`, all of them together.
    """

    def __init__(self, storage: Storage, manifest: Manifest, rank: int) -> None:
        self._storage = storage
        self.manifest = manifest
        self.rank = rank
        self._records = {file.name: file for file in manifest.files}
        self.sharing = Sharing(rank)
        self._asked: list[Any] = []  # transfers
        self._live: list[Any] = []
        self._opened: dict[str, Tensors] = {}
        self._tables: dict[str, ShardTable] = {}
        self._trees: dict[str, tuple[Any, dict[str, SavedTensor]]] = {}
        self.as_then = False  # whether as many ranks read it as saved it, so that each takes what was its own
        self.parts: dict[str, Any] = {}
        self.own: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self._read_documents()

    def _read_documents(self) -> None:
        self.parts = self._document(STATE)["parts"]
        # ranks that were not there when it was saved look at the main rank's document
        was_there = self.rank < self.manifest.world_size
        document = self._document(rank_document(self.rank if was_there else 0))
        self.own = document["own"] if was_there else {}
        self.state = {key: decode_inline(value) for key, value in document["state"].items()}

    def rank_state(self, rank: int) -> dict[str, Any]:
        """What another rank had as its own."""
        return {key: decode_inline(value) for key, value in self._document(rank_document(rank))["state"].items()}

    def has(self, key: str) -> bool:
        own = self._own(key)
        return "absent" not in own if own else key in self.parts or key in self.own

    def lacks(self, key: str) -> bool:
        """Whether this rank had no such part, though the main one did."""
        return "absent" in self._own(key)

    def differs(self, key: str) -> dict[str, Any]:
        """What ranks had differently of a part, where it is not read as each of them had it."""
        found: dict[str, Any] = {} if self.as_then else self.parts.get(key, {}).get("differs", {})
        return found

    def _own(self, key: str) -> dict[str, Any]:
        """A part as this rank alone had it; empty if it had what all had."""
        found: dict[str, Any] = self.own.get(own_key(key, self.rank), {}) if self.as_then else {}
        return found

    def kind(self, key: str) -> str:
        """The class of the object whose state a part is."""
        kind: str = (self._own(key) or self._part(key))["class"]
        return kind

    def tree(self, key: str) -> Any:
        """A part's state, with `SavedTensor`s where tensors are."""
        return self._tree(key)[0]

    def _tree(self, key: str) -> tuple[Any, dict[str, SavedTensor]]:
        """A part's state, and the tensors in it by their names."""
        if key not in self._trees:
            tensors = self._tensors(key)
            found: dict[str, SavedTensor] = {}

            def find(name: str) -> SavedTensor:
                found[name] = SavedTensor(name, *tensors.about(name))
                return found[name]

            self._trees[key] = self._decoded(key, find), found
        return self._trees[key]

    def ask(self, key: str, place: Place | None = None, *, live: bool = False) -> Callable[[], Any]:
        """Ask for the tensors of a part. What is returned gives its state, when they have been read."""
        tensors = self._tensors(key)
        already = len(self._asked)
        given: dict[str, Any] = {}
        for name, saved in self._tree(key)[1].items():
            target = place(saved) if place else None
            given[name] = saved if target is LEFT else self._filled(tensors, saved, target)
        if live:
            self._live += self._asked[already:]
            del self._asked[already:]
        return lambda: self._decoded(key, given.__getitem__)

    def _filled(self, tensors: Tensors, saved: SavedTensor, target: Any) -> Any:
        """The target, or new memory, that a tensor will be read into; of one that is spread, the piece that is here."""
        if target is None:
            return tensors.tensor(saved.name)
        if not is_sharded(target):
            plain = target.detach() if target.requires_grad else target
            tensors.fill(saved.name, plain, Box((0,) * len(saved.shape), saved.shape))
            return target
        layout = layout_of(target)
        box = layout.box(saved.shape, self.rank) if layout.holds(self.rank) else None
        if box is not None and not box.is_empty:
            tensors.fill(saved.name, local_tensor(target), box)
        return target

    @property
    def wanted(self) -> tuple[list[Transfer], list[Transfer]]:
        """All that was asked for: into new memory, and into memory that is in use, which is read later."""
        return self._asked, self._live

    def read_new(self) -> None:
        """Read what was asked for into new memory, verifying it on the way."""
        self._read(self._asked, read_verified)
        self._asked = []

    def verify_live(self) -> None:
        """Verify what was asked for into memory that is in use."""
        mine = [one for one in self._live if self.sharing.is_mine(one)]
        with self._bar("verifying", mine) as advance:
            verify(mine, self.manifest.name, advance)

    def read_live(self, *, verified: bool) -> None:
        """Read what was asked for into memory that is in use; what has not been verified is, on the way."""
        self._read(self._live, read if verified else read_verified)
        self._live = []

    def _read(self, transfers: list[Transfer], how: Callable[..., None]) -> None:
        alone, together = self.sharing.divided(transfers)
        with self._bar("loading", transfers) as advance:
            with self.sharing.phase():
                how(together, self.manifest.name, advance, threads=1)
            how(alone, self.manifest.name, advance)  # last: whom it fails for, the others do not wait for

    def _bar(self, verb: str, transfers: list[Transfer]) -> AbstractContextManager[Callable[[float], None]]:
        size = sum(one.size for one in transfers)
        return progress_bar(
            f"{verb} {self.manifest.name}", size, in_bytes=True, show=self.rank == MAIN and size > PROGRESS_MIN_BYTES
        )

    def spread(self, key: str) -> bool:
        """Whether a part was saved in pieces."""
        return "spread" in self._part(key)

    def has_tensors(self, key: str) -> bool:
        """Whether there are any in a part: an optimizer that has not stepped has none."""
        part = self._part(key)
        return bool(part["spread"]["tensors"]) if "spread" in part else whole_file(key) in self._records

    def layouts(self, key: str) -> frozenset[Layout]:
        """The ways in which a part's tensors were divided; none if it was saved whole."""
        if not self.spread(key):
            return frozenset()
        found = self._table(key).tensors.values()
        return frozenset(one.layout for one in found if not one.layout.is_replicated)

    def _table(self, key: str) -> ShardTable:
        if key not in self._tables:
            self._tables[key] = ShardTable.from_json(self._part(key)["spread"])
        return self._tables[key]

    def _decoded(self, key: str, find: Callable[[str], Any]) -> Any:
        return Decoder(find).decode((self._own(key) or self._part(key))["state"])

    def _part(self, key: str) -> Any:
        """A part as all ranks have it, or the main one; what no other rank has is as this one had it."""
        return self.own[key] if key in self.own else self.parts.get(key) or self._own(key)

    def _tensors(self, key: str) -> Tensors:
        if key not in self._opened:
            self._opened[key] = self._open(key)
        return self._opened[key]

    def _open(self, key: str) -> Tensors:
        own = self._own(key)
        if own:
            return OwnTensors.of(
                own,
                self.rank,
                lambda rank: self._files(whole_file, own_key(key, rank)),
                lambda rank: self._files(spread_file, key, rank),
                functools.cache(lambda: self._open_common(key)),
            )
        return self._open_common(key)

    def _open_common(self, key: str) -> Tensors:
        if self.spread(key):
            files = partial(self._files, spread_file, key)
            return ShardedTensors(self._table(key), files, self.rank, lambda rank: self._is_here(key, rank))
        return _WholeTensors(self._files(whole_file, key), f"{self.manifest.name}: {key}")

    def _files(self, name: Callable[..., str], *about: Any) -> list[TensorFile]:
        """The files that are there under a name: with what is trained, and with what is frozen."""
        names = (name(*about), name(*about, frozen=True))
        return [self._tensor_file(one) for one in names if one in self._records]

    def _is_here(self, key: str, rank: int) -> bool:
        """Whether this host has what a rank has written of a part: it may have only its own ranks' files."""
        if not self.manifest.hosts:
            return True
        found = (self._records.get(spread_file(key, rank, frozen=frozen)) for frozen in (False, True))
        records = [one for one in found if one is not None]
        return all(self._sizes.get(f"{self.manifest.name}/{one.path}") == one.size for one in records)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {entry.key: entry.size for entry in self._storage.list(self.manifest.name)}

    def _tensor_file(self, name: str) -> TensorFile:
        file = self._file(name)
        return TensorFile.open(file, file.stored.key, self._asked_for)

    def _file(self, name: str) -> VerifiedFile:
        return VerifiedFile.of(self._storage, self.manifest.name, self._records[name])

    def _asked_for(self, transfer: Transfer) -> None:
        self._asked.append(transfer)

    def _document(self, name: str) -> Any:
        if name not in self._records:
            raise DamagedError(f"{self.manifest.name} is damaged: it lists no {name}.")
        file = self._file(name)
        return from_json(file.read_all(), file.stored.key)

"""The saved tensors of a part: whole in files, in pieces over the files of many ranks, or one rank's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ckpt.errors import DamagedError
from ckpt.formats.layout import Box
from ckpt.formats.native.manifest import Manifest
from ckpt.formats.native.shard_table import ShardedTensors, ShardTable
from ckpt.formats.native.tensor_file import TensorFile


class PartTensors(Protocol):
    """The saved tensors of a part: dtype and shape at once, the data when all transfers are read.

    `ties`: names of tensors that were one with another when they were saved, each with the other's name.
    """

    @property
    def ties(self) -> Mapping[str, str]: ...

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]: ...

    def tensor(self, name: str) -> torch.Tensor: ...

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None: ...


@dataclass(frozen=True)
class WholeTensors:
    """Tensors that are whole in files. `where` names them in errors."""

    files: list[TensorFile]
    where: str

    @property
    def ties(self) -> Mapping[str, str]:
        return {name: of for file in self.files for name, of in file.ties.items()}

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


@dataclass
class OwnTensors:
    """The tensors of a part as one rank had them: from its own files, and the others from the common ones."""

    plain: frozenset[str]
    files: list[TensorFile]
    pieces: ShardedTensors
    common: Callable[[], PartTensors]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        entry: Mapping[str, Any],
        manifest: Manifest,
        rank: int,
        own_files: Callable[[int], list[TensorFile]],
        piece_files: Callable[[int], list[TensorFile]],
        common: Callable[[], PartTensors],
    ) -> OwnTensors:
        """`own_files` and `piece_files` open the files of a rank; `common` gives the tensors of all ranks."""
        table = ShardTable.from_json(entry["spread"], manifest) if "spread" in entry else ShardTable({})
        pieces = ShardedTensors(table, lambda owner: [*own_files(owner), *piece_files(owner)], rank)
        plain = frozenset(entry.get("plain", ()))
        return cls(plain, own_files(rank) if plain else [], pieces, common, table.aliases)

    @property
    def ties(self) -> Mapping[str, str]:
        own = {name: of for file in self.files for name, of in file.ties.items()} | dict(self.aliases)
        common = {name: of for name, of in self.common().ties.items() if not self.plain & {name, of}}
        return common | own

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self._holder(name).about(self._name(name))

    def tensor(self, name: str) -> torch.Tensor:
        return self._holder(name).tensor(self._name(name))

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None:
        self._holder(name).fill(self._name(name), target, box)

    def _name(self, name: str) -> str:
        return name if name in self.plain else self.aliases.get(name, name)

    def _holder(self, name: str) -> PartTensors:
        name = self._name(name)
        if name in self.plain:
            return next((file for file in self.files if name in file), None) or self.common()
        return self.pieces if name in self.pieces.table.tensors else self.common()

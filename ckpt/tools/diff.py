"""What two checkpoints have differently, found a little at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ckpt.errors import ConfigError
from ckpt.export.source import open_source
from ckpt.formats.native import dtypes
from ckpt.formats.native.block_hash import digest
from ckpt.formats.native.documents import STATE, from_json, to_json
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import FILE_NAME, FileRecord, Manifest
from ckpt.formats.pieces import SLAB, PiecedTensor
from ckpt.formats.tensor_bytes import host_bytes
from ckpt.root import catalog
from ckpt.root.file_names import part_of
from ckpt.root.folder import Folder
from ckpt.root.verified_file import VerifiedFile
from ckpt.storage import Storage
from ckpt.util.console import progress_bar

_MODEL = "model"
_ABSENT = "-"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor or a value that two checkpoints have differently: what each of them has, `-` for nothing.

    Of tensors of one shape, how many elements differ, and by how much at most; NaN where one is no number.
    """

    name: str
    first: str
    second: str
    elements: int | None = None
    most: float | None = None


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Two checkpoints compared. It is true if they differ."""

    first: str
    second: str
    differences: tuple[Difference, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.differences)

    def to_json(self) -> dict[str, Any]:
        listed = [asdict(one) for one in self.differences]
        for one in listed:
            if one["most"] is not None and not math.isfinite(one["most"]):
                one["most"] = str(one["most"])
        return {"first": self.first, "second": self.second, "differences": listed}


def diff(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    part: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Diff:
    """Compare two checkpoints, tensor by tensor and value by value, at paths or URLs.

    Each is a checkpoint of ours or whatever else `merge` reads. Between two of ours all parts are compared, or the one
    that is named, and files with the same hashes are not read; otherwise the tensors of `part`, the model if none is
    given. How a checkpoint is laid out makes no difference. Little is held in memory.
    """
    with ExitStack() as held:
        sides = (_Side.at(first, storage_options, held), _Side.at(second, storage_options, held))
        found = list(_Comparison(*sides, part).differences())
    return Diff(first=os.fspath(first), second=os.fspath(second), differences=tuple(found))


@dataclass
class _Side:
    """One of the two. What is not ours has no manifest."""

    where: str | os.PathLike[str]
    options: Mapping[str, Any] | None
    storage: Storage | None = None
    manifest: Manifest | None = None

    @classmethod
    def at(cls, where: str | os.PathLike[str], options: Mapping[str, Any] | None, held: ExitStack) -> _Side:
        """What is there. A checkpoint is held: a run that goes on meanwhile must not remove it."""
        side = cls(where, options)
        files = Folder.at(where, options).files
        inside = sorted(path for path in files if path.count("/") == 1 and path.endswith(f"/{FILE_NAME}"))
        if FILE_NAME in files:
            side.storage, (name,) = catalog.locate(where, options if "://" in os.fspath(where) else None)
            held.enter_context(side.storage.lock(name, shared=True))
            side.manifest = catalog.read_manifest(side.storage, name)
        elif inside:
            text, name = os.fspath(where).rstrip("/"), inside[-1].partition("/")[0]
            raise ConfigError(f"{text} holds {len(inside)} checkpoints. Name the one to compare: {text}/{name}.")
        return side

    def files(self, part: str) -> list[FileRecord]:
        assert self.manifest is not None
        files = self.manifest.files
        return [file for file in files if file.name.endswith(SUFFIX) and part_of(file.name) == part]

    def parts(self) -> list[str]:
        files = self.manifest.files if self.manifest else ()
        return list(dict.fromkeys(part_of(file.name) for file in files if file.name.endswith(SUFFIX)))

    def documents(self) -> dict[str, FileRecord]:
        files = self.manifest.files if self.manifest else ()
        return {file.name: file for file in files if not file.name.endswith(SUFFIX)}

    def read(self, file: FileRecord | None) -> Any:
        """A document, or nothing if there is none."""
        if file is None or self.manifest is None or self.storage is None:
            return {}
        document = VerifiedFile.of(self.storage, self.manifest.name, file)
        return from_json(document.read_all(), document.stored.key)

    def tensors(self, part: str, held: ExitStack) -> dict[str, PiecedTensor]:
        if self.manifest is not None and not self.files(part):
            return {}
        return held.enter_context(open_source(self.where, part, self.options)).tensors


@dataclass
class _Comparison:
    one: _Side
    other: _Side
    part: str | None

    def differences(self) -> Iterator[Difference]:
        ours = self.one.manifest is not None and self.other.manifest is not None
        every = list(dict.fromkeys([*self.one.parts(), *self.other.parts()])) if ours else [_MODEL]
        for part in every if self.part is None else [self.part]:
            if not ours or _hashes(self.one.files(part)) != _hashes(self.other.files(part)):
                yield from self._tensors(part)
        if ours:
            yield from self._values()

    def _tensors(self, part: str) -> Iterator[Difference]:
        with ExitStack() as held:
            mine, theirs = (side.tensors(part, held) for side in (self.one, self.other))
            size = sum(one.size * one.dtype.itemsize for one in mine.values())
            with progress_bar(f"comparing {part}", size, in_bytes=True) as advance:
                for name in dict.fromkeys([*mine, *theirs]):
                    first, second = mine.get(name), theirs.get(name)
                    found = _compared(f"{part}.{name}", first, second)
                    if found is not None:
                        yield found
                    advance(first.size * first.dtype.itemsize if first else 0)

    def _values(self) -> Iterator[Difference]:
        mine, theirs = self.one.documents(), self.other.documents()
        for name in sorted(mine.keys() | theirs.keys()):
            first, second = mine.get(name), theirs.get(name)
            if first is None or second is None or first.blocks != second.blocks:
                yield from self._in_document(name, self.one.read(first), self.other.read(second))

    def _in_document(self, name: str, first: Any, second: Any) -> Iterator[Difference]:
        if name == STATE:
            flat = [_flat(_stated(one, self.part)) for one in (first, second)]
        elif self.part is None:
            flat = [_of_a_rank(name.removesuffix(".json"), one) for one in (first, second)]
        else:
            return
        for path in dict.fromkeys([*flat[0], *flat[1]]):
            here, there = flat[0].get(path, _ABSENT), flat[1].get(path, _ABSENT)
            if here != there:
                yield Difference(name=path, first=_short(here), second=_short(there))


def _hashes(files: list[FileRecord]) -> list[Any]:
    return sorted((file.name, file.size, file.blocks) for file in files)


def _stated(document: Any, part: str | None) -> dict[str, Any]:
    """The values of parts. How their tensors are spread over ranks is no difference."""
    parts = {key: one for key, one in document.get("parts", {}).items() if part in (None, key)}
    return {key: {"class": one.get("class", ""), "state": one.get("state")} for key, one in parts.items()}


def _of_a_rank(rank: str, document: Any) -> dict[str, str]:
    """What is a rank's own, each as a hash: generators have hundreds of numbers."""
    found = {}
    for key, one in document.get("state", {}).items():
        values, tensors = one.get("values"), one.get("tensors") or {}
        for name, value in (values if isinstance(values, dict) else {"": values}).items():
            inside = {tensor: data for tensor, data in tensors.items() if tensor.startswith(name)}
            found[f"{rank}.{key}.{name}".rstrip(".")] = digest(to_json([value, inside]))[:8]
    return found


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Every single value by its path. Tensors are compared elsewhere."""
    if isinstance(value, dict) and "$tensor" not in value and value:
        inside = value.items()
    elif isinstance(value, list) and value:
        inside = ((str(index), one) for index, one in enumerate(value))  # type: ignore[assignment]
    else:
        return {} if isinstance(value, dict) and "$tensor" in value else {path: value}
    found: dict[str, Any] = {}
    for key, one in inside:
        found |= _flat(one, f"{path}.{key}" if path else key)
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _compared(name: str, first: PiecedTensor | None, second: PiecedTensor | None) -> Difference | None:
    found = Difference(name=name, first=_outline(first), second=_outline(second))
    if first is None or second is None or first.shape != second.shape:
        return found
    elements, most = 0, 0.0
    for box in first.boxes(SLAB // max(first.dtype.itemsize, second.dtype.itemsize)):
        count, by = _apart(first.read(box), second.read(box))
        elements, most = elements + count, by if math.isnan(by) else max(most, by)
    if not elements and first.dtype == second.dtype:
        return None
    return replace(found, elements=elements, most=most)


def _outline(tensor: PiecedTensor | None) -> str:
    return _ABSENT if tensor is None else f"{dtypes.name_of(tensor.dtype)} {list(tensor.shape)}"


def _apart(one: torch.Tensor, other: torch.Tensor) -> tuple[int, float]:
    """How many elements differ, in bits where the dtypes are the same, and by how much at most."""
    if one.dtype == other.dtype:
        bits = [torch.frombuffer(host_bytes(tensor), dtype=torch.uint8) for tensor in (one, other)]
        if torch.equal(*bits):
            return 0, 0.0
        differs = (bits[0] != bits[1]).view(-1, one.dtype.itemsize).any(1)
    else:
        differs = None
    try:
        mine, theirs = (_numbers(tensor) for tensor in (one, other))
    except (RuntimeError, NotImplementedError):  # a dtype that torch has no arithmetic for
        return one.numel() if differs is None else int(differs.sum()), math.nan
    by = (mine - theirs).abs()
    by[mine == theirs] = 0.0  # infinities
    by[mine.isnan() & theirs.isnan()] = 0.0
    if differs is None:
        differs = by != 0
    return int(differs.sum()), float(by.max())


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).to(torch.complex128 if tensor.is_complex() else torch.float64)

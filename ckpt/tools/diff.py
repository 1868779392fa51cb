"""Compare two checkpoints, tensor by tensor and value by value, and how far tensors are apart, in bounded memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ckpt.errors import MissingError, UnsupportedError
from ckpt.export.source import open_checkpoint, open_foreign
from ckpt.formats.checks import damage_reported
from ckpt.formats.layout import Box
from ckpt.formats.native import tensor_file
from ckpt.formats.native.documents import STATE, PlacedDocument, document_places, from_json, to_json
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import FileRecord, Manifest, digest
from ckpt.formats.pieces import SLAB, PiecedTensor
from ckpt.formats.registry import TORCH
from ckpt.formats.sharded_tensors import is_sharded
from ckpt.formats.tensors import host_bytes, narrowed, on_host
from ckpt.root import catalog
from ckpt.root.catalog import part_of
from ckpt.root.folder import OneCheckpoint, Place
from ckpt.root.signing import BELIEVES_ALL, KeySource, Trust, open_trust
from ckpt.root.verify import VerifiedFile
from ckpt.state.model import ModelPart
from ckpt.state.unwrap import unwrap
from ckpt.tools.portable_state import PortableState, foreign_state
from ckpt.util.console import html_table, progress_bar


@dataclass(slots=True)
class Squares:
    """Sums of squares: of the differences between two tensors, and of the elements of the first."""

    difference: float = 0.0
    first: float = 0.0

    @property
    def relative(self) -> float:
        """RMS of the difference over RMS of the first: 0.01 is a change by 1 %. Infinite where the first was all zeros,
        NaN where an element is not finite."""
        if not math.isfinite(self.difference):
            return math.nan
        if self.difference == 0:
            return 0.0
        return math.sqrt(self.difference / self.first) if self.first else math.inf

    def __add__(self, other: Squares) -> Squares:
        return Squares(self.difference + other.difference, self.first + other.first)


@dataclass
class TensorChange:
    """How many elements differ, the largest difference, and the squares. NaN where an element is no number."""

    elements: int = 0
    most: float = 0.0
    squares: Squares | None = None


def compare_tensors(first: PiecedTensor, second: PiecedTensor) -> TensorChange:
    """Compare two tensors of the same shape, a slab at a time."""
    found = TensorChange(squares=Squares())
    for box in first.boxes(SLAB // max(first.dtype.itemsize, second.dtype.itemsize)):
        slab = _compare_slabs(first.read(box), second.read(box))
        found.elements += slab.elements
        found.most = slab.most if math.isnan(slab.most) else max(found.most, slab.most)
        found.squares = found.squares + slab.squares if found.squares and slab.squares else None
    return found


def _compare_slabs(first: torch.Tensor, second: torch.Tensor) -> TensorChange:
    """Elements differ bitwise where the dtypes are the same; otherwise by their numbers."""
    differs = _bits_differ(first, second) if first.dtype == second.dtype else None
    try:
        mine, theirs = _numbers(first), _numbers(second)
        if differs is not None and not differs.any():
            return TensorChange(squares=Squares(0.0, _square_sum(mine)))
        distances = _distances(mine, theirs)
    except (RuntimeError, NotImplementedError):  # a dtype that torch has no arithmetic for
        count = first.numel() if differs is None else int(differs.sum())
        return TensorChange(count, math.nan if count else 0.0)
    if differs is None:
        differs = distances != 0
    squares = Squares(_square_sum(distances), _square_sum(mine))
    return TensorChange(int(differs.sum()), float(distances.max()), squares)


def _bits_differ(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """By element, whether its bits differ."""
    bits = [torch.frombuffer(host_bytes(tensor), dtype=torch.uint8) for tensor in (first, second)]
    if torch.equal(*bits):
        return torch.zeros(first.numel(), dtype=torch.bool)
    return (bits[0] != bits[1]).view(-1, first.dtype.itemsize).any(1)


def _distances(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    distances = (mine - theirs).abs()
    distances[mine == theirs] = 0.0  # infinities
    distances[mine.isnan() & theirs.isnan()] = 0.0
    return distances


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).to(torch.complex128 if tensor.is_complex() else torch.float64)


def _square_sum(numbers: torch.Tensor) -> float:
    return float(torch.vdot(numbers, numbers).real)


_MODEL = "model"
ABSENT = "-"
_NOT_IN_JSON = ("squares", "is_tensor")
_REFERENCES = {"$tensor", "$strided", "$unsharded"}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Describes a tensor or a value that differs: what each checkpoint has, or `-` if a checkpoint lacks this tensor
    or value.

    If both tensors have the same shape, `elements` is the number of elements that differ, `most` the largest
    difference, and `relative` the RMS of the difference divided by the RMS of the first tensor. If an element is NaN,
    so are `most` and `relative`. If the first tensor contains only zeros, `relative` is infinite.
    """

    name: str
    first: str
    second: str
    elements: int | None = None
    most: float | None = None
    relative: float | None = None
    squares: Squares | None = field(default=None, repr=False, compare=False)  # from which `relative` was made
    is_tensor: bool = field(default=False, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Lists the differences between two checkpoints. A `Diff` is truthy if the checkpoints differ."""

    first: str
    second: str
    differences: tuple[Difference, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.differences)

    def _repr_html_(self) -> str:
        """For notebooks."""
        found = f"{len(self.differences)} differences" if len(self.differences) > 1 else "1 difference"
        title = f"{self.first} and {self.second}: {found if self else 'no difference'}"
        columns = ("name", "first", "second", *_CHANGE) if self else ()
        return html_table(title, map(_row, self.differences), columns, _CHANGE)

    def to_json(self) -> dict[str, Any]:
        listed = [_json_fields(difference) for difference in self.differences]
        return {"first": self.first, "second": self.second, "differences": listed}


_CHANGE = ("elements", "at most by", "relative")


def _row(found: Difference) -> tuple[str, ...]:
    elements = "" if found.elements is None else f"{found.elements:,}"
    most = "" if found.most is None else f"{found.most:.3g}"
    relative = "" if found.relative is None else percent(found.relative)
    return found.name, found.first, found.second, elements, most, relative


def percent(relative: float) -> str:
    """A relative change for people."""
    return f"{100 * relative:.3g} %" if math.isfinite(relative) else "from 0" if relative > 0 else "nan"


def _json_fields(difference: Difference) -> dict[str, Any]:
    """As JSON has them: NaN and infinities as text."""
    fields = {key: value for key, value in vars(difference).items() if key not in _NOT_IN_JSON}
    numbers = {key: fields[key] for key in ("most", "relative") if fields[key] is not None}
    return {**fields, **{key: value if math.isfinite(value) else str(value) for key, value in numbers.items()}}


def diff(
    first: str | os.PathLike[str] | nn.Module,
    second: str | os.PathLike[str] | nn.Module,
    *,
    part: str | None = None,
    format: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    verify_key: KeySource | None = None,
    require_signed: bool | str = False,
) -> Diff:
    """Compare two checkpoints, or a model and a checkpoint, tensor by tensor and value by value.

    It doesn't matter how a checkpoint is sharded. If both sources are ckpt checkpoints, `diff` skips files with equal
    hashes. `diff` needs little memory.

    Args:
        first: The path or URL of a checkpoint, or of anything else that `merge` reads; or a model. For a root, `diff`
            takes the newest checkpoint.
        second: What to compare it with, of the same kinds.
        part: Compare only this part. By default, `diff` compares all parts of two ckpt checkpoints, or of two
            torch.save files, and only the model otherwise.
        format: The format to compare, if a folder has saves in several formats: `"deepspeed"`, `"hf"`.
        storage_options: Credentials and the like, for URLs on both sides.
        verify_key: As in `Signing`: ckpt warns if none of these keys has signed them.
        require_signed: As `required` of `Signing`.

    Returns:
        The differences; the result is falsy if there are none.

    Raises:
        MissingError: One of them does not exist, or has no such part.
        DamagedError: The bytes of one of them have changed since they were saved.
    """
    trust = open_trust(verify_key, required=require_signed)
    with ExitStack() as held:
        one, other = (
            _LiveSide(side) if isinstance(side, nn.Module) else _Side.at(side, storage_options, format, held, trust)
            for side in (first, second)
        )
        found = list(_Comparison(one, other, part).differences())
    return Diff(first=one.where, second=other.where, differences=tuple(found))


@dataclass
class _LiveSide:
    """A model in this process."""

    model: nn.Module
    manifest: Manifest | None = None

    @property
    def where(self) -> str:
        return type(unwrap(self.model)).__name__

    def tensors(self, part: str, held: ExitStack) -> dict[str, PiecedTensor]:
        state = {name: value for name, value in ModelPart(part, self.model).capture().items() if torch.is_tensor(value)}
        if any(map(is_sharded, state.values())):
            raise UnsupportedError(
                "diff() can't compare a sharded model. Save the model, and compare the checkpoint instead."
            )
        return {name: _live(tensor) for name, tensor in state.items()}


@dataclass(frozen=True)
class _LiveTensor(PiecedTensor):
    live: torch.Tensor

    def read(self, box: Box) -> torch.Tensor:
        return on_host(narrowed(self.live, list(zip(box.offsets, box.sizes, strict=True))))


def _live(tensor: torch.Tensor) -> _LiveTensor:
    return _LiveTensor(tensor.dtype, tuple(tensor.shape), (), tensor)


@dataclass
class _FileSide:
    """A file of torch.save."""

    where: str
    state: PortableState
    manifest: Manifest | None = None

    def parts(self) -> list[str]:
        return list(self.state.parts)

    def values(self, part: str | None) -> dict[str, Any]:
        parts = {key: {"state": found.values} for key, found in self.state.parts.items() if part in (None, key)}
        return _flatten(parts if part else {**parts, "progress": self.state.progress.to_json()})

    def tensors(self, part: str, held: ExitStack) -> dict[str, PiecedTensor]:
        found = self.state.parts[part].tensors if part in self.state.parts else {}
        return {name: item if isinstance(item, PiecedTensor) else _live(item) for name, item in found.items()}


@dataclass
class _Side:
    """One of the two checkpoints. Those of other tools have no manifest."""

    where: str
    place: Place
    trust: Trust
    checkpoint: OneCheckpoint | None = None
    manifest: Manifest | None = None

    @classmethod
    def at(
        cls,
        where: str | os.PathLike[str],
        options: Mapping[str, Any] | None,
        format: str | None,
        held: ExitStack,
        trust: Trust,
    ) -> _Side | _FileSide:
        """Open a checkpoint, of a root the newest. Ours is locked: retention of a running job must not remove it."""
        place = Place.at(where, options, format, must=False)
        if not place.is_ours:
            trust.refuse_unsigned(os.fspath(where))
        if place.format is TORCH:
            return _FileSide(os.fspath(where), foreign_state(place))
        side = cls(os.fspath(where), place, trust)
        if place.is_ours:
            side.checkpoint = found = place.checkpoint(trust).tell()
            held.enter_context(found.root.lock(found.name, shared=True))
            side.manifest = trust.accepted(catalog.read_manifest(found.root, found.name))
            side.where = found.url if found.is_newest else side.where
            if not side.manifest.is_authentic:
                side.trust = BELIEVES_ALL  # the warning was given
        return side

    def files(self, part: str) -> list[FileRecord]:
        assert self.manifest is not None
        files = self.manifest.files
        return [file for file in files if file.name.endswith(SUFFIX) and part_of(file.name) == part]

    def parts(self) -> list[str]:
        files = self.manifest.files if self.manifest else ()
        return list(dict.fromkeys(part_of(file.name) for file in files if file.name.endswith(SUFFIX)))

    def documents(self) -> dict[str, PlacedDocument]:
        files = self.manifest.files if self.manifest else ()
        return document_places(file for file in files if not file.name.endswith(SUFFIX))

    def values(self, name: str, place: PlacedDocument | None, part: str | None) -> dict[str, Any]:
        """Return a dict that maps paths to the values in a document; if there is no such document, the dict is
        empty."""
        if place is None or self.manifest is None or self.checkpoint is None:
            return {}
        file = VerifiedFile.of(self.checkpoint.root, self.manifest.name, place.file, sha256=self.manifest.is_authentic)
        document = from_json(file.read(place.start, place.stop), file.stored.key)
        with damage_reported(file.stored.key, "checkpoint document"):
            if name == STATE:
                return _flatten(_part_values(document, part))
            return _rank_hashes(name.removesuffix(".json"), document)

    def tensors(self, part: str, held: ExitStack) -> dict[str, PiecedTensor]:
        if self.manifest is not None and not self.files(part):
            return {}
        if self.checkpoint is None:
            return open_foreign(self.place, part).tensors
        return held.enter_context(open_checkpoint(self.checkpoint, part, self.trust)).tensors


@dataclass
class _Comparison:
    first: _Side | _LiveSide | _FileSide
    second: _Side | _LiveSide | _FileSide
    part: str | None

    def differences(self) -> Iterator[Difference]:
        if isinstance(self.first, _FileSide) and isinstance(self.second, _FileSide):
            for part in self._parts(self.first, self.second):
                yield from self._tensors(part)
            yield from self._in_document(self.first.values(self.part), self.second.values(self.part))
            return
        if self.first.manifest is None or self.second.manifest is None:
            for side in (self.first, self.second):
                _require(side, self.part or _MODEL)
            yield from self._tensors(self.part or _MODEL)
            return
        assert isinstance(self.first, _Side)
        assert isinstance(self.second, _Side)
        for part in self._parts(self.first, self.second):
            if _hashes(self.first.files(part)) != _hashes(self.second.files(part)):
                yield from self._tensors(part)
        yield from self._values(self.first, self.second)

    def _parts(self, first: _Side | _FileSide, second: _Side | _FileSide) -> list[str]:
        """The parts to compare: of the one that was named, at least one of the two has tensors or values."""
        every = list(dict.fromkeys([*first.parts(), *second.parts()]))
        if self.part is not None and isinstance(first, _FileSide) and self.part not in every:
            _require(first, self.part)
        return every if self.part is None else [self.part]

    def _tensors(self, part: str) -> Iterator[Difference]:
        with ExitStack() as held:
            mine, theirs = (side.tensors(part, held) for side in (self.first, self.second))
            size = sum(tensor.size * tensor.dtype.itemsize for tensor in mine.values())
            with progress_bar(f"comparing {part}", size, in_bytes=True) as advance:
                for name in dict.fromkeys([*mine, *theirs]):
                    first, second = mine.get(name), theirs.get(name)
                    found = _compare(f"{part}.{name}", first, second)
                    if found is not None:
                        yield found
                    advance(first.size * first.dtype.itemsize if first else 0)

    def _values(self, one: _Side, other: _Side) -> Iterator[Difference]:
        mine, theirs = one.documents(), other.documents()
        for name in sorted(mine.keys() | theirs.keys()):
            first, second = mine.get(name), theirs.get(name)
            is_asked_for = name == STATE or self.part is None
            if is_asked_for and (first is None or second is None or first.digests != second.digests):
                yield from self._in_document(one.values(name, first, self.part), other.values(name, second, self.part))

    def _in_document(self, *flat: dict[str, Any]) -> Iterator[Difference]:
        for path in dict.fromkeys([*flat[0], *flat[1]]):
            here, there = flat[0].get(path, ABSENT), flat[1].get(path, ABSENT)
            if here != there:
                yield Difference(name=path, first=_short(here), second=_short(there))


def _require(side: _Side | _LiveSide | _FileSide, part: str) -> None:
    if isinstance(side, _LiveSide) or (isinstance(side, _Side) and side.manifest is None):
        return  # whatever is asked of it, it says what it has
    if part not in side.parts():
        known = ", ".join(side.parts()) or "none with tensors"
        raise MissingError(f"{side.where} has no part {part!r}. It has: {known}.")


def _hashes(files: list[FileRecord]) -> list[tuple[str, int, tuple[str, ...]]]:
    return sorted((file.name, file.size, file.blocks) for file in files)


def _part_values(document: Any, part: str | None) -> dict[str, Any]:
    """The values of parts, without their shard tables: sharding is no difference."""
    parts = {key: fields for key, fields in document.get("parts", {}).items() if part in (None, key)}
    return {key: {"class": fields.get("class", ""), "state": fields.get("state")} for key, fields in parts.items()}


def _rank_hashes(rank: str, document: Any) -> dict[str, str]:
    """The state of a rank, each value as a hash: generators have hundreds of numbers."""
    found = {}
    for key, state in document.get("state", {}).items():
        values, tensors = state.get("values"), state.get("tensors") or {}
        for name, value in (values if isinstance(values, dict) else {"": values}).items():
            inside = {tensor: data for tensor, data in tensors.items() if tensor.startswith(name)}
            found[f"{rank}.{key}.{name}".rstrip(".")] = digest(to_json([value, inside]))[:8]
    return found


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Every value of nested containers by its path, without tensors, which are compared by their bytes."""
    if isinstance(value, dict) and not _REFERENCES & value.keys() and value:
        inside = value.items()
    elif isinstance(value, list) and value:
        inside = ((str(index), item) for index, item in enumerate(value))  # type: ignore[assignment]
    else:
        return {} if isinstance(value, dict) and _REFERENCES & value.keys() else {path: value}
    found: dict[str, Any] = {}
    for key, item in inside:
        found |= _flatten(item, f"{path}.{key}" if path else key)
    return found


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _compare(name: str, first: PiecedTensor | None, second: PiecedTensor | None) -> Difference | None:
    found = Difference(name=name, first=_outline(first), second=_outline(second), is_tensor=True)
    if first is None or second is None or first.shape != second.shape:
        return found
    change = compare_tensors(first, second)
    if not change.elements and first.dtype == second.dtype:
        return None
    relative = change.squares.relative if change.squares is not None else math.nan
    return replace(found, elements=change.elements, most=change.most, relative=relative, squares=change.squares)


def _outline(tensor: PiecedTensor | None) -> str:
    return ABSENT if tensor is None else f"{tensor_file.dtype_name(tensor.dtype)} {list(tensor.shape)}"

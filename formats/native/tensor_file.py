"""Safetensors files, written and read: any tensor, or any box of one, into any memory.

A file is what the safetensors specification says: eight bytes of header length, a JSON header padded with spaces, the
data without gaps. On top of that (docs/format.md):

- the header is padded so that the data starts at a multiple of 4096, and tensors are sorted by alignment;
- `__metadata__["DCP_SHARDING_INFO"]` holds the offsets of shards in their tensors, in PyTorch's own format;
- `__metadata__["ckpt"]` holds what safetensors cannot express: dtypes it does not know (stored as U8), the full shapes
  of sharded tensors, and tensors that are views of others.

Tensors that share memory (tied weights, overlapping views) are stored once, and share memory again when loaded. The
tensors of several files of a part are put together as `PiecedTensor`s.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from ckpt.errors import DamagedError
from ckpt.formats.checks import (
    Expansion,
    Sizes,
    checked_shape,
    checked_sizes,
    damage_reported,
    dense_strides,
    is_dense,
    reach,
)
from ckpt.formats.layout import Box
from ckpt.formats.native import header
from ckpt.formats.native.header import BARE, KIND, SPELLINGS, Extent, Header, TensorHeader, is_bare, parsed
from ckpt.formats.pieces import Piece, PiecedTensor, Region
from ckpt.formats.tensors import ByteReader, FilePlan, Shard, Want, at_once, host_bytes, is_plain, on_host

SPELLED: dict[torch.dtype, str] = {getattr(torch, name): spelling for name, spelling in SPELLINGS.items()}

# All that a stored tensor may have: of each, torch allocates `itemsize` bytes per element. Not so of quint4x2 and
# quint2x4, which have several elements in a byte: a view of numel * itemsize bytes leads past the end of their memory.
NAMES = frozenset(
    (
        *SPELLINGS,
        *("complex32", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
        *(f"{sign}{bits}" for sign in ("int", "uint") for bits in range(1, 8)),
    )
)
STORABLE = frozenset(getattr(torch, name) for name in NAMES if hasattr(torch, name))

BY_SPELLING = {spelling: dtype for dtype, spelling in SPELLED.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The inverse of `dtype_name`, for the dtypes that a stored tensor may have. Nothing else is ever looked up."""
    if name not in NAMES:
        raise ValueError(f"{name!r} is not a dtype that ckpt stores")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the installed torch ({torch.__version__}) has no dtype {name!r}")
    return dtype


_ALIGNMENT = 16  # bytes: no dtype is longer


@dataclass(frozen=True)
class View:
    """A tensor whose bytes lie within those of a stored one."""

    of: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int  # byte offset in the stored tensor

    def on(self, base: torch.Tensor) -> torch.Tensor:
        """This view of `base`, which must be contiguous and begin its storage."""
        view = torch.empty(0, dtype=self.dtype, device=base.device)
        return view.set_(base.untyped_storage(), self.start // view.element_size(), self.shape, self.stride)


@dataclass(frozen=True)
class _Span:
    """The bytes of a storage from a tensor's first to its last element."""

    name: str
    tensor: torch.Tensor
    first: int
    last: int


def untie(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, View]]:
    """Split tensors into those to store and those that are views of a stored one.

    If none of several overlapping tensors covers all the others, the bytes beneath them are stored under a name of
    their own, and all of them are views.
    """
    stored = dict(tensors)
    views: dict[str, View] = {}
    for cluster in _clusters(_spans(tensors)):
        base = _base(cluster, tensors)
        stored[base.name] = base.tensor
        for span in cluster:
            if span.name != base.name:
                del stored[span.name]
                views[span.name] = _view(span, base)
    return stored, views


def _spans(tensors: Mapping[str, torch.Tensor]) -> Iterable[list[_Span]]:
    """The tensors of each storage that several tensors use, in the order of their first byte."""
    by_address: dict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta:
            by_address[tensor.untyped_storage().data_ptr()].append(name)
    for names in by_address.values():
        if len(names) > 1:  # rare, and training waits for this loop
            by_device: dict[torch.device, list[_Span]] = defaultdict(list)
            for name in names:
                tensor = tensors[name]
                # a lazy conjugate or negation has other values than its bytes: it cannot be a view of them
                if not tensor.is_conj() and not tensor.is_neg():
                    by_device[tensor.device].append(_span(name, tensor))
            for spans in by_device.values():
                yield sorted(spans, key=lambda span: (span.first, -span.last))


def _span(name: str, tensor: torch.Tensor) -> _Span:
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    reach = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return _Span(name, tensor, first, first + (reach + 1) * size)


def _clusters(storages: Iterable[list[_Span]]) -> Iterable[list[_Span]]:
    """Runs of tensors in which each but the first overlaps an earlier one."""
    for spans in storages:
        cluster: list[_Span] = []
        reach = 0
        for span in spans:
            if cluster and span.first >= reach:
                yield cluster
                cluster = []
            cluster.append(span)
            reach = max(reach, span.last)
        yield cluster


def _base(cluster: list[_Span], taken: Container[str]) -> _Span:
    """The tensor to store for a cluster: one that covers the others, or the bare bytes beneath them."""
    first, last = cluster[0].first, max(span.last for span in cluster)
    if len({_geometry(span) for span in cluster}) == 1:
        return cluster[0]
    for span in cluster:
        covers = (span.first, span.last) == (first, last) and span.tensor.is_contiguous()
        if covers and all((other.first - first) % other.tensor.element_size() == 0 for other in cluster):
            return span
    first -= first % _ALIGNMENT  # so that a view of any dtype begins at an element boundary
    raw = torch.empty(0, dtype=torch.uint8, device=cluster[0].tensor.device)
    raw.set_(cluster[0].tensor.untyped_storage(), first, (last - first,), (1,))
    name = f"{cluster[0].name}{BARE}"
    while name in taken:
        name += "+"
    return _Span(name, raw, first, last)


def _view(span: _Span, base: _Span) -> View:
    tensor, stride = span.tensor, span.tensor.stride()
    if _geometry(span) == _geometry(base):
        stride = torch.empty(tensor.shape, device="meta").stride()  # the base is stored contiguously
    return View(base.name, tensor.dtype, tuple(tensor.shape), tuple(stride), span.first - base.first)


def _geometry(span: _Span) -> tuple[object, ...]:
    return span.first, span.tensor.dtype, span.tensor.shape, span.tensor.stride()


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file: dtype, shape, and the range of its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass
class TensorFile:
    """An opened safetensors file: its tensors by name.

    Reads are handed to `want` as transfers. A tensor holds its data once its transfers have been carried out.
    """

    reader: ByteReader
    where: str
    want: Want = at_once
    stored: dict[str, TensorEntry] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    offsets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _bases: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def open(cls, reader: ByteReader, where: str, size: int, want: Want = at_once) -> TensorFile:
        """Open a file of `size` bytes: its header is read, and checked against that."""
        file = cls(reader, where, want)
        with damage_reported(where, KIND):
            file._read_header(size)
        return file

    def __contains__(self, name: str) -> bool:
        return name in self.stored or name in self.views

    @property
    def ties(self) -> dict[str, str]:
        """Tied tensors: views that are all of a stored tensor, each with its name."""

        def is_all(view: View) -> bool:
            base = self.stored[view.of]
            return (view.dtype, view.shape, view.start) == (base.dtype, base.shape, 0) and is_dense(
                view.shape, view.stride
            )

        return {name: view.of for name, view in self.views.items() if is_all(view)}

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and shape of a tensor, without reading it."""
        entry = self.views.get(name) or self._entry(name)
        return entry.dtype, entry.shape

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in new memory. Tensors that shared memory when they were saved share it again."""
        view = self.views.get(name)
        base_name = view.of if view else name
        if base_name not in self._bases:
            entry = self._entry(base_name)
            self._bases[base_name] = torch.empty(entry.shape, dtype=entry.dtype)
            self.read_into(base_name, self._bases[base_name])
        base = self._bases[base_name]
        return view.on(base) if view else base

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Fill `target`, which has the tensor's shape."""
        _, shape = self.about(name)
        self.fill(name, target, Box((0,) * len(shape), shape))

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None:
        """Fill `target`, which is the given box of the tensor and needs no gradient."""
        self.region(name).fill(box.offsets, target, self.want)

    def region(self, name: str) -> Region:
        """The place of a tensor in the file."""
        view = self.views.get(name)
        if view is None:
            entry = self._entry(name)
            return Region(self.reader, self.where, entry.dtype, entry.start, entry.shape, dense_strides(entry.shape))
        start = self.stored[view.of].start + view.start
        return Region(self.reader, self.where, view.dtype, start, view.shape, view.stride)

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self.stored[name]
        except KeyError:
            raise DamagedError(f"{self.where} has no tensor {name!r}, but the checkpoint refers to it.") from None

    def _read_header(self, size: int) -> None:
        header = Header.read(self.reader, self.where, size)
        foreign = {name: dtype_of(dtype) for name, dtype in header.own("dtypes").items()}
        self.stored = {name: _entry(extent, foreign.get(name)) for name, extent in header.entries.items()}
        expansion = Expansion()
        for name, fields in header.own("views").items():
            self.views[name] = _view_from_json(fields, self.stored)
            expansion.add(self.views[name].shape, self.views[name].stride, self.views[name].dtype.itemsize)
        if both := self.stored.keys() & self.views.keys():
            raise ValueError(f"the header has {min(both)} twice")
        self.shapes = {name: checked_shape(shape) for name, shape in header.own("shapes").items()}
        sharding = parsed(header.metadata.get("DCP_SHARDING_INFO", "{}"))
        self.offsets = {name: checked_sizes(info["saved_offsets"]) for name, info in sharding.items()}


def _entry(extent: Extent, foreign: torch.dtype | None) -> TensorEntry:
    """`foreign`: the dtype, if safetensors has none for it; its bytes are the last dimension of what is stored."""
    spelling, shape, start, stop = extent
    if foreign is None:
        return TensorEntry(BY_SPELLING[spelling], shape, start, stop)
    if spelling != "U8" or shape[-1:] != (foreign.itemsize,):
        raise ValueError(f"bytes stored as {spelling} of shape {list(shape)} can't be elements of {foreign}")
    return TensorEntry(foreign, shape[:-1], start, stop)


def _view_from_json(fields: Mapping[str, Any], stored: Mapping[str, TensorEntry]) -> View:
    dtype, base = dtype_of(fields["dtype"]), stored[fields["of"]]
    shape, stride, (start,) = (
        checked_shape(fields["shape"]),
        checked_sizes(fields["stride"]),
        checked_sizes([fields["start"]]),
    )
    if start % dtype.itemsize or start + reach(shape, stride) * dtype.itemsize > base.stop - base.start:
        raise ValueError(f"a view reaches beyond {fields['of']!r}")
    return View(fields["of"], dtype, shape, stride, start)


_FoundPiece = tuple[torch.dtype, Sizes, Piece]  # dtype and shape of the full tensor, and one of its pieces


def pieced(
    files: Iterable[TensorFile], counts: Callable[[TensorFile, str], bool] = lambda file, name: True
) -> dict[str, PiecedTensor]:
    """Every tensor in the files, its pieces collected from all of them in which it `counts`."""
    found: dict[str, list[_FoundPiece]] = defaultdict(list)
    for file in files:
        for name, piece in _in_file(file):
            if counts(file, name):
                found[name].append(piece)
    return {name: _joined(name, pieces) for name, pieces in found.items()}


def _in_file(file: TensorFile) -> Iterator[tuple[str, _FoundPiece]]:
    for name, region in _regions(file):
        shape = file.shapes.get(name, region.sizes)
        box = Box(_offsets(file, name, len(shape)), region.sizes)
        yield name, (region.dtype, shape, Piece(box, region))


def _offsets(file: TensorFile, name: str, dims: int) -> Sizes:
    """The offsets of a piece in its tensor. A view of a piece has the offsets of that piece."""
    base = file.views[name].of if name in file.views and name in file.shapes else name
    return file.offsets.get(name) or file.offsets.get(base) or (0,) * dims


def _regions(file: TensorFile) -> Iterator[tuple[str, Region]]:
    """The region of every tensor. Bare buffers, which only serve as bases of views, are left out."""
    bases = {view.of for view in file.views.values() if is_bare(view.of)}
    for name in (*file.stored, *file.views):
        if name not in bases:
            yield name, file.region(name)


def _joined(name: str, found: list[_FoundPiece]) -> PiecedTensor:
    dtype, shape, first = found[0]
    for other_dtype, other_shape, piece in found:
        if (other_dtype, other_shape) != (dtype, shape) or len(piece.box.offsets) != len(shape):
            raise DamagedError(
                f"the files disagree about {name}: {first.region.where} says {dtype} of shape {list(shape)}, "
                f"{piece.region.where} says {other_dtype} of shape {list(other_shape)}."
            )
    return PiecedTensor(dtype, shape, tuple(piece for *_, piece in found if not piece.box.is_empty))


_log = logging.getLogger("ckpt")

SMALL = 1 << 16  # bytes

_Item = TypeVar("_Item")
_Outlines = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]  # name, dtype and shape of each stored tensor
_Shards = tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]  # name, shape of the full tensor, offsets in it
_Views = tuple[tuple[str, View], ...]


def plan_file(path: str, shards: Mapping[str, Shard], *, likely_unchanged: bool = False) -> FilePlan:
    """A file of these tensors. Plain CPU tensors are not copied: they are read when the file is written."""
    stored, views = untie({name: shard.tensor for name, shard in shards.items()})
    order = in_file_order(stored, shards)
    head, end = _header([(name, stored[name]) for name in order], shards, views)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(head)
        for name in order:
            yield host_bytes(on_host(stored[name]))

    contents: list[bytes | tuple[str, torch.Tensor]] = [head, *((name, stored[name]) for name in order)]
    in_memory = all(is_plain(stored[name]) for name in order)
    return FilePlan(path, len(head) + end, pieces, likely_unchanged, contents, in_memory, head=len(head))


def plan_streamed_file(
    path: str, outlines: Mapping[str, Shard], data: Callable[[], Iterator[memoryview]]
) -> tuple[list[str], FilePlan]:
    """The order of tensors, which are on the meta device, and a file of them whose `data` comes in that order."""
    tensors = {name: shard.tensor for name, shard in outlines.items()}
    order = in_file_order(tensors, outlines)
    head, end = _header([(name, tensors[name]) for name in order], outlines, {})

    def pieces() -> Iterator[memoryview]:
        yield memoryview(head)
        yield from data()

    return order, FilePlan(path, len(head) + end, pieces, head=len(head))


def plan_gathered_file(
    path: str,
    outlines: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    fetch: Callable[[str], torch.Tensor],
    *,
    collective: bool = True,
) -> FilePlan:
    """A file of tensors that are fetched one at a time, each when it is written.

    `outlines` are tensors on the meta device. `fetch` is called once for each, in `in_file_order`. If it is a
    `collective` call, a failure does not skip the remaining calls, or the other ranks would wait for this one.
    """
    order = in_file_order(outlines)
    views = {name: _whole_view(of, outlines[of]) for name, of in aliases.items()}
    head, end = _header([(name, outlines[name]) for name in order], {}, views)

    def pieces() -> Iterator[memoryview]:
        remaining = iter(order)
        try:
            yield memoryview(head)
            for name in remaining:
                yield host_bytes(on_host(fetch(name)))
        except (Exception, GeneratorExit):
            if collective:
                finish_collectives(fetch, remaining)
            raise

    return FilePlan(path, len(head) + end, pieces, head=len(head))


def finish_collectives(call: Callable[[_Item], object], remaining: Iterable[_Item]) -> None:
    """Make the remaining collective calls after a failure on this rank, so that no other rank waits for it.

    A failure among them is logged only: the caller raises the first one.
    """
    try:
        for item in remaining:
            call(item)
    except Exception as error:
        _log.warning(
            "this rank could not join the other ranks' remaining collective calls: %s: %s", type(error).__name__, error
        )


def in_file_order(tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard] = MappingProxyType({})) -> list[str]:
    """Names in the order of the file: larger elements first, so that every tensor is aligned.

    Among tensors of equal element size, small ones come last and so lie together: the step counts of an optimizer,
    which every rank reads from the single rank that wrote them, are then in one block instead of in all. Of `shards`,
    the full tensors count, so that all ranks have the same order.
    """

    def sort_key(name: str) -> tuple[int, bool]:
        size = tensors[name].element_size()
        count = math.prod(shards[name].shape) if name in shards else tensors[name].numel()
        return -size, count * size < SMALL

    return sorted(tensors, key=sort_key)


def _whole_view(name: str, tensor: torch.Tensor) -> View:
    """A view of all of a tensor."""
    return View(name, tensor.dtype, tuple(tensor.shape), tensor.stride(), 0)


def _header(
    tensors: list[tuple[str, torch.Tensor]], shards: Mapping[str, Shard], views: Mapping[str, View]
) -> tuple[bytes, int]:
    """The header, and how many bytes of data follow it."""
    outlines = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors)
    partial = tuple((name, shard.shape, shard.offsets) for name, shard in shards.items() if not shard.is_whole)
    return _header_bytes(outlines, partial, tuple(views.items()))


@lru_cache(maxsize=64)  # it is the same in every save, and this runs while training waits
def _header_bytes(outlines: _Outlines, shards: _Shards, views: _Views) -> tuple[bytes, int]:
    tensors = [_tensor_header(name, dtype, shape) for name, dtype, shape in outlines]
    return header.to_bytes(tensors, _metadata(outlines, shards, views)), sum(tensor.nbytes for tensor in tensors)


def _tensor_header(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorHeader:
    nbytes = math.prod(shape) * dtype.itemsize
    if dtype in SPELLED:
        return TensorHeader(name, SPELLED[dtype], shape, nbytes)
    return TensorHeader(name, "U8", (*shape, dtype.itemsize), nbytes)


def _metadata(outlines: _Outlines, shards: _Shards, views: _Views) -> dict[str, str]:
    metadata = {"format": "pt"}
    ours = {
        "dtypes": {name: dtype_name(dtype) for name, dtype, _ in outlines if dtype not in SPELLED},
        "shapes": {name: list(shape) for name, shape, _ in shards},
        "views": {name: _view_to_json(view) for name, view in views},
    }
    if shards:
        # PyTorch's reader expects every tensor of the file under this key, if the key is there
        known = {name: list(offsets) for name, _, offsets in shards}
        offsets = {name: {"saved_offsets": known.get(name, [0] * len(shape))} for name, _, shape in outlines}
        metadata["DCP_SHARDING_INFO"] = json.dumps(offsets)
    if any(ours.values()):
        metadata["ckpt"] = json.dumps({key: value for key, value in ours.items() if value})
    return metadata


def _view_to_json(view: View) -> dict[str, Any]:
    geometry = {"shape": list(view.shape), "stride": list(view.stride), "start": view.start}
    return {"of": view.of, "dtype": dtype_name(view.dtype), **geometry}

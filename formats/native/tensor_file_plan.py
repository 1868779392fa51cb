"""Planning safetensors files: the order of the tensors, the header, and an iterator over the bytes to write.

A file is what the safetensors specification says: eight bytes of header length, a JSON header padded with spaces, the
data without gaps. On top of that (docs/format.md):

- the header is padded so that the data starts at a multiple of 4096, and tensors are sorted by alignment;
- `__metadata__["DCP_SHARDING_INFO"]` holds the offsets of shards in their tensors, in PyTorch's own format;
- `__metadata__["ckpt"]` holds what safetensors cannot express: dtypes it does not know (stored as U8), the full shapes
  of sharded tensors, and tensors that are views of others.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import torch

from ckpt.formats.native import dtypes, header
from ckpt.formats.native.header import TensorHeader
from ckpt.formats.native.shared_storage import View, untie
from ckpt.formats.state import FilePlan, Shard
from ckpt.formats.tensor_bytes import host_bytes, is_plain, on_host

_log = logging.getLogger("ckpt")

SMALL = 1 << 16  # bytes

_Item = TypeVar("_Item")
_Outlines = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]  # name, dtype and shape of each stored tensor
_Shards = tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]  # name, shape of the full tensor, offsets in it
_Views = tuple[tuple[str, View], ...]


def plan_file(path: str, shards: Mapping[str, Shard], *, likely_unchanged: bool = False) -> FilePlan:
    """A file of these tensors. Plain CPU tensors are not copied: they are read when the file is written."""
    stored, views = untie({name: shard.tensor for name, shard in shards.items()})
    order = in_file_order(stored)
    head, end = _header([(name, stored[name]) for name in order], shards, views)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(head)
        for name in order:
            yield host_bytes(on_host(stored[name]))

    contents: list[bytes | tuple[str, torch.Tensor]] = [head, *((name, stored[name]) for name in order)]
    in_memory = all(is_plain(stored[name]) for name in order)
    return FilePlan(path, len(head) + end, pieces, likely_unchanged, contents, in_memory, head=len(head))


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
        _log.warning("could not finish the collective calls of other ranks: %s: %s", type(error).__name__, error)


def in_file_order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names in the order of the file: larger elements first, so that every tensor is aligned.

    Among tensors of equal element size, small ones come last and so lie together: the step counts of an optimizer,
    which every rank reads from the single rank that wrote them, are then in one block instead of in all.
    """

    def sort_key(name: str) -> tuple[int, bool]:
        tensor = tensors[name]
        return -tensor.element_size(), tensor.numel() * tensor.element_size() < SMALL

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
    if dtype in dtypes.SPELLED:
        return TensorHeader(name, dtypes.SPELLED[dtype], shape, nbytes)
    return TensorHeader(name, "U8", (*shape, dtype.itemsize), nbytes)


def _metadata(outlines: _Outlines, shards: _Shards, views: _Views) -> dict[str, str]:
    metadata = {"format": "pt"}
    ours = {
        "dtypes": {name: dtypes.name_of(dtype) for name, dtype, _ in outlines if dtype not in dtypes.SPELLED},
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
    return {"of": view.of, "dtype": dtypes.name_of(view.dtype), **geometry}

"""Safetensors files that are to be written: their headers, and the order of the tensors in them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch

from ckpt.formats.native import dtypes
from ckpt.formats.native.header import LENGTH
from ckpt.formats.native.shared_storage import View, untie
from ckpt.formats.state import FilePlan, Shard
from ckpt.formats.tensor_bytes import host_bytes, is_plain, on_host

_log = logging.getLogger("ckpt")

ALIGNMENT = 4096
SMALL = 1 << 16  # bytes

_Outlines = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]  # name, dtype and shape of what is stored
_Pieces = tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]  # name, shape of the whole, and offsets in it


def image(path: str, shards: Mapping[str, Shard], *, steady: bool = False) -> FilePlan:
    """The file that holds these tensors. Plain tensors on the CPU are read from where they lie when it is written."""
    stored, views = untie({name: shard.tensor for name, shard in shards.items()})
    order = in_file_order(stored)
    header, end = _header([(name, stored[name]) for name in order], shards, views)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(header)
        for name in order:
            yield host_bytes(on_host(stored[name]))

    contents: list[bytes | tuple[str, torch.Tensor]] = [header, *((name, stored[name]) for name in order)]
    settled = all(is_plain(stored[name]) for name in order)
    return FilePlan(path, len(header) + end, pieces, steady, contents, settled, head=len(header))


def gathered_image(
    path: str,
    outlines: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    fetch: Callable[[str], torch.Tensor],
    *,
    together: bool = True,
) -> FilePlan:
    """The file that holds these tensors, each of which is fetched when its turn to be written comes.

    `outlines` are tensors on the meta device. `fetch` is called once for each, in `in_file_order`; where ranks do it
    `together`, also if writing fails half-way.
    """
    order = in_file_order(outlines)
    views = {
        name: View(of, outlines[of].dtype, tuple(outlines[of].shape), outlines[of].stride(), 0)
        for name, of in aliases.items()
    }
    header, end = _header([(name, outlines[name]) for name in order], {}, views)

    def pieces() -> Iterator[memoryview]:
        left = iter(order)
        try:
            yield memoryview(header)
            for name in left:
                yield host_bytes(on_host(fetch(name)))
        except (Exception, GeneratorExit):
            if together:
                take_part(fetch, left)
            raise

    return FilePlan(path, len(header) + end, pieces, head=len(header))


def take_part(fetch: Callable[[Any], object], left: Iterable[Any]) -> None:
    """Go on with what ranks do together, after a failure here. A failure of that is logged: the first one is raised."""
    try:
        for one in left:
            fetch(one)
    except Exception as error:
        _log.warning("other ranks could not be helped to their end: %s: %s", type(error).__name__, error)


def in_file_order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names as they come in a file: larger elements first, so that all are aligned.

    Among those of one size small tensors come last, and so stand together: the step counts of an optimizer, which
    every rank wants of the one rank that writes them, are then in one block, and not in all.
    """

    def place(name: str) -> tuple[int, bool]:
        tensor = tensors[name]
        return -tensor.element_size(), tensor.numel() * tensor.element_size() < SMALL

    return sorted(tensors, key=place)


def _header(
    tensors: list[tuple[str, torch.Tensor]], shards: Mapping[str, Shard], views: Mapping[str, View]
) -> tuple[bytes, int]:
    """The header, and how many bytes of data come after it."""
    outlines = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors)
    pieces = tuple((name, one.shape, one.offsets) for name, one in shards.items() if not one.is_whole)
    return _spelled_out(outlines, pieces, tuple(views.items()))


@lru_cache(maxsize=64)  # save after save they are the same, and training waits
def _spelled_out(outlines: _Outlines, pieces: _Pieces, views: tuple[tuple[str, View], ...]) -> tuple[bytes, int]:
    entries: dict[str, Any] = {"__metadata__": _metadata(outlines, pieces, views)}
    end = 0
    for name, dtype, shape in outlines:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        spelling, spelled_shape = _spelled(dtype, shape)
        entries[name] = {"dtype": spelling, "shape": spelled_shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return LENGTH.pack(_padded(len(text))) + text.ljust(_padded(len(text))), end


def _padded(length: int) -> int:
    return -(-(length + LENGTH.size) // ALIGNMENT) * ALIGNMENT - LENGTH.size


def _spelled(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    if dtype in dtypes.SPELLED:
        return dtypes.SPELLED[dtype], list(shape)
    return "U8", [*shape, dtype.itemsize]


def _metadata(outlines: _Outlines, pieces: _Pieces, views: tuple[tuple[str, View], ...]) -> dict[str, str]:
    metadata = {"format": "pt"}
    ours = {
        "dtypes": {name: dtypes.name_of(dtype) for name, dtype, _ in outlines if dtype not in dtypes.SPELLED},
        "shapes": {name: list(shape) for name, shape, _ in pieces},
        "views": {name: _view_to_json(view) for name, view in views},
    }
    if pieces:
        # PyTorch's reader asks for every tensor of a file in which it finds this key
        known = {name: list(offsets) for name, _, offsets in pieces}
        offsets = {name: {"saved_offsets": known.get(name, [0] * len(shape))} for name, _, shape in outlines}
        metadata["DCP_SHARDING_INFO"] = json.dumps(offsets)
    if any(ours.values()):
        metadata["ckpt"] = json.dumps({key: value for key, value in ours.items() if value})
    return metadata


def _view_to_json(view: View) -> dict[str, Any]:
    geometry = {"shape": list(view.shape), "stride": list(view.stride), "start": view.start}
    return {"of": view.of, "dtype": dtypes.name_of(view.dtype), **geometry}

"""Digests of batches and of indices: they show whether a resumed loader yields the same data.

A stream without `state_dict` is replayed up to its position. If its order depends on something that is not restored,
such as OS entropy, the replay yields other samples and the epoch silently loses some: only the data itself shows it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

_LEAVES = 8  # of a batch that are digested
_KEPT = (8, 4)  # elements of a sample in the last dimension and in the one before; of the others, the first
_LETTERS = 64  # of a text

Extract = list[tuple[str, bytes]]


def extract(batch: Any) -> Extract:
    """A few bytes of every sample in each leaf of a batch; costs some ten microseconds. Device tensors are left out:
    reading them would wait for the device."""
    found: Extract = []
    for path, value in _leaves(batch, ""):
        data = _bytes(value)
        if data is not None:
            found.append((path, data))
        if len(found) == _LEAVES:
            break
    return found


class Contents:
    """One running digest per leaf over all batches of an epoch; the same for any batch size."""

    def __init__(self) -> None:
        self._digests: dict[str, Any] = {}
        self._first: dict[str, bytes] = {}
        self._varied: set[str] = set()
        self._batches = 0

    def add(self, extracted: Extract) -> None:
        self._batches += 1
        for path, data in extracted:
            self._digests.setdefault(path, xxhash.xxh3_64()).update(data)
            if self._first.setdefault(path, data) != data:
                self._varied.add(path)

    def digests(self) -> dict[str, str]:
        """Only of leaves that vary between batches: a mask of ones would agree for any samples."""
        varied = self._varied if self._batches > 1 else self._digests
        return {path: self._digests[path].hexdigest() for path in sorted(varied)}

    def differing(self, saved: Mapping[str, str]) -> list[str]:
        """The leaves whose digest is not the saved one."""
        now = self.digests()
        return [path for path, digest in saved.items() if now.get(path) != digest]


def index_bytes(indices: list[Any]) -> bytes:
    """Sample indices as a digest takes them: the same bytes however they are cut into batches."""
    return f"{indices!r}"[1:-1].encode() + b", " if indices else b""


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in list(value.items())[: 4 * _LEAVES]:
            yield from _leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple) and not (value and isinstance(value[0], str | bytes | int | float)):
        for number, item in enumerate(value[: 4 * _LEAVES]):
            yield from _leaves(item, f"{path}[{number}]")
    else:
        yield path, value


def _bytes(value: Any) -> bytes | None:
    if hasattr(value, "__array__") and not isinstance(value, torch.Tensor):
        value = _tensor(value)
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, list | tuple):
        return b"".join(repr(item)[:_LETTERS].encode() for item in value)
    return repr(value)[:_LETTERS].encode() if isinstance(value, str | bytes | int | float) else None


def _tensor(array: Any) -> torch.Tensor | None:
    try:
        return torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError):  # of objects or texts
        return None


def _of_tensor(tensor: torch.Tensor) -> bytes | None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    places = [slice(None)] * min(1, tensor.dim())
    for left, size in zip(range(tensor.dim() - 2, -1, -1), tensor.shape[1:], strict=True):
        kept = _KEPT[left] if left < len(_KEPT) else 1
        places.append(slice(None, None, max(1, -(-size // kept))))
    sample = tensor.detach()[tuple(places)].contiguous()
    return ctypes.string_at(sample.data_ptr(), sample.numel() * sample.element_size())

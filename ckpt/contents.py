"""What a stream has handed out, in digests: they tell whether it gives the same again when it is gone through again.

A stream without a position of its own is replayed up to where it was. One that is shuffled by something that nobody
restores, as by the entropy of the operating system, then gives other samples, and nothing else would show it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

_LEAVES = 8  # of a batch that are looked at
_KEPT = (8, 4)  # elements of a sample in the last dimension and in the one before; of the others, the first
_LETTERS = 64  # of a text

Extract = list[tuple[str, bytes]]


def extract(batch: Any) -> Extract:
    """A few bytes of every sample in a batch, leaf by leaf: some microseconds. What lies on a device is left there."""
    found: Extract = []
    for path, value in _leaves(batch, ""):
        data = _bytes(value)
        if data is not None:
            found.append((path, data))
        if len(found) == _LEAVES:
            break
    return found


class Contents:
    """A digest of each leaf over all batches of an epoch, which does not depend on how samples were cut into batches."""

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
        """Of the leaves that tell batches apart; a mask of ones or a counter of positions is the same for any samples."""
        told = self._varied if self._batches > 1 else self._digests
        return {path: self._digests[path].hexdigest() for path in sorted(told)}

    def differing(self, saved: Mapping[str, str]) -> list[str]:
        """The leaves that are not as they were."""
        now = self.digests()
        return [path for path, digest in saved.items() if now.get(path) != digest]


def unrepeated(now: Contents, saved: Mapping[str, str], *, found: int, batches: int, drawn: bool) -> str:
    """Why a stream has not repeated the batches that it had handed out; empty if it has.

    `drawn`: whether it draws from the global generators. Training does so too, so that what it draws for one sample, as
    for an augmentation, is another number now: then something in its samples must still be the same.
    """
    if found < batches:
        return (
            f"ended after {found} of the {batches} batches that it had given before the resume: it is not the same data. "
            "Samples of this epoch were repeated or missed."
        )
    if not saved:
        return (
            "gives batches in which nothing can be compared (tensors on a device, or always the same), so that nobody "
            "has checked whether it gives the same samples again. Samples of this epoch may repeat or be missed."
        )
    different = now.differing(saved)
    if not different or (drawn and len(different) < len(saved)):
        return ""
    where = ", ".join(path or "the batch" for path in different[:3])
    return (
        f"gave other data than before the resume ({where}), so samples of this epoch repeat or are missed: its order "
        "depends on something that is not restored, as the entropy of the operating system or a global generator. Seed "
        "it, or give it state_dict and load_state_dict."
    )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, one in list(value.items())[: 4 * _LEAVES]:
            yield from _leaves(one, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple) and not (value and isinstance(value[0], str | bytes | int | float)):
        for number, one in enumerate(value[: 4 * _LEAVES]):
            yield from _leaves(one, f"{path}[{number}]")
    else:
        yield path, value


def _bytes(value: Any) -> bytes | None:
    if hasattr(value, "__array__") and not isinstance(value, torch.Tensor):
        value = _tensor(value)
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, list | tuple):
        return b"".join(repr(one)[:_LETTERS].encode() for one in value)
    return repr(value)[:_LETTERS].encode() if isinstance(value, str | bytes | int | float) else None


def _tensor(array: Any) -> Any:
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

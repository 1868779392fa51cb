"""What a loaded state is compared with: a copy of the state at the moment of the save, or checksums of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from benchmarks.shared.state import State, bytes_of, same_bits

CHUNK = 64 << 20  # bytes; a checksum needs about four times as much memory on the device
_WORD = 8
_POSITION, _FIRST, _SECOND = -0x61C8864680B583EB, -0x4B47D0C5A1A8B1C3, -0x6B2FB6448B0C0E29  # odd: no bit is lost


class Reference(Protocol):
    """The state at the moment of a save."""

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Record these tensors, in the order of the current stream."""

    def names(self) -> set[str]:
        """The tensors that were recorded."""

    def unequal(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of tensors that differ from the recorded ones in type, shape or any bit."""


class Copy:
    """A copy on the device: bit by bit, and as large as the state."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        torch._foreach_copy_(list(self._copies.values()), [tensors[name] for name in self._copies])

    def names(self) -> set[str]:
        return set(self._copies)

    def unequal(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return [name for name, copy in self._copies.items() if not same_bits(copy, tensors[name])]


class Checksums:
    """Types, shapes and a checksum of every tensor: for a state of which the device cannot hold another copy."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.take(tensors)

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._taken = {name: (described(tensor), checksum(tensor)) for name, tensor in tensors.items()}

    def names(self) -> set[str]:
        return set(self._taken)

    def unequal(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return [
            name
            for name, (description, taken) in self._taken.items()
            if described(tensors[name]) != description or int(checksum(tensors[name])) != int(taken)
        ]


REFERENCES: Mapping[str, type[Copy] | type[Checksums]] = {"copy": Copy, "checksums": Checksums}


def assert_equal(reference: Reference, groups: Any, loaded: State, library: str) -> None:
    """Every bit of every tensor, and every option of every group."""
    found = loaded.tensors()
    assert reference.names() == found.keys(), f"{library}: other tensors were loaded"
    unequal = reference.unequal(found)
    assert not unequal, f"{library}: {len(unequal)} tensors have other values, {', '.join(unequal[:3])} among them"
    assert groups == loaded.groups, f"{library}: the parameter groups have other options"


def described(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """64 bits that depend on every bit and on its position: every word is mixed with its index, then all are added.

    One number on the tensor's device, computed in chunks without waiting for it.
    """
    content = bytes_of(tensor)
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    for start in range(0, len(content), CHUNK):
        words = _words(content[start : start + CHUNK])
        position = torch.arange(start // _WORD, start // _WORD + len(words), device=words.device)
        total += _mix(words, position.mul_(_POSITION)).sum()
    return total


def _words(content: torch.Tensor) -> torch.Tensor:
    """A copy as 64-bit words, padded with zeros."""
    padded = torch.zeros(-(-len(content) // _WORD) * _WORD, dtype=torch.uint8, device=content.device)
    padded[: len(content)] = content
    return padded.view(torch.int64)


def _mix(words: torch.Tensor, salt: torch.Tensor) -> torch.Tensor:
    """Multiplication wraps around. In place, and a bijection of words for any salt: no single change is missed."""
    mixed = words.bitwise_xor_(salt).mul_(_FIRST)
    mixed ^= (mixed >> 32) & 0xFFFFFFFF
    return mixed.mul_(_SECOND)

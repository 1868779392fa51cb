"""A DTensor without its values, from which one like it is built around another shard."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class ShardOutline(NamedTuple):
    """A DTensor without its values."""

    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> ShardOutline:
        return cls(tensor.device_mesh, tensor.placements, tensor.size(), tensor.stride())

    def around(self, piece: torch.Tensor) -> Any:
        """Such a DTensor, with this shard on this rank."""
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = self
        return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=stride)

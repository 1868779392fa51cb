"""How much memory of a device a snapshot may take for a moment, without taking it from training."""

from __future__ import annotations

from typing import Any

import torch

_SNAPSHOTS_UNTIL_RETRY = 10


class DeviceRoom:
    """What training has never used of a device, less a reserve.

    `limit`: bytes to take at most.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._device = device
        self._limit = limit
        self._peak = 0  # bytes that training had allocated at most
        self._staged = 0  # bytes of the largest snapshot
        self._peak_beside = 0  # the allocator's peak when a snapshot was last released: it may be part of that
        self._in_one_piece: int | None = None  # bytes that the allocator could provide when it failed
        self._until_retry = 0  # snapshots

    def measure(self) -> int:
        """Bytes that can be taken now. Blocks that the allocator keeps for later are free."""
        module: Any = torch.get_device_module(self._device)
        free, total = module.mem_get_info(self._device)
        used, reserved = _figures(self._device)
        allocated = used.get("current", 0)
        cached = reserved.get("current", 0) - allocated
        self._peak = max(self._peak, allocated, self._peak_of_training(used.get("peak", 0)))
        needed = self._peak - allocated
        reserve = total // 32 if needed > total // 128 else total // 4  # no step was seen yet: who knows what it needs
        bounds = [free + cached - needed - reserve, self._limit, self._provided()]
        room: int = min(bound for bound in bounds if bound is not None)
        return max(0, room)

    def _provided(self) -> int | None:
        """What the allocator could provide when it had less than it said; None if it has not been tried for a while."""
        self._until_retry -= 1
        return self._in_one_piece if self._until_retry > 0 else None

    def _peak_of_training(self, peak: int) -> int:
        """What training needed at least, by the allocator's peak. A peak that rose without a snapshot is training's."""
        return peak if peak > self._peak_beside else peak - self._staged

    def taken(self, size: int) -> None:
        """A snapshot has taken as many bytes."""
        self._staged = max(self._staged, size)

    def released(self) -> None:
        """The snapshot has given its bytes back."""
        used, _ = _figures(self._device)
        self._peak_beside = max(self._peak_beside, used.get("peak", 0))

    def overestimated(self, room: int) -> None:
        """The allocator could not provide more than this: its free memory is in pieces, and to ask it takes long."""
        self._in_one_piece, self._until_retry = room, _SNAPSHOTS_UNTIL_RETRY


def _figures(device: torch.device) -> tuple[dict[str, int], dict[str, int]]:
    """What the allocator of a device has allocated, and what it has reserved: now, and at most."""
    figures = torch.get_device_module(device).memory_stats_as_nested_dict(device)
    used, reserved = (figures.get(name, {}).get("all", {}) for name in ("allocated_bytes", "reserved_bytes"))
    return used, reserved

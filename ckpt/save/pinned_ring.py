"""A small ring of pinned host memory, through which bytes pass from a device to the image of a snapshot."""

from __future__ import annotations

import torch

from ckpt.save.device_staging import TRANSFER
from ckpt.save.device_streams import Device


class PinnedRing:
    """Slots of one transfer each, for every device. Pinned where the device knows that: see `Device`."""

    def __init__(self) -> None:
        self._slots: dict[tuple[torch.device, int], torch.Tensor] = {}

    def slot(self, device: Device, number: int) -> torch.Tensor:
        """The slot of this number for this device, allocated when it is first used."""
        key = device.device, number
        if key not in self._slots:
            self._slots[key] = device.allocate_on_host(TRANSFER)
        return self._slots[key]

    def release(self) -> None:
        """Free the memory. Nothing may be using it."""
        self._slots = {}

"""Says beforehand, once, that training will wait for a save because there is no room for a copy of the state."""

from __future__ import annotations

import logging

from ckpt.util.console import format_size as shown

_log = logging.getLogger("ckpt")
_BYTES_PER_SECOND = 20e9  # about what is copied from a device through the ring
_NOTICED = 0.05  # seconds


class RoomWarnings:
    """Each warning is logged once."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def of_waiting(self, size: int, limit: int) -> None:
        """Host memory has no room for a snapshot of this size."""
        self._warn_once(
            f"a snapshot of the state needs {shown(size)} of host memory, and {shown(limit)} may be used: training "
            "waits while a checkpoint is written. saving=ckpt.SaveOptions(host_memory=...) sets how much may be used.",
            "host",
        )

    def of_room(self, size: int, total: int) -> None:
        """The device has no room for so many bytes of the state, where that would be noticed."""
        seconds = size / _BYTES_PER_SECOND
        if seconds > _NOTICED:
            self._warn_once(
                f"beside training the device has no room for a copy of {shown(size)} of the state's {shown(total)}: "
                f"training waits while these are copied to host memory, about {seconds:.1f} s at every save.",
                "device",
            )

    def _warn_once(self, message: str, about: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            _log.warning("%s", message)

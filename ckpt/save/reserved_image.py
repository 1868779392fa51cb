"""Host memory for a snapshot that stays in memory: its files themselves, mapped, so that nothing is copied twice."""

from __future__ import annotations

import os
from contextlib import suppress

import torch

from ckpt.errors import FullError, StorageError
from ckpt.save.snapshot_layout import SnapshotLayout
from ckpt.storage import Reserving
from ckpt.storage.base import ReservedFile
from ckpt.util.mapped_range import MappedRange, is_possible

_SMALL = 1 << 20  # bytes: files below this are copied


class ReservedImage:
    """The image of a snapshot. Its large files are reserved in a storage, and get their names when they are written.

    A part must be made resident before it is written to: there may be no memory for it, which would end the process.
    """

    def __init__(self, storage: Reserving, layout: SnapshotLayout) -> None:
        self._storage = storage
        self._range = MappedRange(layout.size)
        self.files: dict[str, ReservedFile] = {}
        try:
            for file, start in zip(layout.files, layout.starts, strict=True):
                if file.size >= _SMALL:
                    self._reserve(file.path, start, file.size)
        except BaseException:
            self.release()
            raise

    @classmethod
    def of(cls, storage: object, layout: SnapshotLayout) -> ReservedImage | None:
        """None for a storage that reserves nothing, and where the system cannot map its files."""
        if not isinstance(storage, Reserving) or not is_possible():
            return None
        with suppress(StorageError, OSError):
            image = cls(storage, layout)
            if image.files and image._can_be_resident(layout):
                return image
            image.release()
        return None

    def bytes(self, size: int) -> torch.Tensor:
        return torch.frombuffer(self._range.memory, dtype=torch.uint8)[:size]

    def make_resident(self, start: int, size: int) -> None:
        """Give a part its memory. Raises if there is none."""
        if size and not self._range.make_resident(start, size):
            raise FullError("there is no memory left for the snapshot.")

    def release(self) -> None:
        """Give up the memory; files that were written keep it."""
        self._range.release()
        for file in self.files.values():
            self._storage.give_up(file)

    def _reserve(self, path: str, start: int, size: int) -> None:
        descriptor, self.files[path] = self._storage.reserve(size)
        try:
            self._range.map_file(descriptor, start, size)
        finally:
            os.close(descriptor)

    def _can_be_resident(self, layout: SnapshotLayout) -> bool:
        """Whether the system has the call for it, and one page."""
        starts = dict(zip((file.path for file in layout.files), layout.starts, strict=True))
        return self._range.make_resident(starts[next(iter(self.files))], 1)

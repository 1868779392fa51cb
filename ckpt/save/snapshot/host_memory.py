"""Host memory for snapshots: who takes it, how much of it there is, and where it comes from.

It is private memory that is prefaulted in the background and used again by later snapshots. A snapshot that stays in
memory has no use for that: its image is its files themselves, mapped, so that nothing is copied twice.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch

from ckpt.errors import FullError, StorageError
from ckpt.storage import Reserving
from ckpt.storage.base import ReservedFile
from ckpt.util.aligned_memory import MappedRange, allocate_pages, can_map_files
from ckpt.util.memory_limit import available, reserve, spare
from ckpt.util.threads import Worker

_CHUNK = 16 << 20  # bytes made resident at a time, in a few milliseconds: a save waits no longer
_THREADS = 2  # beside training
_SMALL = 1 << 20  # bytes: files below this are not reserved, but copied
_WASTE = 4  # an image is used for no less than this part of it: a small one would take it from the next large one


class PrivateImage:
    """Memory of one snapshot at a time, page-aligned, until it is released: then the next may have it."""

    def __init__(self) -> None:
        self.files: Mapping[str, ReservedFile] = {}  # none, ever: its bytes are in no file
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._taken = 0
        self.size = 0
        self.in_use = False
        self.resident = 0  # bytes that have been written to

    def take(self, size: int) -> None:
        """Have as many bytes. They become resident when they are first written to, if they are new."""
        self._taken, self.in_use = size, True
        self.reserve(size)

    def reserve(self, size: int) -> None:
        if size > self.size:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # freed first: there may not be room for both
            self._bytes = torch.frombuffer(allocate_pages(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE), dtype=torch.uint8)
            self.size, self.resident = size, 0

    def bytes(self, size: int) -> torch.Tensor:
        return self._bytes[:size]

    def make_resident(self, start: int, size: int) -> None:
        """Private memory is, when it is written to."""

    def release(self) -> None:
        """The snapshot is not needed any more."""
        self.resident = max(self.resident, self._taken)
        self.in_use = False

    def chunks(self) -> Iterator[torch.Tensor]:
        for start in range(0, self.size, _CHUNK):
            yield self._bytes[start : start + _CHUNK]


class ReservedImage:
    """The image of a snapshot whose large files are reserved in a storage, and get their names when they are written.

    A part must be made resident before it is written to: there may be no memory for it, which would end the process.
    `places`: the path, the start and the size of every file.
    """

    def __init__(self, storage: Reserving, size: int, places: Sequence[tuple[str, int, int]]) -> None:
        self._storage = storage
        self._range = MappedRange(size)
        self.files: dict[str, ReservedFile] = {}
        try:
            for path, start, length in places:
                if length >= _SMALL:
                    self._reserve(path, start, length)
        except BaseException:
            self.release()
            raise

    @classmethod
    def of(cls, storage: object, size: int, places: Sequence[tuple[str, int, int]]) -> ReservedImage | None:
        """None for a storage that reserves nothing, and where the system cannot map its files."""
        if not isinstance(storage, Reserving) or not can_map_files():
            return None
        with suppress(StorageError, OSError):
            image = cls(storage, size, places)
            first = next((start for path, start, _ in places if path in image.files), None)
            if first is not None and image._range.make_resident(first, 1):  # the system has the call, and one page
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


Image = PrivateImage | ReservedImage


class HostMemory:
    """Owns all private memory of snapshots, as many images as there are snapshots at the same time.

    `limit`: bytes to take at most; by default what is available, less a reserve for training.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._images: list[PrivateImage] = []
        self._prefaulted: PrivateImage | None = None
        self._untouched: Iterator[torch.Tensor] = iter(())  # its chunks that are not resident yet
        self._lock = threading.Lock()
        self._giving_out = threading.Lock()
        self._prefaulting = Worker("ckpt-memory")
        self._not_paused = threading.Event()
        self._not_paused.set()

    @property
    def size(self) -> int:
        """Bytes of all images."""
        return sum(image.size for image in self._images)

    @property
    def free_resident(self) -> int:
        """Bytes that the system counts as used, though no snapshot uses them."""
        return sum(image.resident for image in self._images if not image.in_use)

    def room(self, to_come: int) -> int:
        """Bytes that another snapshot may take. `to_come`: bytes in use that are not resident yet."""
        if self.limit is not None:
            return self.limit - sum(image.size for image in self._images if image.in_use)
        memory = available() + self.free_resident - to_come
        return memory - reserve(memory)

    def prefault(self, size: int) -> None:
        """Begin to make an image of this size resident, unless there is one."""
        if not any(size <= image.size and not image.in_use for image in self._images) and not self._prefaulting.busy:
            self._prefaulted = image = self._find(size)
            image.reserve(size)
            self._untouched = image.chunks()
            self._prefaulting.start(lambda: self._touch_all(image))

    def take(self, size: int) -> PrivateImage:
        """An image that no other snapshot uses, of at least this size. There must be room for it."""
        with self._giving_out:
            image = self._find(size)
            if image is self._prefaulted:
                self._stop_prefaulting()
            if size > image.size and not self._has_room_beside(size - image.size):
                self._images = [one for one in self._images if one.in_use or one is image]
            image.take(size)
        return image

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend prefaulting while this context lasts, in which a load, say, needs the machine."""
        self._not_paused.clear()
        try:
            yield
        finally:
            self._not_paused.set()

    def release(self) -> None:
        """Free all memory. Nothing may be using it."""
        self._stop_prefaulting()
        self._images = []

    def _find(self, size: int) -> PrivateImage:
        """A free image: the smallest that is not far too large, else one that must grow."""
        free = sorted((image for image in self._images if not image.in_use), key=lambda image: image.size)
        fitting = [image for image in free if size <= image.size <= _WASTE * size]
        found = fitting[:1] or [image for image in free if image.size < size][-1:]
        if not found:
            found = [PrivateImage()]
            self._images += found
        return found[0]

    def _has_room_beside(self, size: int) -> bool:
        """Whether as many bytes more may be taken, though unused images stay."""
        return size <= (spare() if self.limit is None else self.limit - self.size)

    def _stop_prefaulting(self) -> None:
        """The bytes that are not resident yet become so when they are written to."""
        self._untouched = iter(())
        self._not_paused.set()
        with suppress(Exception):  # whatever failed there, the memory can be used
            self._prefaulting.wait()

    def _touch_all(self, image: PrivateImage) -> None:
        def work() -> None:
            while True:
                self._not_paused.wait()
                with self._lock:
                    chunk = next(self._untouched, None)
                    if chunk is None or not threading.main_thread().is_alive():  # the interpreter is shutting down
                        return
                chunk[:: mmap.PAGESIZE].zero_()  # writing to one byte of a page makes it resident
                with self._lock:
                    image.resident += len(chunk)

        helpers = [Worker("ckpt-memory").start(work) for _ in range(_THREADS - 1)]
        work()
        for helper in helpers:
            helper.wait()

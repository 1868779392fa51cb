"""Host memory for snapshots: allocated once, prefaulted in the background, reused."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from ckpt.storage.base import ReservedFile
from ckpt.util.aligned_memory import allocate_pages
from ckpt.util.threads import SerialWorker, ThreadCall

_CHUNK = 16 << 20  # bytes made resident at a time, in a few milliseconds: a save waits no longer
_THREADS = 2  # beside training


class HostImage:
    """The memory of one snapshot at a time, page-aligned."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.in_use = False
        self.resident = 0  # bytes that have been written to

    @property
    def size(self) -> int:
        return len(self._bytes)

    def reserve(self, size: int) -> None:
        """Allocate as many bytes, unless there are as many. They become resident when they are first written to."""
        if size > self.size:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # freed first: there may not be room for both
            memory = allocate_pages(max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE)
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
            self.resident = 0

    def bytes(self, size: int) -> torch.Tensor:
        return self._bytes[:size]

    def chunks(self) -> Iterator[torch.Tensor]:
        for start in range(0, self.size, _CHUNK):
            yield self._bytes[start : start + _CHUNK]


class HostImages:
    """As many images as there are snapshots at the same time."""

    def __init__(self) -> None:
        self._images: list[HostImage] = []
        self._untouched: Iterator[torch.Tensor] = iter(())  # chunks that are not resident yet
        self._lock = threading.Lock()
        self._giving_out = threading.Lock()
        self._prefaulting = SerialWorker("ckpt-memory")
        self._not_paused = threading.Event()
        self._not_paused.set()

    @property
    def size(self) -> int:
        """Bytes of all images."""
        return sum(image.size for image in self._images)

    @property
    def free_size(self) -> int:
        """Bytes of the image that the next snapshot gets."""
        return max((image.size for image in self._images if not image.in_use), default=0)

    @property
    def free_resident(self) -> int:
        """Bytes that the system counts as used, though no snapshot uses them."""
        return sum(image.resident for image in self._images if not image.in_use)

    def prefault(self, size: int) -> None:
        """Begin to make an image of this size resident, unless there is one."""
        if size > self.free_size and not self._prefaulting.busy:
            image = self._free()
            image.reserve(size)
            self._untouched = image.chunks()
            self._prefaulting.start(lambda: self._touch_all(image))

    def take(self, size: int) -> HostImage:
        """An image that no other snapshot uses, of at least this size."""
        self._stop_prefaulting()
        with self._giving_out:
            image = self._free()
            image.in_use = True
        image.reserve(size)
        return image

    def take_part(self, size: int) -> ImagePart:
        """As many bytes of an image, until they are released."""
        return ImagePart(self, self.take(size), size)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend prefaulting while this context lasts, in which a load, say, needs the machine."""
        self._not_paused.clear()
        try:
            yield
        finally:
            self._not_paused.set()

    def give_back(self, image: HostImage, size: int) -> None:
        """The snapshot that had so many bytes of the image is not needed any more."""
        image.resident = max(image.resident, size)
        image.in_use = False

    def release(self) -> None:
        """Free all memory. Nothing may be using it."""
        self._stop_prefaulting()
        self._images = []

    def _free(self) -> HostImage:
        """The largest image that is not in use; a new one if all are."""
        free = [image for image in self._images if not image.in_use]
        if not free:
            free = [HostImage()]
            self._images += free
        return max(free, key=lambda image: image.size)

    def _stop_prefaulting(self) -> None:
        """The bytes that are not resident yet become so when they are written to."""
        with self._lock:
            self._untouched = iter(())
        self._not_paused.set()
        with suppress(Exception):  # whatever failed there, the memory can be used
            self._prefaulting.wait()

    def _touch_all(self, image: HostImage) -> None:
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

        helpers = [ThreadCall(work, "ckpt-memory") for _ in range(_THREADS - 1)]
        work()
        for helper in helpers:
            helper.result()


@dataclass
class ImagePart:
    """The bytes of an image that a snapshot has."""

    images: HostImages
    image: HostImage
    size: int
    files: Mapping[str, ReservedFile] = field(default_factory=dict)  # none: the bytes are in no file

    def bytes(self, size: int) -> torch.Tensor:
        return self.image.bytes(size)

    def make_resident(self, start: int, size: int) -> None:
        """Private memory is, when it is written to."""

    def release(self) -> None:
        self.images.give_back(self.image, self.size)

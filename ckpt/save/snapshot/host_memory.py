"""Host memory for snapshots: who takes it, how much of it there is, and where it comes from.

It is private memory that is prefaulted in the background and used again by later snapshots. A snapshot that stays in
memory has no use for that: its image is its files themselves, mapped, so that nothing is copied twice.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch

from ckpt.errors import FullError, StorageError
from ckpt.save.snapshot.devices import Device
from ckpt.storage import Reserving
from ckpt.storage.base import ReservedFile
from ckpt.util.aligned_memory import HUGE_PAGE, MappedRange, allocate_pages, can_map_files
from ckpt.util.memory_limit import available, reserve, spare
from ckpt.util.threads import CORES, Worker

_log = logging.getLogger("ckpt")

_CHUNK = 16 << 20  # bytes made resident at a time, in a few milliseconds: a save waits no longer
_THREADS = 2  # beside training
_SMALL = 1 << 20  # bytes: files below this are not reserved, but copied
_SLOTS = 2  # snapshots in memory that take turns
_PAUSE = 0.005  # seconds
_READYING = max(1, min(4, CORES // 4))  # threads that allocate the memory of files
_LOOK_AGAIN = 0.1  # seconds
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

    Its pages are made ready in the background: they are allocated, and registered with the device, which then writes to
    them itself. The files stay mapped when they have their names. When they were deleted, the next snapshot of the same
    layout has their memory again.
    """

    def __init__(self, storage: Reserving, size: int, places: Sequence[tuple[str, int, int]]) -> None:
        self._storage = storage
        self._range = MappedRange(size)
        self._layout = _layout(size, places)
        self.device: Device | None = None
        self.part = 0
        self._readying: Worker | None = None
        self._parts: list[torch.Tensor] = []  # that are registered
        self._registered = 0  # bytes, from the start on
        self._changed = threading.Condition()
        self._ends = False
        self._is_new = True  # no snapshot was ever in it
        self.in_use = True
        self.files: dict[str, ReservedFile] = {}
        try:
            for path, start, length in places:
                if length >= _SMALL:
                    self._reserve(path, start, length)
        except BaseException:
            self.unmap()
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
            image.unmap()
        return None

    def another(self) -> ReservedImage | None:
        """One like it, for the same device; None if there can be none."""
        return ReservedImage.of(self._storage, *self._layout) if self.device is not None else None

    def is_for(self, storage: object, size: int, places: Sequence[tuple[str, int, int]]) -> bool:
        """Whether it has the layout of these files."""
        return self._storage is storage and self._layout == _layout(size, places)

    def claim(self) -> bool:
        """Have the memory of the same files again. False if one of them is needed, or is gone."""
        if self._is_new:
            self._is_new, self.in_use = False, True
            return True
        claimed: dict[str, ReservedFile] = {}
        for path, file in self.files.items():
            again = self._storage.reserve_again(file)
            if again is None:
                for taken in claimed.values():
                    self._storage.give_up(taken)
                return False
            claimed[path] = again
        self.files, self.in_use = claimed, True
        return True

    def bytes(self, size: int) -> torch.Tensor:
        return torch.frombuffer(self._range.memory, dtype=torch.uint8)[:size]

    def make_resident(self, start: int, size: int) -> None:
        """Give a part its memory. Raises if there is none."""
        if size and not self._range.make_resident(start, size):
            raise FullError("there is no memory left for the snapshot.")

    def make_ready(self, device: Device | None, size: int) -> None:
        """Begin to give it its memory, and to register that with the device, in parts that no transfer goes beyond.

        Launches of kernels wait for each part.
        """
        if self._readying is None:
            self.device, self.part = device, size
            self._readying = Worker("ckpt-register").start(lambda: self._make_ready(device, size))

    @property
    def is_straight(self) -> bool:
        """Whether the device writes to it itself, as far as is known: at the latest when it was waited for."""
        with self._changed:
            is_over = self._readying is None or not self._readying.busy
            return self.device is not None and (self._registered == self._range.size or not is_over)

    def wait_until_ready(self, start: int, size: int) -> None:
        """Until the device can write to a part itself, or never can: then this has its memory all the same."""
        with self._changed:
            while self._registered < start + size and self._readying is not None and self._readying.busy:
                self._changed.wait(_LOOK_AGAIN)
        if self._registered < start + size:
            self.make_resident(start, size)

    def _make_ready(self, device: Device | None, size: int) -> None:
        memory = self.bytes(self._range.size)
        pool = [Worker("ckpt-register", kept=True) for _ in range(_READYING)]
        try:
            for start in range(0, len(memory), size):
                part = memory[start : start + size]
                if self._ends or not threading.main_thread().is_alive() or not self._allocate(start, len(part), pool):
                    return
                if device is not None and not self._register(device, part):
                    return
                with self._changed:
                    self._registered = start + len(part)
                    self._changed.notify_all()
                time.sleep(_PAUSE)  # kernels of training that waited for this part are launched before the next
        finally:
            for worker in pool:
                worker.close()

    def _allocate(self, start: int, size: int, pool: Sequence[Worker]) -> bool:
        """Give the files in this part their memory, in several threads. False if there is none."""
        share = -(-size // len(pool) // HUGE_PAGE) * HUGE_PAGE
        pieces = [
            (max(begin, place), min(begin + share, start + size, place + length))
            for _, place, length in self._layout[1]
            for begin in range(start, start + size, share)
        ]
        found = list[bool]()

        def allocate(begin: int, end: int) -> None:
            found.append(self._range.make_resident(begin, end - begin))

        for turn, piece in enumerate(piece for piece in pieces if piece[0] < piece[1]):
            pool[turn % len(pool)].start(partial(allocate, *piece))
        for worker in pool:
            worker.wait()
        return all(found)

    def _register(self, device: Device, part: torch.Tensor) -> bool:
        try:
            registered = device.register(part)
        except RuntimeError:  # of the device: what training does next there raises it too
            registered = False
        if registered:
            self._parts.append(part)
        else:
            _log.debug("%s can't write to host memory directly, so snapshots take a little longer", device.device)
        return registered

    def release(self) -> None:
        """The snapshot is written, or not needed any more: files that were not written are free."""
        for file in self.files.values():
            self._storage.give_up(file)
        self.in_use = False

    def unmap(self) -> None:
        """Give up the memory; files that were written keep it."""
        self._ends = True
        if self._readying is not None:
            self._readying.close()  # waits for it
        while self._parts and self.device is not None:  # before the pages go: the driver holds on to them
            self.device.unregister(self._parts.pop())
        self._range.release()
        self.release()

    def _reserve(self, path: str, start: int, size: int) -> None:
        descriptor, self.files[path] = self._storage.reserve(size)
        try:
            self._range.map_file(descriptor, start, size)
        finally:
            os.close(descriptor)


def _layout(size: int, places: Sequence[tuple[str, int, int]]) -> tuple[int, list[tuple[str, int, int]]]:
    return size, [place for place in places if place[2] >= _SMALL]


Image = PrivateImage | ReservedImage


class HostMemory:
    """Owns all private memory of snapshots, as many images as there are snapshots at the same time.

    `limit`: bytes to take at most; by default what is available, less a reserve for training.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._images: list[PrivateImage] = []
        self._mapped: list[ReservedImage] = []
        self._prefaulted: PrivateImage | None = None
        self._untouched: Iterator[torch.Tensor] = iter(())  # its chunks that are not resident yet
        self._lock = threading.Lock()  # of `_untouched` and `resident`: several threads prefault
        self._giving_out = threading.Lock()  # of the images: training and the save thread both take some
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
            if size > image.size and not self._has_room_beside(size - image.size):  # then unused images go first
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

    def take_files(self, storage: object, size: int, places: Sequence[tuple[str, int, int]]) -> ReservedImage | None:
        """Files that the storage has reserved, mapped; None if it reserves none. If it can be, those of before."""
        with self._giving_out:
            self._unmap([image for image in self._mapped if not image.is_for(storage, size, places)])
            for image in self._mapped:
                if not image.in_use and image.claim():
                    return image
            self._unmap(self._mapped[: 1 - _SLOTS])
            found = ReservedImage.of(storage, size, places)
            if found is not None:
                found.claim()
                self._mapped.append(found)
            return found

    def prepare_files(
        self, storage: object, size: int, places: Sequence[tuple[str, int, int]], device: Device | None, part: int
    ) -> None:
        """Make files ready for the first snapshot to come."""
        with self._giving_out:
            if not self._mapped:
                self._make_ready(ReservedImage.of(storage, size, places), device, part)

    def prepare_another(self) -> None:
        """Make files ready for the next snapshot like those of the first, if a device writes to them."""
        with self._giving_out:
            if len(self._mapped) == 1:
                first = self._mapped[0]
                self._make_ready(first.another(), first.device, first.part)

    def _make_ready(self, image: ReservedImage | None, device: Device | None, part: int) -> None:
        if image is not None:
            image.in_use = False
            image.make_ready(device, part)
            self._mapped.append(image)

    def release_files(self) -> None:
        """Unmap files of snapshots, so that their memory is free when they are deleted. Nothing may be using them."""
        with self._giving_out:
            self._unmap(self._mapped)

    def _unmap(self, images: Sequence[ReservedImage]) -> None:
        for image in [image for image in images if not image.in_use]:
            self._mapped.remove(image)
            image.unmap()

    def release(self) -> None:
        """Free all memory. Nothing may be using it."""
        self._stop_prefaulting()
        self.release_files()
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

"""Snapshots: a copy of the state as it is at a moment, laid out as the files that will be written.

State on a device is copied on the device first, in the stream that training uses. That takes milliseconds, and whatever
changes the state later comes after it in the stream: an optimizer step, a captured graph, a kernel of the user's own.
The copy is fetched to host memory while training continues. Where the device has no room for it, and for state on the
host, training waits until it has been copied to host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch

from ckpt.formats.tensors import FilePlan, host_bytes
from ckpt.save.arrival import Arrival
from ckpt.save.device_fetch import BESIDE_TRAINING, WHILE_IT_WAITS, Fetcher
from ckpt.save.device_room import DeviceRoom
from ckpt.save.device_staging import DeviceBlock, plan_blocks, stage
from ckpt.save.device_streams import Device
from ckpt.save.host_image import HostImages, ImagePart
from ckpt.save.reserved_image import ReservedImage
from ckpt.save.room_warnings import RoomWarnings
from ckpt.save.snapshot_layout import PAGE, SnapshotLayout, in_pages
from ckpt.save.streamed_files import streamed_files
from ckpt.save.tensor_copies import Leaves, TensorCopies
from ckpt.storage import Reserving
from ckpt.util.aligned_memory import HUGE_PAGE
from ckpt.util.memory_limit import available, reserve
from ckpt.util.threads import ThreadCall

_LITTLE = 64 << 20  # bytes: less than this is not worth prefaulting
_NEGLIGIBLE = 1 << 20  # bytes


@dataclass
class Snapshot:
    """The files of a state, by path. Bytes from a device arrive while training continues: who reads them waits."""

    files: dict[str, FilePlan]
    arrival: Arrival = field(default_factory=Arrival)
    in_host_memory: bool = True
    on_release: Callable[[], None] = lambda: None

    def release(self) -> None:
        """Give back all memory. The files cannot be read any more."""
        on_release, self.on_release = self.on_release, lambda: None
        on_release()


class Snapshots:
    """Takes snapshots, in host memory that later ones reuse.

    `host_memory`: bytes to use at most; by default what is available, less a reserve. `device_memory`: bytes that a
    snapshot may take on each device until it is fetched; by default what training has never needed, less a reserve.
    """

    def __init__(self, host_memory: int | None = None, device_memory: int | None = None) -> None:
        self._limit = host_memory
        self._device_limit = device_memory
        self._images = HostImages()
        self._small = 0  # bytes of copies that are not in an image
        self._devices: dict[torch.device, Device] = {}
        self._rooms: dict[torch.device, DeviceRoom] = {}
        self._fetcher = Fetcher(self._devices)
        self._arrivals: weakref.WeakSet[Arrival] = weakref.WeakSet()
        self._warnings = RoomWarnings()

    def prepare_devices(self, devices: Iterable[torch.device]) -> None:
        """Create the streams of these devices now: the first stream in a process takes a twentieth of a second."""
        for device in devices:
            if device not in self._devices:
                self._devices[device] = Device.of(device)
                self._rooms[device] = DeviceRoom(device, self._device_limit)

    def prefault(self, tensors: Iterable[torch.Tensor], *, for_devices_only: bool = False) -> None:
        """Begin to prefault memory for a snapshot of these tensors; with `for_devices_only`, of those on devices."""
        size = in_pages(tensor.nbytes for tensor in tensors if not (for_devices_only and tensor.is_cpu)) + (1 << 20)
        if size > _LITTLE and self._fits(size):
            self._images.prefault(size)

    def copy(self, leaves: Leaves | None) -> TensorCopies | None:
        """Copy tensors, so that a snapshot can be taken of the copies later: in milliseconds, if they are on devices.

        None if that is not possible, or if those on the host are large: to copy them twice would take longer.
        """
        if leaves is None or not self._is_little(leaves):
            return None
        self.prepare_devices(leaves.on_device)
        if not all(self._has_room(device, size) for device, size in leaves.sizes.items()):
            return None
        copies = TensorCopies(leaves, self._release_devices(leaves.sizes))
        try:
            self._copy_on_devices(leaves, copies)
            self._copy_on_host(leaves, copies)
        except torch.OutOfMemoryError:
            for device in leaves.sizes:
                self._rooms[device].overestimated(copies.size_on(device))
            copies.release()
            return None
        except BaseException:
            copies.release()
            raise
        copies.forget_sources()
        return copies

    @contextmanager
    def beside_training(self, copies: TensorCopies) -> Iterator[None]:
        """Whatever is computed from the copies here, on their devices, does not queue behind the work of training."""
        with ExitStack() as stack:
            for device in copies.leaves.on_device:
                stack.enter_context(self._devices[device].beside_training())
            yield

    def _copy_on_devices(self, leaves: Leaves, copies: TensorCopies) -> None:
        with ExitStack() as stack:
            for device in leaves.on_device:
                stack.enter_context(self._devices[device].ordered())
            copies.add_on_devices()
        for device, size in leaves.sizes.items():
            self._rooms[device].taken(size)

    def _is_little(self, leaves: Leaves) -> bool:
        """Whether what is on the host is little, and there is memory for it; beside devices it is copied once more."""
        size = leaves.host_size * (2 if leaves.on_device else 1)
        is_free = size < _NEGLIGIBLE and self._limit is None
        return size <= _LITTLE and (is_free or self._fits(size))

    def _copy_on_host(self, leaves: Leaves, copies: TensorCopies) -> None:
        little, large = leaves.host_size - leaves.large_size, leaves.large_size
        image = self._images.take(large) if large else None
        self._small += little

        def give_back() -> None:
            self._small -= little
            if image is not None:
                self._images.give_back(image, large)

        copies.add_on_host(image.bytes(large) if image is not None else torch.empty(0), give_back)

    def take(
        self, files: list[FilePlan], copies: TensorCopies | None = None, storage: object = None
    ) -> Snapshot | None:
        """Copy the contents of these files; None if there is not enough memory for it.

        When this returns, nothing that training does can reach the snapshot. With `copies`, the tensors of the files
        are these, and they are released as soon as they are fetched: into files of the `storage`, if it reserves any.
        """
        if copies is not None:
            return self._take_from_copies(files, copies, storage)
        layout = SnapshotLayout.of(files)
        self.prepare_devices(layout.devices)
        fits = self._fits(layout.size)
        if not fits and not self._fits_on_devices(layout):
            self._warnings.of_waiting(layout.size, self._host_limit)
            return None
        with ExitStack() as stack:
            for device in layout.devices:
                stack.enter_context(self._devices[device].ordered())
            blocks = plan_blocks(layout.on_device)
            self._stage(blocks)
        if fits:
            return self._fetched(layout, blocks, self._images.take_part(layout.size))
        return self._streamed(layout, blocks)

    def paused(self) -> AbstractContextManager[None]:
        """Suspend prefaulting while this context lasts."""
        return self._images.paused()

    def close(self) -> None:
        """Release all memory."""
        self._images.release()
        self._fetcher.release()

    def _take_from_copies(self, files: list[FilePlan], copies: TensorCopies, storage: object) -> Snapshot:
        layout = SnapshotLayout.of(files, HUGE_PAGE if isinstance(storage, Reserving) else PAGE)
        if not layout.on_device:
            return Snapshot({file.path: replace(file, contents=None) for file in files}, on_release=copies.release)
        image: ImagePart | ReservedImage | None = ReservedImage.of(storage, layout)
        if image is None and self._fits(layout.size):
            image = self._images.take_part(layout.size)
        blocks = [replace(block, is_private=True) for block in plan_blocks(layout.on_device)]
        if image is not None:
            snapshot = self._fetched(layout, blocks, image, copies.release_devices)
        else:
            streamed = streamed_files(layout, blocks, self._fetcher)
            snapshot = Snapshot(streamed, in_host_memory=False, on_release=lambda: self._release_copies(blocks, copies))
        copies.release_host()
        return snapshot

    def _release_copies(self, blocks: list[DeviceBlock], copies: TensorCopies) -> None:
        self._release_blocks(blocks)
        copies.release_devices()

    def _has_room(self, device: torch.device, size: int) -> bool:
        return self._devices[device].can_stage and size <= self._rooms[device].measure()

    def _release_devices(self, devices: Iterable[torch.device]) -> Callable[[], None]:
        """What to call when copies on these devices are released."""

        def released() -> None:
            for device in devices:
                self._rooms[device].released()

        return released

    def _stage(self, blocks: list[DeviceBlock]) -> None:
        for device, room in self._rooms.items():
            mine = [block for block in blocks if block.device == device]
            if mine and self._devices[device].can_stage:
                stage(mine, room)

    def _fetched(
        self,
        layout: SnapshotLayout,
        blocks: list[DeviceBlock],
        image: ImagePart | ReservedImage,
        on_fetched: Callable[[], None] = lambda: None,
    ) -> Snapshot:
        """A snapshot in host memory: what could not be staged is there when this returns, the rest comes later."""
        arrival = Arrival([(block.start, block.size) for block in blocks])
        memory = image.bytes(layout.size)
        live = [(number, block) for number, block in enumerate(blocks) if not block.is_detached]
        staged = [(number, block) for number, block in enumerate(blocks) if block.is_detached]
        fetching: ThreadCall | None = None

        def release() -> None:
            arrival.discard()
            if fetching is not None:
                fetching.has_failed()  # waits for it
            image.release()

        def fetch(blocks: list[tuple[int, DeviceBlock]], threads: int) -> None:
            self._fetcher.fetch(blocks, host_bytes(memory), arrival, threads, image.make_resident)

        try:
            for start, size in layout.host_ranges() if image.files else ():
                image.make_resident(start, size)
            layout.fill(memory)
            if live:
                self._warn_of_room(layout, live)
                fetch(live, WHILE_IT_WAITS)
            if staged:
                fetching = ThreadCall(lambda: self._fetch(fetch, staged, arrival, on_fetched), "ckpt-fetch")
        except BaseException:
            self._release_blocks(blocks)
            release()
            raise
        self._arrivals.add(arrival)
        return Snapshot(layout.files_in(memory, arrival, image.files), arrival, on_release=release)

    def _fetch(
        self,
        fetch: Callable[[list[tuple[int, DeviceBlock]], int], None],
        staged: list[tuple[int, DeviceBlock]],
        arrival: Arrival,
        on_fetched: Callable[[], None],
    ) -> None:
        try:
            fetch(staged, BESIDE_TRAINING)
        except BaseException as error:  # raised where the files are read
            arrival.fail(error)
        finally:
            self._release_blocks([block for _, block in staged])
            on_fetched()

    def _release_blocks(self, blocks: list[DeviceBlock]) -> None:
        devices = {block.device for block in blocks if self._devices[block.device].can_stage}
        for block in blocks:
            block.release()
        for device in devices:
            self._rooms[device].released()

    def _streamed(self, layout: SnapshotLayout, blocks: list[DeviceBlock]) -> Snapshot | None:
        """A snapshot that stays on the devices until its files are written; None if some of it could not be staged."""
        if not all(block.is_detached for block in blocks):
            self._release_blocks(blocks)
            self._warnings.of_waiting(layout.size, self._host_limit)
            return None
        files = streamed_files(layout, blocks, self._fetcher)
        return Snapshot(files, in_host_memory=False, on_release=lambda: self._release_blocks(blocks))

    @property
    def _host_limit(self) -> int:
        if self._limit is not None:
            return self._limit - self._images.size + self._images.free_size - self._small
        to_come = sum(arrival.missing for arrival in self._arrivals)  # memory that is in use, and not resident yet
        memory = available() + self._images.free_resident - to_come
        return memory - reserve(memory)

    def _fits(self, size: int) -> bool:
        return size <= self._host_limit

    def _fits_on_devices(self, layout: SnapshotLayout) -> bool:
        """Whether a snapshot can stay on the devices, and host memory is only needed for what is on the host."""
        sizes = layout.device_sizes
        return bool(sizes) and self._fits(layout.host_size) and all(map(self._has_room, sizes, sizes.values()))

    def _warn_of_room(self, layout: SnapshotLayout, live: list[tuple[int, DeviceBlock]]) -> None:
        if all(self._devices[block.device].can_stage for _, block in live):
            self._warnings.of_room(sum(block.size for _, block in live), layout.size)

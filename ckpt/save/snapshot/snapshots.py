"""Snapshots: a copy of the state as it is at a moment, laid out as the files that will be written.

There is one way: copy, encode, fetch, write.

1. **Copy** (`Snapshots.copy`), while training waits. State on a device is copied on the device, in the stream that
   training uses. That takes milliseconds, and whatever changes the state later comes after it in the stream: an
   optimizer step, a captured graph, a kernel of the user's own.
2. **Encode**, in the background: names, headers, shard tables. The copies stand for the tensors.
3. **Fetch** (`Snapshots.take`), in the background: the copies go to their places in the image of the files, in host
   memory, or in files that a storage in memory has reserved. If host memory has no room for the image, they stay on the
   device, and are fetched as they are written.
4. **Write**, from the image, beside the fetch.

Where copies cannot be made first, the state is encoded first, and `take` makes the copies while training waits: tensors
on devices as far as these have room, the rest straight into the image. That is so for state on the host that is not
small, which would be copied twice otherwise, and for values that only their encoding can judge (tensors that share
memory, objects of FSDP 1). Without room in host memory either, training waits until the checkpoint is written, and is
told so beforehand. State that is gathered from all ranks has no snapshot: it is whole nowhere.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from ckpt.formats.device_hashes import hashes_on_device
from ckpt.formats.native.manifest import BLOCK_SIZE, FileRecord, digest
from ckpt.formats.tensors import FileHashes, FilePlan
from ckpt.save.snapshot import devices
from ckpt.save.snapshot.devices import Device
from ckpt.save.snapshot.fetch import (
    BESIDE_TRAINING,
    STRAIGHT,
    WHILE_IT_WAITS,
    Arrival,
    Fetcher,
    Transfer,
    plan_transfers,
)
from ckpt.save.snapshot.file_image import PAGE, SnapshotLayout
from ckpt.save.snapshot.host_memory import HostMemory, Image, ReservedImage
from ckpt.save.snapshot.tensor_copies import Leaves, TensorCopies, flat_bytes
from ckpt.storage import Reserving
from ckpt.util.aligned_memory import HUGE_PAGE
from ckpt.util.console import format_size
from ckpt.util.threads import Worker

_log = logging.getLogger("ckpt")

_LITTLE = 64 << 20  # bytes: less than this is not worth prefaulting
_NEGLIGIBLE = 1 << 20  # bytes
_BYTES_PER_SECOND = 20e9  # about what is copied from a device through the ring
_NOTICED = 0.05  # seconds


@dataclass
class Snapshot:
    """The files of a state, by path. Bytes from a device arrive while training continues: who reads them waits."""

    files: dict[str, FilePlan]
    arrival: Arrival = field(default_factory=Arrival)
    in_host_memory: bool = True
    on_release: Callable[[], None] = lambda: None
    unfetched: Mapping[str, FilePlan] = field(default_factory=dict)  # of the files, those that are on devices alone
    on_leave: Callable[[], None] = lambda: None

    def release(self) -> None:
        """Give back all memory. The files cannot be read any more."""
        on_release, self.on_release = self.on_release, lambda: None
        on_release()

    def leave_devices(self) -> None:
        """Give back memory on devices: all files are written. Those that are nowhere else cannot be read any more."""
        self.files = {path: file for path, file in self.files.items() if path not in self.unfetched}
        self.on_leave()


def _is_unchanged(file: FilePlan, earlier: FileRecord | None) -> bool:
    return earlier is not None and file.hashes is not None and file.hashes.blocks == earlier.blocks


def _flattened(file: FilePlan) -> FilePlan:
    """The same with the bytes of tensors on devices: hashing and fetching need them, and each call takes the GIL."""

    def flattened(content: bytes | tuple[str, torch.Tensor]) -> bytes | tuple[str, torch.Tensor]:
        if isinstance(content, bytes) or devices.is_on_host(content[1]):
            return content
        return content[0], flat_bytes(content[1])

    return file if file.contents is None else replace(file, contents=list(map(flattened, file.contents)))


class Snapshots:
    """Takes snapshots, in host memory that later ones reuse.

    `host_memory`: bytes to use at most; by default what is available, less a reserve. `device_memory`: bytes that a
    snapshot may take on each device until it is fetched; by default what training has never needed, less a reserve.
    """

    def __init__(self, host_memory: int | None = None, device_memory: int | None = None) -> None:
        self.memory = HostMemory(host_memory)
        self._device_limit = device_memory
        self._devices: dict[torch.device, Device] = {}
        self._fetcher = Fetcher(self._devices)
        self._arrivals: weakref.WeakSet[Arrival] = weakref.WeakSet()
        self._warned: set[str] = set()

    def prepare_devices(self, devices: Iterable[torch.device]) -> None:
        """Create the streams of these devices now: the first stream in a process takes a twentieth of a second."""
        for device in devices:
            if device not in self._devices:
                self._devices[device] = Device.of(device, self._device_limit)

    def prefault(self, tensors: Iterable[torch.Tensor], *, for_devices_only: bool = False) -> None:
        """Begin to prefault memory for a snapshot of these tensors; with `for_devices_only`, of those on devices."""
        sizes = [tensor.nbytes for tensor in tensors if not (for_devices_only and tensor.is_cpu)]
        size = sum(-(-size // PAGE) * PAGE for size in sizes) + (1 << 20)
        if size > _LITTLE and size <= self._room:
            self.memory.prefault(size)

    def prepare(self, files: list[FilePlan], storage: object) -> None:
        """Begin to make memory ready that the storage reserves for snapshots of these files."""
        layout = SnapshotLayout.of(files, HUGE_PAGE)
        self.memory.prepare_files(storage, layout.size, layout.places, self._only_device(layout), STRAIGHT)

    def paused(self) -> AbstractContextManager[None]:
        """Suspend prefaulting while this context lasts."""
        return self.memory.paused()

    def close(self) -> None:
        """Release all memory."""
        self.memory.release()
        self._fetcher.release()

    def copy(self, leaves: Leaves | None) -> TensorCopies | None:
        """Copy tensors, so that a snapshot can be taken of the copies later: in milliseconds, if they are on devices.

        None if that is not possible, or if those on the host are large: to copy them twice would take longer.
        """
        if leaves is None or not self._is_little(leaves):
            return None
        self.prepare_devices(leaves.on_device)
        if not self._fit_on_devices(leaves.sizes):
            return None
        copies = TensorCopies(leaves, {device: self._devices[device] for device in leaves.on_device})
        try:
            with self._ordered(leaves.on_device):
                complete = copies.add_on_devices()
            if not complete:
                copies.release()
                return None
            self._copy_on_host(copies)
        except BaseException:
            copies.release()
            raise
        copies.forget_sources()
        return copies

    def _is_little(self, leaves: Leaves) -> bool:
        """Whether what is on the host is little, and there is memory for it; beside devices it is copied once more."""
        size = leaves.host_size * (2 if leaves.on_device else 1)
        is_free = size < _NEGLIGIBLE and self.memory.limit is None
        return size <= _LITTLE and (is_free or size <= self._room)

    def _copy_on_host(self, copies: TensorCopies) -> None:
        size = copies.leaves.host_size
        if size:
            image = self.memory.take(size)
            copies.add_on_host(image.bytes(size), image.release)
        else:  # there may be empty tensors all the same
            copies.add_on_host(torch.empty(0, dtype=torch.uint8), lambda: None)

    @contextmanager
    def beside_training(self, copies: TensorCopies) -> Iterator[None]:
        """Whatever is computed from the copies here, on their devices, does not queue behind the work of training."""
        with ExitStack() as stack:
            for device in copies.leaves.on_device:
                stack.enter_context(self._devices[device].beside_training())
            yield

    def take(
        self,
        files: list[FilePlan],
        copies: TensorCopies | None = None,
        storage: object = None,
        earlier: Mapping[str, FileRecord] = MappingProxyType({}),
    ) -> Snapshot | None:
        """Copy the contents of these files; None if there is not enough memory for it.

        When this returns, nothing that training does can reach the snapshot. With `copies`, the tensors of the files
        are these, and they are released as soon as they are fetched: into files of the `storage`, if it reserves any.
        Their devices hash them first. What is as in an `earlier` checkpoint, by path, is not fetched unless it is read.
        """
        if copies is None:
            return self._taken(files, None, storage)
        hashed = self._hashed([_flattened(file) for file in files], copies)
        unchanged = [file for file in hashed if _is_unchanged(file, earlier.get(file.path))]
        if not unchanged:
            return self._taken(hashed, copies, storage)
        changed = [file for file in hashed if not _is_unchanged(file, earlier.get(file.path))]
        return self._with_unfetched(unchanged, copies, lambda: self._taken(changed, copies, storage))

    def _taken(self, files: list[FilePlan], copies: TensorCopies | None, storage: object) -> Snapshot | None:
        layout = SnapshotLayout.of(files, HUGE_PAGE if isinstance(storage, Reserving) else PAGE)
        if copies is not None and not layout.on_device:  # the copies are all there is, and in host memory
            copies.release_devices()
            return Snapshot({file.path: replace(file, contents=None) for file in files}, on_release=copies.release)
        image: Image | None = self.memory.take_files(storage, layout.size, layout.places)
        fits = image is not None or layout.size <= self._room
        if copies is None:
            if not fits and not self._fit_without_image(layout):
                self._warn_of_waiting(layout)
                return None
            layout, copies = self._copied(layout)
        straight = self._made_ready(image, layout)
        transfers = plan_transfers(layout.on_device, STRAIGHT if straight is not None else 0)
        if fits:
            image = image or self.memory.take(layout.size)
            snapshot = self._fetched(layout, transfers, image, copies, straight)
        elif any(transfer.is_live for transfer in transfers):  # a device had less room than it said
            copies.release()
            self._warn_of_waiting(layout)
            return None
        else:
            snapshot = self._streamed(layout, transfers, copies)
        copies.release_host()
        return snapshot

    def _made_ready(self, image: Image | None, layout: SnapshotLayout) -> ReservedImage | None:
        """The image, if the device writes to it itself, as soon as each part of it is ready."""
        if not isinstance(image, ReservedImage) or (device := self._only_device(layout)) is None:
            return None
        image.make_ready(device, STRAIGHT)
        return image if image.is_straight else None

    def _only_device(self, layout: SnapshotLayout) -> Device | None:
        sizes = layout.device_sizes
        self.prepare_devices(sizes)
        return self._devices[next(iter(sizes))] if len(sizes) == 1 else None

    def _hashed(self, files: list[FilePlan], copies: TensorCopies) -> list[FilePlan]:
        """The files with the hashes of their bytes, as far as devices can tell them."""
        found: dict[str, FileHashes] = {}
        layout = SnapshotLayout.of(files)
        for device in copies.leaves.on_device:
            contents = layout.contents_on(device)
            with self._devices[device].beside_training():
                read = hashes_on_device([*contents.values()], device, BLOCK_SIZE)
                if read is not None:
                    for path, blocks in zip(contents, read(), strict=True):
                        found[path] = FileHashes(blocks, digest(bytes(contents[path][0])))  # the header
        return [replace(file, hashes=found.get(file.path)) for file in files]

    def _with_unfetched(
        self, files: list[FilePlan], copies: TensorCopies, take: Callable[[], Snapshot | None]
    ) -> Snapshot | None:
        """A snapshot, and beside it these files, which stay on the devices until it leaves them: an earlier checkpoint
        has them, so that they are most probably not read."""
        layout = SnapshotLayout.of(files)
        on_devices = layout.streamed(plan_transfers(layout.on_device), self._fetcher)
        copies.stay()
        others = take()
        if others is None:
            copies.release()
            return None

        def release() -> None:
            others.release()
            copies.release()

        of_both = others.files | on_devices
        return replace(others, files=of_both, on_release=release, unfetched=on_devices, on_leave=copies.leave)

    def _copied(self, layout: SnapshotLayout) -> tuple[SnapshotLayout, TensorCopies]:
        """Copy tensors on their devices, in the order of training, as far as these have room."""
        devices = layout.device_sizes
        self.prepare_devices(devices)
        room = {device: self._devices[device].measure_room() for device in devices}
        leaves = Leaves.last_of([copy.source for copy in layout.on_device], room)
        copies = TensorCopies(leaves, {device: self._devices[device] for device in devices})
        try:
            with self._ordered(devices):
                copies.add_on_devices()
        except BaseException:
            copies.release()
            raise
        copies.forget_sources()
        return layout.with_copies(copies), copies

    @contextmanager
    def _ordered(self, devices: Iterable[torch.device]) -> Iterator[None]:
        """Order what is enqueued here between all work of training before and after it."""
        with ExitStack() as stack:
            for device in devices:
                stack.enter_context(self._devices[device].ordered())
            yield

    def _fetched(
        self,
        layout: SnapshotLayout,
        transfers: list[Transfer],
        image: Image,
        copies: TensorCopies,
        straight: ReservedImage | None,
    ) -> Snapshot:
        """A snapshot in host memory: what is live is there when this returns, copies come later."""
        arrival = Arrival([(transfer.start, transfer.size) for transfer in transfers])
        live = [(number, transfer) for number, transfer in enumerate(transfers) if transfer.is_live]
        copied = [(number, transfer) for number, transfer in enumerate(transfers) if not transfer.is_live]
        memory = image.bytes(layout.size)
        fetching: Worker | None = None

        def release() -> None:
            arrival.discard()
            if fetching is not None:
                fetching.close()  # waits for it
            copies.release_devices()
            image.release()

        def fetch_copies() -> None:
            try:
                if straight is not None:
                    self._fetcher.fetch_straight(copied, straight, memory, arrival)
                else:
                    self._fetcher.fetch(copied, image, memory, arrival, BESIDE_TRAINING)
            except BaseException as error:  # raised where the files are read
                arrival.fail(error)
            finally:
                copies.release_devices()

        try:
            layout.fill(image)
            if live:
                self._warn_of_live(live, layout.size)
                self._fetcher.fetch(live, image, memory, arrival, WHILE_IT_WAITS)
            if copied:
                fetching = Worker("ckpt-fetch").start(fetch_copies)
        except BaseException:
            release()
            raise
        self._arrivals.add(arrival)
        return Snapshot(layout.files_in(image, arrival), arrival, on_release=release)

    def _streamed(self, layout: SnapshotLayout, transfers: list[Transfer], copies: TensorCopies) -> Snapshot:
        """A snapshot that stays on the devices until its files are written."""

        def release() -> None:
            for transfer in transfers:
                transfer.release()
            copies.release_devices()

        return Snapshot(layout.streamed(transfers, self._fetcher), in_host_memory=False, on_release=release)

    @property
    def _room(self) -> int:
        """Bytes of host memory that may be taken."""
        return self.memory.room(to_come=sum(arrival.missing for arrival in self._arrivals))

    def _fit_without_image(self, layout: SnapshotLayout) -> bool:
        """Whether a snapshot can stay on the devices, and host memory is only needed for what is on the host."""
        sizes = layout.device_sizes
        self.prepare_devices(sizes)
        return bool(sizes) and layout.host_size <= self._room and self._fit_on_devices(sizes)

    def _fit_on_devices(self, sizes: dict[torch.device, int]) -> bool:
        return all(size <= self._devices[device].measure_room() for device, size in sizes.items())

    # Training waits for want of room: that is said beforehand, once.

    def _warn_of_waiting(self, layout: SnapshotLayout) -> None:
        self._warn_once(
            f"a snapshot of the state needs {format_size(layout.size)} of host memory, and {format_size(self._room)} "
            "may be used: training waits while a checkpoint is written. saving=ckpt.SaveOptions(host_memory=...) sets "
            "how much may be used.",
            "host",
        )

    def _warn_of_live(self, live: list[tuple[int, Transfer]], total: int) -> None:
        """Where a device has no room for copies and that would be noticed; not where it never can have copies."""
        size = sum(transfer.size for _, transfer in live)
        seconds = size / _BYTES_PER_SECOND
        if seconds > _NOTICED and all(self._devices[transfer.device].room is not None for _, transfer in live):
            self._warn_once(
                f"the device has no room to copy {format_size(size)} of the state's {format_size(total)}, so at every "
                f"save training waits about {seconds:.1f} s while ckpt copies these to host memory.",
                "device",
            )

    def _warn_once(self, message: str, about: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            _log.warning("%s", message)

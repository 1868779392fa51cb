"""Snapshots of state on a device, simulated: it is copied there first, and fetched while training continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.formats.native.manifest import digest
from ckpt.formats.tensors import host_bytes
from ckpt.save.snapshot import snapshots, tensor_copies
from ckpt.save.snapshot.devices import Device, DeviceRoom, copy_packed
from ckpt.save.snapshot.fetch import Arrival, Fetcher, Source, Transfer
from ckpt.save.snapshot.host_memory import HostMemory, PrivateImage
from ckpt.save.snapshot.snapshots import Snapshots
from ckpt.save.snapshot.tensor_copies import Leaves
from ckpt.storage import ANY, Buffer
from tests.helpers.places import Folder, PassedOn, Place
from tests.helpers.processes import DEADLINE
from tests.helpers.simulated_device import SimulatedDevice, simulate, with_room
from tests.helpers.training import exact

SIZE = 3 * (50 * 50 + 50) * 4  # bytes of weights and moments


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    return simulate(monkeypatch)


class Run:
    """A model with optimizer state: its weights and moments are on the device, its step counts on the host."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(50, 50)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.step()

    def step(self) -> None:
        self.model(torch.randn(4, 50)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def manager(self, root: Any, **options: Any) -> ckpt.StateManager:
        return ckpt.StateManager(root, model=self.model, optimizer=self.optimizer, **options)

    def state(self) -> str:
        return exact([self.model.state_dict(), self.optimizer.state_dict()])

    @torch.no_grad()
    def spoil(self) -> None:
        """Change everything, as nothing that is hooked would: through data."""
        for parameter in self.model.parameters():
            parameter.data.fill_(float("nan"))
            for value in self.optimizer.state[parameter].values():
                value.data.fill_(float("nan"))


def loaded(root: Any, name: str) -> str:
    other = Run(9)
    with other.manager(root) as manager:
        manager.load_state(name)
    return other.state()


def test_what_is_changed_right_after_the_call_is_saved_as_it_was(root: Place, device: SimulatedDevice) -> None:
    run, states = Run(1), {}
    with run.manager(root) as manager:
        for name in ("a", "b", "c"):
            device.gate.clear()
            states[name] = run.state()
            manager.save_state(name)
            assert not device.fetched  # it is all on the device yet
            run.spoil()
            device.gate.set()
            manager.wait()
            device.fetched.clear()
            manager.load_state(name)
            run.step()
    assert {name: loaded(root, name) for name in states} == states
    assert device.most_in_flight == 1


def _hashed_on_host(files: list[list[Any]], _: torch.device, block_size: int) -> Any:
    """What a device with Triton does: of every file, the hashes of its blocks."""
    found = []
    for contents in files:
        data = b"".join(part if isinstance(part, bytes) else bytes(host_bytes(part)) for part in contents)
        found.append(tuple(digest(data[start : start + block_size]) for start in range(0, len(data), block_size)))
    return lambda: found


def test_what_the_device_has_hashed_and_an_earlier_checkpoint_has_is_not_fetched_unless_it_must_be_written(
    root: Folder, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "hashes_on_device", _hashed_on_host)
    copied, memory = tensor_copies._copied, list[torch.Tensor]()

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        memory.append(copied(*args, **options))
        return memory[-1]

    monkeypatch.setattr(tensor_copies, "_copied", noted)
    run, states, fetched = Run(1), {}, {}
    with run.manager(root) as manager:
        for name in ("new", "same", "damaged", "trained", "half"):
            if name == "trained":
                run.step()
            if name == "half":
                with torch.no_grad():
                    run.model.weight += 1  # and what the optimizer has is the same
            if name == "damaged":
                (root / "same" / "model.safetensors").unlink()  # what cannot be linked is written
            states[name] = run.state()
            device.fetched.clear()
            manager.save_state(name)
            manager.wait()
            fetched[name] = sum(device.fetched)
            copies, end = [block for block in memory if block.numel() > 2], time.monotonic() + DEADLINE
            while any(sizes := [block.untyped_storage().nbytes() for block in copies]) and time.monotonic() < end:
                time.sleep(0.01)
            assert sizes
            assert not any(sizes), name  # training has the memory back, and not only at the next save
            memory.clear()
    parameters = 4 * (50 * 50 + 50)
    assert fetched["new"] >= SIZE <= fetched["trained"]
    assert fetched["same"] == 0
    assert parameters <= fetched["damaged"] < SIZE
    assert parameters <= fetched["half"] < SIZE
    del states["same"]
    assert {name: loaded(root, name) for name in states} == states
    assert [name for name, problems in ckpt.verify(root).items() if problems] == ["same"]


class Odd(nn.Module):
    """Tensors in every order of memory, of every kind."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.transposed = nn.Parameter(torch.randn(70, 30).t())
        self.channels_last = nn.Parameter(torch.randn(4, 3, 5, 7).to(memory_format=torch.channels_last))
        self.register_buffer("strided", torch.randn(80, 2)[:, 0])
        self.register_buffer("conjugate", torch.randn(40, dtype=torch.complex64).conj())
        self.register_buffer("octets", torch.randint(0, 255, (1301,), dtype=torch.uint8))
        self.register_buffer("rounded", torch.randn(777).to(torch.bfloat16))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("also_empty", torch.empty(0))
        self.register_buffer("scalar", torch.tensor(float(seed)))

    def exact(self) -> str:
        return exact({name: tensor.resolve_conj() for name, tensor in self.state_dict().items()})


@pytest.mark.parametrize("options", [{}, {"device_memory": 0}, {"host_memory": 2000}])
def test_tensors_of_every_order_and_kind_are_saved_as_they_are(
    root: Place, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    with_room(monkeypatch, device, options.get("device_memory", 1 << 40))
    model = Odd(1)
    state = model.exact()
    with ckpt.StateManager(root, model=model, saving=ckpt.SaveOptions(**options)) as manager:
        manager.save_state("a")
    again = Odd(2)
    with ckpt.StateManager(root, model=again) as manager:
        manager.load_state("a")
    assert again.exact() == state


def test_a_tensor_that_a_full_device_cannot_put_in_order_is_copied_by_rows(
    root: Place, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_room(monkeypatch, device, 0)
    monkeypatch.setattr(Source, "flat", _no_memory)
    model = nn.ParameterDict({"weight": nn.Parameter(torch.randn(70, 30).t())})
    with ckpt.StateManager(root, model=model) as manager:
        manager.save_state("a")
    again = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(30, 70))})
    with ckpt.StateManager(root, model=again) as manager:
        manager.load_state("a")
    assert torch.equal(again["weight"], model["weight"])


def _no_memory(_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError


def test_small_tensors_that_a_full_device_cannot_pack_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target = torch.zeros(5, dtype=torch.uint8)
    monkeypatch.setattr(torch, "cat", _no_memory)
    copy_packed([torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([3, 4, 5], dtype=torch.uint8)], target)
    assert target.tolist() == [1, 2, 3, 4, 5]


def test_a_snapshot_that_was_given_back_cannot_be_read(device: SimulatedDevice) -> None:
    with Run(1).manager("memory://") as manager:
        captured = manager.session.saves._captured("a", {}).encode()
        device.gate.clear()
        snapshot = manager.session.saver.snapshots.take(captured.snapshot_files)
        assert snapshot is not None
        threading.Timer(0.1, device.gate.set).start()
        snapshot.release()
        snapshot.release()
        with pytest.raises(ckpt.StateError, match="whose memory it has released"):
            list(snapshot.files["model.safetensors"].pieces())


@pytest.mark.parametrize("encoded_first", [False, True])
def test_the_memory_of_copies_is_given_back_when_they_are_fetched(
    root: Place, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, encoded_first: bool
) -> None:
    if encoded_first:
        monkeypatch.setattr(Snapshots, "copy", lambda *_: None)  # as where some tensors share memory
    copied, blocks = tensor_copies._copied, list[torch.Tensor]()

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        blocks.append(copied(*args, **options))
        return blocks[-1]

    monkeypatch.setattr(tensor_copies, "_copied", watched)
    with Run(1).manager(root) as manager:
        manager.save_state("a")
        manager.wait()
        fetched, end = [block for block in blocks if block.numel() > 2], time.monotonic() + 60
        while any(sizes := [block.untyped_storage().nbytes() for block in fetched]) and time.monotonic() < end:
            time.sleep(0.01)  # the save thread gives them back after it has told that the save is done
        fetched.clear()
        blocks.clear()  # nothing may read them any more
    assert sizes
    assert not any(sizes)


@pytest.mark.parametrize("room", [0, 1000, SIZE // 2])
def test_what_the_device_has_no_room_for_is_copied_before_the_call_returns(
    root: Place, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    with_room(monkeypatch, device, room)
    run = Run(1)
    with run.manager(root) as manager:
        state = run.state()
        manager.save_state("a")
        fetched = sum(device.fetched)
        run.spoil()
        manager.wait()
    assert fetched >= SIZE - room
    assert loaded(root, "a") == state


def test_an_allocator_that_has_less_than_it_says_makes_training_wait(
    root: Place, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_room(monkeypatch, device, 1 << 40, allocatable=SIZE // 2)
    run, states = Run(1), {}
    with run.manager(root) as manager:
        for name in ("a", "b"):
            states[name] = run.state()
            manager.save_state(name)
            run.step()
            manager.wait()
    assert {name: loaded(root, name) for name in states} == states


# the step counts take 8 bytes on the host: there is room to copy them twice, as copies of all tensors do, or once
@pytest.mark.parametrize("host_memory", [2000, 12])
def test_a_state_larger_than_host_memory_is_fetched_as_it_is_written(
    root: Place, device: SimulatedDevice, host_memory: int
) -> None:
    run, states = Run(1), {}
    with run.manager(root, saving=ckpt.SaveOptions(host_memory=host_memory)) as manager:
        for name in ("a", "b"):
            device.gate.clear()
            states[name] = run.state()
            manager.save_state(name)  # returns, though nothing can be fetched
            run.step()
            device.gate.set()
            manager.wait()
        assert manager.session.saver.snapshots.memory.size <= 4096  # the step counts, which are on the host
    assert {name: loaded(root, name) for name in states} == states


@pytest.mark.parametrize("host_memory", [2000, 12])
def test_training_waits_where_the_host_has_no_room_and_the_device_less_than_it_says(
    root: Place, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, host_memory: int
) -> None:
    with_room(monkeypatch, device, 1 << 40, allocatable=SIZE // 2)
    run = Run(1)
    with run.manager(root, saving=ckpt.SaveOptions(host_memory=host_memory)) as manager:
        device.gate.clear()
        opening = threading.Timer(0.3, device.gate.set)
        opening.start()
        manager.save_state("a")
        assert (root / "a" / "manifest.json").exists()  # nothing of the live state is needed any more
        opening.join()
    assert loaded(root, "a") == run.state()


def test_without_room_anywhere_training_waits_and_is_told_once(
    root: Place, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_room(monkeypatch, device, 1000)
    run = Run(1)
    with run.manager(root, saving=ckpt.SaveOptions(host_memory=2000)) as manager:
        for name in ("a", "b"):
            manager.save_state(name)
            assert (root / name / "manifest.json").exists()
    assert loaded(root, "b") == run.state()
    assert caplog.text.count("training waits while a checkpoint is written") == 1


def test_a_device_that_fails_while_it_is_fetched_is_a_save_that_fails(root: Place, device: SimulatedDevice) -> None:
    run = Run(1)
    with run.manager(root) as manager:
        manager.save_state("before", wait=True)
        device.error = RuntimeError("the device is gone")
        manager.save_state("lost")
        with pytest.raises(RuntimeError, match="the device is gone"):
            manager.wait()
        device.error = None
        manager.save_state("after")
    assert ckpt.verify(root) == {"after": [], "before": []}
    assert loaded(root, "after") == run.state()


class FirstPieces(PassedOn):
    """Notes when the first bytes of a file come."""

    def __init__(self, root: Place) -> None:
        super().__init__(root)
        self.begun = threading.Event()

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        if key.endswith(".safetensors"):
            pieces = self._noted(pieces)
        super().write(key, pieces, over=over)

    def _noted(self, pieces: Iterable[Buffer]) -> Iterable[Buffer]:
        for piece in pieces:
            self.begun.set()
            yield piece


def test_writing_begins_before_all_has_been_fetched(
    root: Place, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FirstPieces(root)
    fetch, late = device.fetch, []

    def fetch_some(sources: Iterable[torch.Tensor], target: torch.Tensor) -> None:
        if len(device.fetched) == 40:  # more than a page of the first file
            late.append(storage.begun.wait(DEADLINE))
        fetch(sources, target)

    monkeypatch.setattr(device, "fetch", fetch_some)
    run = Run(1)
    with run.manager(storage) as manager:
        state = run.state()
        manager.save_state("a")
        run.spoil()
    assert late == [True]
    assert loaded(root, "a") == state


def test_a_snapshot_that_nobody_needs_any_more_is_not_fetched_to_its_end(device: SimulatedDevice) -> None:
    run = Run(1)
    with run.manager("memory://") as manager:
        device.gate.clear()
        captured = manager.session.saves._captured("a", {}).encode()
        snapshot = manager.session.saver.snapshots.take(captured.snapshot_files)
        assert snapshot is not None
        snapshot.arrival.is_discarded = True
        device.gate.set()
        snapshot.release()
        assert len(device.fetched) < SIZE // 300 // 2


class Module:
    """Stands for torch.cuda: what its allocator says."""

    def __init__(self) -> None:
        self.free, self.total, self.figures = 60, 128, dict[str, dict[str, dict[str, int]]]()

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        return self.free, self.total

    def memory_stats_as_nested_dict(self, _: torch.device) -> dict[str, dict[str, dict[str, int]]]:
        return self.figures

    def say(self, allocated: int, reserved: int, peak: int) -> None:
        self.free = self.total - reserved
        used = {"current": allocated, "peak": peak}
        self.figures = {"allocated_bytes": {"all": used}, "reserved_bytes": {"all": {"current": reserved}}}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    found = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda _: found)
    return found


def test_room_on_a_device_is_what_training_has_never_used(module: Module) -> None:
    room = DeviceRoom(torch.device("cpu"))
    module.say(allocated=20, reserved=30, peak=20)
    assert room.measure() == 108 - 32  # before the first step a quarter is left to it
    module.say(allocated=20, reserved=90, peak=80)
    assert room.measure() == 48 - 4  # blocks that the allocator keeps are room; a thirty-second is left
    room.taken(40)
    module.say(allocated=20, reserved=120, peak=100)
    room.released()
    assert room.measure() == 48 - 4  # the peak was training's with a snapshot of 40 beside it
    module.say(allocated=20, reserved=120, peak=101)
    assert room.measure() == 27 - 4  # it rose when there was no snapshot
    module.say(allocated=20, reserved=120, peak=30)
    assert room.measure() == 27 - 4  # the user has reset the figures


def test_room_on_a_device_is_bounded_by_what_the_user_and_the_allocator_say(module: Module) -> None:
    module.say(allocated=20, reserved=90, peak=80)
    room = DeviceRoom(torch.device("cpu"), 10)
    assert room.measure() == 10
    room.overestimated(4)
    assert {room.measure() for _ in range(9)} == {4}
    assert room.measure() == 10  # it is tried again after a while


def test_the_copies_of_a_save_leave_as_much_room_for_those_of_the_next(
    device: SimulatedDevice, module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.room = DeviceRoom(device.device)
    tensor, snapshots = torch.zeros(40, dtype=torch.uint8), Snapshots()
    module.say(allocated=20, reserved=90, peak=80)
    for _ in range(2):
        copies = snapshots.copy(Leaves.of([tensor], [tensor], {}))
        assert copies is not None
        module.say(allocated=60, reserved=120, peak=100)  # training went up to 60 beside the copies
        copies.release()
        module.say(allocated=20, reserved=120, peak=100)


def test_host_memory_is_made_resident_before_a_snapshot_needs_it() -> None:
    images, size, deadline = HostMemory(), 1 << 20, time.monotonic() + DEADLINE
    images.prefault(size)
    try:
        while images.free_resident < size:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        images.release()


def test_fetches_of_two_snapshots_take_turns(device: SimulatedDevice) -> None:
    fetcher = Fetcher({device.device: device})
    images = [PrivateImage() for _ in range(2)]
    for image in images:
        image.take(4000)

    def fetch(number: int) -> None:
        transfers = [Transfer(device.device, "file", is_live=True) for _ in range(40)]
        for index, transfer in enumerate(transfers):
            tensor = torch.full((100,), 100 * number + index, dtype=torch.uint8)
            transfer.add(Source(tensor, 0, 100), 100 * index)
        arrival = Arrival([(transfer.start, transfer.size) for transfer in transfers])
        fetcher.fetch(enumerate(transfers), images[number], images[number].bytes(4000), arrival, 2)
        arrival.wait()

    threads = [threading.Thread(target=fetch, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert device.most_in_flight == 1
    for number, image in enumerate(images):
        found = bytes(host_bytes(image.bytes(4000)))
        assert found == b"".join(bytes([100 * number + index]) * 100 for index in range(40))


def test_on_a_device_of_which_nothing_is_known_all_work_ends_before_a_copy_and_the_copy_before_all_other_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[object] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", events.append)
    device = torch.device("xpu", 0)
    with Device.of(device).ordered():
        events.append("copied")
    assert events == [device, "copied", device]

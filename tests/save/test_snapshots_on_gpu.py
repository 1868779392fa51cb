"""A checkpoint of state on a GPU is that state as it was when `save_state` was called, bit for bit.

Whatever changes the state after the call, and however little memory there is for the snapshot. CKPT_SAVES says how many
saves are made for each way to change it: 50 unless it is set.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.helpers.ways_to_change import DEVICE, WAYS, State, Training, build, differences, read

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SAVES = int(os.environ.get("CKPT_SAVES", "50"))
MB = 1 << 20
SMALL = 12 * MB  # about a third of the state
FEW_WAYS = [
    "the optimizer steps",
    "a CUDA graph replays the whole step",
    "parameters are multiplied through .data",
    "two optimizers step in streams of their own",
    "the state is partly on the host",
]
LITTLE_MEMORY: dict[str, dict[str, Any]] = {
    "nothing may be staged on the device": {"device_memory": 0},
    "a part of it may be staged on the device": {"device_memory": SMALL},
    "a part of it fits into host memory": {"host_memory": SMALL},
    "a part of it fits into host memory and nothing may be staged": {"device_memory": 0, "host_memory": SMALL},
}


@pytest.fixture(autouse=True)
def _device_memory_is_returned() -> Iterator[None]:
    """Each test begins with an allocator that holds nothing of the one before."""
    yield
    torch._dynamo.reset()  # graphs of compiled models hold memory
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("way", WAYS)
def test_every_checkpoint_is_the_state_at_its_call_although(way: str, tmp_path: Path) -> None:
    training = build(way)
    with training.current(), training.manager(tmp_path) as manager:
        _save_and_compare(manager, training, tmp_path, SAVES)


@pytest.mark.parametrize("memory", LITTLE_MEMORY)
@pytest.mark.parametrize("way", FEW_WAYS)
def test_with_little_memory_for_snapshots_it_is_still_the_state_at_its_call(
    way: str, memory: str, tmp_path: Path
) -> None:
    training = build(way)
    with training.current(), training.manager(tmp_path, **LITTLE_MEMORY[memory]) as manager:
        _save_and_compare(manager, training, tmp_path, min(SAVES, 10))


def test_saves_that_follow_one_another_at_once_are_each_the_state_at_its_call(tmp_path: Path) -> None:
    training = build("the optimizer steps")
    with training.manager(tmp_path, last=10) as manager:
        expected = {f"save-{number}": _save_and_change(manager, training, number) for number in range(10)}
    wrong = {name: differences(read(tmp_path / name, DEVICE), state) for name, state in expected.items()}
    assert wrong == {name: [] for name in expected}


@pytest.mark.parametrize(
    "saving",
    [{}, {"device_memory": 0}, {"device_memory": SMALL}, {"device_memory": "12MB"}, {"host_memory": SMALL}],
    ids=str,
)
def test_a_save_takes_no_more_device_memory_than_it_may_and_returns_all_of_it(
    saving: dict[str, Any], tmp_path: Path
) -> None:
    training = build("the optimizer steps")
    with training.manager(tmp_path, **saving) as manager:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for number in range(3):
            manager.save_state(f"save-{number}")
            manager.wait()
            assert torch.cuda.memory_allocated() == before
        taken = torch.cuda.max_memory_allocated() - before
        _save_and_compare(manager, training, tmp_path, 2)
        assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_allocated() == before
    if "device_memory" in saving:
        assert taken <= (SMALL if saving["device_memory"] else 0) + MB  # a checksum of each tensor is not staging


@pytest.mark.parametrize("left", [24 * MB, 96 * MB], ids=["24 MB are left", "96 MB are left"])
def test_on_a_full_device_the_state_is_saved_and_training_has_what_is_left(left: int, tmp_path: Path) -> None:
    training = build("a fused optimizer steps")
    with training.manager(tmp_path) as manager, _full_device(left):
        _save_without_room(manager, training, tmp_path, needed=left - 8 * MB)


def test_where_the_process_may_allocate_no_more_the_state_is_saved(tmp_path: Path) -> None:
    """The device has room, and says so: only to allocate fails."""
    training = build("a fused optimizer steps")
    with training.manager(tmp_path) as manager, _no_more_memory():
        _save_without_room(manager, training, tmp_path, needed=0)


@pytest.mark.parametrize("full", [False, True], ids=["with room elsewhere", "with no room elsewhere"])
def test_where_cached_memory_is_in_fragments_the_state_is_saved(full: bool, tmp_path: Path) -> None:
    """As much as the state and more is cached, in pieces smaller than a weight."""
    training = build("a fused optimizer steps")
    kept = _fragments()
    with training.manager(tmp_path) as manager:
        if full:
            with _full_device(24 * MB):
                _save_without_room(manager, training, tmp_path, needed=16 * MB)
        else:
            _save_and_compare(manager, training, tmp_path, min(SAVES, 10))
    del kept


def _save_and_compare(manager: ckpt.StateManager, training: Training, root: Path, saves: int) -> None:
    """Save as often, with the state changing all the while, and compare each checkpoint with its state."""
    for number in range(saves):
        expected = _save_and_change(manager, training, number)
        manager.wait()
        assert differences(read(root / f"save-{number}", DEVICE), expected) == []
        assert differences(training.state(), expected), "nothing has changed since: this shows nothing"


def _save_and_change(manager: ckpt.StateManager, training: Training, number: int) -> State:
    """Change the state, save it, and change it again at once. A copy of the state at the call.

    In half of the saves the change before is still to be made by the device, and in half of them the device is busy
    between the copy and the call.
    """
    if number % 2:
        training.sleep()
    training.change()
    expected = training.clone()
    if number % 4 < 2:
        training.sleep()
    manager.save_state(f"save-{number}")
    for _ in range(3):
        training.change()
    return expected


def _save_without_room(manager: ckpt.StateManager, training: Training, root: Path, needed: int) -> None:
    """The same, compared on the host. After each call training allocates as many bytes as it needs."""
    for number in range(5):
        training.change()
        expected = training.clone("cpu")
        training.sleep()
        manager.save_state(f"save-{number}")
        training.change()
        work = torch.empty(needed, dtype=torch.uint8, device=DEVICE)
        training.change()
        del work
        manager.wait()
        assert differences(read(root / f"save-{number}", "cpu"), expected) == []


@contextmanager
def _full_device(left: int) -> Iterator[None]:
    """The device has no more free memory than this, and up to 32 MB; the allocator has cached nothing whole."""
    torch.cuda.empty_cache()
    held: list[torch.Tensor] = []
    size = 1 << 30
    while size >= 32 * MB:  # the allocator would take a segment of 20 MB for something smaller than half of that
        if torch.cuda.mem_get_info()[0] - size < left:
            size //= 2
        else:
            held.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
    try:
        yield
    finally:
        held.clear()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # or the next manager would leave training as much again


@contextmanager
def _no_more_memory() -> Iterator[None]:
    """The allocator may take hardly more memory from the device than it has."""
    torch.cuda.empty_cache()
    may_take = torch.cuda.memory_reserved() + 4 * MB  # a segment for small tensors
    torch.cuda.set_per_process_memory_fraction(may_take / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _fragments() -> list[torch.Tensor]:
    """Every second of many blocks of 3 MB; the others are in the allocator's cache."""
    torch.cuda.empty_cache()
    return [torch.empty(3 * MB, dtype=torch.uint8, device=DEVICE) for _ in range(128)][::2]

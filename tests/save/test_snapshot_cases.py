"""The parts of a snapshot case by case: which tensors are copied together, in which memory, and how transfers lie."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ckpt.errors import StateError
from ckpt.save.snapshot import devices, fetch, host_memory, tensor_copies
from ckpt.save.snapshot.devices import copy_packed
from ckpt.save.snapshot.fetch import Run, Source, Transfer, plan_transfers
from ckpt.save.snapshot.file_image import PAGE, SnapshotLayout
from ckpt.save.snapshot.host_memory import HostMemory, PrivateImage
from ckpt.save.snapshot.tensor_copies import Leaves, TensorCopies, TensorCopy, copy_on_host, flat_bytes


def numbered(count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.arange(count).to(dtype)


class TestLeaves:
    def test_small_tensors_of_a_dtype_are_copied_together_and_large_ones_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tensor_copies, "_TOGETHER", 64)
        tensors = [numbered(63), numbered(64), numbered(3, torch.float32), numbered(5), numbered(16, torch.float32)]
        leaves = Leaves.of(tensors, tensors, {})
        assert leaves is not None
        assert [group.sizes for group in leaves.small] == [[63, 5], [12]]
        assert leaves.large.sizes == [64, 64]
        assert (leaves.on_device, leaves.sizes) == ({}, {})
        assert leaves.host_size == 128 + 64 + 64 + 64
        copies = TensorCopies(leaves)
        given_back: list[int] = []
        copies.add_on_host(torch.empty(leaves.host_size, dtype=torch.uint8), lambda: given_back.append(1))
        for tensor in tensors:
            tensor_copy = copies.of(tensor)
            assert torch.equal(tensor_copy, tensor)
            assert copies.bytes_of(tensor) is not None
            assert tensor_copy.dtype == tensor.dtype
        assert copies.bytes_of(torch.ones(1)) is None
        copies.forget_sources()
        assert [group.tensors for group in (*leaves.small, leaves.large)] == [[], [], []]
        copies.release()
        copies.release()
        assert given_back == [1]

    def test_a_group_ends_with_the_block_that_it_fills(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tensor_copies, "BLOCK", 10)
        tensors = [numbered(size) for size in (4, 6, 3, 9, 1)]
        leaves = Leaves.of(tensors, tensors, {})
        assert leaves is not None
        assert [group.sizes for group in leaves.small] == [[4, 6], [3, 9], [1]]
        assert [group.size for group in leaves.small] == [10, 12, 1]

    def test_what_shares_memory_is_none_of_them(self) -> None:
        base = numbered(20)
        for first, second, apart in (
            (base[:10], base[10:], True),
            (base[:11], base[10:], False),
            (base[10:], base[:11], False),
            (base[5:5], base[:10], True),
            (base[:10], base[3:4], False),
        ):
            assert (Leaves.of([first, second], [first, second], {}) is not None) == apart, (first, second)

    def test_on_devices_those_of_odd_sizes_are_apart_and_the_last_are_chosen_first(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(devices, "is_on_host", lambda tensor: False)
        tensors, cpu = [numbered(size) for size in (16, 32, 5, 0, 48)], torch.device("cpu")
        leaves = Leaves.of(tensors, tensors, {})
        assert leaves is not None
        assert [group.sizes for group in leaves.on_device[cpu]] == [[16, 32, 0, 48], [5]]
        assert leaves.sizes == {cpu: 101}
        for room, chosen in (
            (101, [48, 0, 5, 32, 16]),
            (100, [48, 0, 5, 32]),
            (84, [48, 0, 5]),
            (48, [48, 0]),
            (47, [0]),
        ):
            found = Leaves.last_of(tensors, {cpu: room})
            sizes = {size for groups in found.on_device.values() for group in groups for size in group.sizes}
            assert sizes == set(chosen), room
            assert not found.are_dense

    def test_copies_of_tensors_in_any_order_and_of_several_dtypes_have_every_bit(self) -> None:
        odd = torch.tensor([1.0, float("nan"), -0.0]).to(torch.float8_e4m3fn)
        turned = numbered(6, torch.float32).view(2, 3).t()
        conjugated = torch.tensor([1 + 2j, 3 - 1j]).conj()
        for tensor in (odd, turned, conjugated, torch.empty(0), torch.tensor(3.0)):
            expected = tensor.clone(memory_format=torch.contiguous_format).resolve_conj().contiguous()
            assert torch.equal(flat_bytes(tensor), expected.view(-1).view(torch.uint8))
            together = tensor_copies._copied([tensor, tensor], are_dense=False)
            assert torch.equal(together.view(torch.uint8), flat_bytes(tensor).repeat(2))


class TestCopiesOnTheHost:
    def test_parts_are_shared_out_in_pieces_for_a_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tensor_copies, "_PART", 10)
        for sizes, shares in (
            ([], []),
            ([10], [[10]]),
            ([4, 5, 1, 1], [[4, 5, 1], [1]]),
            ([10, 10], [[10], [10]]),
            ([9, 10, 1], [[9, 10], [1]]),
            ([0, 1], [[0, 1]]),
        ):
            found = tensor_copies._shares([(0, 0, size) for size in sizes])
            assert [[part[2] for part in share] for share in found] == shares, sizes

    @pytest.mark.parametrize("part", [3, 8, 100, 1 << 20])
    def test_every_byte_gets_to_its_place_and_no_other_is_touched(
        self, monkeypatch: pytest.MonkeyPatch, part: int
    ) -> None:
        monkeypatch.setattr(tensor_copies, "_PART", part)
        first, second, turned = numbered(20), numbered(8) + 100, (numbered(6) + 50).view(2, 3).t()
        memory = torch.full((60,), 255, dtype=torch.uint8)
        copy_on_host([TensorCopy("a", first, 2), TensorCopy("a", second, 30), TensorCopy("b", turned, 40)], memory)
        gap = torch.full((60,), 255, dtype=torch.uint8)
        gap[2:22], gap[30:38], gap[40:46] = first, second, turned.reshape(-1)
        assert torch.equal(memory, gap)

    def test_where_executors_take_no_work_any_more_this_thread_copies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Ended:
            def __init__(self, *args: Any, **options: Any) -> None: ...

            def __enter__(self) -> Ended:
                return self

            def __exit__(self, *args: object) -> None: ...

            def map(self, *args: Any) -> None:
                raise RuntimeError("cannot schedule new futures after interpreter shutdown")

        monkeypatch.setattr(tensor_copies, "ThreadPoolExecutor", Ended)
        monkeypatch.setattr(tensor_copies, "_PART", 4)
        source, memory = numbered(20), torch.zeros(20, dtype=torch.uint8)
        copy_on_host([TensorCopy("a", source, 0)], memory)
        assert torch.equal(memory, source)

    @pytest.mark.parametrize("non_blocking", [True, False])
    def test_packed_copies_lie_one_after_the_other_whatever_is_small(
        self, monkeypatch: pytest.MonkeyPatch, non_blocking: bool
    ) -> None:
        monkeypatch.setattr(devices, "_SMALL", 4)
        asked: list[bool] = []
        copy = torch.Tensor.copy_

        def noted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            asked.append(non_blocking)
            return copy(target, source)

        monkeypatch.setattr(torch.Tensor, "copy_", noted)
        for sizes in ([1, 2, 4, 3, 1, 5, 2], [4], [3], [], [4, 4, 1]):
            parts = torch.split(numbered(sum(sizes)), sizes) if sizes else ()
            target = torch.full((sum(sizes) + 1,), 255, dtype=torch.uint8)
            copy_packed(parts, target, **({} if non_blocking else {"non_blocking": False}))
            assert torch.equal(target, torch.cat([numbered(sum(sizes)), torch.tensor([255], dtype=torch.uint8)]))
        assert set(asked) == {non_blocking}
        assert len(asked) == 5 + 1 + 1 + 0 + 3

    def test_where_small_ones_cannot_be_packed_each_is_copied_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(tensors: object) -> None:
            raise torch.OutOfMemoryError

        monkeypatch.setattr(torch, "cat", full)
        target = torch.zeros(6, dtype=torch.uint8)
        copy_packed(torch.split(numbered(6), [1, 2, 3]), target)
        assert torch.equal(target, numbered(6))


def is_busy(memory: HostMemory) -> bool:
    return memory._prefaulting.busy


class TestHostMemory:
    def test_an_image_is_used_again_if_it_is_large_enough_and_not_far_too_large(self) -> None:
        memory = HostMemory(limit=1 << 20)
        first = memory.take(1000)
        second = memory.take(4000)
        assert first is not second
        assert (memory.size, memory.room(0), memory.free_resident) == (5000, (1 << 20) - 5000, 0)
        assert (first.bytes(1000).numel(), first.in_use) == (1000, True)
        first.release()
        second.release()
        assert (memory.room(0), memory.free_resident) == (1 << 20, 5000)
        assert memory.take(1000) is first
        first.release()
        for size, found in ((900, first), (1001, second), (999, first), (250, first)):
            taken = memory.take(size)
            assert taken is found, size
            taken.release()
        grown = memory.take(249)  # neither: it would take an image from a larger snapshot
        assert grown not in (first, second)
        grown.release()
        assert memory.take(5000) is second  # the largest grows
        assert second.size == 5000
        memory.release()
        assert memory.size == 0

    def test_where_the_limit_leaves_no_room_beside_it_unused_images_are_given_up(self) -> None:
        memory = HostMemory(limit=10_000)
        small, large = memory.take(1000), memory.take(6000)
        small.release()
        large.release()
        grown = memory.take(9000)
        assert grown is large
        assert memory.size == 10_000  # both have room
        grown.release()
        assert memory.take(9001) is grown
        assert memory.size == 9001

    def test_bytes_become_resident_when_a_snapshot_has_used_them(self) -> None:
        image = PrivateImage()
        image.take(5000)
        assert image.resident == 0
        image.release()
        assert (image.resident, image.in_use) == (5000, False)
        image.take(100)
        image.release()
        assert image.resident == 5000
        image.reserve(4000)
        assert image.size == 5000
        image.reserve(6000)
        assert (image.size, image.resident) == (6000, 0)

    def test_it_is_prefaulted_in_the_background_but_not_while_it_is_paused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(host_memory, "_CHUNK", 4096)
        memory = HostMemory(limit=1 << 20)
        with memory.paused():
            memory.prefault(10_000)
            (image,) = memory._images
            assert is_busy(memory)
            threading.Event().wait(0.05)
            assert image.resident == 0
        memory._prefaulting.wait()
        assert image.resident >= 10_000
        memory.prefault(9000)
        assert (memory.size, is_busy(memory)) == (10_000, False)
        assert memory.take(9000) is image
        image.release()
        with memory.paused():
            memory.prefault(20_000)
            taken = memory.take(20_000)  # stops it
            assert not is_busy(memory)
        assert taken.size == 20_000
        taken.release()
        memory.release()

    def test_a_chunk_is_no_longer_than_the_image(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_memory, "_CHUNK", 4096)
        image = PrivateImage()
        image.reserve(9000)
        assert [len(chunk) for chunk in image.chunks()] == [4096, 4096, 4096]  # of whole pages


class TestTransfers:
    def test_large_tensors_are_cut_and_small_ones_of_a_file_joined(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fetch, "TRANSFER", 10)
        tensors = [numbered(size) for size in (4, 3, 8, 25, 0, 5)]
        copies = [
            TensorCopy("a", tensors[0], 100),
            TensorCopy("a", tensors[1], 104),
            TensorCopy("a", tensors[2], 108),
            TensorCopy("b", tensors[3], 200),
            TensorCopy("b", tensors[4], 225),
            TensorCopy("b", tensors[5], 225, True),
        ]
        found = plan_transfers(copies)
        assert [(one.file, one.is_live, one.size, one.start) for one in found] == [
            ("a", False, 9, 100), ("a", False, 6, 110), ("b", False, 10, 200), ("b", False, 10, 210),
            ("b", False, 5, 220), ("b", True, 5, 225),
        ]  # fmt: skip
        assert found[0].runs == [Run(0, 100, 7), Run(7, 108, 2)]
        assert [one.start for one in plan_transfers(copies, 40)] == [100, 200, 225]
        image = torch.full((240,), 255, dtype=torch.uint8)
        for transfer in found:
            data = torch.cat(list(transfer.flat()))
            for offset, start, size in transfer.runs:
                image[start : start + size] = data[offset : offset + size]
        for copy in copies:
            assert torch.equal(image[copy.start : copy.start + len(copy.source)], copy.source)
        assert int((image != 255).sum()) == 45
        found[0].release()
        with pytest.raises(StateError, match="a snapshot whose memory it has released"):
            list(found[0].flat())

    def test_where_the_device_has_no_room_to_order_bytes_the_host_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        source = Source(numbered(6).view(2, 3).t(), 1, 5)

        def full(self: Source) -> torch.Tensor:
            raise torch.OutOfMemoryError

        expected = flat_bytes(source.tensor)[1:5]
        assert torch.equal(source.flat(), expected)
        monkeypatch.setattr(Source, "flat", full)
        assert torch.equal(source.flat_somewhere(), expected)

    def test_runs_that_meet_are_one(self) -> None:
        transfer = Transfer(torch.device("cpu"), "a", False)
        for start, size in ((0, 4), (4, 2), (10, 1)):
            transfer.add(Source(numbered(size), 0, size), start)
        assert (transfer.runs, transfer.size, len(transfer.sources)) == ([Run(0, 0, 6), Run(6, 10, 1)], 7, 3)


def test_an_image_has_every_file_from_a_page_on_with_its_headers_and_tensors() -> None:
    from ckpt.formats.native.tensor_file import plan_file
    from ckpt.formats.tensors import FilePlan, Shard

    weights = {"w": numbered(5000), "v": numbered(3)}
    tensors = plan_file("x.safetensors", {name: Shard.whole(tensor) for name, tensor in weights.items()})
    plans = [FilePlan.of("a.json", b"{}"), tensors, FilePlan.of("b.json", b"[1]")]
    layout = SnapshotLayout.of(plans)
    assert [start % PAGE for start in layout.starts] == [0, 0, 0]
    assert layout.places == [(plan.path, start, plan.size) for plan, start in zip(plans, layout.starts, strict=True)]
    assert layout.host_size == 5003
    assert layout.device_sizes == {}
    assert layout.size == layout.starts[2] + PAGE
    image = PrivateImage()
    image.take(layout.size)
    layout.fill(image)
    files = layout.files_in(image, fetch.Arrival())
    for plan in (tensors,):
        assert files[plan.path].in_memory
        assert b"".join(map(bytes, files[plan.path].pieces())) == b"".join(map(bytes, plan.pieces()))


def test_whoever_waits_for_bytes_gets_them_or_the_error() -> None:
    arrival = fetch.Arrival([(0, 4), (10, 6)])
    assert arrival.missing == 10
    arrival.wait(0)
    got: list[str] = []

    def wait(stop: int | None) -> None:
        try:
            arrival.wait(stop)
            got.append(f"{stop}")
        except ValueError:
            got.append(f"{stop} failed")

    threads = [threading.Thread(target=wait, args=(stop,)) for stop in (10, None)]
    for thread in threads:
        thread.start()
    arrival.arrived(0)
    threads[0].join(20)
    assert (got, arrival.missing) == (["10"], 6)
    with pytest.raises(StopIteration):
        next(arrival.pieces(memoryview(b""), 0, 0))
    arrival.fail(ValueError("lost"))
    threads[1].join(20)
    assert got == ["10", "None failed"]
    arrival.wait(10)
    with pytest.raises(ValueError, match="lost"):
        arrival.wait(11)
    done = fetch.Arrival([(0, 4)])
    done.arrived(0)
    done.discard()
    done.wait()
    assert done.is_discarded
    late = fetch.Arrival([(0, 4)])
    late.discard()
    with pytest.raises(StateError, match="whose memory it has released"):
        late.wait()

"""The hashes of a file's blocks, computed where its tensors are: the same as those of its bytes."""

from __future__ import annotations

import random

import pytest
import torch
import xxhash

from ckpt.formats import device_hashes as module
from ckpt.formats.device_hashes import hashes_on_device
from ckpt.formats.tensors import host_bytes
from tests.formats.test_fingerprint import on_a_gpu

KIB = 1024
SIZES = [0, 1, 4, 60, 64, 100, 1000, KIB - 1, KIB, KIB + 1, 3000, 5000, 20_000, 40_000]
Contents = list[bytes | torch.Tensor]


def _files(seed: int, device: str, largest: int = 9000) -> tuple[list[Contents], list[bytes]]:
    """Files of a header and tensors of any length, at addresses of any alignment, and their bytes."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    files, data = list[Contents](), list[bytes]()
    for _ in range(draw.randint(1, 3)):
        parts = []
        for _ in range(draw.randint(0, 8)):
            size, skipped = draw.choice([*SIZES, draw.randint(0, largest)]), draw.choice([0, 0, 0, 1, 2])
            random_bytes = torch.randint(0, 256, (size + 3,), dtype=torch.uint8, generator=generator).to(device)
            parts.append(random_bytes[skipped : skipped + size])
        as_bytes = [bytes(host_bytes(part.cpu())) for part in parts]
        files.append([as_bytes[0], *parts[1:]] if parts else [])
        data.append(b"".join(as_bytes))
    return files, data


def _expected(data: list[bytes], block_size: int) -> list[tuple[str, ...]]:
    starts = [range(0, len(one), block_size) for one in data]
    return [
        tuple(xxhash.xxh3_128_hexdigest(one[start : start + block_size]) for start in of)
        for one, of in zip(data, starts, strict=True)
    ]


@pytest.mark.parametrize("block_size", [KIB, 2 * KIB, 8 * KIB, 32 * KIB])
def test_they_are_xxh3_of_every_block_whatever_the_tensors_lengths_and_alignment(
    block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH", 40 * KIB)  # several
    for seed in range(15):
        files, data = _files(seed, "cpu")
        assert module._enqueued(files, torch.device("cpu"), block_size)() == _expected(data, block_size)


def test_every_bit_of_a_file_decides() -> None:
    data = torch.zeros(5 * KIB + 100, dtype=torch.uint8)
    seen = set()
    for place in [0, 63, KIB - 1, KIB, 3 * KIB + 1, 4 * KIB - 1, 4 * KIB, 5 * KIB - 1, 5 * KIB, len(data) - 1]:
        for bit in range(8):
            data[place] = 1 << bit
            seen.add(module._enqueued([[data]], torch.device("cpu"), 4 * KIB)()[0])
        data[place] = 0
    assert len(seen) == 80


def test_a_device_without_kernels_or_without_memory_leaves_it_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("the device is full")

    assert hashes_on_device([[b"x"]], torch.device("cpu"), KIB) is None
    monkeypatch.setattr(module, "_has_kernels", lambda: True)
    monkeypatch.setattr(module, "_enqueued", full)
    assert hashes_on_device([[b"x"]], torch.device("cuda"), KIB) is None


def test_a_device_that_was_full_is_asked_again_for_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Exception] = [RuntimeError("Triton Error [CUDA]: out of memory"), RuntimeError("no compiler")]

    def enqueued(*_: object) -> None:
        raise answers.pop(0)

    monkeypatch.setattr(module, "_enqueued", enqueued)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_: tensor)
    module._has_kernels.cache_clear()
    try:
        for _ in range(3):  # full; then without a compiler, which is remembered
            assert hashes_on_device([[b"x"]], torch.device("cuda"), KIB) is None
        assert answers == []
    finally:
        module._has_kernels.cache_clear()


def test_more_than_a_device_has_memory_for_is_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_GATHERED", 4 * KIB)
    cpu, data = torch.device("cpu"), torch.zeros(9 * KIB, dtype=torch.uint8)
    assert len(module._enqueued([[data[1 : 4 * KIB]]], cpu, 32 * KIB)()[0]) == 1
    with pytest.raises(torch.OutOfMemoryError, match="need a copy that is too large"):
        module._enqueued([[data[1:]]], cpu, 32 * KIB)


@on_a_gpu
def test_the_kernels_compute_the_same() -> None:
    assert module._has_kernels(), "Triton comes with PyTorch's builds for CUDA"
    for seed in range(15):
        files, data = _files(seed, "cuda", 600_000)
        for block_size in (KIB, 8 * KIB, 256 * KIB, 32 << 20):
            read = hashes_on_device(files, torch.device("cuda"), block_size)
            assert read is not None
            assert read() == _expected(data, block_size)


@on_a_gpu
def test_what_is_computed_later_in_the_stream_does_not_change_the_hashes() -> None:
    tensor = torch.zeros(65 << 20, dtype=torch.uint8, device="cuda")
    expected = _expected([b"head" * 250 + bytes(65 << 20)], 32 << 20)
    for number in range(1, 20):
        tensor.fill_(0)
        read = hashes_on_device([[b"head" * 250, tensor]], torch.device("cuda"), 32 << 20)
        tensor.fill_(number)
        assert read is not None
        assert read() == expected

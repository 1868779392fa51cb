"""Fingerprints of tensors: the same from xxhash, from PyTorch's operators and from the kernel, and of every bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash

from ckpt.formats import fingerprint as module
from ckpt.formats.fingerprint import BLOCK, CHUNK, Chunks, device_hashes, fingerprint, fingerprints
from ckpt.formats.tensors import host_bytes

SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 1023, 1024, 1025, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 8, 5 * CHUNK + 1025, 3]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64]
DTYPES += [torch.int64, torch.int16, torch.uint8, torch.bool]


def on_a_gpu(test: Callable[..., None]) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


def _bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def _by_operators(tensors: list[torch.Tensor]) -> list[str]:
    """As a device without Triton computes them."""
    sizes = list(map(len, tensors))
    hashes, found, place = bytes(host_bytes(device_hashes(tensors, Chunks.of(sizes)))), [], 0
    for size in sizes:
        stop = place + 16 * -(-size // CHUNK)
        found.append(module._combined(hashes[place:stop], size))
        place = stop
    return found


def test_a_fingerprint_is_what_the_format_says() -> None:
    data = bytes(range(256)) * 600  # a chunk, and a part of one
    first, second = data[:CHUNK], data[CHUNK:]
    padded = second + bytes(-len(second) % BLOCK)
    hashes = b"".join(xxhash.xxh3_128_intdigest(chunk).to_bytes(16, "little") for chunk in (first, padded))
    expected = xxhash.xxh3_128_hexdigest(hashes + len(data).to_bytes(8, "little"))
    assert fingerprint(memoryview(data)) == expected
    assert fingerprint(memoryview(b"")) == xxhash.xxh3_128_hexdigest(bytes(8))


def test_pytorchs_operators_compute_the_same_as_xxhash_for_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 2 * CHUNK)
    monkeypatch.setattr(module, "_TOGETHER", 4 * CHUNK)  # batches that end inside of a tensor, and after several
    tensors = [_bytes(size) for size in SIZES]
    assert _by_operators(tensors) == [fingerprint(host_bytes(tensor)) for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_have_the_fingerprint_of_their_bytes(dtype: torch.dtype) -> None:
    tensor = (torch.arange(3000) % 7).to(dtype).view(50, 60)
    other = tensor.t()
    found = fingerprints({"rows": tensor, "columns": other})()
    assert found["rows"] == fingerprint(host_bytes(tensor))
    assert found["columns"] == fingerprint(host_bytes(other.contiguous())) != found["rows"]


def test_a_bit_that_differs_anywhere_changes_the_fingerprint() -> None:
    data = torch.zeros(CHUNK + 1500, dtype=torch.uint8)
    places = [0, 1, 63, 64, 1023, 1024, CHUNK - 64, CHUNK - 1, CHUNK, CHUNK + 1024, len(data) - 1]
    seen = {fingerprint(host_bytes(data))}
    for place in places:
        for bit in (0, 3, 7):
            data[place] = 1 << bit
            seen.add(fingerprint(host_bytes(data)))
            assert _by_operators([data])[0] in seen
        data[place] = 0
    assert len(seen) == 1 + 3 * len(places)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_signs_orders_zeros_and_lengths_are_told_apart(dtype: torch.dtype) -> None:
    rows = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    two = rows.clone()
    two[3, 7], two[9, 11] = -two[3, 7], -two[9, 11]
    swapped = rows[[1, 0, *range(2, 64)]]
    square = rows.clone()  # sums of rows and of columns stay the same
    square[0, 0], square[0, 1], square[1, 0], square[1, 1] = rows[0, 1], rows[0, 0], rows[1, 1], rows[1, 0]
    kinds = [rows, -rows, two, swapped, square, rows.flip(0), rows.roll(1), rows[:-1], rows * 0, -(rows * 0)]
    kinds += [torch.zeros(size, dtype=dtype) for size in (0, 1, 2, 63, 64, 65, 16384, 16385)]
    assert len(set(fingerprints(dict(enumerate(kinds)))().values())) == len(kinds)


def test_a_fingerprint_is_of_the_moment_when_it_was_asked_for() -> None:
    tensor = torch.ones(10)
    read = fingerprints({"x": tensor})
    tensor.zero_()
    assert read()["x"] == fingerprint(host_bytes(torch.ones(10)))


def test_a_device_without_memory_for_it_brings_the_tensors_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("the device is full")

    tensors = {size: _bytes(size) for size in SIZES}
    expected = fingerprints(tensors)()
    monkeypatch.setattr(module, "device_hashes", full)
    assert module._enqueued(torch.device("cuda"), tensors)() == expected


@on_a_gpu
def test_the_kernel_computes_the_same_as_xxhash() -> None:
    assert module._has_kernel(), "Triton comes with PyTorch's builds for CUDA"
    tensors = {size: _bytes(size) for size in SIZES}
    tensors[-1] = torch.randn(1000, 70).t()  # in another order in memory
    tensors[-2] = _bytes(100_003)[3:]  # from an address that is no multiple of eight
    on_device = {name: tensor.cuda() if name != -2 else _bytes(100_003).cuda()[3:] for name, tensor in tensors.items()}
    assert fingerprints(on_device)() == fingerprints(tensors)()


@on_a_gpu
def test_on_a_device_without_triton_operators_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_kernel", lambda: False)
    tensors = {size: _bytes(size) for size in SIZES}
    assert fingerprints({name: tensor.cuda() for name, tensor in tensors.items()})() == fingerprints(tensors)()


@on_a_gpu
def test_what_is_computed_later_in_the_stream_does_not_change_a_fingerprint() -> None:
    tensor = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    expected = fingerprint(memoryview(bytes(64 << 20)))
    for number in range(1, 20):
        tensor.fill_(0)
        read = fingerprints({"x": tensor})
        tensor.fill_(number)
        assert read()["x"] == expected

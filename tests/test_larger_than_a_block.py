"""Data that is larger than a block, a window or a buffer: every part of it is its own, and all of it is durable."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt
from ckpt.formats.blocks import BLOCK_SIZE
from ckpt.formats.native import TensorFile, image
from ckpt.formats.sharding import Box
from ckpt.formats.state import Shard
from ckpt.storage import LocalStorage
from ckpt.storage.direct import BLOCK, write_durably
from tests.places import Place

MIB = 1 << 20


class Bytes:
    """A file in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, start: int, stop: int) -> bytes:
        return self.data[start:stop]

    def read_into(self, start: int, *buffers: memoryview) -> None:
        for buffer in buffers:
            buffer[:] = self.data[start : start + len(buffer)]
            start += len(buffer)


def file_with(tensor: torch.Tensor) -> TensorFile:
    data = b"".join(image("model.safetensors", {"weight": Shard.whole(tensor)}).pieces())
    return TensorFile.open(Bytes(data), "step/model.safetensors")


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    """Twenty MiB in rows of one MiB, no two alike."""
    return torch.arange(20 * MIB // 4, dtype=torch.float32).reshape(20, -1)


@pytest.mark.parametrize("offset", [0, 3])
def test_columns_of_a_large_tensor_are_those_of_every_row(rows: torch.Tensor, offset: int) -> None:
    box = Box((offset, 1000), (20 - offset, 500))
    target = torch.empty(box.sizes)
    file_with(rows).fill("weight", target, box)
    assert torch.equal(target, rows[offset:, 1000:1500])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_large_tensor_that_is_cast_has_every_row(rows: torch.Tensor, dtype: torch.dtype) -> None:
    target = torch.empty(rows.shape, dtype=dtype)
    file_with(rows).read_into("weight", target)
    assert torch.equal(target, rows.to(dtype))


def test_a_large_tensor_is_read_into_every_second_row_of_a_larger_one(rows: torch.Tensor) -> None:
    larger = torch.zeros(40, rows.shape[1])
    file_with(rows).read_into("weight", larger[::2])
    assert torch.equal(larger[::2], rows)
    assert not larger[1::2].any()


def write(path: Path, pieces: object) -> None:
    with open(path, "xb", buffering=0) as file:
        write_durably(file.fileno(), pieces)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [BLOCK, 3 * BLOCK + 4097])
def test_a_large_file_is_synced_after_its_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    done: list[tuple[str, int]] = []
    sync, pwrite = os.fsync, os.pwrite

    def synced(descriptor: int) -> None:
        sync(descriptor)
        done.append(("synced", os.fstat(descriptor).st_ino))

    def written(descriptor: int, data: memoryview, start: int) -> int:
        count = pwrite(descriptor, data, start)
        done.append(("written", os.fstat(descriptor).st_ino))
        return count

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "pwrite", written)
    LocalStorage(tmp_path).write("object", [b"x" * size])
    inode = (tmp_path / "object").stat().st_ino
    of_the_file = [what for what, which in done if which == inode]
    assert of_the_file.count("written") >= size // BLOCK
    assert of_the_file[-1] == "synced"


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize("direct", [True, False])
def test_a_disk_that_takes_less_than_it_is_given_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    pwrite, short = os.pwrite, 0

    def half(descriptor: int, data: memoryview, start: int) -> int:
        nonlocal short
        if is_direct(descriptor) and not direct:
            raise OSError(errno.EINVAL, "not aligned for this disk")
        if len(data) < 2 * 4096:
            return pwrite(descriptor, data, start)
        short += 1
        return pwrite(descriptor, data[: len(data) // 2 // 4096 * 4096], start)

    monkeypatch.setattr(os, "pwrite", half)
    data = random.Random(1).randbytes(2 * BLOCK + 12_345)
    write(tmp_path / "file", [data])
    assert short >= 3
    assert (tmp_path / "file").read_bytes() == data


def test_a_block_of_memory_is_refilled_only_when_the_slow_disk_has_written_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More blocks than there are buffers, and a disk that takes its time with the first."""
    pwrite, blocks = os.pwrite, 20

    def slowly(descriptor: int, data: memoryview, start: int) -> int:
        if start == 0:
            time.sleep(1.0)
        return pwrite(descriptor, data, start)

    def pieces() -> Iterator[bytes]:
        for number in range(blocks):
            yield bytes([number]) * BLOCK

    monkeypatch.setattr(os, "pwrite", slowly)
    write(tmp_path / "file", pieces())
    with open(tmp_path / "file", "rb") as file:
        for number in range(blocks):
            assert file.read(BLOCK) == bytes([number]) * BLOCK, f"block {number} has another's bytes"
        assert not file.read()


def large(seed: int) -> nn.Linear:
    """A weight of more than two blocks of hashes."""
    torch.manual_seed(seed)
    return nn.Linear(1024, 2 * BLOCK_SIZE // 4096 + 100, bias=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large") / "root"
    with ckpt.StateManager(root, model=large(1)) as manager:
        manager.save_state("a", wait=True)
    return root


def test_a_weight_of_several_blocks_comes_back(saved: Path) -> None:
    model = large(2)
    with ckpt.StateManager(saved, model=model) as manager:
        manager.load_state()
    assert torch.equal(model.weight, large(1).weight)


@pytest.mark.parametrize("where", [5 * MIB, BLOCK_SIZE + 5 * MIB, 2 * BLOCK_SIZE + 1000])
def test_a_flipped_bit_in_any_block_is_noticed_by_verify_and_by_a_load(saved: Path, where: int) -> None:
    file = saved / "a" / "model.safetensors"
    with flipped(file, where):
        (wrong,) = ckpt.verify(saved)["a"]
        assert f"bytes {where // BLOCK_SIZE * BLOCK_SIZE} to" in wrong
        with (
            ckpt.StateManager(saved, model=large(2)) as manager,
            pytest.raises(ckpt.DamagedError, match="was altered"),
        ):
            manager.load_state("a")
    assert ckpt.verify(saved) == {"a": []}


class flipped:  # noqa: N801
    """While this lasts, one bit of a file is another."""

    def __init__(self, path: Path, where: int) -> None:
        self.path, self.where = path, where

    def __enter__(self) -> None:
        with open(self.path, "r+b") as file:
            file.seek(self.where)
            byte = file.read(1)[0]
            file.seek(self.where)
            file.write(bytes([byte ^ 1]))

    def __exit__(self, *_: object) -> None:
        self.__enter__()


@pytest.mark.parametrize("wait", [True, False])
def test_a_large_state_is_saved_as_it_was_though_training_goes_on(root: Place, wait: bool) -> None:
    model = large(1)
    before = model.weight.detach().clone()
    with ckpt.StateManager(root, model=model) as manager:
        manager.save_state("a", wait=wait)
        with torch.no_grad():
            model.weight.zero_()
        manager.wait()
        manager.load_state("a")
    assert torch.equal(model.weight, before)



"""Data that is larger than a block, a window or a buffer: every part of it is its own, and all of it is durable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt
from ckpt.formats.layout import Box
from ckpt.formats.native.manifest import BLOCK_SIZE
from ckpt.formats.native.tensor_file import TensorFile, plan_file
from ckpt.formats.tensors import Shard
from ckpt.save.snapshot.fetch import TRANSFER
from tests.helpers.file_in_memory import FileInMemory
from tests.helpers.places import Place, at, copy

MIB = 1 << 20


def file_with(tensor: torch.Tensor) -> TensorFile:
    data = b"".join(plan_file("model.safetensors", {"weight": Shard.whole(tensor)}).pieces())
    return TensorFile.open(FileInMemory(data), "step/model.safetensors", len(data))


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


@contextmanager
def flipped(path: Path, where: int) -> Iterator[None]:
    """While this context lasts, a bit of the file is flipped."""
    _flip(path, where)
    try:
        yield
    finally:
        _flip(path, where)


def _flip(path: Path, where: int) -> None:
    with open(path, "r+b") as file:
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ 1]))


def test_two_blocks_that_changed_places_are_noticed(saved: Path, root: Place) -> None:
    copy(at(str(saved)), root)
    file = root / "a" / "model.safetensors"
    data = file.read_bytes()
    first, second = data[:BLOCK_SIZE], data[BLOCK_SIZE : 2 * BLOCK_SIZE]
    file.write_bytes(second + first + data[2 * BLOCK_SIZE :])
    assert len(ckpt.verify(root)["a"]) == 2
    file.write_bytes(first + first + data[2 * BLOCK_SIZE :])
    with ckpt.StateManager(root, model=large(2)) as manager, pytest.raises(ckpt.DamagedError, match="was altered"):
        manager.load_state("a")


def test_a_transposed_weight_over_two_pieces_of_memory_is_saved_as_it_is(root: Place) -> None:
    """It is not contiguous, and larger than what is copied at once."""
    rows = TRANSFER // 4096 + 500
    weight = torch.arange(rows * 1024, dtype=torch.float32).reshape(1024, rows).t()
    model = nn.ParameterDict({"weight": nn.Parameter(weight)})
    assert not model["weight"].is_contiguous()
    with ckpt.StateManager(root, model=model) as manager:
        manager.save_state("a")
    again = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(rows, 1024))})
    with ckpt.StateManager(root, model=again) as manager:
        manager.load_state("a")
    assert torch.equal(again["weight"], weight)


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

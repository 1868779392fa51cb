from __future__ import annotations

import ctypes
import json
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from ckpt.errors import DamagedError, StorageError
from ckpt.formats.native.header import ALIGNMENT
from ckpt.formats.native.tensor_file import SPELLED, TensorFile, plan_file
from ckpt.formats.tensors import Shard

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental", "ignore:torch.distributed is disabled"
)


@dataclass(frozen=True)
class Bytes:
    """A file in memory, for a format that needs no more."""

    data: bytes

    def read(self, start: int, stop: int) -> bytes:
        return self.data[start:stop]

    def read_into(self, start: int, *buffers: memoryview) -> None:
        for buffer in buffers:
            if start + len(buffer) > len(self.data):
                raise StorageError("the file ends too early")
            buffer[:] = self.data[start : start + len(buffer)]
            start += len(buffer)


def file_of(tensors: Mapping[str, torch.Tensor | Shard]) -> bytes:
    """The bytes of the file. Whatever is in it, safetensors must accept it."""
    shards = {name: tensor if isinstance(tensor, Shard) else Shard.whole(tensor) for name, tensor in tensors.items()}
    laid_out = plan_file("model.safetensors", shards)
    data = b"".join(laid_out.pieces())
    assert data == b"".join(laid_out.pieces())  # it can be gone through again
    assert len(data) == laid_out.size
    safetensors.torch.load(data)
    return data


def opened(tensors: Mapping[str, torch.Tensor | Shard]) -> TensorFile:
    return open_file(file_of(tensors), "step/model.safetensors")


def open_file(data: bytes, where: str = "file") -> TensorFile:
    return TensorFile.open(Bytes(data), where, len(data))


def test_small_tensors_stand_together_so_that_whoever_wants_only_them_reads_little() -> None:
    """Of an optimizer's state, every rank wants all step counts, and of the moments only its own pieces."""
    state = {f"{kind}.{n}": torch.zeros(20_000) for n in range(8) for kind in ("exp_avg", "exp_avg_sq")}
    file = opened(state | {f"step.{n}": torch.tensor(float(n)) for n in range(8)} | {"exp_avg.8": torch.zeros(20_000)})
    spans = [(entry.start, entry.stop) for name, entry in file.stored.items() if name.startswith("step")]
    assert max(stop for _, stop in spans) - min(start for start, _ in spans) == 8 * 4


def header(data: bytes) -> dict[str, Any]:
    (length,) = struct.unpack_from("<Q", data)
    entries = json.loads(data[8 : 8 + length])
    assert isinstance(entries, dict)
    return entries


def data_size(data: bytes) -> int:
    (length,) = struct.unpack_from("<Q", data)
    return len(data) - 8 - int(length)


def bits(tensor: torch.Tensor) -> bytes:
    assert tensor.is_contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits: NaNs with payloads, denormals and all."""
    tensor = torch.empty(shape, dtype=dtype)
    data = random.Random(seed).randbytes(tensor.nbytes)
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    if data:
        ctypes.memmove(tensor.data_ptr(), data, len(data))
    return tensor


def _constructible(dtype: torch.dtype) -> bool:
    return not str(dtype).startswith(("torch.q", "torch.uq"))  # quantized ones are refused before they come here


DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype) and _constructible(d)}, key=str)
SHAPES = [(), (0,), (3, 0, 2), (1,), (2, 3, 5)]


def test_the_dtypes_are_all_there() -> None:
    names = {str(dtype).removeprefix("torch.") for dtype in DTYPES}
    assert {"bool", "bfloat16", "complex32", "complex128", "float8_e8m0fnu", "int64", "uint64", "bits16"} <= names
    assert len(DTYPES) > 30


class TestDtypes:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype_and_shape_comes_back_bit_by_bit(self, dtype: torch.dtype) -> None:
        tensors = {f"t{shape}": filled(shape, dtype, seed=index) for index, shape in enumerate(SHAPES)}
        file = opened(tensors)
        for name, tensor in tensors.items():
            again = file.tensor(name)
            assert (again.dtype, again.shape) == (dtype, tensor.shape)
            assert file.about(name) == (dtype, tuple(tensor.shape))
            assert bits(again) == bits(tensor)
            target = filled(tuple(tensor.shape), dtype, seed=99)
            file.read_into(name, target)
            assert bits(target) == bits(tensor)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype_may_lie_in_memory_as_it_likes(self, dtype: torch.dtype) -> None:
        whole = filled((4, 3, 2), dtype)
        turned, strided, column = whole.transpose(0, 2), whole[::2], whole[:, 1:2].expand(4, 5, 2)
        for tensor in (turned, strided, column):
            file = opened({"t": tensor})
            again = file.tensor("t")
            assert (again.dtype, again.shape) == (dtype, tensor.shape)
            for index in [(0, 0, 0), (1, 2, 1), (1, 0, 1)]:
                assert bits(again[index]) == bits(tensor[index])
            target = filled(tuple(tensor.shape[::-1]), dtype, seed=9).permute(2, 1, 0)
            assert not target.is_contiguous()
            file.read_into("t", target)
            for index in [(0, 0, 0), (1, 2, 1), (1, 0, 1)]:
                assert bits(target[index]) == bits(tensor[index])

    def test_all_dtypes_in_one_file(self) -> None:
        tensors = {str(dtype): filled((3,), dtype, seed) for seed, dtype in enumerate(DTYPES)}
        file = opened(tensors)
        assert all(bits(file.tensor(name)) == bits(tensor) for name, tensor in tensors.items())

    @pytest.mark.parametrize("dtype", SPELLED, ids=str)
    def test_safetensors_reads_the_same_tensors(self, dtype: torch.dtype, tmp_path: Path) -> None:
        tensors = {f"t{shape}": filled(shape, dtype, seed=index) for index, shape in enumerate(SHAPES)}
        path = tmp_path / "model.safetensors"
        path.write_bytes(file_of(tensors))
        loaded = safetensors.torch.load_file(path)
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (loaded[name].dtype, loaded[name].shape) == (dtype, tensor.shape)
            assert bits(loaded[name].contiguous()) == bits(tensor)

    @pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in SPELLED], ids=str)
    def test_safetensors_reads_the_bytes_of_what_it_has_no_word_for(self, dtype: torch.dtype, tmp_path: Path) -> None:
        tensor = filled((2, 3), dtype)
        path = tmp_path / "model.safetensors"
        path.write_bytes(file_of({"t": tensor}))
        with safetensors.safe_open(path, framework="pt") as file:
            loaded = file.get_tensor("t")
        assert loaded.dtype == torch.uint8
        assert loaded.shape == (2, 3, dtype.itemsize)
        assert bits(loaded) == bits(tensor)


class TestLayout:
    @pytest.mark.parametrize("count", [0, 1, 30, 41, 200])
    def test_the_data_starts_at_a_multiple_of_4096_and_has_no_gaps(self, count: int) -> None:
        tensors = {f"layers.{index}.weight": filled((index,), DTYPES[index % len(DTYPES)]) for index in range(count)}
        data = file_of(tensors)
        (length,) = struct.unpack_from("<Q", data)
        assert ALIGNMENT == 4096
        assert (8 + length) % ALIGNMENT == 0
        assert data_size(data) == sum(tensor.nbytes for tensor in tensors.values())

    def test_tensors_start_at_multiples_of_their_element_size(self) -> None:
        tensors = {str(dtype): filled((3,), dtype) for dtype in DTYPES}
        entries = header(file_of(tensors))
        for name, tensor in tensors.items():
            assert entries[name]["data_offsets"][0] % tensor.element_size() == 0

    def test_a_file_says_that_it_is_of_torch(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.write_bytes(file_of({"t": torch.ones(1)}))
        with safetensors.safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}  # a plain model needs nothing of ours

    def test_any_name_is_a_name(self) -> None:
        tensors = {
            name: torch.tensor(float(i)) for i, name in enumerate(["ü", "a b", '"', "\\", "a\nb", "$", "[0]['x']"])
        }
        file = opened(tensors)
        assert all(torch.equal(file.tensor(name), tensor) for name, tensor in tensors.items())

    def test_tensors_are_read_where_they_lie_when_the_file_is_written(self) -> None:
        tensor = torch.zeros(4)
        laid_out = plan_file("model.safetensors", {"t": Shard.whole(tensor)})
        tensor.fill_(7)
        file = open_file(b"".join(laid_out.pieces()))
        assert torch.equal(file.tensor("t"), torch.full((4,), 7.0))

    def test_a_parameter_that_wants_a_gradient_is_written(self) -> None:
        assert torch.equal(opened({"t": torch.nn.Parameter(torch.ones(3))}).tensor("t"), torch.ones(3))


def tied(tensors: Mapping[str, torch.Tensor], size: int) -> TensorFile:
    """Check that the tensors take `size` bytes together, and come back equal and tied just as they were."""
    data = file_of(tensors)
    assert data_size(data) == size
    file = open_file(data)
    again = {name: file.tensor(name) for name in tensors}
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name], tensor)
        assert file.about(name) == (tensor.dtype, tuple(tensor.shape))
    for name in tensors:
        _change_both(tensors, again, name)
    return file


def _change_both(live: Mapping[str, torch.Tensor], again: Mapping[str, torch.Tensor], name: str) -> None:
    """A change through one name must show under the same names on both sides."""
    for side in (live, again):
        side[name][(-1,) * side[name].dim()].add_(1)
    for other, tensor in live.items():
        assert torch.equal(again[other], tensor), f"{other} after a change of {name}"


class TestTies:
    def test_one_tensor_under_two_names_is_stored_once(self) -> None:
        x = torch.arange(12.0).reshape(3, 4)
        file = tied({"embed": x, "head": x}, x.nbytes)
        assert file.tensor("embed").data_ptr() == file.tensor("head").data_ptr()
        assert [*file.stored] == ["embed"]

    def test_two_names_in_safetensors_read_as_the_first(self) -> None:
        x = torch.arange(4.0)
        assert safetensors.torch.load(file_of({"embed": x, "head": x})).keys() == {"embed"}

    def test_parameters_tied_by_a_view_are_stored_once(self) -> None:
        parameter = torch.nn.Parameter(torch.ones(4))
        data = file_of({"a": parameter, "b": parameter.detach(), "c": parameter.view(2, 2)})
        assert data_size(data) == 16

    def test_a_tail_is_a_view_of_the_whole(self) -> None:
        x = torch.arange(10)
        file = tied({"tail": x[2:], "whole": x}, x.nbytes)
        assert [*file.stored] == ["whole"]
        assert file.tensor("tail").data_ptr() == file.tensor("whole").data_ptr() + 16

    def test_views_of_all_kinds_onto_one_tensor(self) -> None:
        x = torch.arange(24.0).reshape(4, 6)
        views = {"x": x, "row": x[1], "column": x[:, 2], "turned": x.t(), "steps": x[::2, 1::3], "flat": x.view(-1)}
        tied({**views, "one": x[2, 3], "block": x[1:3, 2:4]}, x.nbytes)

    def test_parts_of_the_whole_that_lie_apart(self) -> None:
        x = torch.arange(10)
        file = tied({"whole": x, "early": x[1:3], "late": x[5:8], "last": x[9:]}, x.nbytes)
        assert [*file.stored] == ["whole"]

    def test_partial_overlaps_without_one_that_covers_all(self) -> None:
        x = torch.arange(10)
        file = tied({"front": x[:6], "back": x[4:]}, x.nbytes)
        assert file.stored.keys() == {"front@storage"}

    def test_a_chain_of_overlaps(self) -> None:
        x = torch.arange(30, dtype=torch.int16)
        tied({"a": x[:10], "b": x[8:20], "c": x[18:28]}, 28 * 2)

    def test_overlaps_that_do_not_start_at_the_storage(self) -> None:
        x = torch.arange(100, dtype=torch.float64)
        tied({"a": x[51:60], "b": x[55:70]}, (70 - 51) * 8 + 8)  # the bytes start at a multiple of 16

    def test_neighbours_that_do_not_overlap_are_stored_apart(self) -> None:
        x = torch.arange(10)
        file = tied({"front": x[:5], "back": x[5:]}, x.nbytes)
        assert file.stored.keys() == {"front", "back"}

    def test_a_small_part_of_a_large_storage_is_stored_alone(self) -> None:
        x = torch.arange(100_000)
        assert data_size(file_of({"a": x[:2], "b": x[50_000:50_003]})) == 5 * 8

    def test_a_view_of_another_dtype(self) -> None:
        x = torch.arange(6, dtype=torch.int64)
        tied({"as_int": x.view(torch.int32), "x": x, "as_bytes": x.view(torch.uint8)}, x.nbytes)

    def test_a_view_of_another_dtype_that_starts_between_elements(self) -> None:
        x = torch.arange(16, dtype=torch.int32)
        tied({"long": x[2:10].view(torch.int64), "int": x[1:7]}, 40)
        tied({"int": x[5:11], "long": x[6:12].view(torch.int64)}, 32)
        tied({"covers": x[1:13], "long": x[4:8].view(torch.int64)}, 13 * 4)

    def test_transposed_tensors_that_are_tied(self) -> None:
        x = torch.arange(12.0).reshape(3, 4)
        turned = x.t()
        file = tied({"a": turned, "b": turned}, x.nbytes)
        assert file.tensor("a").data_ptr() == file.tensor("b").data_ptr()
        tied({"a": x.t(), "b": x}, x.nbytes)

    def test_strided_tensors_that_are_tied(self) -> None:
        x = torch.arange(12)
        tied({"a": x[::3], "b": x[::3]}, 4 * 8)
        tied({"a": x[::2], "b": x[1::2]}, x.nbytes)

    def test_expanded_tensors_that_are_tied(self) -> None:
        x = torch.ones(1).expand(5)
        file = opened({"a": x, "b": x})
        assert torch.equal(file.tensor("b"), x)
        assert file.tensor("a").data_ptr() == file.tensor("b").data_ptr()

    def test_a_conjugate_beside_its_origin_keeps_its_values(self) -> None:
        x = torch.tensor([1 + 2j, 3 - 4j])
        file = opened({"x": x, "conjugate": x.conj(), "imag": x.conj().imag, "part": x.conj()[1:]})
        for name, tensor in {"x": x, "conjugate": x.conj(), "imag": x.conj().imag, "part": x.conj()[1:]}.items():
            assert torch.equal(file.tensor(name), tensor)

    def test_the_bytes_below_overlaps_take_no_name_that_is_taken(self) -> None:
        x, other, tail = torch.arange(10), torch.full((4,), 7), torch.arange(5)
        tied({"a": x[:6], "b": x[4:], "a@storage": other, "a@storage+": tail[1:], "c": tail}, 80 + 32 + 40)

    def test_empty_tensors_are_never_tied(self) -> None:
        x = torch.arange(4)
        tensors = {"x": x, "none": x[:0], "none too": x[4:]}
        file = opened(tensors)
        assert all(torch.equal(file.tensor(name), tensor) for name, tensor in tensors.items())

    def test_read_into_fills_a_target_from_a_view(self) -> None:
        x = torch.arange(12.0).reshape(3, 4)
        file = opened({"x": x, "turned": x.t(), "row": x[1]})
        for name, expected in {"x": x, "turned": x.t(), "row": x[1]}.items():
            target = torch.zeros(expected.shape)
            file.read_into(name, target)
            assert torch.equal(target, expected)


class TestReadInto:
    def test_it_fills_the_target_in_place(self) -> None:
        target = torch.zeros(3, 4)
        place = target.data_ptr()
        opened({"t": torch.arange(12.0).reshape(3, 4)}).read_into("t", target)
        assert torch.equal(target, torch.arange(12.0).reshape(3, 4))
        assert target.data_ptr() == place

    def test_it_reads_straight_into_a_target_whose_bytes_fit(self) -> None:
        asked: list[tuple[int, int]] = []

        class Watching(Bytes):
            def read_into(self, start: int, *buffers: memoryview) -> None:
                asked.extend((ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer)) for buffer in buffers)
                super().read_into(start, *buffers)

        target = torch.zeros(4)
        data = file_of({"t": torch.ones(4)})
        TensorFile.open(Watching(data), "file", len(data)).read_into("t", target)
        assert asked == [(target.data_ptr(), 16)]

    def test_it_fills_a_parameter_and_keeps_its_gradient(self) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.ones(2)
        opened({"t": torch.full((2,), 5.0)}).read_into("t", parameter)
        assert parameter.tolist() == [5.0, 5.0]
        assert parameter.requires_grad
        assert parameter.grad.tolist() == [1.0, 1.0]

    @pytest.mark.parametrize(
        "dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.complex64]
    )
    def test_it_casts_to_the_dtype_of_the_target(self, dtype: torch.dtype) -> None:
        source = torch.tensor([1.0, -2.0, 0.5])
        target = torch.zeros(3, dtype=dtype)
        opened({"t": source}).read_into("t", target)
        assert bits(target) == bits(source.to(dtype))

    def test_it_leaves_what_is_beside_a_target_alone(self) -> None:
        around = torch.zeros(4, 6)
        opened({"t": torch.ones(4, 2)}).read_into("t", around[:, 2:4])
        assert torch.equal(around, torch.tensor([0.0, 0, 1, 1, 0, 0]).expand(4, 6))

    def test_it_fills_targets_whose_values_are_not_their_bytes(self) -> None:
        below = torch.zeros(2, dtype=torch.complex64)
        opened({"t": torch.tensor([1 + 2j, 3 - 4j])}).read_into("t", below.conj())
        assert below.tolist() == [1 - 2j, 3 + 4j]

    def test_a_name_that_is_not_there_is_damage_that_names_it(self) -> None:
        file = opened({"t": torch.ones(1)})
        for action in (file.tensor, file.about, lambda name: file.read_into(name, torch.ones(1))):
            with pytest.raises(DamagedError, match=r"step/model\.safetensors has no tensor 'absent'"):
                action("absent")


class TestLazyValues:
    def test_conjugates_and_negatives_come_back_equal(self) -> None:
        x = torch.tensor([[1 + 2j, 3 - 4j], [0j, 5j]])
        tensors = {"conjugate": x.conj(), "negative": x.clone().conj().imag, "adjoint": x.clone().mH}
        assert tensors["conjugate"].is_conj()
        assert tensors["negative"].is_neg()
        file = opened(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(file.tensor(name), tensor)
            assert not file.tensor(name).is_conj()


class TestShards:
    def test_a_piece_says_where_it_belongs(self) -> None:
        piece = Shard(torch.ones(2, 3), shape=(8, 3), offsets=(4, 0))
        data = file_of({"piece": piece, "whole": torch.ones(2)})
        metadata = header(data)["__metadata__"]
        # every tensor of such a file is there: PyTorch's reader asks for all of them
        offsets = {"piece": {"saved_offsets": [4, 0]}, "whole": {"saved_offsets": [0]}}
        assert json.loads(metadata["DCP_SHARDING_INFO"]) == offsets
        file = open_file(data)
        assert file.offsets == {"piece": (4, 0), "whole": (0,)}
        assert file.shapes == {"piece": (8, 3)}
        assert file.about("piece") == (torch.float32, (2, 3))

    def test_whole_tensors_say_nothing_of_shards(self) -> None:
        assert "DCP_SHARDING_INFO" not in header(file_of({"whole": torch.ones(2)}))["__metadata__"]

    def test_pieces_may_be_empty_or_of_a_dtype_that_safetensors_has_no_word_for(self) -> None:
        pieces = {
            "empty": Shard(torch.ones(0, 3), shape=(8, 3), offsets=(8, 0)),
            "double": Shard(filled((2, 3), torch.complex128), shape=(4, 3), offsets=(2, 0)),
        }
        file = opened(pieces)
        assert file.offsets == {"empty": (8, 0), "double": (2, 0)}
        assert all(bits(file.tensor(name)) == bits(shard.tensor) for name, shard in pieces.items())

    def test_torch_puts_the_pieces_together(self, tmp_path: Path) -> None:
        whole = {"rows": torch.arange(24.0).reshape(6, 4), "blocks": torch.arange(16).reshape(4, 4)}
        for rank in range(2):
            rows = whole["rows"][rank * 3 : rank * 3 + 3].clone()
            block = whole["blocks"][:, rank * 2 : rank * 2 + 2].clone()
            pieces = {
                "rows": Shard(rows, (6, 4), (rank * 3, 0)),
                "blocks": Shard(block, (4, 4), (0, rank * 2)),
            }
            (tmp_path / f"model-{rank:05d}.safetensors").write_bytes(file_of(pieces))
        again = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        load(again, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
        assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def with_header(entries: Any) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


def entry(**other: Any) -> dict[str, Any]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **other}}


def ours(**fields: Any) -> dict[str, Any]:
    return {"__metadata__": {"ckpt": json.dumps(fields)}, **entry()}


def view(**other: Any) -> dict[str, Any]:
    return ours(views={"v": {"of": "t", "dtype": "float32", "shape": [2], "stride": [1], "start": 0, **other}})


class TestDamage:
    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"1234567",
            bytes(8),
            b"\xff" * 100,
            struct.pack("<Q", 1 << 40) + b"{}",
            struct.pack("<Q", 1000) + b"{}",
            random.Random(0).randbytes(10_000),
            with_header(b"not JSON"),
            with_header(b"\xff\xfe\xfd"),
            with_header(b"[" * 100_000),
            with_header(b'{"a":' * 100_000),
            with_header([]),
            with_header("text"),
            with_header(5),
            with_header(None),
            with_header({"t": []}),
            with_header({"t": None}),
            with_header({"t": {}}),
            with_header(entry(dtype="F33")),
            with_header(entry(dtype=["F32"])),
            with_header(entry(dtype=None)),
            with_header(entry(shape=[3])),
            with_header(entry(shape=[-2])),
            with_header(entry(shape=[-1, -2])),
            with_header(entry(shape=[2.0])),
            with_header(entry(shape=["2"])),
            with_header(entry(shape=[True, 2])),
            with_header(entry(shape=[1 << 64])),
            with_header(entry(shape=2)),
            with_header(entry(shape=None)),
            with_header(entry(data_offsets=[8, 0])),
            with_header(entry(data_offsets=[-8, 0])),
            with_header(entry(data_offsets=[0, 8.0])),
            with_header(entry(data_offsets=[0])),
            with_header(entry(data_offsets=[0, 8, 16])),
            with_header(entry(data_offsets=[0, 1 << 70])),
            with_header(entry(data_offsets="08")),
            with_header({"__metadata__": [], **entry()}),
            with_header({"__metadata__": "text", **entry()}),
            with_header({"__metadata__": {"ckpt": 5}, **entry()}),
            with_header({"__metadata__": {"ckpt": "not JSON"}, **entry()}),
            with_header({"__metadata__": {"ckpt": "[]"}, **entry()}),
            with_header({"__metadata__": {"DCP_SHARDING_INFO": "[]"}, **entry()}),
            with_header({"__metadata__": {"DCP_SHARDING_INFO": '{"t": 5}'}, **entry()}),
            with_header({"__metadata__": {"DCP_SHARDING_INFO": '{"t": {"saved_offsets": "0"}}'}, **entry()}),
            with_header(ours(dtypes={"t": "save"})),
            with_header(ours(dtypes={"t": "float99"})),
            with_header(ours(dtypes={"t": 5})),
            with_header(ours(dtypes=[])),
            with_header(ours(shapes={"t": "12"})),
            with_header(ours(views={"v": {}})),
            with_header(view(of="absent")),
            with_header(view(of=["t"])),
            with_header(view(dtype="load")),
            with_header(view(shape=[3])),
            with_header(view(shape=[1 << 62], stride=[0], start=8)),
            with_header(view(stride=[2])),
            with_header(view(stride=[])),
            with_header(view(stride=[-1])),
            with_header(view(start=4)),
            with_header(view(start=1, shape=[1])),
            with_header(view(start=-4)),
        ],
        ids=lambda data: repr(data[8:100]),
    )
    def test_a_header_that_is_not_one_is_damage(self, data: bytes) -> None:
        with pytest.raises(DamagedError, match=r"step/model\.safetensors is not a valid safetensors file"):
            open_file(data, "step/model.safetensors")

    def test_a_header_like_these_that_is_right_is_read(self) -> None:
        assert open_file(with_header(entry())).tensor("t").tolist() == [0.0, 0.0]
        assert open_file(with_header(view())).tensor("v").tolist() == [0.0, 0.0]
        assert open_file(with_header(view(start=4, shape=[1]))).tensor("v").tolist() == [0.0]

    @pytest.fixture
    def valid(self) -> bytes:
        x = torch.arange(10.0)
        piece = Shard(torch.ones(2, 3), shape=(8, 3), offsets=(4, 0))
        foreign = torch.ones(2, dtype=torch.complex128)
        empty, scalar = torch.ones(3, 0), torch.tensor(5)
        return file_of({"a": x[:6], "b": x[4:], "c": foreign, "p": piece, "n": empty, "s": scalar})

    @pytest.mark.parametrize("seed", range(10))
    def test_whatever_happens_to_a_header_only_damage_is_raised(self, valid: bytes, seed: int) -> None:
        chance = random.Random(seed)
        text = valid[: 8 + len(valid[8:4096].rstrip())]
        noticed = 0
        for _ in range(200):
            data = bytearray(valid)
            for _ in range(chance.choice([1, 1, 2, 8])):
                data[chance.randrange(len(text))] = chance.choice([chance.randrange(256), *b'0129-.,:[]{}"etn'])
            noticed += _is_noticed(bytes(data))
        assert noticed > 100

    @pytest.mark.parametrize("seed", range(5))
    def test_random_bytes_are_damage(self, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(200):
            text = chance.randbytes(chance.randrange(60))
            assert _is_noticed(text)
            assert _is_noticed(struct.pack("<Q", len(text)) + text)

    def test_every_truncation_is_noticed(self, valid: bytes) -> None:
        assert not _is_noticed(valid)
        assert all(_is_noticed(valid[:length]) for length in range(0, len(valid), 7))


def _is_noticed(data: bytes) -> bool:
    """Whether reading everything in a file shows that it is damaged. Any other error is a failure."""
    try:
        file = open_file(data)
    except DamagedError:
        return True
    try:
        for name in [*file.stored, *file.views]:
            file.tensor(name)
    except (DamagedError, StorageError):
        return True
    return False

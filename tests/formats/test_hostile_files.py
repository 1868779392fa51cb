"""Files that somebody has made to be read beyond their end, or into memory that is too short for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import ckpt
from ckpt.errors import DamagedError, UnsupportedError
from ckpt.formats.foreign.torch_save import find_tensor
from ckpt.formats.native import header, tensor_file
from ckpt.formats.native.documents import decode_inline
from ckpt.formats.native.tensor_file import TensorFile, plan_file
from ckpt.formats.tensors import Shard, Transfer, as_bytes, at_once, host_bytes
from tests.helpers.file_in_memory import FileInMemory
from tests.helpers.forgery import alter_header, alter_json, joined, reseal, split
from tests.helpers.torch_archives import archive, tensor

PACKED = ["quint4x2", "quint2x4"]


def opened(data: bytes) -> TensorFile:
    return TensorFile.open(FileInMemory(data), "file", len(data))


@pytest.mark.filterwarnings("ignore")  # torch announces that it will drop these dtypes
class TestDtypesChosenByAFile:
    @pytest.mark.parametrize("name", PACKED)
    def test_a_view_of_memory_is_never_longer_than_the_memory(self, name: str) -> None:
        tensor = torch.empty(64, dtype=getattr(torch, name))
        assert tensor.nbytes > tensor.untyped_storage().nbytes()
        for view in (host_bytes, as_bytes):
            with pytest.raises(UnsupportedError, match=rf"{name} tensor of shape \[64\] has .* bytes of memory"):
                view(tensor)

    def test_nor_is_that_of_an_expanded_tensor(self) -> None:
        with pytest.raises(UnsupportedError, match="has 4 bytes of memory, but its elements need 4000"):
            host_bytes(torch.ones(1).expand(1000))

    @pytest.mark.parametrize("name", [*PACKED, "qint8", "quint8", "qint32", "load", "", "float99", 5, None, ["int8"]])
    def test_a_stored_tensor_has_a_dtype_of_the_list(self, name: Any) -> None:
        head = header.to_bytes(
            [header.TensorHeader("t", "U8", (64, 1), 64)], {"ckpt": json.dumps({"dtypes": {"t": name}})}
        )
        with pytest.raises(DamagedError, match="file is not a valid safetensors file"):
            opened(head + bytes(64))
        inline = {"values": {"$tensor": "t"}, "tensors": {"t": {"dtype": name, "shape": [3], "bytes": "AAAA"}}}
        with pytest.raises(DamagedError):
            decode_inline(inline)

    def test_every_dtype_of_the_list_has_the_memory_that_its_size_says(self) -> None:
        for dtype in tensor_file.STORABLE:
            assert torch.empty(64, dtype=dtype).untyped_storage().nbytes() == 64 * dtype.itemsize, dtype
        assert {tensor_file.dtype_name(dtype) for dtype in tensor_file.SPELLED} <= tensor_file.NAMES
        assert {spelling: dtype.itemsize for dtype, spelling in tensor_file.SPELLED.items()} == header.ITEM_SIZES

    @pytest.mark.parametrize("name", PACKED)
    def test_torch_save_cannot_choose_such_a_dtype(self, name: str) -> None:
        data = archive(tensor(getattr(torch, name), (64,)), {"0": bytes(64)})
        with pytest.raises(DamagedError, match=f"'{name}' is not a dtype that ckpt stores"):
            find_tensor(FileInMemory(data), 0, len(data), "tensor")
        data = archive(tensor(torch.uint8, (64,)), {"0": bytes(64)})
        assert find_tensor(FileInMemory(data), 0, len(data), "tensor").sizes == (64,)

    @pytest.mark.parametrize("name", PACKED)
    def test_a_checkpoint_with_such_a_dtype_changes_nothing(self, name: str, tmp_path: Path) -> None:
        model = nn.Linear(8, 8)
        with ckpt.StateManager(tmp_path, model=model) as manager:
            manager.save_state("a")

        def lie(fields: dict[str, Any]) -> None:
            fields["weight"].update(dtype="U8", shape=[256, 1])
            fields["__metadata__"]["ckpt"] = json.dumps({"dtypes": {"weight": name}})

        alter_header(tmp_path / "a" / "model.safetensors", lie)
        self._refused(tmp_path, model)

    @pytest.mark.parametrize("name", PACKED)
    def test_nor_can_the_state_of_a_rank_choose_it(self, name: str, tmp_path: Path) -> None:
        model = nn.Linear(8, 8)
        with ckpt.StateManager(tmp_path, model=model) as manager:
            manager.save_state("a")

        def lie(document: Any) -> None:
            for stored in document["state"]["rng"]["tensors"].values():
                stored["dtype"] = name

        alter_json(tmp_path / "a" / "rank-00000.json", lie)
        self._refused(tmp_path, model)

    @staticmethod
    def _refused(root: Path, model: nn.Module) -> None:
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with ckpt.StateManager(root, model=model) as manager, pytest.raises(ckpt.CkptError, match="dtype"):
            manager.load_state("a")
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BYTE = b'{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
TWICE = b'{"t": %s, "t": %s}'
SECOND = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


class TestBytesOfTensors:
    @pytest.mark.parametrize(
        ("fields", "size", "why"),
        [
            ({"t": ENTRY}, 7, "tensor ends at byte .* but the file has"),
            ({"t": ENTRY}, 9, "tensor ends at byte .* but the file has"),
            ({"t": ENTRY}, 0, "tensor ends at byte .* but the file has"),
            ({}, 1, "tensor ends at byte .* but the file has"),
            ({"t": SECOND}, 16, "begins at byte"),
            ({"t": ENTRY, "u": ENTRY}, 8, "begins at byte"),
            ({"t": ENTRY, "u": {**ENTRY, "data_offsets": [12, 20]}}, 20, "begins at byte"),
            ({"t": {**ENTRY, "shape": [3]}}, 8, "8 bytes can't form a F32 of shape"),
            ({"t": {**ENTRY, "data_offsets": [8, 0]}}, 8, "bytes can't form a F32"),
            ({"t": {**ENTRY, "dtype": "F4"}}, 8, "unknown dtype"),
            ({"t": {**ENTRY, "shape": [2, *[1] * 64]}}, 8, "a tensor can't have the shape"),
            ({"t": {**ENTRY, "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}}, 0, "can't have the shape"),
            (TWICE % (BYTE, BYTE), 1, "twice"),
            (b'{"t": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "shape": [1]}}', 1, "twice"),
            (b"[" * 100_000, 0, "RecursionError"),
        ],
    )  # fmt: skip
    def test_tensors_fill_a_file_without_gaps_or_overlaps(self, fields: Any, size: int, why: str) -> None:
        with pytest.raises(DamagedError, match=why):
            opened(joined(fields, bytes(size)))

    def test_a_header_longer_than_its_file_is_not_allocated(self) -> None:
        with pytest.raises(DamagedError, match="its header claims 99999999 bytes, but the file has 12"):
            opened((99_999_999).to_bytes(8, "little") + b"abcd")

    def test_a_header_like_these_that_is_right_is_read(self) -> None:
        file = opened(joined({"u": SECOND, "t": ENTRY}, bytes(16)))
        assert file.tensor("u").tolist() == file.tensor("t").tolist() == [0.0, 0.0]

    def test_a_view_does_not_make_gigabytes_of_a_few_bytes(self) -> None:
        wide = {"of": "t", "dtype": "float32", "shape": [1 << 33], "stride": [0], "start": 0}
        ours = {"views": {"v": wide}}
        with pytest.raises(DamagedError, match="too few stored bytes: 4"):
            opened(joined({"__metadata__": {"ckpt": json.dumps(ours)}, "t": ENTRY}, bytes(8)))
        several = {"views": {f"v{n}": {**wide, "shape": [1 << 24]} for n in range(9)}}  # 64 MiB each
        with pytest.raises(DamagedError, match="too few stored bytes: 4"):
            opened(joined({"__metadata__": {"ckpt": json.dumps(several)}, "t": ENTRY}, bytes(8)))

    def test_a_view_of_nothing_lies_inside_its_tensor_too(self) -> None:
        outside = {"of": "t", "dtype": "float32", "shape": [0, 4], "stride": [1 << 40, 1], "start": 64}
        with pytest.raises(DamagedError, match="reaches beyond"):
            opened(joined({"__metadata__": {"ckpt": json.dumps({"views": {"v": outside}})}, "t": ENTRY}, bytes(8)))

    def test_a_wide_view_is_read_a_window_at_a_time(self) -> None:
        rows = torch.arange(6_000_000, dtype=torch.int32).view(2000, 3000)
        data = b"".join(plan_file("file", {"rows": Shard.whole(rows), "columns": Shard.whole(rows.t())}).pieces())
        sizes: list[int] = []

        def want(transfer: Transfer) -> None:
            sizes.append(transfer.size)
            at_once(transfer)

        file = TensorFile.open(FileInMemory(data), "file", len(data), want)
        target = torch.empty(3000, 2000, dtype=torch.int32)
        file.read_into("columns", target)
        assert torch.equal(target, rows.t())
        assert max(sizes) <= 8 << 20 < sum(sizes)


def _shortened(file: bytes) -> bytes:
    return file[:-16]


def _lengthened(file: bytes) -> bytes:
    return file + bytes(16)


def _emptied(file: bytes) -> bytes:
    fields, _ = split(file)
    return joined(fields, b"")


class TestAFileOfAnotherLengthThanItsHeaderSays:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        with ckpt.StateManager(tmp_path, model=model, optimizer=optimizer) as manager:
            manager.save_state("a")
        return tmp_path / "a"

    @pytest.mark.parametrize("change", [_shortened, _lengthened, _emptied])
    @pytest.mark.parametrize("part", ["model", "optimizer"])
    def test_it_is_refused_by_every_reader_before_anything_is_changed(
        self, saved: Path, part: str, change: Callable[[bytes], bytes]
    ) -> None:
        path = saved / f"{part}.safetensors"
        path.write_bytes(change(path.read_bytes()))
        reseal(saved)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.Adam(model.parameters())
        before = {key: value.clone() for key, value in model.state_dict().items()}
        said = f"a/{part}.safetensors is not a valid safetensors file.* ends at byte"
        with ckpt.StateManager(saved.parent, model=model, optimizer=optimizer) as manager:
            with pytest.raises(DamagedError, match=said):
                manager.load_state("a")
            with pytest.raises(DamagedError, match="so nothing was loaded"):
                manager.resume()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert not optimizer.state
        (problem,) = ckpt.verify(saved)["a"]
        assert f"a/{part}.safetensors is not a valid safetensors file" in problem
        with pytest.raises(DamagedError, match=f"a/{part}.safetensors is not a valid safetensors file"):
            ckpt.merge(saved, saved.parent / "out.safetensors", part=part)
        if part == "model":
            with pytest.raises(DamagedError, match="is not a valid safetensors file"):
                ckpt.load_model(saved, model)

    @pytest.mark.parametrize("change", [_shortened, _lengthened])
    def test_nor_is_a_published_model_of_that_kind_read(self, tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
        model = nn.Linear(8, 8)
        (tmp_path / "model").mkdir()
        safetensors.torch.save_file(dict(model.state_dict()), tmp_path / "model" / "model.safetensors")
        path = tmp_path / "model" / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(DamagedError, match="is not a valid safetensors file"):
            ckpt.load_model(tmp_path / "model", model)
        with pytest.raises(DamagedError, match="is not a valid safetensors file"):
            ckpt.merge(tmp_path / "model", tmp_path / "out.safetensors")
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

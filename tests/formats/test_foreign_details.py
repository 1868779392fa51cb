"""Readers of other tools' files, and the layouts of shards, function by function."""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
from collections import Counter, OrderedDict, deque
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save as safetensors_of

from ckpt.errors import DamagedError, MissingError
from ckpt.formats import fingerprint
from ckpt.formats.foreign import hf_safetensors, torch_files, torch_save, torch_write
from ckpt.formats.foreign.deepspeed import master_weight, universal
from ckpt.formats.foreign.hf_safetensors import tensors_at
from ckpt.formats.foreign.megatron import MegatronSave
from ckpt.formats.foreign.torch_save import Described, check_bounds, checked_key, read_pickle, read_values
from ckpt.formats.layout import Box, Layout, chunk
from ckpt.formats.pieces import Piece, PiecedTensor, Region
from ckpt.root.folder import ROOT_ITSELF, Folder
from ckpt.storage import MemoryStorage


class Special(torch.Tensor):
    """A tensor with a class of its own."""


class Bytes:
    """A file in memory that notes which ranges are read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.read_ranges: list[tuple[int, int]] = []

    def read(self, start: int, stop: int) -> bytes:
        self.read_ranges.append((start, stop))
        return self.data[start:stop]

    def read_into(self, start: int, *buffers: memoryview) -> None:
        for buffer in buffers:
            buffer[:] = self.data[start : start + len(buffer)]
            start += len(buffer)


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def whole(reader: Bytes, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, start: int = 0) -> PiecedTensor:
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    region = Region(reader, "file", dtype, start, shape, strides)
    return PiecedTensor(dtype, shape, (Piece(Box((0,) * len(shape), shape), region),))


class TestPickles:
    @pytest.mark.parametrize("protocol", range(6))
    def test_plain_values_of_every_protocol_are_read_as_they_are(self, protocol: int) -> None:
        values = [
            [], [1], [1, 2, 3], (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {}, {"a": 1}, {"a": 1, 2: "b"}, set(),
            {1, 2},
            frozenset((1,)), None, True, False, 0, 255, 256, 65535, 65536, -1, 1 << 40, -(1 << 70), 1.5, "", "x" * 300,
            "ü", b"", b"x" * 300, bytearray(b"x"), OrderedDict(a=1), Counter("aab"), deque([1, 2], 5), 1 + 2j,
            [[1], [1]], {"deep": [{"er": (1, [2])}]},
        ]  # fmt: skip
        for value in values:
            if protocol == 5 and type(value) is bytearray:
                continue  # it has an instruction of its own there, which is refused by its name
            data = pickle.dumps(value, protocol)
            archive = saved(value, pickle_protocol=max(protocol, 2))
            found = read_values(Bytes(archive), 0, len(archive), "file")
            assert found == value
            assert type(found) is type(value)
            if type(value) in (list, tuple, dict, int, str, float, type(None), bool):
                again = read_pickle(data, (), "file")
                assert again == value
                assert type(again) is type(value)
        shared = [1]
        twice = read_pickle(pickle.dumps([shared, shared], protocol), (), "file")
        assert twice[0] is twice[1]

    def test_a_list_between_marks_is_one(self) -> None:
        assert read_pickle(b"(I1\nI2\nl.", (), "file") == [1, 2]
        assert read_pickle(b"(I1\nI2\nd.", (), "file") == {1: 2}
        assert read_pickle(b"(I1\nI2\nt.", (), "file") == (1, 2)
        for odd in (b"(I1\nd.", b"", b".", b"(.", b"I1\n", b"cos\nsystem\n."):
            with pytest.raises(DamagedError):
                read_pickle(odd, (), "file")

    def test_values_are_bounded_by_their_bytes_and_levels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_save, "_ALWAYS_NODES", 0)
        monkeypatch.setattr(torch_save, "_PER_BYTE", 1)
        check_bounds([1, 2, 3], 4, "file")
        with pytest.raises(DamagedError, match="file holds more references to the same objects"):
            check_bounds([1, 2, 3], 3, "file")
        check_bounds("x" * 64, 3, "file")
        with pytest.raises(DamagedError):
            check_bounds("x" * 64, 2, "file")
        check_bounds(b"1234", 3, "file")
        with pytest.raises(DamagedError):
            check_bounds(b"1234", 2, "file")
        shared = [1]
        check_bounds([shared, shared], 5, "file")
        with pytest.raises(DamagedError):
            check_bounds([shared, shared], 4, "file")
        inside: list[Any] = []
        inside.append(inside)
        with pytest.raises(DamagedError, match="contains itself"):
            check_bounds(inside, 100, "file")
        value: Any = []
        for _ in range(torch_save.DEEPEST):
            value = [value]
        check_bounds(value, 10_000_000, "file")
        with pytest.raises(DamagedError, match="nested too deeply"):
            check_bounds([value], 10_000_000, "file")

    def test_keys_are_numbers_text_and_short_tuples(self) -> None:
        long = torch_save._LONGEST_KEY
        for key in (
            1,
            "a",
            None,
            1.5,
            b"x",
            (1, "a"),
            (1,) * long,
            (),
            Described("x"),
            1 << (torch_save._WIDEST_KEY - 1),
        ):
            assert checked_key(key) is key
        wrong: tuple[Any, ...] = (
            (1,) * (long + 1),
            ((1,),),
            [1],
            frozenset(),
            1 << torch_save._WIDEST_KEY,
            (1 << torch_save._WIDEST_KEY,),
        )
        for refused in wrong:
            with pytest.raises(ValueError, match="a key of a dict is"):
                checked_key(refused)


class TestArchives:
    def test_ends_are_read_once_and_what_lies_between_from_the_file(self) -> None:
        data = bytes(range(256)) * 64
        file = Bytes(b"before" + data + b"after")
        window = torch_save._FileWindow(file, 6, len(data))
        ends = torch_save._ENDS
        assert sorted(file.read_ranges) == [(6, 6 + ends), (6 + len(data) - ends, 6 + len(data))]
        file.read_ranges.clear()
        for start, stop, reads in (
            (0, 10, 0), (0, ends, 0), (ends - 1, ends, 0), (ends - 1, ends + 1, 1), (len(data) - ends, len(data), 0),
            (len(data) - ends - 1, len(data), 1), (len(data) - 1, len(data), 0), (5000, 5010, 1),
        ):  # fmt: skip
            file.read_ranges.clear()
            window.seek(start)
            assert window.read(stop - start) == data[start:stop]
            assert window.tell() == stop
            assert len(file.read_ranges) == reads
        assert window.seek(-3, 2) == len(data) - 3
        assert window.read() == data[-3:]
        assert window.read() == b""
        assert window.seek(5) == 5
        assert window.seek(2, 1) == 7
        with pytest.raises(ValueError, match="before the first byte"):
            window.seek(-1)

    def test_what_is_compressed_is_refused(self) -> None:
        data = saved({"a": 1})
        packed = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as other:
            for name in archive.namelist():
                other.writestr(name, archive.read(name))
        assert read_values(Bytes(data), 0, len(data), "file") == {"a": 1}
        with pytest.raises(DamagedError, match="is compressed, so it could unpack to any size"):
            read_values(Bytes(packed.getvalue()), 0, len(packed.getvalue()), "file")
        with pytest.raises(DamagedError):
            read_values(Bytes(data[:-30]), 0, len(data) - 30, "file")


class TestOthers:
    def test_lightning_numbers_several_optimizers_and_not_one(self) -> None:
        found = {
            "state_dict": {"w": 1},
            "optimizer_states": ["o"],
            "lr_schedulers": ["a", "b"],
            "native_amp_scaling_state": "s",
        }
        assert torch_files.lightning_parts(found, "x.ckpt") == {
            "model": {"w": 1}, "optimizer": "o", "scheduler.0": "a", "scheduler.1": "b", "scaler": "s",
        }  # fmt: skip
        assert torch_files.lightning_parts({"state_dict": {}, "optimizer_states": None}, "x") == {"model": {}}
        both = {"state_dict": {}, "MixedPrecision": "first", "MixedPrecisionPlugin": "second"}
        assert torch_files.lightning_parts(both, "x.ckpt")["scaler"] == "first"
        loops = {"fit_loop": {"epoch_progress": {"current": {"processed": 3}}}}
        assert torch_files.lightning_counters({"epoch": 2, "global_step": 7, "loops": loops}) == {"epoch": 3, "step": 7}
        assert torch_files.lightning_counters({"epoch": 0, "global_step": True}) == {"epoch": 0}
        assert torch_files.lightning_counters({"epoch": -1, "loops": []}) == {}

    def test_a_flat_weight_of_deepspeed_gets_its_shape(self) -> None:
        data = torch.arange(6.0).numpy().tobytes()
        flat = whole(Bytes(data), (6,))
        assert master_weight(flat, None, "file") is flat
        assert master_weight({"param": flat}, (6,), "file") is flat
        shaped = master_weight(flat, (2, 3), "file")
        assert shaped.shape == (2, 3)
        region = shaped.pieces[0].region
        assert (region.sizes, region.start, region.where) == ((2, 3), 0, "file")
        for shape in ((7,), (2, 2)):
            with pytest.raises(
                DamagedError,
                match="file is not a valid part of a universal checkpoint: 6 elements",
            ):
                master_weight(flat, shape, "file")

    def test_a_universal_save_of_deepspeed_has_what_its_files_say_of_its_own_parameters(self) -> None:
        storage = MemoryStorage("universal-files")
        groups: list[dict[str, tuple[int, ...]]] = [{"a": (2,), "b": (2, 2)}, {"c": (1,), "quiet": (3,)}]
        assert universal(Folder.of_checkpoint(storage, ROOT_ITSELF), groups) is None
        files: dict[str, Any] = {
            "optimizer_state": {
                "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}],
                "optimizer_state_dict": {"state": {0: {"step": torch.tensor(7.0)}, 1: {}}},
            },
            "a/exp_avg": {"param": torch.ones(2)}, "a/fp32": {"param": torch.zeros(2)}, "a/step": torch.tensor(3.0),
            "b/exp_avg": torch.arange(4.0), "c/exp_avg": {"param": torch.ones(1)}, "other/exp_avg": torch.ones(9),
        }  # fmt: skip
        for path, value in files.items():
            storage.write(f"zero/{path}.pt", [saved(value)])
        found = universal(Folder.of_checkpoint(storage, ROOT_ITSELF), groups)
        assert found is not None
        assert {name: sorted(state) for name, state in found["state"].items()} == {
            "a": ["exp_avg", "step"], "b": ["exp_avg", "step"], "c": ["exp_avg"],
        }  # fmt: skip
        assert (float(found["state"]["a"]["step"]), float(found["state"]["b"]["step"])) == (3.0, 7.0)
        assert found["state"]["b"]["exp_avg"].shape == (2, 2)
        assert found["param_groups"] == [{"lr": 0.1, "params": ["a", "b"]}, {"lr": 0.2, "params": ["c", "quiet"]}]

    def test_an_index_has_a_limit_and_its_files_must_be_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        storage, name = MemoryStorage("index-limit"), "model.safetensors.index.json"
        index = json.dumps({"weight_map": {"w": "x.safetensors"}}).encode()
        storage.write(name, [index])
        with pytest.raises(DamagedError, match=r"x\.safetensors"):
            tensors_at(Folder.of_checkpoint(storage, ROOT_ITSELF), name)
        storage.write("x.safetensors", [safetensors_of({"w": torch.ones(2)})])
        for limit, fits in ((len(index), True), (len(index) - 1, False)):
            monkeypatch.setattr(hf_safetensors, "_LARGEST_INDEX", limit)
            with nullcontext() if fits else pytest.raises(DamagedError, match=f"{limit} bytes"):
                assert tensors_at(Folder.of_checkpoint(storage, ROOT_ITSELF), name).keys() == {"w"}

    def test_a_save_of_megatron_that_lacks_a_piece_is_refused(self) -> None:
        region = Region(Bytes(bytes(100)), "file", torch.float32, 0, (2,), (1,))
        part = PiecedTensor(torch.float32, (4,), (Piece(Box((0,), (2,)), region),))
        rest = PiecedTensor(torch.float32, (4,), (*part.pieces, Piece(Box((2,), (2,)), region)))

        def save(tensor: PiecedTensor) -> MegatronSave:
            stored = SimpleNamespace(pieced=lambda *_: tensor, pieces=(), chunks=(), places={})
            folder: Any = SimpleNamespace(where="folder", check=lambda _: None, opened=None, files={})
            contents: Any = SimpleNamespace(tensors={"decoder.weight": stored})
            return MegatronSave(folder, contents)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ckpt.formats.foreign.dcp.needed_files", lambda _: {})
            assert list(save(rest).tensors("model")) == ["decoder.weight"]
            with pytest.raises(DamagedError):
                save(part).tensors("model")
            with pytest.raises(MissingError, match=r"no part 'optimizer' with tensors\. Parts with tensors: model\."):
                save(rest).tensors("optimizer")

    def test_tensors_of_special_kinds_are_found_wherever_they_are_and_stay_what_they_are(self, tmp_path: Path) -> None:
        special = torch.zeros(1).as_subclass(Special)
        for value in (special, [1, special], (special,), {"a": {"b": [special]}}):
            assert torch_write._has_subclasses(value)
        for plain in (torch.zeros(1), torch.nn.Parameter(torch.zeros(1)), [1, "x"], {"a": (torch.zeros(1),)}, None):
            assert not torch_write._has_subclasses(plain)
        torch_write.write_file(str(tmp_path / "special.pt"), {"a": [special]}, lambda count: None)
        with torch.serialization.safe_globals([Special]):
            assert type(torch.load(tmp_path / "special.pt")["a"][0]) is Special

    def test_fingerprints_read_on_the_device_are_those_of_the_host(self) -> None:
        tensors = {
            "a": torch.arange(100_000), "empty": torch.zeros(0), "b": torch.ones(3), "turned": torch.rand(30, 40).t(),
            "odd": torch.arange(9, dtype=torch.uint8)[1:],
        }  # fmt: skip
        read = fingerprint._enqueued(torch.device("cpu"), tensors)
        assert read() == {name: fingerprint._of_copy(tensor) for name, tensor in tensors.items()}
        assert fingerprint._enqueued(torch.device("cpu"), {"empty": torch.zeros(0)})().keys() == {"empty"}


class TestLayouts:
    def test_pieces_are_those_of_torch_chunk(self) -> None:
        for size in range(12):
            for count in range(1, 6):
                expected, at = [], 0
                for part in torch.chunk(torch.zeros(size), count) if size else ():
                    expected.append((at, len(part)))
                    at += len(part)
                found = [chunk(size, count, number) for number in range(count)]
                assert [one for one in found if one[1]] == expected
                assert all(one == (size, 0) for one in found[len(expected) :])

    def test_a_rank_holds_its_box(self) -> None:
        halves = Layout((2,), (0, 1), ("S0",))
        assert halves.box((5, 2), 0) == Box((0, 0), (3, 2))
        assert halves.box((5, 2), 1) == Box((3, 0), (2, 2))
        assert Layout((3,), (0, 1, 2), ("S0",)).box((2, 2), 2) == Box((2, 0), (0, 2))
        grid = Layout((2, 2), (0, 1, 2, 3), ("S0", "S1"))
        assert [grid.box((4, 6), rank).offsets for rank in range(4)] == [(0, 0), (0, 3), (2, 0), (2, 3)]
        both = Layout((2, 2), (0, 1, 2, 3), ("S0", "S0"))
        assert [both.box((8,), rank).ranges for rank in range(4)] == [[(0, 2)], [(2, 2)], [(4, 2)], [(6, 2)]]
        assert Layout((2, 3), tuple(range(6)), ("S0", "S0")).box((4,), 2) == Box((4,), (0,))  # empty: at the end
        turned = Layout((2, 2), (0, 1, 2, 3), ("S0/2", "S0"))
        assert [turned.box((8,), rank).ranges for rank in range(4)] == [[(0, 2)], [(4, 2)], [(2, 2)], [(6, 2)]]
        mixed = Layout((2, 2), (4, 5, 6, 7), ("R", "S0"))
        assert mixed.copies == 2
        assert [mixed.copy_of(rank) for rank in (4, 5, 6, 7)] == [0, 0, 1, 1]
        assert mixed.box((4,), 7) == Box((2,), (2,))
        assert mixed.holders((4,), 1) == {6: Box((0,), (2,)), 7: Box((2,), (2,))}
        assert mixed.copy_with(7) == Layout((2,), (6, 7), ("S0",))
        assert halves.copy_with(1) is halves
        assert Layout.replicated(2).copy_with(1) == Layout.of_one(1)
        assert (mixed.holds(7), mixed.holds(0)) == (True, False)
        assert (mixed.is_replicated, Layout.replicated(3).is_replicated) == (False, True)

    def test_boxes_overlap_where_both_are(self) -> None:
        box = Box((2, 0), (4, 3))
        assert box.overlap(Box((4, 1), (9, 1))) == [(2, 0, 2), (1, 0, 1)]
        assert box.overlap(Box((0, 0), (3, 3))) == [(0, 2, 1), (0, 0, 3)]
        assert box.overlap(Box((6, 0), (1, 3))) is None
        assert box.overlap(Box((0, 0), (2, 3))) is None
        assert Box((1,), (0,)).is_empty
        assert not box.is_empty

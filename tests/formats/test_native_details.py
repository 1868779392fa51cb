"""ckpt's own files, function by function: where each limit lies, and what each error says."""

from __future__ import annotations

import json
import math
import struct
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt.errors import DamagedError, UnsupportedError, VersionError
from ckpt.formats.checks import (
    MOST_DIMENSIONS,
    Expansion,
    checked_shape,
    checked_sizes,
    damage_reported,
    dense_strides,
    is_dense,
    is_permuted,
    of_type,
    reach,
    reason,
    widest,
)
from ckpt.formats.layout import Box, Layout
from ckpt.formats.native import documents, header, manifest, tensor_file
from ckpt.formats.native.documents import (
    Decoder,
    Encoder,
    decode_inline,
    encode_inline,
    encode_part,
    from_json,
    is_json_already,
    numpy_array,
    numpy_size,
    parts_in,
    step,
    to_json,
)
from ckpt.formats.native.header import Header, TensorHeader, outlines
from ckpt.formats.native.manifest import FileRecord, Manifest, digests_of_every, is_resumed, xxh3_128
from ckpt.formats.native.shard_table import (
    EVERY,
    ShardedTensors,
    ShardSpec,
    ShardTable,
    balanced,
    build_table,
    written_by,
)
from ckpt.formats.native.tensor_file import (
    TensorFile,
    dtype_of,
    in_file_order,
    pieced,
    plan_file,
    plan_gathered_file,
    untie,
)
from ckpt.formats.tensors import Shard, Unsharded, copy_into, host_bytes, memory_size, narrowed, on_host, same_bytes
from tests.helpers.file_in_memory import FileInMemory

HUGE = 1 << 63


def opened(data: bytes, where: str = "file") -> TensorFile:
    return TensorFile.open(FileInMemory(data), where, len(data))


def file_of(**tensors: torch.Tensor | Shard) -> bytes:
    shards = {name: one if isinstance(one, Shard) else Shard.whole(one) for name, one in tensors.items()}
    return b"".join(plan_file("file", shards).pieces())


def with_header(entries: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def refused(value: Any, prefix: str = "") -> list[str]:
    encoder = Encoder(prefix=prefix)
    encoder.encode(value)
    return encoder.problems


def nested(levels: int, kind: str) -> Any:
    """A value so many levels below the outermost one."""
    wraps: dict[str, Callable[[Any], Any]] = {
        "list": lambda inner: [inner, "x"],
        "dict": lambda inner: {"k": inner},
        "key": lambda inner: (inner, "x"),
        "deque": lambda inner: deque([inner, "x"]),
    }
    value: Any = 1
    for _ in range(levels - (kind == "key")):
        value = wraps[kind](value)
    return {value: 1} if kind == "key" else value


class TestChecks:
    def test_sizes_and_shapes_are_taken_up_to_their_limits(self) -> None:
        assert checked_sizes([0, HUGE - 1]) == (0, HUGE - 1)
        for wrong in (-1, HUGE, True, 1.0, "1", None):
            with pytest.raises(ValueError, match="a size or offset can't be"):
                checked_sizes([1, wrong])
        assert checked_shape([1] * MOST_DIMENSIONS) == (1,) * MOST_DIMENSIONS
        assert checked_shape([HUGE // 16]) == (HUGE // 16,)
        assert checked_shape([0, HUGE // 16, 0]) == (0, HUGE // 16, 0)
        for shape in ([1] * (MOST_DIMENSIONS + 1), [HUGE // 16 + 1], [0, HUGE // 16 + 1], [HUGE // 16, 2]):
            with pytest.raises(ValueError, match="a tensor can't have the shape"):
                checked_shape(shape)

    def test_strides_are_judged_by_where_they_lead(self) -> None:
        assert reach((2, 3), (3, 1)) == 6
        assert reach((2, 3), (10, 2)) == 15
        assert reach((0, 3), (10, 2)) == 0
        assert reach((), ()) == 1
        assert is_dense((2, 3), (3, 1))
        assert is_dense((2, 1, 3), (3, 77, 1))  # a dimension of one has no stride
        assert not is_dense((2, 3), (1, 2))
        assert is_permuted((2, 3), (1, 2))
        assert is_permuted((2, 1, 3), (1, 6, 2))
        assert not is_permuted((2, 3), (6, 2))
        assert not is_permuted((0, 3), (3, 1))
        assert not is_permuted((2, 3), (1,))
        assert dense_strides((2, 3, 4)) == (12, 4, 1)
        assert dense_strides(()) == ()
        assert widest((2, 3, 4), (12, 4, 1)) == 0
        assert widest((2, 30, 4), (12, 4, 1)) == 1
        assert widest((1, 2), (100, 1)) == 1

    def test_overlaps_add_up_to_a_limit(self) -> None:
        found = Expansion(100)
        found.add((10,), (1,), 8)  # none
        found.add((11,), (0,), 8)  # 80 bytes more than are stored
        found.add((3,), (2,), 8)  # holes make nothing good
        found.add((6,), (0,), 4)
        with pytest.raises(ValueError, match=r"a tensor of shape \[2\] has too few stored bytes: 1"):
            found.add((2,), (0,), 1)

    def test_errors_are_short_and_those_of_ckpt_pass(self) -> None:
        assert reason(ValueError("so.")) == "so"
        assert reason(KeyError("so")) == "KeyError: 'so'"
        assert reason(ValueError("x" * 300)) == "x" * 300
        assert reason(ValueError("x" * 301)) == "x" * 300 + "..."
        with pytest.raises(UnsupportedError, match=r"^mine$"), damage_reported("where", "what"):
            raise UnsupportedError("mine")
        with pytest.raises(DamagedError, match=r"^where is not a valid what: so\.$"), damage_reported("where", "what"):
            raise ValueError("so")
        assert of_type(list, [1]) == [1]
        with pytest.raises(ValueError, match="expected a int, found a bool"):
            of_type(int, True)


class TestEncoder:
    def test_lists_that_json_stores_as_they_are_are_known(self) -> None:
        for values, expected in (
            ([1, 2], True), ([HUGE - 1, -HUGE], True), ([1, HUGE], False), ([-HUGE - 1, 1], False),
            (["a", "b"], True), (["a", "\ud800"], False), ([1.0, 2.5], True), ([1.0, math.inf], False),
            ([math.nan, 1.0], False), ([1, 1.0], False), ([True, False], False), ([None], False), ([], False),
        ):  # fmt: skip
            assert is_json_already(values) == expected, values

    @pytest.mark.parametrize("kind", ["list", "dict", "key", "deque"])
    def test_a_hundred_levels_are_stored_and_one_more_is_refused(self, kind: str) -> None:
        value = nested(100, kind)
        encoder = Encoder()
        data = json.loads(to_json(encoder.encode(value)))
        assert encoder.problems == []
        assert Decoder(lambda _: None).decode(data) == value
        for problem in refused(nested(101, kind)):
            assert problem.endswith("...: nested more than 100 levels deep")
            assert len(problem.removesuffix("...: nested more than 100 levels deep")) == 80
        assert refused(nested(101, kind))

    @pytest.mark.parametrize("kind", ["list", "dict", "tuple"])
    def test_json_deeper_than_any_value_is_refused(self, kind: str) -> None:
        wraps: dict[str, Callable[[Any], Any]] = {
            "list": lambda inner: [inner],
            "dict": lambda inner: {"k": inner},
            "tuple": lambda inner: {"$tuple": [inner]},
        }
        limit, data = sys.getrecursionlimit(), list[Any]()
        sys.setrecursionlimit(20_000)
        try:
            for _ in range(300 if kind == "tuple" else 600):
                data = wraps[kind](data)
            Decoder(lambda _: None).decode(data)
            with pytest.raises(DamagedError, match="nested too deep"):
                Decoder(lambda _: None).decode(wraps[kind](data))
        finally:
            sys.setrecursionlimit(limit)

    def test_what_cannot_be_stored_is_named_with_its_path(self) -> None:
        class Mine(torch.Tensor):
            pass

        inside: list[Any] = []
        inside.append(inside)
        factory: Any = defaultdict(lambda: 1)
        for value, expected in (
            ({"a": [object()]}, "part.a[0]: a object"),
            ([print], "part[0]: a function"),
            ({"a": int}, "part.a: the class builtins.int"),
            ({"a": inside}, "part.a[0]: a list inside itself"),
            ({"a": factory}, "part.a: a defaultdict whose factory is a function"),
            ({"t": torch.zeros(2).as_subclass(Mine)}, f"part.t: a {Mine.__module__}.{Mine.__qualname__}"),
            ({"t": torch.empty(2, device="meta")}, "part.t: a tensor on the meta device, which has no data"),
            ({"t": torch.zeros(2, 2).to_sparse()}, "part.t: a tensor of layout torch.sparse_coo"),
            ({"a b": {"c": object()}}, "part['a b'].c: a object"),
            ({3: object()}, "part[3]: a object"),
            ({(object(),): 1}, "part(key)[0]: a object"),
        ):
            (problem,) = refused(value, "part")
            assert problem.startswith(expected)
        assert refused([1, 2.0, "x", None, True, inside[:0], {"same": [1]}]) == []
        twice = [1]
        assert refused([twice, twice]) == []

    def test_tensors_of_one_path_have_names_of_their_own(self) -> None:
        encoder = Encoder()
        tensors = [torch.tensor(n) for n in range(3)]
        data = encoder.encode({"a": tensors[0], "": 1})
        assert encoder._add("a", tensors[1]) == "a#2"
        assert encoder._add("a", tensors[2]) == "a#3"
        assert encoder._add("__metadata__", tensors[2]) == "__metadata__#2"
        assert data["a"] == {"$tensor": "a"}
        assert Encoder().encode(tensors[0]) == {"$tensor": "value"}
        assert step("", "lr") == "lr"
        assert step("groups[0]", "lr") == "groups[0].lr"
        assert step("groups", 0) == "groups[0]"
        assert step("a", "b c") == "a['b c']"

    def test_every_kind_of_value_comes_back_with_its_type(self) -> None:
        values = [
            (1, 2), {1, 2}, frozenset((1,)), deque([1], 3), OrderedDict(a=1), defaultdict(list, {"a": [1]}), b"x",
            bytearray(b"x"), 1j, range(1, 9, 2), slice(1, None, 2), torch.Size([1, 2]), torch.float8_e5m2,
            torch.strided, torch.channels_last, torch.device("cpu"), HUGE, -HUGE, -HUGE - 1, math.inf, "\ud800x",
            {"$tuple": 1}, {"a": 1, 2: 3}, {}, [], {"$x": 1, "y": 2}, [HUGE, 1], ["\ud800"],
        ]  # fmt: skip
        encoder = Encoder()
        back = Decoder(lambda _: None).decode(json.loads(to_json(encoder.encode(values))))
        assert encoder.problems == []
        assert back == values
        assert [type(value) for value in back] == [type(value) for value in values]
        assert back[3].maxlen == 3
        assert back[5]["new"] == []

    def test_a_name_of_torch_that_is_another_kind_is_damage(self) -> None:
        decoder = Decoder(lambda _: None, "state")
        for tag, name in (("$dtype", "strided"), ("$layout", "float32"), ("$memory_format", "save"), ("$dtype", "x")):
            with pytest.raises(DamagedError, match=f"has no {tag[1:]} '{name}'"):
                decoder.decode({tag: name})
        with pytest.raises(DamagedError, match=r"a value of the unknown kind '\$new'\. Did a newer"):
            decoder.decode({"$new": 1})
        with pytest.raises(DamagedError, match="state is not a valid state document: a key appears twice"):
            decoder.decode({"$items": [[1, 2], [1, 3]]})
        with pytest.raises(DamagedError, match="a tensor of the unknown kind 'os'"):
            decoder.decode({"$packed": {"kind": "os", "tensors": {}, "context": None}})
        assert decoder.decode({"$x": 1, "y": 2}) == {"$x": 1, "y": 2}

    def test_packed_tensors_are_their_placeholders_before_they_are_read(self) -> None:
        found = {"a": torch.zeros(1), "b": "placeholder"}
        packed = {"kind": "torchao.optim.subclass_8bit", "tensors": {name: {"$tensor": name} for name in found}}
        assert Decoder(found.__getitem__).decode({"$packed": {**packed, "context": None}}) == found

    def test_a_tensor_that_is_no_shard_is_said_to_be_none(self) -> None:
        encoder = Encoder()
        data = encoder.encode({"a": Unsharded(torch.arange(3))})
        assert data == {"a": {"$unsharded": {"$tensor": "a"}}}
        back = Decoder(encoder.tensors.__getitem__, unsharded=lambda tensor: ("none", tensor)).decode(data)
        assert back["a"][0] == "none"
        assert Decoder(encoder.tensors.__getitem__).decode(data)["a"] is encoder.tensors["a"]

    def test_strides_come_back_and_those_that_no_tensor_has_are_refused(self) -> None:
        tensor = torch.arange(6.0).reshape(2, 3).t()
        encoder = Encoder()
        data = encoder.encode([tensor, tensor])
        assert data[0] == {"$strided": ["[0]", [1, 3]]}
        stored = {name: one.contiguous() for name, one in encoder.tensors.items()}
        same = Decoder(lambda _: stored["[0]"]).decode(data)
        assert same[0].stride() == (1, 3)
        assert same[0].equal(tensor)
        assert same[0] is same[1]  # tied tensors are one again
        kept = Decoder(lambda _: tensor).decode(data)
        assert kept[0] is tensor
        assert Decoder(lambda _: "placeholder").decode(data) == ["placeholder", "placeholder"]
        with pytest.raises(DamagedError, match=r"can't have the strides \[1, 4\]"):
            Decoder(lambda _: stored["[0]"]).decode({"$strided": ["x", [1, 4]]})
        assert Encoder().encode(torch.zeros(4)[::2]) == {"$tensor": "value"}  # with gaps, it is stored without

    def test_arrays_have_the_bytes_of_their_shape(self) -> None:
        import numpy as np

        assert numpy_size([2, 3], "<f4") == 24
        assert numpy_size([1 << 20], "|V0") == 0
        with pytest.raises(ValueError, match="1048577 elements of 0 bytes"):
            numpy_size([(1 << 20) + 1], "|V0")
        with pytest.raises(ValueError, match="holds Python objects"):
            numpy_size([1], "|O")
        with pytest.raises(ValueError, match="3 bytes can't form an array of"):
            numpy_array([1], "<f4", b"123")
        values = [np.arange(6, dtype=">i2").reshape(2, 3), np.float32(1.5), np.zeros((0, 3)), np.array("x"),
                  np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")]), np.bool_(True),
                  np.array(["", ""])]  # fmt: skip
        encoder = Encoder()
        data = json.loads(to_json(encoder.encode(values)))
        back = Decoder(encoder.tensors.__getitem__).decode(data)
        assert encoder.problems == []
        for value, again in zip(values, back, strict=True):
            assert type(again) is type(value)
            assert again.dtype == value.dtype
            assert again.shape == value.shape
            assert again.tobytes() == value.tobytes()
        assert "NumPy value of dtype object, which holds Python objects" in refused(np.array([None]))[0]
        wrong = {"$ndarray": {"dtype": "<f4", "shape": [2], "tensor": "x"}}
        placeholder = SimpleNamespace(dtype=torch.uint8, shape=(8,))
        assert Decoder({"x": placeholder}.__getitem__).decode(wrong) is placeholder
        for tensor in (torch.zeros(7, dtype=torch.uint8), torch.zeros(8, dtype=torch.int8)):
            with pytest.raises(DamagedError, match="can't form an array of"):
                Decoder({"x": tensor}.__getitem__).decode(wrong)


class TestDocuments:
    def test_json_has_no_numbers_that_others_cannot_read(self) -> None:
        assert to_json({"a": [1, 2.5]}) == b'{"a":[1,2.5]}'
        for value in (math.nan, math.inf):
            with pytest.raises(ValueError, match="JSON"):
                to_json([value])
        assert from_json(b"[1]", "x") == [1]
        for text in (b"{", b"[" * 100_000, b"\xff"):
            with pytest.raises(DamagedError, match=r"^x is not JSON: "):
                from_json(text, "x")

    def test_a_part_has_what_its_readers_rely_on(self) -> None:
        good: dict[str, Any] = {"class": "X", "state": 1, "plain": ["a"], "differs": {"tensors": {"t": [0, 1]}}}
        assert parts_in({"parts": {"a": good, "b": {"absent": True}}}, "parts", "x") == {
            "a": good, "b": {"absent": True},
        }  # fmt: skip
        changes: tuple[dict[str, Any], ...] = (
            {"class": 1}, {"plain": ["a", 1]}, {"plain": "a"}, {"spread": []}, {"about": None}, {"differs": []},
            {"differs": {"tensors": []}}, {"differs": {"tensors": {"t": [-1]}}},
        )  # fmt: skip
        for change in changes:
            with pytest.raises(DamagedError, match=r"^x is not a valid document: "):
                parts_in({"parts": {"a": {**good, **change}}}, "parts", "x")
        parts: tuple[Any, ...] = ({"state": 1}, {"class": "X"}, [], {})
        for part in parts:
            with pytest.raises(DamagedError, match=r"^x is not a valid document"):
                parts_in({"parts": {"a": part}}, "parts", "x")
        with pytest.raises(DamagedError):
            parts_in({"parts": []}, "parts", "x")

    def test_small_state_is_in_one_document_with_its_tensors(self) -> None:
        problems: list[str] = []
        value = {"t": torch.arange(3, dtype=torch.int16), "z": torch.zeros(0, 2), "c": torch.tensor([1 + 2j]).conj()}
        data = json.loads(to_json(encode_inline(value, "p", problems)))
        back = decode_inline(data)
        assert problems == []
        assert {name: (one.dtype, one.tolist()) for name, one in back.items()} == {
            name: (one.dtype, one.tolist()) for name, one in value.items()
        }
        data["tensors"]["t"]["shape"] = [2]
        with pytest.raises(DamagedError, match=r"^x is not a valid state document: 6 bytes can't form"):
            decode_inline(data, "x")
        with pytest.raises(DamagedError, match=r"^x is not a valid state"):
            decode_inline({}, "x")
        encode_inline({"t": object()}, "p", problems)
        encode_part("K", {"u": object()}, "q", problems)
        assert problems == ["p.t: a object", "q.u: a object"]


class TestHeaders:
    def test_data_begins_at_a_page_and_follows_without_gaps(self) -> None:
        for size in (1, 3900, 4000, 4096, 8300):
            data = header.to_bytes(
                [TensorHeader("x" * size, "U8", [2], 2), TensorHeader("y", "F32", [], 4)], {"a": "b"}
            )
            assert len(data) % 4096 == 0
            assert len(data) - (8 + len(data[8:].rstrip())) < 4096
            read = Header.read(FileInMemory(data + bytes(6)), "file", len(data) + 6)
            start = len(data)
            assert dict(read.entries) == {
                "x" * size: ("U8", (2,), start, start + 2), "y": ("F32", (), start + 2, start + 6),
            }  # fmt: skip
            assert dict(read.metadata) == {"a": "b"}
        with pytest.raises(UnsupportedError, match="a tensor is named '__metadata__'"):
            header.to_bytes([TensorHeader("__metadata__", "U8", [1], 1)], {})

    def test_what_is_no_header_is_damage_that_says_why(self) -> None:
        entry = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
        whole = with_header({"a": entry}, b"12")
        assert Header.read(FileInMemory(whole), "file", len(whole)).entries["a"].shape == (2,)
        empty = struct.pack("<Q", 2) + b"{}"
        assert not Header.read(FileInMemory(empty), "file", len(empty)).entries
        for data, why in (
            (b"", "it has 0 bytes"),
            (b"1234567", "it has 7 bytes"),
            (bytes(8), "Expecting value"),
            (struct.pack("<Q", 3) + b"{}", "its header claims 3 bytes, but the file has 10"),
            (struct.pack("<Q", 100_000_001) + b"{}", "its header claims 100000001 bytes"),
            (whole + b"3", "the last tensor ends at byte"),
            (whole[:-1], "the last tensor ends at byte"),
            (with_header({"a": {**entry, "dtype": "X8"}}, b"12"), "a has the unknown dtype 'X8'"),
            (with_header({"a": {**entry, "dtype": "U16"}}, b"12"), r"a: 2 bytes can't form a U16 of shape \[2\]"),
            (with_header({"a": {**entry, "data_offsets": [1, 3]}}, b"123"), "a tensor begins at byte"),
            (with_header({"__metadata__": {"x": 1}}), "the metadata in its header has a value that is not a string"),
            (with_header({"__metadata__": {"ckpt": "[]"}}), "expected a dict, found a list"),
            (struct.pack("<Q", 17) + b'{"a": 1, "a": 2} ', "a name appears twice"),
            (with_header({"a": [1]}), "expected a dict, found a list"),
        ):
            for read in (Header.read, outlines):
                with pytest.raises(DamagedError, match=f"^file is not a valid safetensors file: .*{why}"):
                    read(FileInMemory(data), "file", len(data))
            with pytest.raises(DamagedError, match=f"^file is not a valid safetensors file: .*{why}"):
                opened(data)
        tables = with_header({"__metadata__": {"ckpt": '{"views": []}'}})
        for call in (lambda: outlines(FileInMemory(tables), "file", len(tables)), lambda: opened(tables)):
            with pytest.raises(DamagedError, match=r"^file is not a valid safetensors file: expected"):
                call()

    def test_outlines_are_those_of_the_tensors_and_not_of_bare_buffers(self) -> None:
        base = torch.arange(8.0)
        data = file_of(a=base[:5], b=base[3:], tied=torch.zeros(2), half=torch.zeros(3, dtype=torch.complex32))
        found = outlines(FileInMemory(data), "file", len(data))
        assert {name: (one.dtype, one.shape, one.tied) for name, one in found.items()} == {
            "a": ("float32", (5,), False), "b": ("float32", (5,), False), "tied": ("float32", (2,), False),
            "half": ("complex32", (3,), False),
        }  # fmt: skip
        data = file_of(a=base, b=base)
        assert {name: one.tied for name, one in outlines(FileInMemory(data), "file", len(data)).items()} == {
            "a": False, "b": True,
        }  # fmt: skip


MANIFEST = Manifest(
    name="step-1", id="5f", sequence=2, created="2025-01-01T00:00:00.000+00:00", run="r",
    files=(FileRecord(name="m", path="m", size=9, blocks=("ab", "cd"), block_size=8, head=(9, "ef")),),
    versions={"ckpt": "0.1"},
)  # fmt: skip


class TestManifests:
    def problems(self, **fields: object) -> list[str]:
        lines = json.loads(b"{" + MANIFEST.unsigned_bytes())
        return manifest.manifest_problems({**lines, **fields}, manifest.BLOCK_SIZE)

    def file(self, **fields: object) -> list[str]:
        lines = json.loads(b"{" + MANIFEST.unsigned_bytes())
        return self.problems(files=[{**lines["files"][0], **fields}])

    def test_every_field_is_taken_up_to_its_limit(self) -> None:
        sha = "0" * 64
        resumed = {"name": "a", "id": "b", "step": 1, "found_in": "c", "passed_over": {"d": "why"}}
        good: list[list[str]] = [
            self.file(), self.file(head=None), self.file(head=[1, "ef"]), self.file(sha256=[]),
            self.file(sha256=[sha, sha]), self.file(head_sha256=""), self.file(head_sha256=sha),
            self.file(size=0, blocks=[], head=None), self.file(size=16), self.file(blocks=["f" * 128, "0"]),
            self.file(block_size=1 << 30, blocks=["a"]), self.file(size=8, blocks=["ab"], head=[8, "ef"]),
            self.problems(world_size=1 << 24), self.problems(world_size=1), self.problems(id="x" * 64),
            self.problems(sequence=0), self.problems(parent=None), self.problems(parent="x"),
            self.problems(metrics={"a": 1, "b": "nan", "c": -0.5}), self.problems(resumed={}),
            self.problems(resumed=resumed), self.problems(resumed={**resumed, "more": 3}),
            self.problems(seconds={"a": manifest.LARGEST_SEQUENCE}), self.problems(memory={"a": -1.5}),
            self.problems(hosts=[{"name": "h", "ranks": [0, 1 << 24]}]), self.problems(files=[]),
        ]  # fmt: skip
        assert good == [[]] * len(good)
        bad: list[list[str]] = [
            self.file(head=[0, "ef"]), self.file(head=[10, "ef"]), self.file(head=[9, "x"]), self.file(head=[9]),
            self.file(head=[9, "ef", 1]), self.file(head="ab"), self.file(sha256=[sha]),
            self.file(sha256=[sha, "0" * 63]),
            self.file(sha256=[sha, sha, sha]), self.file(head_sha256="0"), self.file(blocks=["ab"]),
            self.file(blocks=["ab", "cd", "ef"]), self.file(size=8), self.file(size=17), self.file(size=-1),
            self.file(size=1 << 63), self.file(block_size=0), self.file(block_size=(1 << 30) + 1),
            self.file(blocks=["f" * 129, "0"]), self.file(blocks=["", "0"]), self.file(blocks=["AB", "0"]),
            self.file(path="../m"), self.file(name="manifest.json"), self.file(path=".saving"),
            self.file(blocks=[1, 2]),
            self.problems(world_size=0), self.problems(world_size=(1 << 24) + 1), self.problems(id=""),
            self.problems(id="x" * 65), self.problems(id="a/b"), self.problems(id=1), self.problems(sequence=-1),
            self.problems(parent=1), self.problems(metrics={"a": "x"}), self.problems(metrics={"a": None}),
            self.problems(resumed=[]), self.problems(resumed={"name": "a"}),
            self.problems(resumed={**resumed, "step": -1}), self.problems(seconds={"a": manifest.LARGEST_SEQUENCE * 2}),
            self.problems(hosts=[{"name": "h", "ranks": [-1]}]), self.problems(hosts=[{"ranks": []}]),
            self.problems(hosts=[1]), self.problems(files=[1]), self.problems(created="yesterday"),
        ]  # fmt: skip
        assert [index for index, found in enumerate(bad) if not found] == []
        assert is_resumed({})
        assert is_resumed(resumed)
        assert not is_resumed({"name": "a"})
        assert not is_resumed(None)

    def test_no_two_files_have_one_name_or_path(self) -> None:
        first = json.loads(b"{" + MANIFEST.unsigned_bytes())["files"][0]
        both = self.problems(files=[first, {**first, "name": "n"}])
        assert both == ["'m' is the path of 2 files"]
        assert self.problems(files=[first, {**first, "path": "n"}]) == ["'m' is the name of 2 files"]
        assert self.problems(files=[first, {**first, "name": "n", "path": "n"}]) == []
        wrong = replace(MANIFEST, files=(replace(MANIFEST.files[0], blocks=()),))
        with pytest.raises(UnsupportedError, match="step-1 cannot be saved: file 'm': 9 bytes have 2 blocks"):
            wrong.to_bytes()

    def test_what_it_says_of_itself_is_checked_first(self) -> None:
        def read(**fields: object) -> Manifest:
            lines = json.loads(b"{" + MANIFEST.unsigned_bytes())
            text = json.dumps({**lines, **fields}).encode().removeprefix(b"{")
            whole = b'{\n "digest": "xxh3-128:' + manifest.digest(text).encode() + b'",\n' + text
            return Manifest.from_bytes(whole, "here")

        assert read() == MANIFEST
        assert read(unknown=1) == MANIFEST
        for fields, why in (
            ({"format": "other"}, "its format is 'other'"), ({"version": 0}, "its version is 0"),
            ({"version": 1_000_000}, "its version is 1000000"), ({"version": True}, "its version is True"),
        ):  # fmt: skip
            with pytest.raises(DamagedError, match=f"^here is not a valid manifest: {why}"):
                read(**fields)
        with pytest.raises(VersionError, match=r"^here has format version 999999, written by ckpt 0\.1,"):
            read(version=999_999)
        for versions in ({}, {"ckpt": "\x1b"}, {"ckpt": 1}, None):
            with pytest.raises(VersionError, match=r"^here has format version 2, written by ckpt \?,"):
                read(version=2, versions=versions)
        data = MANIFEST.to_bytes()
        assert Manifest.from_bytes(data, "here") == MANIFEST
        for at in (0, 30, len(data) - 1):
            with pytest.raises(DamagedError, match=r"^here was altered"):
                Manifest.from_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "here")

    def test_its_size_step_and_hashes_are_those_of_its_files(self) -> None:
        record = MANIFEST.files[0]
        assert replace(MANIFEST, files=(record, record)).size == 18
        assert (MANIFEST.step, replace(MANIFEST, progress={"step": 7}).step) == (0, 7)
        assert not record.has_sha256
        assert replace(record, sha256=("0" * 64,) * 2).has_sha256
        assert not replace(record, sha256=("0" * 64,)).has_sha256
        assert replace(record, size=0, blocks=()).has_sha256
        assert not MANIFEST.is_authentic
        signed = manifest.Signature("k", "v", b"")
        assert not replace(MANIFEST, signature=signed).is_authentic
        assert replace(MANIFEST, signature=replace(signed, verified=True)).is_authentic
        assert signed.message == manifest.CONTEXT
        assert signed.line == b' "signature": "ed25519:k:v",\n'
        text = MANIFEST.unsigned_bytes()
        ours = manifest.Signature("0" * 64, "1" * 128, text)
        assert manifest.split_signature(ours.line + text) == (ours, text)
        assert manifest.split_signature(text) == (None, text)
        back = Manifest.from_bytes(replace(MANIFEST, signature=ours, run="changed since").to_bytes(), "x")
        assert (back.run, back.signature) == ("r", replace(ours, name="step-1"))
        assert manifest.short("0123456789abcdefX") == "0123456789abcdef"
        for field in ("memory", "resumed"):
            assert f'"{field}"'.encode() not in text
        assert b'"memory"' in replace(MANIFEST, memory={"a": 1}).unsigned_bytes()
        infinite = replace(MANIFEST, metrics={"a": math.inf, "b": 0.5})
        assert Manifest.from_bytes(infinite.to_bytes(), "x").metrics == {"a": math.inf, "b": 0.5}
        assert FileRecord.from_json({**record.to_json(), "new": 1}) == record
        assert "sha256" not in record.to_json()

    @pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 33])
    def test_blocks_are_hashed_as_a_stream_and_by_several_threads(self, size: int) -> None:
        data = bytes(range(size))
        hasher = manifest.BlockHasher(8, sha256=True)
        pieces = [memoryview(data)[:3], memoryview(data)[3:20], memoryview(data)[20:]]
        assert b"".join(hasher.through(pieces)) == data
        blocks = [data[at : at + 8] for at in range(0, size, 8)]
        assert hasher.size == size
        assert hasher.digests == tuple(map(manifest.digest, blocks))
        assert hasher.sha256_digests == tuple(map(manifest.sha256, blocks))
        for count in (1, 2, 3):
            found: dict[int, str] = {}
            for first in range(count):
                found |= digests_of_every(pieces, first, count, xxh3_128, 8)
            assert found == dict(enumerate(map(manifest.digest, blocks)))
        plain = manifest.BlockHasher(8)
        plain.update(memoryview(data))
        assert plain.sha256_digests == ()


class TestTensorFiles:
    def test_tensors_that_share_memory_are_stored_once_and_share_it_again(self) -> None:
        base = torch.arange(20.0)
        wide = torch.arange(4, dtype=torch.int64)
        for tensors, stored in (
            ({"a": base, "b": base}, {"a"}),
            ({"a": base[:5], "b": base}, {"b"}),
            ({"a": base[:5], "b": base[5:9], "c": base[9:]}, {"a", "b", "c"}),  # beside each other
            ({"a": base[:5], "b": base[4:9]}, {"a@storage"}),
            ({"a": base[:5], "b": base[4:9], "c": base[10:]}, {"a@storage", "c"}),
            ({"a": base[:5], "b": base[4:9], "a@storage": base[:9].clone()}, {"a@storage", "a@storage+"}),
            ({"a": base[:10], "b": base[2:4], "c": base[8:12]}, {"a@storage"}),
            ({"a": base[::2], "b": base[::2]}, {"a"}),
            ({"a": wide, "b": wide.view(torch.int16)[1:3]}, {"a"}),
            ({"a": wide.view(torch.int16)[1:], "b": wide[1:]}, {"a@storage"}),
            ({"a": torch.zeros(0), "b": torch.zeros(0)}, {"a", "b"}),
        ):
            found, views = untie(tensors)
            assert set(found) == stored
            assert set(found) | set(views) >= set(tensors)
            file = opened(file_of(**tensors))
            back = {name: file.tensor(name) for name in tensors}
            for name, tensor in tensors.items():
                assert name in file
                assert back[name].dtype == tensor.dtype
                assert back[name].equal(tensor), name
            shared = {(a, b) for a in tensors for b in tensors if a < b and overlaps(tensors[a], tensors[b])}
            assert {(a, b) for a in tensors for b in tensors if a < b and overlaps(back[a], back[b])} == shared
        assert "absent" not in opened(file_of(a=base))

    def test_ties_are_views_of_all_of_a_tensor(self) -> None:
        base = torch.arange(6.0).reshape(2, 3)
        file = opened(file_of(a=base, b=base, turned=base.t(), part=base[1], bits=base.view(torch.int32)))
        assert file.ties == {"b": "a"}
        assert file.about("turned") == (torch.float32, (3, 2))
        assert file.about("bits") == (torch.int32, (2, 3))
        with pytest.raises(DamagedError, match="file has no tensor 'x', but the checkpoint refers to it"):
            file.about("x")

    def test_dtypes_that_safetensors_has_not_are_bytes_of_their_length(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tensor = torch.arange(3).to(torch.complex32)
        data = file_of(x=tensor)
        assert opened(data).tensor("x").view(torch.int32).equal(tensor.view(torch.int32))
        good = {"dtype": "U8", "shape": [1, 4], "data_offsets": [0, 4]}
        for name, entry in (
            ("complex32", {**good, "dtype": "I8"}), ("complex32", {**good, "shape": [4, 1]}),
            ("complex32", {**good, "shape": [4]}), ("complex128", good), ("quint4x2", good), ("save", good),
        ):  # fmt: skip
            if (name, entry["shape"]) == ("complex32", [4]):
                continue
            broken = with_header({"__metadata__": {"ckpt": json.dumps({"dtypes": {"x": name}})}, "x": entry}, b"1234")
            with pytest.raises(DamagedError, match=r"can't be elements of|is not a dtype that ckpt stores"):
                opened(broken)
        with pytest.raises(ValueError, match="'quint4x2' is not a dtype that ckpt stores"):
            dtype_of("quint4x2")
        monkeypatch.setattr(tensor_file, "NAMES", {"float99", "save"})
        for name in ("float99", "save"):
            with pytest.raises(ValueError, match=f"has no dtype '{name}'"):
                dtype_of(name)

    def test_a_view_stays_inside_its_tensor(self) -> None:
        def file(**change: object) -> bytes:
            view = {"of": "x", "dtype": "int16", "shape": [2], "stride": [1], "start": 4, **change}
            entry = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
            return with_header(
                {"__metadata__": {"ckpt": json.dumps({"views": {"v": view}})}, "x": entry}, bytes(range(8))
            )

        assert opened(file()).tensor("v").tolist() == [0x504, 0x706]
        assert opened(file(shape=[3], stride=[0], start=6)).about("v") == (torch.int16, (3,))
        for change in ({"start": 5}, {"start": 6}, {"stride": [2]}, {"shape": [3]}, {"of": "y"}, {"dtype": "x"}):
            with pytest.raises(DamagedError):
                opened(file(**change))
        twice = with_header(
            {"__metadata__": {"ckpt": json.dumps({"views": {"x": {
                "of": "x", "dtype": "uint8", "shape": [1], "stride": [1], "start": 0}}})},
             "x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"1",
        )  # fmt: skip
        with pytest.raises(DamagedError, match="the header has x twice"):
            opened(twice)

    def test_pieces_of_a_tensor_are_collected_from_all_files(self) -> None:
        whole = torch.arange(12.0).reshape(6, 2)
        files = [
            opened(
                file_of(w=Shard(whole[start : start + 3], (6, 2), (start, 0)), own=torch.tensor(float(start))),
                str(start),
            )
            for start in (0, 3)
        ]
        found = pieced(files)
        assert found["w"].shape == (6, 2)
        assert [piece.box for piece in found["w"].pieces] == [Box((0, 0), (3, 2)), Box((3, 0), (3, 2))]
        assert len(pieced(files, lambda file, name: file is files[1])["w"].pieces) == 1
        assert pieced(files)["own"].shape == ()
        half = Shard(whole[3:], (6, 2), (3, 0))
        tied = pieced([opened(file_of(a=half, b=half, part=whole[4]))])
        assert [tied[name].pieces[0].box.offsets for name in ("a", "b", "part")] == [(3, 0), (3, 0), (0,)]
        for other in (whole[:3].double(), whole[:3, :1].contiguous()):
            shape = (6, 2) if other.dtype == torch.float64 else (6, 1)
            wrong = opened(file_of(w=Shard(other, shape, (0, 0))), "wrong")
            with pytest.raises(DamagedError, match=r"the files disagree about w: 0 says .*, wrong says"):
                pieced([files[0], wrong])

    def test_a_plan_says_what_is_in_memory_and_in_which_order(self) -> None:
        tensors = {
            "byte": torch.zeros(100_000, dtype=torch.uint8), "small": torch.zeros(3), "large": torch.zeros(20_000),
            "edge": torch.zeros((1 << 16) // 4), "wide": torch.zeros(2, dtype=torch.int64),
        }  # fmt: skip
        assert in_file_order(tensors) == ["wide", "large", "edge", "small", "byte"]
        shards = {name: Shard.whole(tensor) for name, tensor in tensors.items()}
        plan = plan_file("path", shards)
        assert (plan.path, plan.in_memory, plan.likely_unchanged) == ("path", True, False)
        assert plan_file("path", shards, likely_unchanged=True).likely_unchanged
        assert plan.contents is not None
        assert [one[0] for one in plan.contents[1:]] == in_file_order(tensors)
        assert plan.contents[0] == bytes(next(plan.pieces()))
        assert plan.head == len(bytes(next(plan.pieces())))
        assert plan.size == len(b"".join(plan.pieces()))
        turned = {**shards, "t": Shard.whole(torch.arange(6.0).reshape(2, 3).t())}
        assert not plan_file("path", turned).in_memory
        assert opened(b"".join(plan_file("path", turned).pieces())).tensor("t").tolist() == [[0, 3], [1, 4], [2, 5]]

    def test_collective_calls_are_all_made_though_one_fails(self, caplog: pytest.LogCaptureFixture) -> None:
        meta = {name: torch.empty(2, device="meta") for name in ("a", "b", "c")}
        for collective, expected in ((True, ["a", "b", "c"]), (False, ["a", "b"])):
            made: list[str] = []

            def fetch(name: str, made: list[str] = made) -> torch.Tensor:
                made.append(name)
                if name == "b":
                    raise ZeroDivisionError
                return torch.ones(2)

            plan = plan_gathered_file("path", meta, {"d": "a"}, fetch, collective=collective)
            with pytest.raises(ZeroDivisionError):
                list(plan.pieces())
            assert made == expected
            made.clear()
            pieces: Any = plan.pieces()
            next(pieces)
            pieces.close()
            assert made == (["a", "b"] if collective else [])
        assert "could not join the other ranks' remaining collective calls: ZeroDivisionError" in caplog.text
        whole = plan_gathered_file("path", meta, {"d": "a"}, lambda name: torch.full((2,), ord(name) * 1.0))
        file = opened(b"".join(whole.pieces()))
        assert file.ties == {"d": "a"}
        assert file.tensor("d").tolist() == [97.0, 97.0]
        assert whole.size == len(b"".join(whole.pieces()))


def overlaps(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have bytes in common, the gaps of their strides counted."""

    def span(tensor: torch.Tensor) -> range:
        size = reach(tuple(tensor.shape), tensor.stride()) * tensor.element_size()
        return range(tensor.data_ptr(), tensor.data_ptr() + size)

    first, second = span(one), span(other)
    return max(first.start, second.start) < min(first.stop, second.stop)


class TestShardTables:
    HALVES = Layout((2,), (0, 1), ("S0",))
    BOTH = Layout.replicated(2)
    GRID = Layout((2, 2), (0, 1, 2, 3), ("R", "S0"))

    def test_ranks_write_what_they_hold_once(self) -> None:
        big = torch.zeros(40_000)
        table = build_table({"x": big, "y": torch.ones(40_000), "s": torch.zeros(2), "same": big}, 2)
        assert table.aliases == {"same": "x"}
        assert {name: spec.copy for name, spec in table.tensors.items()} == {"x": 0, "y": 1, "s": 0}
        tensors = {"x": big, "y": big, "s": big[:2]}
        assert list(written_by(table, tensors, 0)) == ["x", "s"]
        assert list(written_by(table, tensors, 1)) == ["y"]
        assert list(written_by(table, tensors, 2)) == []
        every = table.with_every_copy()
        assert list(written_by(every, tensors, 1)) == ["x", "y", "s"]
        assert every.tensors["x"].writers() == {0, 1}
        assert table.tensors["y"].writers() == {1}
        uneven = ShardTable(
            {"one": ShardSpec(torch.int8, (1, 2), self.HALVES), "none": ShardSpec(torch.int8, (0, 2), self.HALVES)}
        )
        rows = {"one": torch.zeros(1, 2, dtype=torch.int8), "none": torch.zeros(0, 2, dtype=torch.int8)}
        assert list(written_by(uneven, rows, 0)) == ["one", "none"]
        assert list(written_by(uneven, rows, 1)) == ["none"]  # an empty shard of what is not empty is not written
        apart = {name: torch.arange(8.0)[start : start + 4] for name, start in (("a", 0), ("b", 4))}
        assert build_table(apart, 1).aliases == {}
        shaped = torch.arange(6.0)
        assert build_table({"a": shaped, "b": shaped.view(2, 3), "c": shaped.view(6)}, 1).aliases == {"c": "a"}
        assert build_table({"a": torch.zeros(0), "b": torch.zeros(0)}, 1).aliases == {}

    def test_the_largest_go_to_the_copy_with_the_least(self) -> None:
        def spec(count: int, layout: Layout = self.BOTH) -> ShardSpec:
            return ShardSpec(torch.uint8, (count,), layout)

        least = 1 << 16
        found = balanced({
            "a": spec(5 * least), "b": spec(3 * least), "c": spec(3 * least), "d": spec(least), "e": spec(least - 1),
            "f": spec(9 * least, self.HALVES),
        })  # fmt: skip
        assert {name: one.copy for name, one in found.items()} == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 0, "f": 0}
        assert list(found) == list("abcdef")

    def test_a_table_is_read_as_it_was_written_and_checked(self) -> None:
        table = ShardTable(
            {"x": ShardSpec(torch.float32, (4, 2), self.HALVES), "y": ShardSpec(torch.int8, (3,), self.BOTH, 1),
             "z": ShardSpec(torch.int8, (3,), self.BOTH, EVERY)}, {"tied": "x"},
        )  # fmt: skip
        data = json.loads(json.dumps(table.to_json()))
        assert len(data["layouts"]) == 2
        assert ShardTable.from_json(data) == table
        small = replace(MANIFEST, world_size=2)
        assert ShardTable.from_json(data, small) == table
        for row in (["float32", [4, 2], 0, 1], ["float32", [4, 2], 0, -2], ["float32", [4, 2], 0, True],
                    ["float32", [4, 2], 2, 0], ["x", [4, 2], 0, 0], ["float32", [-1], 0, 0],
                    ["int8", [3], 1, 2]):  # fmt: skip
            with pytest.raises(DamagedError, match=r"^the shard table of a part is not a valid shard table"):
                ShardTable.from_json({**data, "tensors": {"x": row}})
        with pytest.raises(DamagedError, match="an alias is not a string"):
            ShardTable.from_json({**data, "aliases": {"a": "x", "b": 1}})
        with pytest.raises(DamagedError):
            ShardTable.from_json(data, replace(MANIFEST, world_size=1))

    def test_it_has_no_more_shards_than_the_files_have_room_for(self) -> None:
        ranks = 4096
        layout = Layout((ranks,), tuple(range(ranks)), ("S0",)).to_json()
        manifest = replace(MANIFEST, world_size=ranks)
        for count, fits in ((8, True), (9, False)):
            rows = {str(number): ["int8", [ranks], 0, 0] for number in range(count)}
            data = {"layouts": [layout], "tensors": rows, "aliases": {}}
            assert len(ShardTable.from_json(data).tensors) == count
            if fits:
                ShardTable.from_json(data, manifest)
            else:
                with pytest.raises(DamagedError, match="more shards than the checkpoint's files can hold"):
                    ShardTable.from_json(data, manifest)

    def test_a_tensor_is_read_from_the_files_that_can_be_read_here(self) -> None:
        whole = torch.arange(8.0).reshape(4, 2)
        spec = ShardSpec(torch.float32, (4, 2), self.GRID, EVERY)
        table = ShardTable({"x": spec}, {"tied": "x"})
        asked: list[int] = []

        def files(rank: int) -> list[TensorFile]:
            asked.append(rank)
            box = spec.layout.box(spec.shape, rank)
            part = Shard(whole[box.offsets[0] : box.offsets[0] + 2], (4, 2), box.offsets)
            return [opened(file_of(other=torch.zeros(1))), opened(file_of(x=part))]

        for rank, here, expected in (
            (0, {0, 1, 2, 3}, [0, 1]), (3, {0, 1, 2, 3}, [2, 3]), (0, {2, 3}, [2, 3]), (3, {0, 1, 3}, [0, 1]),
            (7, {2, 3}, [2, 3]), (2, set[int](), [2, 3]),
        ):  # fmt: skip
            asked.clear()
            found = ShardedTensors(table, files, rank, here.__contains__)
            assert found.tensor("x").equal(whole)
            assert asked == expected
            assert found.tensor("tied") is found.tensor("x")
            assert found.ties == {"tied": "x"}
            assert found.about("tied") == (torch.float32, (4, 2))
        asked.clear()
        found = ShardedTensors(table, files, 0)
        row = torch.zeros(1, 2)
        found.fill("tied", row, Box((3, 0), (1, 2)))
        assert row.equal(whole[3:])
        assert asked == [1]
        with pytest.raises(DamagedError, match="refers to tensor 'y', but does not say which file has it"):
            found.about("y")
        with pytest.raises(DamagedError, match="rank 0 wrote a piece of tensor 'x', but no file of that rank has it"):
            ShardedTensors(table, lambda _: []).tensor("x")
        huge = ShardTable({"x": ShardSpec(torch.uint8, (1 << 60,), Layout.of_one(0))})
        with pytest.raises(DamagedError, match="rank 0 wrote a piece"):  # before there is memory for it
            ShardedTensors(huge, lambda _: []).tensor("x")

        def only(tensor: torch.Tensor | Shard, _: int) -> list[TensorFile]:
            return [opened(file_of(x=tensor))]

        for wrong in (
            Shard(whole[:2], (4, 2), (1, 0)),
            Shard(whole[:2], (5, 2), (0, 0)),
            whole[:3],
            whole[:2].double(),
        ):
            with pytest.raises(DamagedError, match="does not match the checkpoint's shard table: its x is"):
                ShardedTensors(table, partial(only, wrong)).tensor("x")


class TestTensors:
    def test_memory_is_that_of_the_tensor_and_no_more(self) -> None:
        tensor = torch.arange(4, dtype=torch.int16)
        view = host_bytes(tensor[1:3])
        assert view.tolist() == [1, 0, 2, 0]
        view[0] = 9
        assert tensor[1] == 9
        assert len(host_bytes(torch.zeros(0))) == 0
        assert memory_size(tensor[1:]) == 6
        short = torch.zeros(4).t()
        short.untyped_storage().resize_(8)
        with pytest.raises(UnsupportedError, match="has 8 bytes of memory, but its elements need 16"):
            memory_size(short)
        for lazy in (
            torch.tensor([1 + 2j]).conj(),
            torch.tensor([1 + 2j]).conj().imag,
            torch.arange(6.0).reshape(2, 3).t(),
        ):
            plain = on_host(lazy)
            assert plain is not lazy
            assert plain.equal(lazy)
            assert bytes(host_bytes(plain)) == bytes(
                host_bytes(lazy.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg())
            )

    def test_bits_are_compared_and_boxes_cut(self) -> None:
        nan = torch.tensor([math.nan, 0.0])
        assert same_bytes(nan, nan.clone())
        assert not same_bytes(nan, torch.tensor([math.nan, -0.0]))
        grid = torch.arange(12).reshape(3, 4)
        assert narrowed(grid, [(1, 2), (0, 4)]).equal(grid[1:])
        assert narrowed(grid, [(0, 3), (2, 1)]).equal(grid[:, 2:3])
        assert narrowed(grid, [(0, 3), (0, 4)]) is grid
        target = torch.zeros(2, dtype=torch.float64)
        copy_into(torch.tensor([1.5, 2.0]), target)
        assert target.tolist() == [1.5, 2.0]
        assert Shard.whole(grid).is_whole
        assert not Shard(grid, (6, 4), (0, 0)).is_whole
        assert documents.rank_document(3) == "rank-00003.json"

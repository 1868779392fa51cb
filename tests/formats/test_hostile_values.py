"""Pickles and documents of a few bytes that would fill the memory, overflow the stack or take forever."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import DamagedError
from ckpt.formats.foreign import dcp
from ckpt.formats.foreign.torch_save import ALLOWED, find_tensor, read_pickle, read_values
from ckpt.formats.native.documents import Decoder, decode_inline, from_json, parts_in
from tests.helpers.file_in_memory import FileInMemory
from tests.helpers.forgery import alter_json
from tests.helpers.torch_archives import Call, archive, pickled, tensor


def values(data: bytes) -> Any:
    return read_values(FileInMemory(data), 0, len(data), "value.pt")


def nested_key(depth: int) -> bytes:
    """A dict whose key is a tuple in a tuple in a tuple."""
    return b"\x80\x02}" + b"K\x01" + b"\x85" * depth + b"K\x02s."


def laughs(depth: int, *, tuples: bool) -> bytes:
    """Ten references to ten references to ..."""
    text = b"\x80\x02K\x01\x85q\x00" if tuples else b"\x80\x02]q\x00"
    for level in range(depth):
        refer = b"h%c" % level
        text += (b"(" + refer * 10 + b"t" if tuples else b"](" + refer * 10 + b"e") + b"q%c" % (level + 1)
    return text + b"."


def as_key(data: bytes) -> bytes:
    """The dict whose only key a pickle is."""
    return b"\x80\x02}" + data[2:-1] + b"K\x02s."


class TestPickles:
    @pytest.mark.parametrize(
        "data",
        [
            nested_key(2),
            as_key(laughs(8, tuples=True)),
            laughs(8, tuples=True),
            laughs(8, tuples=False),
            b"\x80\x02" + b"]" * 200 + b"a" * 199 + b".",
            b"\x80\x02K\x01" + b"\x85" * 200 + b".",
            b"\x80\x02]q\x00h\x00a.",
            b"\x80\x02}q\x00K\x01h\x00s.",
            pickled({frozenset((1, 2)): 3}, 4),
            b"\x80\x04\x8f(K\x01\x85\x85\x90.",  # a set of a tuple in a tuple
            b"\x80\x04(K\x01\x85\x85\x91.",  # and a frozenset
            b"\x80\x02}(K\x01\x85\x85K\x02u.",
            b"(K\x01\x85\x85K\x02d.",
            b"\x80\x02}" + b"(" + b"K\x01" * 100 + b"tK\x02s.",
            pickled({1 << 5000: 1}),
            pickled({((1,),)}),
            pickled(Call(OrderedDict, [(((1,),), 2)])),
            pickled(Call(deque, Call(range, 10))),
            pickled(Call(set, Call(range, 10))),
            pickled(Call(Counter, "text")),
            b"\x80\x02K\x01K\x02R.",
            b"\x80\x02]K\x01K\x02s.",
            b"\x80\x02}K\x01a.",
            b"\x80\x02" + b"h\x05.",
            b"\x80\x02" + b"0" * 10 + b".",
            b"I" + b"9" * 10_000 + b"\n.",
            b"",
        ],
        ids=lambda data: repr(data[:24]),
    )
    def test_a_few_bytes_do_not_stop_the_process(self, data: bytes) -> None:
        names = {*ALLOWED, "builtins.range", "__builtin__.xrange", "__builtin__.frozenset"}
        with pytest.raises(DamagedError):
            read_pickle(data, names, "here")
        with pytest.raises(DamagedError):
            values(archive(data))
        with pytest.raises(DamagedError):
            dcp.read_metadata(data, ".metadata")

    @pytest.mark.parametrize(
        "value",
        [
            Call(frozenset, Call(range, 1000)),
            Call(torch.Size, Call(range, 1000)),
            Call(torch.Size, [1, "2"]),
            Call(bytearray, 1 << 10),
            Call(bytearray, np.int64(1 << 10)),
            Call(bytearray, Call(range, 1000)),
            Call(bytes, Call(range, 1000)),
            Call(bytes, [1, 2]),
            Call(bytearray, "text", "utf-7"),
            Call(torch.device, "nonsense"),
            Call(torch.device, "cpu", "cpu", "cpu"),
            Call(complex, [1]),
            Call(range, 1.5),
            Call(np.dtype, Call(range, 1000)),
            Call(np.dtype, "O"),
            Call(np.dtype, "i4,O"),
            {"a": Call(frozenset, [[1]])},
        ],
        ids=itertools.count(),
    )
    def test_what_a_call_would_make_is_bounded(self, value: Any) -> None:
        with pytest.raises(DamagedError):
            values(archive(value))

    def test_values_like_these_that_are_right_are_read(self) -> None:
        right = [
            {(1, "a", None): 2, b"b": 3, 2.5: 4, True: 5},
            frozenset(("a", "b")),
            torch.Size((2, 3)),
            bytearray(b"12"),
            b"34",
            OrderedDict(a=1),
            Counter("aab"),
            deque([1, 2], 5),
            range(10**12),
            [[[[[["deep"]]]]]],
            ["shared"] * 1000,
        ]
        for protocol in (2, 4):
            found = values(archive(pickled(right[1:], protocol)))
            assert found == right[1:]
            assert values(archive(pickled(right[0], protocol))) == right[0]

    def test_the_same_bytes_are_not_copied_over_and_over(self) -> None:
        rows = np.frombuffer(bytes(100_000), dtype=np.uint8)
        rebuild, arguments, state = tuple(rows.__reduce__())

        class Array:
            def __reduce__(self) -> Any:
                return rebuild, arguments, state

        with pytest.raises(DamagedError, match="more references to the same objects"):
            values(archive(pickled([Array() for _ in range(5000)], 4)))  # 500 MB of 300 kB

    @pytest.mark.parametrize("name", ["data.pkl", "byteorder"])
    def test_nothing_of_an_archive_is_decompressed(self, name: str) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as file:
            for entry in ("data.pkl", "byteorder"):
                kind = zipfile.ZIP_DEFLATED if entry == name else zipfile.ZIP_STORED
                file.writestr(f"x/{entry}", b"little" if entry == "byteorder" else b"N.", compress_type=kind)
        with pytest.raises(DamagedError, match=f"{name} in the archive is compressed"):
            values(buffer.getvalue())


_HOSTILE = """
import resource, sys
import torch
from ckpt.errors import DamagedError
from tests.formats.test_hostile_values import *

resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
sys.setrecursionlimit(1_000_000)  # as some programs do: the stack of C is no longer guarded by it
RANGE = Call(range, 10**10)
for data in (
    archive(nested_key(200_000)), archive(as_key(laughs(40, tuples=True))), archive(laughs(40, tuples=False)),
    archive(b"\\x80\\x02" + b"]" * 200_000 + b"a" * 199_999 + b"."),
    *(archive(Call(kind, RANGE)) for kind in (frozenset, torch.Size, bytes, bytearray)),
    archive(Call(bytearray, 1 << 36)),
):
    try:
        values(data)
    except DamagedError as error:
        print("refused", len(str(error)) < 1000)
data = 1
for _ in range(50_000):
    data = {"$tuple": [data]}
for hostile in ({"$items": [[data, 1]]}, {"$frozenset": {"$range": [0, 10**10, 1]}}):
    try:
        Decoder(lambda name: None).decode(hostile)
    except DamagedError as error:
        print("refused", len(str(error)) < 1000)
"""


@pytest.mark.slow
def test_nothing_crashes_hangs_or_fills_the_memory() -> None:
    """In a process of its own: without the bounds, each of these ends in a crash, in the memory's limit or never."""
    done = subprocess.run([sys.executable, "-c", _HOSTILE], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["refused True"] * 11), done.stderr[-2000:]


class TestTensorsOfTorchSave:
    def test_a_stride_of_zero_does_not_make_gigabytes_of_a_few_bytes(self) -> None:
        data = archive(tensor(torch.float32, (1 << 33,), (0,)), {"0": bytes(40)})
        with pytest.raises(DamagedError, match="claim far more than the"):
            values(data)
        with pytest.raises(DamagedError):
            find_tensor(FileInMemory(data), 0, len(data), "chunk")

    def test_nor_do_many_tensors_of_one_storage(self) -> None:
        many = [tensor(torch.uint8, (1 << 26,), (0,), first=n) for n in range(10)]  # 64 MiB each
        with pytest.raises(DamagedError, match="claim far more than the"):
            values(archive(many, {"0": bytes(64)}))

    def test_an_expanded_tensor_is_read(self, tmp_path: Path) -> None:
        torch.save({"wide": torch.ones(1).expand(1000)}, tmp_path / "value.pt")
        found = values((tmp_path / "value.pt").read_bytes())["wide"]
        assert torch.equal(found.read(found.box), torch.ones(1000))

    @pytest.mark.parametrize(
        ("sizes", "strides", "first"),
        [
            ((65,), (1,), 0), ((64,), (1,), 1), ((2,), (64,), 0), ((-1,), (1,), 0), ((1,), (-1,), 0), ((1,), (1,), -1),
            ((1.5,), (1,), 0), ((1,), (), 0), ((0, 1 << 62, 1 << 62), (1, 1, 1), 0), ((1,) * 65, (1,) * 65, 0),
            ("12", (1, 1), 0), (5, (1,), 0), ((True,), (1,), 0),
        ],
    )  # fmt: skip
    def test_a_tensor_lies_inside_its_storage(self, sizes: Any, strides: Any, first: Any) -> None:
        data = archive(tensor(torch.uint8, sizes, strides, first=first), {"0": bytes(64)})
        with pytest.raises(DamagedError):
            values(data)
        with pytest.raises(DamagedError):
            find_tensor(FileInMemory(data), 0, len(data), "chunk")


PART = {"class": "A", "state": {}}
MANY = {"$range": [0, 1000, 1]}


class TestDocuments:
    @pytest.mark.parametrize(
        "data",
        [
            *({tag: MANY} for tag in ("$tuple", "$set", "$frozenset", "$size", "$ordered", "$counter", "$bytes")),
            {"$deque": [None, MANY]}, {"$deque": MANY}, {"$deque": [1, 2, 3]}, {"$deque": ["a", []]},
            {"$defaultdict": ["list", MANY]}, {"$defaultdict": ["eval", {}]}, {"$defaultdict": [["list"], {}]},
            {"$tuple": 5}, {"$set": [[1]]}, {"$frozenset": [{}]}, {"$size": ["a"]}, {"$size": [1 << 62, 2.5]},
            {"$complex": [1, 2, 3]}, {"$complex": ["a", "b"]}, {"$range": [1, 2, 0]}, {"$range": [1.5, 2, 3]},
            {"$slice": []},
            {"$int": "12z"}, {"$int": 5}, {"$float": "many"}, {"$float": [1]}, {"$str": "gICA"}, {"$bytes": 5},
            {"$bytes": "a"}, {"$dtype": "load"}, {"$dtype": 5}, {"$layout": "nn"}, {"$device": "none"}, {"$device": 5},
            {"$items": 5}, {"$items": [1]}, {"$items": [[1, 2, 3]]}, {"$items": [[[1], 2]]},
            {"$unknown": 1}, {"$items": [[1, 2], [1, 3]]}, {"$": 1}, {"$tensor": ["t"]}, {"$tensor": {}},
            {"$tensor": "absent"},
            {"$strided": 5}, {"$strided": ["t"]}, {"$strided": ["t", 5]}, {"$strided": ["t", [1 << 40]]},
            {"$strided": ["t", [-1]]}, {"$strided": ["t", [0]]}, {"$strided": ["t", [1, 1]]},
            {"$strided": ["absent", [1]]},
            {"$numpy": {}}, {"$numpy": {"dtype": "|O", "shape": [1], "bytes": "AAAAAAAAAAA="}},
            {"$numpy": {"dtype": "<f4", "shape": [1 << 40], "bytes": "AAAA"}},
            {"$numpy": {"dtype": "|V0", "shape": [1 << 40], "bytes": ""}},
            {"$numpy": {"dtype": "<f4", "shape": [-1], "bytes": "AAAAAA=="}},
            {"$numpy": {"dtype": "<f4", "shape": "1", "bytes": "AAAAAA=="}},
            {"$numpy": {"dtype": MANY, "shape": [1], "bytes": "AAAAAA=="}},
            {"$ndarray": {"dtype": "<f4", "shape": [2], "tensor": "t"}}, {"$ndarray": {"dtype": "<f4", "shape": [1]}},
            {"$packed": {}}, {"$packed": {"kind": "os", "tensors": {}, "context": None}},
            {"$packed": {"kind": ["os"], "tensors": {}, "context": None}},
        ],
        ids=lambda data: repr(data)[:80],
    )  # fmt: skip
    def test_no_other_error_leaves_the_decoder(self, data: Any) -> None:
        tensors = {"t": torch.zeros(4, dtype=torch.int8)}
        for wrapped in (data, [data], {"a": {"b": data}}, {"$tuple": [data]}, {"$items": [["key", data]]}):
            with pytest.raises(DamagedError):
                Decoder(tensors.__getitem__).decode(wrapped)

    @pytest.mark.parametrize("around", [lambda data: [data], lambda data: {"$tuple": [data]}, lambda data: {"a": data}])
    def test_what_is_nested_beyond_measure_is_refused(self, around: Any) -> None:
        data: Any = 1
        for _ in range(20_000):
            data = around(data)
        with pytest.raises(DamagedError):
            Decoder(lambda name: None).decode({"$items": [[data, 1]]})

    def test_json_that_is_nested_beyond_measure_is_refused(self) -> None:
        with pytest.raises(DamagedError, match="is not JSON"):
            from_json(b"[" * 1_000_000, "state.json")

    @pytest.mark.parametrize(
        "data", [{}, [], None, 5, {"values": 1}, {"tensors": {}}, {"values": {"$tensor": "t"}, "tensors": 5}]
    )
    def test_inline_state_has_values_and_tensors(self, data: Any) -> None:
        with pytest.raises(DamagedError):
            decode_inline(data)

    @pytest.mark.parametrize(
        "fields",
        [
            {"dtype": "float32", "shape": [1 << 40], "bytes": "AAAAAA=="},
            {"dtype": "float32", "shape": [2], "bytes": "AAAAAA=="},
            {"dtype": "float32", "shape": [], "bytes": ""},
            {"dtype": "float32", "shape": [-1], "bytes": "AAAAAA=="},
            {"dtype": "float32", "shape": 1, "bytes": "AAAAAA=="},
            {"dtype": "float32", "shape": [1], "bytes": 5},
            {"dtype": "float32", "shape": [0, 1 << 62, 1 << 62], "bytes": ""},
            {"dtype": "float32"},
            5,
        ],
    )
    def test_a_tensor_in_a_document_has_the_bytes_of_its_shape(self, fields: Any) -> None:
        with pytest.raises(DamagedError):
            decode_inline({"values": {"$tensor": "t"}, "tensors": {"t": fields}})

    @pytest.mark.parametrize(
        "part",
        [
            5, [], {}, {"class": "A"}, {"state": {}}, {"class": 5, "state": {}}, {**PART, "spread": []},
            {**PART, "differs": 5}, {**PART, "differs": {"tensors": []}},
            {**PART, "differs": {"tensors": {"t": ["a"]}}}, {**PART, "plain": "ab"},
            {**PART, "plain": [[1]]}, {**PART, "about": []},
        ],
    )  # fmt: skip
    def test_a_part_has_what_its_readers_rely_on(self, part: Any) -> None:
        for document in ({"parts": {"a": part}}, {"parts": part}, part):
            if document != {"parts": {}}:
                with pytest.raises(DamagedError, match=r"state\.json is not a valid document"):
                    parts_in(document, "parts", "state.json")


def test_a_table_of_shards_without_anything_is_damage_for_a_conversion_too(tmp_path: Path) -> None:
    with ckpt.StateManager(tmp_path / "run", model=nn.Linear(2, 2)) as manager:
        manager.save_state("a")
    alter_json(tmp_path / "run" / "a" / "state.json", lambda data: data["parts"]["model"].update(spread={}))
    with pytest.raises(DamagedError, match="not a valid shard table"):
        ckpt.convert(tmp_path / "run" / "a", tmp_path / "out", to="accelerate")


@pytest.mark.parametrize("document", ["state.json", "rank-00000.json"])
@pytest.mark.parametrize(
    "hostile", [{"$frozenset": MANY}, {"$items": [[[1], 2]]}, {"$bytes": 5}, {"$tensor": "absent"}], ids=str
)
def test_a_checkpoint_with_such_a_value_changes_nothing(tmp_path: Path, document: str, hostile: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with ckpt.StateManager(tmp_path, model=model, optimizer=optimizer) as manager:
        manager.save_state("a")

    def alter(data: Any) -> None:
        if document == "state.json":
            data["parts"]["optimizer"]["state"]["param_groups"][0]["lr"] = hostile
        else:
            data["state"]["rng"]["values"]["python"] = hostile

    alter_json(tmp_path / "a" / document, alter)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with ckpt.StateManager(tmp_path, model=model, optimizer=optimizer) as manager, pytest.raises(DamagedError):
        manager.load_state("a")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 0.1


def _in_python(state: Any) -> None:
    state["rng"]["values"]["python"] = {"$tuple": [3, {"$tuple": [1, 2]}, None]}


def _in_torch(state: Any) -> None:
    for stored in state["rng"]["tensors"].values():
        stored.update(dtype="uint8", shape=[3], bytes="AAAA")


def _in_numpy(state: Any) -> None:
    state["rng"]["values"]["numpy"]["state"]["pos"] = 1 << 30  # NumPy would read there


def _of_a_loader(state: Any) -> None:
    state["loaders"]["values"] = {"first": {"batches": -1}}


def _of_another_loader(state: Any) -> None:
    state["loaders"]["values"] = {"first": {"layout": {"nonsense": 1}}}


@pytest.mark.parametrize(
    "change",
    [
        _in_python,
        _in_torch,
        _in_numpy,
        _of_a_loader,
        _of_another_loader,
        lambda state: state.pop("rng"),
        lambda state: state.pop("loaders"),
        lambda state: state.update(loaders={"values": 5, "tensors": {}}),
        lambda state: state.update(source={"values": 5, "tensors": {}}),
    ],
)
def test_state_of_a_rank_that_no_generator_or_loader_takes_changes_nothing(tmp_path: Path, change: Any) -> None:
    model = nn.Linear(2, 2)
    with ckpt.StateManager(tmp_path, model=model) as manager:
        manager.save_state("a")
    alter_json(tmp_path / "a" / "rank-00000.json", lambda document: change(document["state"]))
    before, drawn = model.weight.detach().clone(), torch.get_rng_state()
    with ckpt.StateManager(tmp_path, model=model) as manager, pytest.raises(DamagedError, match="rank-00000"):
        manager.load_state("a")
    assert torch.equal(model.weight, before)
    assert torch.equal(torch.get_rng_state(), drawn)

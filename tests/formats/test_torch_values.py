"""What `torch.save` made of plain data comes back as it was, and nothing in it is executed."""

from __future__ import annotations

import collections
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.formats.foreign.torch_save import read_values
from ckpt.root.verify import StoredFile
from ckpt.storage import LocalStorage


def values_of(tmp_path: Path, value: Any) -> Any:
    torch.save(value, tmp_path / "value.pt")
    size = (tmp_path / "value.pt").stat().st_size
    return read_values(StoredFile(LocalStorage(tmp_path), "value.pt"), 0, size, "value.pt")


def test_all_kinds_of_data(tmp_path: Path) -> None:
    value = {
        "numbers": [1, -5, 1 << 90, 1.5, float("inf"), 2 + 3j, True, None],
        "text": ("a", b"\x00\xfe", bytearray(b"xy"), b""),
        "sets": ({1, 2}, frozenset((3,)), set()),
        "torch": (torch.Size((2, 3)), torch.device("cuda", 1), torch.bfloat16),
        "collections": (
            collections.OrderedDict(a=1),
            collections.Counter("aab"),
            collections.deque([1, 2], maxlen=4),
            collections.defaultdict(list, x=[1]),
        ),
        "others": (range(1, 7, 2), slice(1, None, 2)),
        7: "a key that is no text",
    }
    found = values_of(tmp_path, value)
    assert repr(found) == repr(value)
    arrays: list[Any] = [np.arange(6, dtype=dtype).reshape(2, 3) for dtype in ("<u4", ">f8", "i1", "c8")]
    arrays += [
        np.asfortranarray(np.ones((2, 3))),
        np.zeros(0),
        np.float32(0.1),
        np.arange(624, dtype=np.uint32),
    ]
    for found, other in zip(values_of(tmp_path, arrays), arrays, strict=True):
        assert (found.dtype, found.shape, found.tobytes()) == (other.dtype, other.shape, other.tobytes())


def test_a_thing_that_is_referred_to_several_times_is_made_once(tmp_path: Path) -> None:
    value: list[Any] = ["x"]
    for _ in range(10):
        value = [value, value]
    found = values_of(tmp_path, value)
    while isinstance(found[0], list):
        assert found[0] is found[1]
        found = found[0]


def test_what_is_inside_itself_is_refused(tmp_path: Path) -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ckpt.DamagedError, match="contains itself"):
        values_of(tmp_path, value)


def test_a_pickle_that_could_be_of_any_size_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "value.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"]" * 1_000_000)
    size = (tmp_path / "value.pt").stat().st_size
    with pytest.raises(ckpt.DamagedError, match=r"data\.pkl in the archive is compressed"):
        read_values(StoredFile(LocalStorage(tmp_path), "value.pt"), 0, size, "value.pt")


@pytest.mark.parametrize("pickled", [b"c__builtin__\nbytearray\n(I99999999999\ntR.", b"c__builtin__\neval\n(Vx\ntR."])
def test_calls_that_no_data_needs_are_refused(tmp_path: Path, pickled: bytes) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("x/data.pkl", pickled)
    (tmp_path / "value.pt").write_bytes(data.getvalue())
    with pytest.raises(ckpt.DamagedError, match=r"with a number|__builtin__\.eval"):
        read_values(StoredFile(LocalStorage(tmp_path), "value.pt"), 0, len(data.getvalue()), "value.pt")

"""Archives as `torch.save` writes them, around pickles that it would never write."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch


class Call:
    """Is pickled as a call of a function with these arguments."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


class Stored:
    """Is pickled as a reference to a storage of the archive."""

    def __init__(self, key: str, size: int, kind: Any = torch.storage.UntypedStorage) -> None:
        self.reference = ("storage", kind, key, "cpu", size)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.reference if isinstance(value, Stored) else None


def pickled(value: Any, protocol: int = 2) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol).dump(value)
    return buffer.getvalue()


def archive(
    data: bytes | Any, storages: Mapping[str, bytes] | None = None, *, compression: int = zipfile.ZIP_STORED
) -> bytes:
    """An archive with this pickle, or with that of a value."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr("archive/data.pkl", data if isinstance(data, bytes) else pickled(data))
        file.writestr("archive/byteorder", "little")
        for key, content in (storages or {}).items():
            file.writestr(f"archive/data/{key}", content)
    return buffer.getvalue()


def tensor(
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...] = (1,),
    *,
    key: str = "0",
    size: int = 64,
    first: int = 0,
) -> Call:
    """A tensor over a storage, as it is pickled by the name of its dtype."""
    rebuild = torch._utils._rebuild_tensor_v3
    return Call(rebuild, Stored(key, size), first, sizes, strides, False, OrderedDict(), dtype)

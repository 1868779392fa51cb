"""Plain data that `torch.save` wrote, as the values that were saved. The pickle is not executed.

Supported are containers, numbers, text, NumPy arrays, and torch's dtypes, devices and sizes. Tensors become
`PiecedTensor`s, which are read when they are needed. Any other name in the pickle is refused.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Container
from typing import Any

import torch

from ckpt.formats.foreign.pickle_bounds import Described
from ckpt.formats.foreign.pickle_reader import CONTAINERS, FACTORIES
from ckpt.formats.foreign.torch_save import DTYPES, TENSORS, TorchArchive, is_tensor, open_archive
from ckpt.formats.layout import Box
from ckpt.formats.pieces import Piece, PiecedTensor
from ckpt.formats.transfers import ByteReader

_ARRAY = ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")
_SCALAR = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")
_DTYPE = "numpy.dtype"
_KINDS = "biufcSU"  # of NumPy: numbers and text; never objects


def read_values(reader: ByteReader, start: int, length: int, where: str, allowed: Container[str] | None = None) -> Any:
    """The value that was saved to these bytes of a file. Other names that are `allowed` remain `Described`."""
    with open_archive(reader, start, length, where, "no plain data of torch.save") as archive:
        return _ValueBuilder(archive).built(archive.described(ALLOWED if allowed is None else allowed))


class _ValueBuilder:
    """Builds the values that a pickle describes, each object once however often it is referenced."""

    def __init__(self, archive: TorchArchive) -> None:
        self._archive = archive
        self._done: dict[int, Any] = {}
        self._kept: list[Any] = []  # or a new object could get the identity of one that was freed

    def built(self, value: Any) -> Any:
        if id(value) not in self._done:
            self._kept.append(value)
            self._done[id(value)] = self._build(value)
        return self._done[id(value)]

    def _build(self, value: Any) -> Any:
        if is_tensor(value):
            return self._tensor(value)
        if isinstance(value, Described):
            return _named(Described(value.name, self.built(value.arguments), self.built(value.state)))
        if isinstance(value, defaultdict):
            return defaultdict(value.default_factory, self._items(value))
        if isinstance(value, dict):  # also OrderedDict and Counter
            return type(value)(self._items(value))
        if isinstance(value, deque):
            return deque(map(self.built, value), value.maxlen)
        if isinstance(value, list | tuple | set | frozenset):
            return type(value)(map(self.built, value))
        return value

    def _items(self, value: dict[Any, Any]) -> dict[Any, Any]:
        return {self.built(key): self.built(item) for key, item in value.items()}

    def _tensor(self, found: Described) -> PiecedTensor:
        region = self._archive.region(found)
        whole = Box((0,) * len(region.sizes), region.sizes)
        return PiecedTensor(region.dtype, region.sizes, () if whole.is_empty else (Piece(whole, region),))


def _named(found: Described) -> Any:
    if found.name in DTYPES:
        return DTYPES[found.name]
    if found.name in _BUILDERS:
        return _BUILDERS[found.name](found)
    return found  # a class of NumPy, which only occurs in the description of an array


def _encoded(found: Described) -> bytes:
    text, encoding = map(_text, found.arguments)
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"it encodes bytes as {encoding!r}")
    return text.encode("latin-1")


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"a {type(value).__name__} stands where text should")
    return value


def _bytes(found: Described) -> Any:
    kinds = [type(argument) for argument in found.arguments]
    if kinds not in ([], [bytes], [str, str]):
        raise ValueError("it asks for bytes by their number")  # bytes(n) could exhaust the memory
    data = _encoded(found) if len(kinds) == 2 else b"".join(found.arguments)
    return bytearray(data) if found.name.endswith("bytearray") else data


def _listed(kind: Callable[..., Any]) -> Callable[[Described], Any]:
    """Built from a list that is there: one of a range could exhaust the memory."""

    def build(found: Described) -> Any:
        if any(type(argument) not in (list, tuple, set) for argument in found.arguments):
            raise ValueError(f"it asks for a {kind.__name__} of what is no list")
        return kind(*found.arguments)

    return build


def _array_dtype(found: Described) -> Any:
    import numpy as np

    dtype = np.dtype(_text(found.arguments[0]))
    if dtype.kind not in _KINDS:
        raise ValueError(f"it has an array of {dtype}, which is more than numbers and text")
    order: Any = found.state[1] if found.state else "|"
    return dtype.newbyteorder(order) if order in ("<", ">") else dtype


def _array(found: Described) -> Any:
    import numpy as np

    _, shape, dtype, by_columns, data = found.state
    array = np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if by_columns else "C")
    return array.copy()  # writable, unlike a view of the bytes


def _scalar(found: Described) -> Any:
    import numpy as np

    dtype, data = found.arguments
    return np.frombuffer(data, dtype=dtype)[0]


def _call(kind: Callable[..., Any]) -> Callable[[Described], Any]:
    return lambda found: kind(*found.arguments)


_PLAIN: dict[str, Callable[..., Any]] = {
    f"{home}.{kind.__name__}": kind for home in ("builtins", "__builtin__") for kind in (complex, slice)
} | {"builtins.range": range, "__builtin__.xrange": range}
_BYTES = [f"{home}.{name}" for home in ("builtins", "__builtin__") for name in ("bytes", "bytearray")]
_BUILDERS: dict[str, Callable[[Described], Any]] = {
    **{name: _call(kind) for name, kind in _PLAIN.items()},
    **dict.fromkeys(_BYTES, _bytes),
    **{f"{home}.frozenset": _listed(frozenset) for home in ("builtins", "__builtin__")},
    "torch.Size": _listed(torch.Size),
    "torch.device": _call(torch.device),
    "_codecs.encode": _encoded,
    _DTYPE: _array_dtype,
    **dict.fromkeys(_ARRAY, _array),
    **dict.fromkeys(_SCALAR, _scalar),
}
ALLOWED = frozenset((*TENSORS, *CONTAINERS, *FACTORIES, *_BUILDERS, "numpy.ndarray"))

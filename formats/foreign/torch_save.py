"""Files of `torch.save`: the place of every tensor's bytes, and the values that were saved. Pickles are read as data.

A pickle is a program that names classes and functions and calls them. This interpreter follows its opcodes, imports,
builds and calls nothing, and puts a `Described` with the name and the arguments where the pickle would call something.
A name that the caller did not allow is an error, so a file of another kind than expected is refused.

A few bytes can describe more than memory holds, deeper than a stack is. Objects may be shared: ten lists, each of ten
references to the one before, are ten billion items to whoever goes through them. So every object is counted as often
as it is referred to, and there are bounds.

Of values, containers, numbers, text, NumPy arrays, and torch's dtypes, devices and sizes are supported. Tensors become
`PiecedTensor`s, which are read when they are needed.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import CkptError, DamagedError
from ckpt.formats.checks import checked_shape, checked_sizes, damage_reported, of_type, reach, reason
from ckpt.formats.layout import Box
from ckpt.formats.native import tensor_file
from ckpt.formats.pieces import Piece, PiecedTensor, Region
from ckpt.formats.tensors import ByteReader, FolderReader

DEEPEST = 100  # levels, as of what ckpt saves
_LONGEST_KEY = 64  # items of a tuple
_WIDEST_KEY = 1024  # bits of an integer
_PER_BYTE = 8  # nodes for each byte of the pickle: an item needs at least one, unless it is shared
_ALWAYS_NODES = 1_000_000  # nodes, however short the pickle is


@dataclass(eq=False)
class Described:
    """An object that a pickle names, with the `arguments` of its call and the `state` it is given, if any."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None


_SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes))


def checked_key(key: Any) -> Any:
    """A key of a dict or an item of a set: hashing tuples inside tuples overflows the stack, or takes forever."""
    if isinstance(key, Described) or _is_scalar(key):
        return key
    if type(key) is tuple and len(key) <= _LONGEST_KEY and all(map(_is_scalar, key)):
        return key
    raise ValueError(
        f"a key of a dict is a {type(key).__name__}, but ckpt reads only numbers, strings and short tuples of these"
    )


def _is_scalar(key: Any) -> bool:
    return type(key) in _SCALARS and (type(key) is not int or key.bit_length() <= _WIDEST_KEY)


def check_bounds(value: Any, length: int, where: str) -> None:
    """Refuse what is inside itself, nested too deep, or much larger than a pickle of that length can be by itself."""
    _Measure(_ALWAYS_NODES + _PER_BYTE * length, where).of(value, 0)


class _Measure:
    """Counts the nodes of a value, and its levels. Each object is gone through once."""

    def __init__(self, limit: int, where: str) -> None:
        self._limit = limit
        self._where = where
        self._done: dict[int, tuple[int, int]] = {}  # nodes and levels of each object, by its identity
        self._enclosing: set[int] = set()

    def of(self, value: Any, depth: int) -> tuple[int, int]:
        if id(value) in self._done:
            return self._done[id(value)]
        if depth > DEEPEST or id(value) in self._enclosing:
            self._refuse("a value that contains itself, or is nested too deeply")
        self._enclosing.add(id(value))
        nodes, levels = _own_nodes(value), 0
        for child in _children(value):
            if type(child) in _SCALARS:
                nodes += _own_nodes(child)
            else:
                more, below = self.of(child, depth + 1)
                nodes, levels = nodes + more, max(levels, 1 + below)
        if levels > DEEPEST:
            self._refuse("a value that contains itself, or is nested too deeply")
        if nodes > self._limit:
            self._refuse("more references to the same objects than a file of its size should")
        self._enclosing.discard(id(value))
        self._done[id(value)] = nodes, levels
        return nodes, levels

    def _refuse(self, what: str) -> None:
        raise DamagedError(f"{self._where} holds {what}.")


def _own_nodes(value: Any) -> int:
    if type(value) is bytes:
        return 1 + len(value) // 2
    return 1 + len(value) // 32 if type(value) is str else 1


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, Described):
        yield from (value.arguments, value.state)
    elif isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value


PERSISTENT = "<persistent>"  # the name of a reference to data outside the pickle


class _EveryName:
    """Allows every name: objects that the caller does not know remain `Described`, without what is put into them."""

    def __contains__(self, name: object) -> bool:
        return True


EVERY_NAME = _EveryName()


def read_pickle(data: bytes, allowed: Container[str], where: str) -> Any:
    """What a pickle describes. `allowed` are the full names it may contain; `where` names the file in errors.

    However it is gone through, that takes no more than in proportion to its length: see `check_bounds`.
    """
    with damage_reported(where, "pickle"):
        found = _Machine(allowed, where).run(data)
        check_bounds(found, len(data), where)
        return found


@dataclass
class _Machine:
    """Interprets the opcodes that Python's pickler writes for plain data and objects."""

    allowed: Container[str]
    where: str
    stack: list[Any] = field(default_factory=list)
    below: list[list[Any]] = field(default_factory=list)  # the stacks under each mark
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return self.stack.pop()
            self._follow(opcode.name, argument)
        raise ValueError("the pickle has no end")

    def _follow(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            self.stack[-_TUPLES[name] :] = [tuple(self.stack[-_TUPLES[name] :])]
        elif name in _STEPS:
            getattr(self, f"_{name.lower()}")()
        elif name in _NUMBERED:
            getattr(self, _NUMBERED[name])(argument)
        elif name not in _IGNORED:
            raise ValueError(f"the pickle uses the opcode {name}, which saved state never needs")

    def _mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def _since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def _tuple(self) -> None:
        items = self._since_mark()
        self.stack.append(tuple(items))

    def _list(self) -> None:
        items = self._since_mark()
        self.stack.append(items)

    def _dict(self) -> None:
        items = self._since_mark()
        self.stack.append(dict(_pairs(items)))

    def _frozenset(self) -> None:
        items = self._since_mark()
        self.stack.append(frozenset(map(checked_key, items)))

    def _append(self) -> None:
        item = self.stack.pop()
        self._target(list, deque).append(item)

    def _appends(self) -> None:
        items = self._since_mark()
        self._target(list, deque).extend(items)

    def _additems(self) -> None:
        items = self._since_mark()
        self._target(set).update(map(checked_key, items))

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._target(dict)[checked_key(key)] = value

    def _setitems(self) -> None:
        items = self._since_mark()
        target = self._target(dict)
        for key, value in _pairs(items):
            target[key] = value

    def _target(self, *kinds: type) -> Any:
        """The container to fill. What an unknown class of a container is filled with is not kept."""
        target = self.stack[-1]
        unknown = self.allowed is EVERY_NAME and isinstance(target, Described)
        return kinds[0]() if unknown else _of(target, *kinds)

    def _pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._since_mark()

    def _pop_mark(self) -> None:
        self._since_mark()

    def _memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def _get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def _global(self, spaced: str) -> None:
        self.stack.append(self._named(spaced.replace(" ", ".", 1)))

    def _stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(self._named(f"{module}.{name}"))

    def _named(self, name: str) -> Described:
        if name not in self.allowed:
            raise DamagedError(
                f"{self.where} names {name!r}, which such a file does not need. ckpt did not execute it. "
                "Don't load this file with anything else unless you trust whoever wrote it."
            )
        return Described(name)

    def _reduce(self) -> None:
        arguments, called = _of(self.stack.pop(), tuple), _of(self.stack.pop(), Described)
        make = CONTAINERS.get(called.name)
        self.stack.append(make(*arguments) if make else Described(called.name, arguments))

    _newobj = _reduce

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], OrderedDict):
            return  # the `_metadata` of a module's state_dict(): versions of its classes, not state
        if not isinstance(self.stack[-1], Described):
            raise TypeError(f"the pickle sets the state of a {type(self.stack[-1]).__name__}")
        self.stack[-1].state = state

    def _binpersid(self) -> None:
        self.stack.append(Described(PERSISTENT, (self.stack.pop(),)))


def _of(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"a {type(value).__name__} stands where a {kinds[0].__name__} should")
    return value


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Keys and values, which follow each other."""
    return zip(map(checked_key, items[::2]), items[1::2], strict=True)


def _ordered(items: Any = ()) -> OrderedDict[Any, Any]:
    return OrderedDict((checked_key(key), value) for key, value in _of(items, list, tuple))


def _counter(counts: Any = None) -> Counter[Any]:
    return Counter(_of(counts or {}, dict))


def _deque(items: Any = (), length: int | None = None) -> deque[Any]:
    return deque(_of(items, list, tuple), length)


def _set(items: Any = ()) -> set[Any]:
    return set(map(checked_key, _of(items, list, tuple)))


def _defaultdict(factory: Described | None = None) -> defaultdict[Any, Any]:
    return defaultdict(_FACTORIES[factory.name] if factory else None)


_BUILTIN = ("builtins", "__builtin__")  # in Python 3 and Python 2
_FACTORIES: dict[str, type] = {
    f"{home}.{kind.__name__}": kind for home in _BUILTIN for kind in (int, float, str, list, dict, set)
}
# built for real, because the pickle fills them after their construction; all of them are plain containers
CONTAINERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered,
    "collections.Counter": _counter,
    "collections.defaultdict": _defaultdict,
    "collections.deque": _deque,
    **{f"{home}.set": _set for home in _BUILTIN},
}
FACTORIES = frozenset(_FACTORIES)

_LITERALS = frozenset((
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
))  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, type] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_STEPS = frozenset((
    "MARK", "TUPLE", "LIST", "DICT", "FROZENSET", "APPEND", "APPENDS", "ADDITEMS", "SETITEM", "SETITEMS", "POP",
    "POP_MARK", "MEMOIZE", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID",
))  # fmt: skip
_NUMBERED = {
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), "_put"),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), "_get"),
    "GLOBAL": "_global",
}
_IGNORED = frozenset(("PROTO", "FRAME"))

ARCHIVE = b"PK\x03\x04"  # what a file of torch.save begins with
_ENDS = 4096  # bytes at either end, which usually hold all of the archive except the data
_MOST_TIES = 16  # tensors may share storages, and each of them is read
_ALWAYS = 256 << 20  # bytes of tensors, however small an archive is: one element may be expanded to many
_LOCAL_HEADER = struct.Struct("<26xHH")  # skips to the lengths of the name and of the extra field
_REBUILD = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_PARAMETER = "torch._utils._rebuild_parameter"
_TYPED = "torch._tensor._rebuild_from_type_v2"  # of a tensor that has attributes, which are not read
_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter")
_UNTYPED = "torch.storage.UntypedStorage"
_STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
}
DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
TENSORS = frozenset(
    (*_REBUILD, _PARAMETER, _TYPED, *_CLASSES, _UNTYPED, *_STORAGES, *DTYPES, "collections.OrderedDict")
)


def find_tensor(reader: ByteReader, start: int, length: int, where: str) -> Region:
    """The place of the single tensor that `torch.save` wrote to these bytes of a file. Reads only a few kB."""
    with open_archive(reader, start, length, where, "no valid tensor of torch.save") as archive:
        region = archive.region(archive.described(TENSORS))
        if region.nbytes > length:
            raise ValueError(f"{length} bytes can't hold a tensor of {region.nbytes} bytes")
        return region


def is_tensor(found: Any) -> bool:
    """Whether a value that was read from a pickle describes a tensor."""
    return isinstance(found, Described) and found.name in (*_REBUILD, _PARAMETER, _TYPED)


@contextmanager
def open_archive(reader: ByteReader, start: int, length: int, where: str, not_found: str) -> Iterator[TorchArchive]:
    """The archive in these bytes of a file. Any defect raises one `DamagedError`: the file holds `not_found`."""
    window = _FileWindow(reader, start, length)
    try:
        with zipfile.ZipFile(window) as archive:
            yield TorchArchive(window, archive, where)
    except CkptError:
        raise
    except Exception as error:  # of zipfile, of zlib, of torch: hostile bytes raise errors of any kind
        cut_off = isinstance(error, zipfile.BadZipFile) and window.begins_an_archive
        why = "the archive was cut off" if cut_off else reason(error)
        raise DamagedError(f"{where} has {not_found} at byte {start}: {why}.") from error


class TorchArchive:
    """An archive of `torch.save`: a pickle, and the bytes of every storage."""

    def __init__(self, window: _FileWindow, archive: zipfile.ZipFile, where: str) -> None:
        self._window = window
        self._archive = archive
        self._where = where
        self._root = archive.namelist()[0].partition("/")[0]
        self._room = _ALWAYS + _MOST_TIES * window.length  # bytes that its tensors may have together
        order = f"{self._root}/byteorder"
        if order in archive.namelist() and self._bytes(order) != b"little":
            raise ValueError("the file's byte order differs from this machine's")

    def described(self, allowed: Container[str]) -> Any:
        """What the pickle describes. `allowed` are the names that it may contain."""
        return read_pickle(self._bytes(f"{self._root}/data.pkl"), allowed, self._where)

    def _bytes(self, name: str) -> bytes:
        entry = self._archive.getinfo(name)
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > self._window.length:
            raise ValueError(f"{name.rpartition('/')[2]} in the archive is compressed, so it could unpack to any size")
        return self._archive.read(entry)

    def region(self, found: Any) -> Region:
        """The place of the bytes of a tensor that the pickle describes."""
        saved = _TensorRecord.described(found)
        entry = self._archive.getinfo(f"{self._root}/data/{saved.key}")
        if saved.stop > entry.file_size or entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(
                f"a tensor of {saved.stop} bytes can't be stored in {entry.file_size} bytes, compressed or not"
            )
        data = self._window.start + self._window.data_of(entry.header_offset, entry.file_size)
        region = Region(self._window.reader, self._where, saved.dtype, data + saved.start, saved.sizes, saved.strides)
        self._room -= region.nbytes
        if self._room < 0:
            raise ValueError(f"its tensors claim far more than the {self._window.length} bytes of the file")
        return region


@dataclass(frozen=True)
class _TensorRecord:
    """A tensor in the pickle: the key of its storage, and which elements of that it is."""

    key: str
    dtype: torch.dtype
    first: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def described(cls, found: Described) -> _TensorRecord:
        if found.name == _PARAMETER:
            found = found.arguments[0]
        if found.name == _TYPED:
            found = _without_attributes(found)
        if found.name not in _REBUILD:
            raise ValueError(f"the pickle describes {found.name}, not a tensor")
        storage, first, sizes, strides, _, _, *rest = found.arguments
        if storage.name != PERSISTENT:
            raise ValueError(f"a tensor has {storage.name} as its storage")
        _, kind, key, _, _ = storage.arguments[0]
        dtype = _dtype(kind.name, rest, typed=found.name == _REBUILD[0])
        return cls(str(key), dtype, *_checked(first, sizes, strides))

    @property
    def start(self) -> int:
        return self.first * self.dtype.itemsize

    @property
    def stop(self) -> int:
        return self.start + reach(self.sizes, self.strides) * self.dtype.itemsize


def _without_attributes(found: Described) -> Described:
    rebuild, kind, arguments, _ = found.arguments
    if kind.name not in _CLASSES:
        raise ValueError(f"the pickle describes {kind.name}, not a tensor")
    return Described(rebuild.name, arguments)


def _dtype(storage: str, rest: list[Any], *, typed: bool) -> torch.dtype:
    if typed:
        if any(rest):
            raise ValueError("a tensor is lazily conjugated or negated, and ckpt can't read such tensors")
        return _STORAGES[storage]
    return stored_dtype(rest[0].name)


def stored_dtype(name: str) -> torch.dtype:
    """The dtype of a tensor by its name in a pickle: `torch.float32`."""
    return tensor_file.dtype_of(tensor_file.dtype_name(DTYPES[name]))


def _checked(first: Any, sizes: Any, strides: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    if len(sizes) != len(strides):
        raise ValueError(f"a tensor can't have {len(sizes)} sizes and {len(strides)} strides")
    return checked_sizes([first])[0], checked_shape(sizes), checked_sizes(strides)


class _FileWindow:
    """A range of a file, as a file object for `zipfile`. Both ends are read once: they hold all of a small archive."""

    def __init__(self, reader: ByteReader, start: int, length: int) -> None:
        self.start = start
        self.reader = reader
        self.length = length
        self._at = 0
        self._tail_at = max(0, length - _ENDS)
        self._tail = reader.read(start + self._tail_at, start + length)
        self._head = reader.read(start, start + min(length, _ENDS))

    @property
    def begins_an_archive(self) -> bool:
        return self._head.startswith(ARCHIVE)

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self.length)[whence]
        if self._at < 0:
            raise ValueError("an offset points before the first byte of the file")
        return self._at

    def read(self, count: int = -1) -> bytes:
        stop = self.length if count < 0 else min(self.length, self._at + count)
        found = self._between(self._at, stop)
        self._at = max(self._at, stop)
        return found

    def _between(self, start: int, stop: int) -> bytes:
        if start >= self._tail_at:
            return self._tail[start - self._tail_at : stop - self._tail_at]
        if stop <= len(self._head):
            return self._head[start:stop]
        return self.reader.read(self.start + start, self.start + stop)

    def data_of(self, header: int, length: int) -> int:
        """The offset of an entry's data."""
        name, extra = _LOCAL_HEADER.unpack(self._between(header, header + _LOCAL_HEADER.size))
        data: int = header + _LOCAL_HEADER.size + name + extra
        if data + length > self.length:
            raise ValueError("the archive ends in the middle of a file")
        return data


_ARRAY = ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")
_SCALAR = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")
_DTYPE = "numpy.dtype"
_KINDS = "biufcSU"  # of NumPy: numbers and text; never objects


def read_values(reader: ByteReader, start: int, length: int, where: str, allowed: Container[str] | None = None) -> Any:
    """The value that was saved to these bytes of a file. Other names that are `allowed` remain `Described`."""
    with open_archive(reader, start, length, where, "no valid data of torch.save") as archive:
        return _ValueBuilder(archive).built(archive.described(ALLOWED if allowed is None else allowed))


def read_file(folder: FolderReader, path: str, allowed: Container[str] | None = None) -> Any:
    """The value in a file of a folder, with tensors that have not been read."""
    return read_values(folder.opened(path), 0, folder.files[path], f"{folder.where}/{path}", allowed)


class NamesOf:
    """The names of plain data, of arguments, and those that begin so, which remain descriptions."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __contains__(self, name: object) -> bool:
        return name in ALLOWED or name == "argparse.Namespace" or str(name).startswith(self._prefix)


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
    text, encoding = (of_type(str, argument) for argument in found.arguments)
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"the pickle encodes bytes as {encoding!r}, but ckpt reads only latin-1")
    return text.encode("latin-1")


def _bytes(found: Described) -> Any:
    kinds = [type(argument) for argument in found.arguments]
    if kinds not in ([], [bytes], [str, str]):
        raise ValueError("the pickle calls bytes() with a number")  # bytes(n) could exhaust the memory
    data = _encoded(found) if len(kinds) == 2 else b"".join(found.arguments)
    return bytearray(data) if found.name.endswith("bytearray") else data


def _listed(kind: Callable[..., Any]) -> Callable[[Described], Any]:
    """Built from a list that is there: one of a range could exhaust the memory."""

    def build(found: Described) -> Any:
        if any(type(argument) not in (list, tuple, set) for argument in found.arguments):
            raise ValueError(f"the pickle builds a {kind.__name__} from something that is not a list")
        return kind(*found.arguments)

    return build


def _array_dtype(found: Described) -> Any:
    import numpy as np

    dtype = np.dtype(of_type(str, found.arguments[0]))
    if dtype.kind not in _KINDS:
        raise ValueError(f"the pickle has an array of {dtype}, but ckpt reads only arrays of numbers or strings")
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

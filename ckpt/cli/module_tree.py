"""The tensors of a part as a tree of modules, equal ones folded into one line."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ckpt.formats.native.header import Outline
from ckpt.util.console import format_size, format_table

_BITS = re.compile(r"\d+")
_DEEPEST = 60  # modules in each other: a file may claim anything
_LONGEST_NUMBER = 9  # digits
_COLUMNS = ("parameters", "size", "dtype", "shape")
T = TypeVar("T")


@dataclass
class Module(Generic[T]):
    """A module: what is known of the tensors of its own, and the modules in it, by their names."""

    tensors: dict[str, T] = field(default_factory=dict)
    modules: dict[str, Module[T]] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, T]) -> Module[T]:
        top = cls()
        for name, tensor in tensors.items():
            *path, last = name.split(".", _DEEPEST)
            module = top
            for word in path:
                module = module.modules.setdefault(word, cls())
            module.tensors[last] = tensor
        return top

    @property
    def shape(self) -> str:
        """Equal for two modules with tensors of the same `repr` in the same places."""
        inside = [f"{name}:{tensor!r}" for name, tensor in self.tensors.items()]
        inside += [f"{name}({module.shape})" for name, module in self.modules.items()]
        return ",".join(inside)

    @property
    def all_tensors(self) -> Iterator[T]:
        yield from self.tensors.values()
        for module in self.modules.values():
            yield from module.all_tensors

    def folded(self) -> Iterator[tuple[str, list[str]]]:
        """The names of the modules in it, those in a row that are numbered and equal in one group: `0-11`."""
        waiting = deque(self.modules.items())
        while waiting:
            first, module = waiting.popleft()
            names, shape = [first], module.shape
            while waiting and _follows(waiting[0][0], names[-1]) and waiting[0][1].shape == shape:
                names.append(waiting.popleft()[0])
            yield first if len(names) == 1 else f"{first}-{names[-1]}", names


def tree_lines(title: str, tensors: Mapping[str, Outline], depth: int) -> Iterator[str]:
    """A table: modules down to a depth, and the tensors of those that are not cut off there."""
    rows = list(_rows(Module.of(tensors), depth, 0, 1))
    yield from format_table((title, *_COLUMNS), rows, _COLUMNS[:2])


def _rows(module: Module[Outline], depth: int, level: int, times: int) -> Iterator[tuple[str, ...]]:
    indent = "  " * level
    for name, tensor in module.tensors.items():
        size = "tied" if tensor.tied else format_size(times * _size(tensor))
        shape = f"[{', '.join(map(str, tensor.shape))}]"
        yield f"{indent}{name}", f"{times * _elements(tensor):,}", size, tensor.dtype, shape
    for name, names in module.folded():
        inside, count = module.modules[names[0]], len(names)
        found, all_of_them = list(inside.all_tensors), times * count
        dtypes = ", ".join(dict.fromkeys(tensor.dtype for tensor in found))
        counted = f"{indent}{name}" + (f"  ({count} equal)" if count > 1 else "")
        elements = f"{all_of_them * sum(map(_elements, found)):,}"
        yield counted, elements, format_size(all_of_them * sum(map(_size, found))), dtypes, ""
        if level + 1 < depth:
            yield from _rows(inside, depth, level + 1, all_of_them)


def _follows(name: str, before: str) -> bool:
    numbers = [word for word in (name, before) if word.isdecimal() and len(word) <= _LONGEST_NUMBER]
    return len(numbers) == 2 and int(name) == int(before) + 1


def _elements(tensor: Outline) -> int:
    return 0 if tensor.tied else math.prod(tensor.shape)


def _size(tensor: Outline) -> int:
    bits = _BITS.search(tensor.dtype)  # float8_e4m3fn has 8; bool has no number
    return -(-_elements(tensor) * (int(bits.group()) if bits else 8) // 8)

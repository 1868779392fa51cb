"""A disk after a power failure, from a record of what was done to it.

The model is pessimistic. Of a file's bytes, those that no fsync has covered may be there, be torn, be zero, or be
missing. Of a folder's names, what was created, renamed, linked or removed since the folder's last fsync may or may not
have happened; of changes to one name a later one implies the earlier ones. An fsync of a file says nothing of its name.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaign.calls import NAMES

_HEAD = struct.Struct("<iiiiqqIII4x")
_SECTOR = 512


@dataclass(frozen=True)
class Record:
    """One recorded call. `other` is where a rename or a link comes from; of a mark, `path` is its text."""

    name: str
    pid: int
    fd: int
    flags: int
    offset: int
    size: int
    path: str
    other: str
    data: bytes


def read_trace(path: Path) -> list[Record]:
    return list(_records(path.read_bytes()))


def _records(data: bytes) -> Iterator[Record]:
    at = 0
    while at < len(data):
        op, pid, fd, flags, offset, size, path, other, length = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        first, second, third = (data[at : (at := at + count)] for count in (path, other, length))
        yield Record(NAMES[op], pid, fd, flags, offset, size, first.decode(), second.decode(), third)


@dataclass(eq=False)
class _File:
    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    pending: list[tuple[str, int, bytes]] = field(default_factory=list)

    def change(self, what: str, offset: int, data: bytes) -> None:
        self.pending.append((what, offset, data))
        _apply(self.content, what, offset, data)

    def sync(self) -> None:
        self.durable, self.pending = bytes(self.content), []

    def crashed(self, choice: random.Random) -> bytes:
        mode = choice.choice(("none", "all", "some", "torn"))
        content = bytearray(self.durable)
        for what, offset, data in self.pending:
            if mode == "none" or (mode in ("some", "torn") and choice.random() < 0.5):
                continue
            if mode == "torn" and what == "write":
                data = data[: choice.randrange(len(data) // _SECTOR + 1) * _SECTOR]
            _apply(content, what, offset, data)
        return bytes(content)


def _apply(content: bytearray, what: str, offset: int, data: bytes) -> None:
    if what == "truncate":
        del content[offset:]
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    if what == "write":
        content[offset : offset + len(data)] = data


@dataclass(frozen=True)
class _Naming:
    """A change of a folder: names that go, and names that come."""

    gone: tuple[str, ...]
    come: tuple[tuple[str, Node], ...] = ()

    @property
    def names(self) -> set[str]:
        return {*self.gone, *(name for name, _ in self.come)}

    def apply(self, entries: dict[str, Node]) -> None:
        for name in self.gone:
            entries.pop(name, None)
        entries.update(self.come)


@dataclass(eq=False)
class _Folder:
    entries: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    pending: list[_Naming] = field(default_factory=list)

    def change(self, naming: _Naming) -> None:
        self.pending.append(naming)
        naming.apply(self.entries)

    def sync(self) -> None:
        self.durable, self.pending = dict(self.entries), []

    def crashed(self, choice: random.Random) -> dict[str, Node]:
        entries = dict(self.durable)
        for naming in self._survivors(choice):
            naming.apply(entries)
        return entries

    def _survivors(self, choice: random.Random) -> list[_Naming]:
        mode = choice.choice(("none", "all", "first", "some"))
        if mode != "some":
            most = {"none": 0, "all": len(self.pending), "first": choice.randint(0, len(self.pending))}
            return self.pending[: most[mode]]
        wanted: set[str] = set()
        kept: list[_Naming] = []
        for naming in reversed(self.pending):
            if naming.names & wanted or choice.random() < 0.5:
                wanted |= naming.names
                kept.append(naming)
        return kept[::-1]


Node = _File | _Folder


class Disk:
    """What a sequence of calls has made of an empty folder, in memory and on the disk."""

    def __init__(self) -> None:
        self._root = _Folder()
        self._opened: dict[tuple[int, int], Node] = {}

    def crash(self, target: Path, choice: random.Random) -> None:
        """Write down what a power failure at this moment may leave."""
        _write(self._root, target, choice, {})

    def apply(self, record: Record) -> None:
        """Do what a recorded call did. Those that change nothing, and marks, are passed over."""
        known = {
            "open": self._open, "write": self._change, "truncate": self._change, "allocate": self._change,
            "fsync": self._sync, "rename": self._rename, "link": self._link, "mkdir": self._mkdir,
            "unlink": self._remove, "rmdir": self._remove,
        }  # fmt: skip
        if record.name in known:
            known[record.name](record)

    def _at(self, path: str) -> tuple[_Folder, str]:
        *parents, name = path.split("/")
        folder = self._root
        for parent in parents:
            inside = folder.entries[parent]
            assert isinstance(inside, _Folder)
            folder = inside
        return folder, name

    def _open(self, record: Record) -> None:
        here = record.pid, record.fd
        if record.offset >= 0:  # through /proc/self/fd: the same file once more
            self._opened[here] = self._opened[record.pid, record.offset]
            return
        folder, name = self._at(record.path)
        node = self._root if record.path == "." else folder.entries.get(name)
        if node is None:
            node = _File()
            folder.change(_Naming((), ((name, node),)))
        elif record.flags & os.O_TRUNC and isinstance(node, _File):
            node.change("truncate", 0, b"")
        self._opened[here] = node

    def _change(self, record: Record) -> None:
        file = self._opened[record.pid, record.fd]
        assert isinstance(file, _File)
        if record.name == "write":
            file.change("write", record.offset, record.data)
        elif record.name == "truncate":
            file.change("truncate", record.size, b"")
        else:
            file.change("allocate", record.offset + record.size, b"")

    def _sync(self, record: Record) -> None:
        self._opened[record.pid, record.fd].sync()

    def _rename(self, record: Record) -> None:
        (source, old), (target, new) = self._at(record.other), self._at(record.path)
        node = source.entries[old]
        if source is target:  # atomic within a folder
            target.change(_Naming((old,), ((new, node),)))
        else:
            target.change(_Naming((), ((new, node),)))
            source.change(_Naming((old,)))

    def _link(self, record: Record) -> None:
        (source, old), (target, new) = self._at(record.other), self._at(record.path)
        target.change(_Naming((), ((new, source.entries[old]),)))

    def _mkdir(self, record: Record) -> None:
        if record.path != ".":
            folder, name = self._at(record.path)
            folder.change(_Naming((), ((name, _Folder()),)))

    def _remove(self, record: Record) -> None:
        folder, name = self._at(record.path)
        folder.change(_Naming((name,)))


def _write(folder: _Folder, target: Path, choice: random.Random, written: dict[_File, Path]) -> None:
    target.mkdir()
    for name, node in folder.crashed(choice).items():
        path = target / name
        if isinstance(node, _Folder):
            _write(node, path, choice, written)
        elif node in written:
            os.link(written[node], path)
        else:
            path.write_bytes(node.crashed(choice))
            written[node] = path

"""Files that ranks of a host write together: the first of them writes, and the others hand it their shards.

Under FSDP, the rows of neighbouring ranks follow each other, and so do those of the ranks of a host. Under tensor
parallelism, their columns lie side by side; the stages of a pipeline have other tensors. Their file has one entry for
each tensor, as any safetensors file, and reads as if one rank had held all of it. The bytes go through local sockets,
in the order of the file: the one that writes holds no more of them than a few megabytes, and puts columns together row
by row.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch

from ckpt.errors import RanksError
from ckpt.formats.layout import Box
from ckpt.formats.native import tensor_file
from ckpt.formats.native.documents import to_json
from ckpt.formats.native.manifest import digest
from ckpt.formats.native.shard_table import ShardTable, bands, joined_box, shares
from ckpt.formats.tensors import FilePlan, Shard, host_bytes, narrowed
from ckpt.ranks.consensus import FollowingError, Ranks
from ckpt.ranks.find import ranks_per_host
from ckpt.ranks.store_and_heartbeats import LivenessWatch, format_ranks
from ckpt.root.catalog import spread_file, tensor_files_of
from ckpt.save.capture import CapturedState

# Bytes of a file that several ranks write together; larger shards are files of their own. One rank writes all of it.
# Every block of it has rows of all ranks, so that each reads all of it: from the page cache, or over a broadcast.
LARGEST = 1 << 30
_AT_ONCE = 4 << 20  # bytes
_POLL = 1.0  # seconds
_TO_MEET = 60.0  # seconds until the others are there: all have just got the same plan
_PAUSE = 0.005
_RANK = struct.Struct("<i")


def offer(captured: CapturedState, tables: Mapping[str, ShardTable], world_size: int) -> dict[str, Any]:
    """What this rank could write together with others of its host, and who these are. Empty if there are none.

    `tables`: by part, which rank writes which shards.
    """
    size = ranks_per_host() or 1  # with consecutive numbers, or they are not near each other
    if size == 1 or not (where := _near()):
        return {}
    return {"near": f"{size}/{where}", "parts": _offered(captured, tables, size, world_size)}


def plan_together(offers: list[dict[str, Any]]) -> dict[str, Any]:
    """How many ranks write together, and which parts: so many ranks of a host that their files are not too large.

    Empty if the ranks of some host cannot."""
    size = ranks_per_host() or 1
    near = [offer["near"] for offer in offers]
    if any(near[rank] != near[rank - rank % size] for rank in range(len(near))):
        return {}
    parts = [offer["parts"] for offer in offers]
    for together in (one for one in range(size, 1, -1) if size % one == 0):
        keys = [
            key for key, (_, _, aside) in parts[0].items()
            if all(key in each and together in each[key][1] and each[key][2] == aside for each in parts)
        ]  # fmt: skip
        most = max((each[key][0] for each in parts for key in keys), default=0)
        if keys and together * most <= LARGEST:
            return {"together": together, "parts": keys, "token": secrets.token_hex(16)}
    return {}


def _near() -> str:
    """The same for processes that reach each other by local sockets: of one user, host and network namespace. Empty if
    that is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return digest(f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}".encode())[-16:]
    except OSError:
        return ""


def group_of(rank: int, size: int, world_size: int) -> range:
    """The ranks that write together with this one."""
    first = rank - rank % size
    return range(first, min(first + size, world_size))


def _offered(
    captured: CapturedState, tables: Mapping[str, ShardTable], size: int, world_size: int
) -> dict[str, tuple[int, list[int], str]]:
    """The parts whose shards ranks of a host could write as one file: how many bytes this rank has of each, how many
    ranks could, and a digest of which tensors each rank writes for itself all the same: frozen ones, which it links.

    Not those with tensors that share memory, nor those with frozen ones of which the table does not say that they stand
    aside: ranks have different tensors, or each has all.
    """
    counts = [count for count in range(size, 1, -1) if size % count == 0]
    found = {}
    for key, table in tables.items():
        mine = WrittenShards.of(captured, key, table, {})
        untold = key in captured.sharded and captured.aside(key) != table.aside
        frozen = key in captured.parts and captured.parts[key].frozen
        if not untold and not frozen and mine.are_complete:
            groups = {count: group_of(captured.rank, count, world_size) for count in counts}
            fitting = [count for count, ranks in groups.items() if _are_boxes(table, ranks)]
            aside = digest(to_json(sorted(table.aside)))
            found[key] = (sum(size for _, size in mine.wanted), fitting, aside)
    return {key: offer for key, offer in found.items() if offer[1]}


def _shares_of(table: ShardTable, rank: int) -> list[tuple[str, int]]:
    """The names of the tensors that a rank writes shards of, in the order of its file, and the bytes of each."""
    mine = {name: box for name in table.tensors for _, box in shares(table.tensors[name], range(rank, rank + 1))}
    outlines = _outlines(table, mine)
    order = tensor_file.in_file_order({name: shard.tensor for name, shard in outlines.items()}, outlines)
    return [(name, outlines[name].tensor.nbytes) for name in order]


def _outlines(table: ShardTable, boxes: Mapping[str, Box]) -> dict[str, Shard]:
    """Boxes of tensors, on the meta device."""
    specs = table.tensors
    return {
        name: Shard(torch.empty(box.sizes, dtype=specs[name].dtype, device="meta"), specs[name].shape, box.offsets)
        for name, box in boxes.items()
    }


def _are_boxes(table: ShardTable, ranks: range) -> bool:
    """Whether the shards that these ranks have of each tensor are one box of it."""
    return all(joined_box(spec, ranks) is not None or not shares(spec, ranks) for spec in table.tensors.values())


class _Source(Protocol):
    """The bytes of a rank's shards, one after the other."""

    def take(self, size: int) -> Iterator[memoryview]:
        """The next bytes, in pieces that are valid until the next one is asked for."""


class _Own:
    """Those of this rank, from where they are."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def take(self, size: int) -> Iterator[memoryview]:
        while size:
            self._rest = self._rest or next(self._pieces)
            view, self._rest = self._rest[:size], self._rest[size:]
            size -= len(view)
            yield view


@dataclass(frozen=True)
class WrittenShards:
    """The shards of a part that a rank writes, in the files that it would write alone: the one of its shards, and the
    one of what it writes for ranks that have other tensors. `wanted`: their names and sizes, in the order in which all
    ranks of the host have them; `stored`: those of each file, in its order."""

    wanted: Sequence[tuple[str, int]]
    files: Sequence[FilePlan]
    stored: Sequence[Sequence[tuple[str, int]]]

    @classmethod
    def of(
        cls, captured: CapturedState, key: str, table: ShardTable, snapshot: Mapping[str, FilePlan]
    ) -> WrittenShards:
        spread, own = tensor_files_of(key, captured.rank)
        live = {file.path: file for file in (*captured.rank_files, *captured.diverged_files)}
        replicas = captured.replicas.get(key)
        contents = {spread: live[spread].contents} if spread in live else {}
        if own in live and replicas is not None:  # that of a snapshot has all of them
            contents[own] = live[own].contents or replicas.file.contents
        stored = [
            [(content[0], content[1].nbytes) for content in found or () if isinstance(content, tuple)]
            for found in contents.values()
        ]
        files = [snapshot.get(path, live[path]) if path == spread else live[path] for path in contents]
        return cls(_shares_of(table, captured.rank), files, stored)

    @property
    def are_complete(self) -> bool:
        """Whether the files have all of them, in their order, and nothing that would be a view of another one."""
        place = {entry: number for number, entry in enumerate(self.wanted)}
        found = [[place[entry] for entry in each if entry in place] for each in self.stored]
        return all(each == sorted(each) for each in found) and sorted(chain(*found)) == [*range(len(place))]

    def pieces(self) -> Iterator[memoryview]:
        """Their bytes. What a file has beside them is passed over."""
        sources = [
            (_Own(_after_head(file)), iter(stored)) for file, stored in zip(self.files, self.stored, strict=True)
        ]
        number = {name: index for index, stored in enumerate(self.stored) for name, _ in stored}
        for name, size in self.wanted:
            source, stored = sources[number[name]]
            for other, passed in stored:
                if other == name:
                    break
                for _ in source.take(passed):
                    pass
            yield from source.take(size)


def _after_head(file: FilePlan) -> Iterator[memoryview]:
    head = file.head
    for piece in file.pieces():
        skipped = min(head, len(piece))
        head -= skipped
        if skipped < len(piece):
            yield piece[skipped:]


@dataclass
class _Link:
    """A connection to another rank of this host, which is waited for as long as it sends heartbeats."""

    channel: Ranks
    ranks: list[int]  # the one at the other end; until it has said which, all that it may be
    connected: socket.socket
    call: str

    def __post_init__(self) -> None:
        self._watch = LivenessWatch(self.channel.timeout)
        self._buffer = memoryview(bytearray(0))
        self.connected.settimeout(_POLL)

    def take(self, size: int) -> Iterator[memoryview]:
        self._buffer = self._buffer if len(self._buffer) else memoryview(bytearray(_AT_ONCE))
        while size:
            view = self._buffer[: min(size, _AT_ONCE)]
            self.receive(view)
            size -= len(view)
            yield view

    def receive(self, view: memoryview) -> None:
        while view:
            try:
                got = self.connected.recv_into(view)
            except TimeoutError:
                _require_alive(self.channel, self.ranks, self._watch, self.call)
                continue
            except OSError:
                got = 0
            if not got:
                which = format_ranks(self.ranks) if len(self.ranks) == 1 else f"one of {format_ranks(self.ranks)}"
                raise FollowingError(f"{self.call}: {which} stopped in the middle of handing over its shards.")
            view = view[got:]

    def send(self, view: memoryview) -> None:
        while view:
            try:
                view = view[self.connected.send(view) :]
            except TimeoutError:
                _require_alive(self.channel, self.ranks, self._watch, self.call)
            except OSError as error:
                raise FollowingError(
                    f"{self.call}: rank {self.ranks[0]}, which writes the shards of this host, stopped reading them."
                ) from error


def _require_alive(channel: Ranks, ranks: list[int], watch: LivenessWatch, call: str) -> None:
    """Raise for ranks that send no heartbeats any more. For a call in a loop: most do nothing."""
    if watch.is_due() and (silent := channel.silent(ranks, watch)):
        raise RanksError(
            f"{call}: {format_ranks(silent)} of the same host {'have' if len(silent) > 1 else 'has'} not answered for "
            f"{channel.timeout:g} s while ranks handed over their shards. Nothing was committed; earlier checkpoints "
            "are kept."
        )


@dataclass(frozen=True)
class Handover:
    """How the ranks of a group write together in one save. `tables` and `mine`: of the parts, by key."""

    channel: Ranks
    ranks: range
    tables: Mapping[str, ShardTable]
    mine: Mapping[str, WrittenShards]
    token: str
    call: str

    @contextmanager
    def files(self) -> Iterator[list[FilePlan]]:
        """The files that this rank writes for all, while the others send their shards; none, once it has sent its."""
        me, writer = self.channel.rank, self.ranks.start
        senders = [rank for rank in self.ranks if rank != writer and self._has_shards(rank)]
        if me != writer:
            if me in senders:
                self._send(writer)
            yield []
            return
        with ExitStack() as stack:
            links = self._accepted(senders, stack)
            yield [plan for key in self.tables for plan in self._plan(key, links)]

    def _has_shards(self, rank: int) -> bool:
        alone = range(rank, rank + 1)
        return any(shares(spec, alone) for table in self.tables.values() for spec in table.tensors.values())

    def _plan(self, key: str, links: Mapping[int, _Source]) -> Iterator[FilePlan]:
        table, writer = self.tables[key], self.ranks.start
        boxes = {name: box for name, spec in table.tensors.items() if (box := joined_box(spec, self.ranks)) is not None}
        itemsize = {name: spec.dtype.itemsize for name, spec in table.tensors.items()}

        def pieces() -> Iterator[memoryview]:
            sources: dict[int, _Source] = {**links, writer: _Own(self.mine[key].pieces())}
            for name in order:
                for band in bands(table.tensors[name], self.ranks):
                    yield from rows_of(boxes[name], band, sources, itemsize[name])

        order, plan = tensor_file.plan_streamed_file(spread_file(key, writer), _outlines(table, boxes), pieces)
        if order:
            yield plan

    def _send(self, writer: int) -> None:
        with self._connected(writer) as connected:
            link = _Link(self.channel, [writer], connected, self.call)
            link.send(memoryview(_RANK.pack(self.channel.rank)))
            for key in self.tables:
                for piece in self.mine[key].pieces():
                    link.send(piece)

    @property
    def _address(self) -> str:
        """In Linux' namespace of sockets without files. Nobody else knows the token, which is new in every save."""
        return f"\0ckpt-{self.token}-{self.ranks.start}"

    def _accepted(self, senders: list[int], stack: ExitStack) -> dict[int, _Link]:
        """A connection to each of these ranks."""
        links: dict[int, _Link] = {}
        deadline, watch = time.monotonic() + _TO_MEET, LivenessWatch(self.channel.timeout)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(self._address)
            server.listen(len(self.ranks))
            server.settimeout(_POLL)
            while missing := [rank for rank in senders if rank not in links]:
                if time.monotonic() > deadline:
                    raise FollowingError(f"{self.call}: rank {missing[0]} did not hand over its shards.")
                try:
                    connected = stack.enter_context(server.accept()[0])
                except TimeoutError:
                    _require_alive(self.channel, missing, watch, self.call)
                    continue
                if _is_mine(connected):
                    link = _Link(self.channel, missing, connected, self.call)
                    said = memoryview(bytearray(_RANK.size))
                    link.receive(said)
                    link.ranks = [*_RANK.unpack(said)]
                    links[link.ranks[0]] = link
        return links

    @contextmanager
    def _connected(self, writer: int) -> Iterator[socket.socket]:
        began, watch = time.monotonic(), LivenessWatch(self.channel.timeout)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
            while True:
                try:
                    connected.connect(self._address)
                    break
                except OSError as error:  # it is not there yet
                    waited = time.monotonic() - began
                    if waited > _TO_MEET:
                        raise FollowingError(
                            f"{self.call}: rank {writer} did not ask for the shards of rank "
                            f"{self.channel.rank} ({error.strerror or error})."
                        ) from error
                    if waited > _POLL:
                        _require_alive(self.channel, [writer], watch, self.call)
                    time.sleep(_PAUSE)
            if not _is_mine(connected):
                raise RanksError(f"{self.call}: another user's program answered in place of rank {writer}.")
            yield connected


def rows_of(
    joined: Box, band: list[tuple[int, Box]], sources: Mapping[int, _Source], itemsize: int
) -> Iterator[memoryview]:
    """The bytes of a band of rows, in their order."""
    if len(band) == 1:  # one rank has all of them
        rank, box = band[0]
        yield from sources[rank].take(math.prod(box.sizes) * itemsize)
        return
    rows, width = band[0][1].sizes[0], math.prod(joined.sizes[1:]) * itemsize
    at_once = max(1, _AT_ONCE // width)
    for start in range(0, rows, at_once):
        count = min(at_once, rows - start)
        whole = torch.empty((count, *joined.sizes[1:], itemsize), dtype=torch.uint8)
        for rank, box in band:
            part = torch.empty((count, *box.sizes[1:], itemsize), dtype=torch.uint8)
            view = host_bytes(part)
            for piece in sources[rank].take(len(view)):
                view[: len(piece)] = piece
                view = view[len(piece) :]
            there = zip(box.offsets[1:], joined.offsets[1:], box.sizes[1:], strict=True)
            narrowed(whole, [(0, count), *((at - first, size) for at, first, size in there), (0, itemsize)]).copy_(part)
        yield host_bytes(whole)


def _is_mine(connected: socket.socket) -> bool:
    """Whether a process of the same user is at the other end."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user == os.getuid()

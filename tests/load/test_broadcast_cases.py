"""Reads for other ranks of the host case by case, without a process group: who reads what, and whose error it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt.errors import AbsentError, CkptError, DeniedError, RanksError, StorageError, TransientError, TruncatedError
from ckpt.formats.native.manifest import FileRecord
from ckpt.formats.tensors import Transfer
from ckpt.load import broadcast
from ckpt.load.broadcast import BroadcastGroup, Broadcasts
from ckpt.ranks.consensus import FollowingError, SingleProcess
from ckpt.root.verify import VerifiedFile
from ckpt.storage import MemoryStorage
from tests.helpers.places import PassedOn


def file_of(storage: Any, name: str) -> VerifiedFile:
    return VerifiedFile.of(storage, "a", FileRecord(name=name, path=name, size=6, blocks=("x",)))


class Passed:
    """Hands the memory of the rank that reads to those that ask later."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.phases = 0

    def broadcast(self, memory: torch.Tensor, source: int) -> None:
        assert source == 1
        if self.sent:
            memory.copy_(self.sent.pop())
        else:
            self.sent.append(memory.clone())

    def finish(self) -> None:
        """Nothing is under way."""

    @contextmanager
    def phase(self) -> Iterator[None]:
        self.phases += 1
        yield


def test_which_files_the_ranks_of_a_host_read_together() -> None:
    wanted: Any = [
        {"host": "two", "files": {"x": "1", "y": "2", "z": "3"}, "once_per_job": False},
        {"host": "one", "files": {"x": "1"}, "once_per_job": False},
        {"host": "two", "files": {"x": "1", "y": "9", "z": "3", "w": "5"}, "once_per_job": True},
        {"host": "two", "files": {"x": "1", "y": "2", "z": "3"}, "once_per_job": True},
        {"host": "six", "files": {"x": "1"}, "once_per_job": True},
        {"host": "six", "files": {"x": "2"}, "once_per_job": True},
    ]
    (plan,) = broadcast.plan_reads(wanted)
    assert (plan["ranks"], plan["files"]) == ([0, 2, 3], {"x": 0, "z": 2})
    assert plan["name"] != broadcast.plan_reads(wanted)[0]["name"]


def test_what_all_ranks_of_the_job_want_is_read_by_the_first_rank_of_a_host() -> None:
    def planned(*wanted: tuple[str, dict[str, str]], once_per_job: bool = True) -> Any:
        return broadcast.plan_reads([
            {"host": host, "files": files, "once_per_job": once_per_job} for host, files in wanted
        ])  # fmt: skip

    alike = dict.fromkeys("abcd", "1")
    of_two = ("two", {**alike, "y": "2", "z": "3"})
    plan = planned(of_two, ("one", alike), of_two, ("six", alike), ("one", {**alike, "y": "2"}))
    assert [(group["ranks"], group["files"], group["leaders"]) for group in plan] == [
        ([1, 4], {}, False),
        ([3], {}, False),
        ([0, 2], {"y": 0, "z": 2}, False),
        ([1, 3, 0], {"a": 1, "b": 3, "c": 0, "d": 1}, True),
    ]
    assert len({group["name"] for group in plan}) == len(plan)
    (one_host,) = planned(of_two, of_two)
    assert (set(one_host["files"].values()), one_host["leaders"]) == ({0, 1}, False)
    assert planned(("one", {"x": "1"}), ("two", {"x": "2"})) == []
    (on_its_own,) = planned(of_two, ("one", alike), of_two, once_per_job=False)
    assert (on_its_own["ranks"], on_its_own["leaders"]) == ([0, 2], False)


def test_what_is_read_once_for_the_job_passes_through_the_first_ranks_of_the_hosts_and_then_through_each_host() -> None:
    passed = list[tuple[str, int]]()

    class Group:
        def __init__(self, name: str) -> None:
            self.name = name

        def broadcast(self, memory: torch.Tensor, reader: int) -> None:
            passed.append((self.name, reader))

    root, groups = MemoryStorage("passed"), (Group("leaders"), Group("host"))
    shared = Broadcasts(2, {"a/once": 0, "a/here": 3}, groups, {"a/once"})  # type: ignore[arg-type]
    transfers = [Transfer(file_of(root, name), 0, 2) for name in ("once", "here")]
    for transfer in shared.split(transfers)[1]:
        transfer.reader.read_into(0, memoryview(bytearray(2)))
    assert passed == [("host", 3), ("leaders", 0), ("host", 0)]


@pytest.mark.parametrize(("reader", "source"), [(1, 14), (0, 13), (5, 13)])
def test_what_a_rank_outside_has_read_comes_from_the_first_rank_of_the_group(
    reader: int, source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def sent(memory: torch.Tensor, rank: int, **_: Any) -> Any:
        asked.append(rank)
        return SimpleNamespace(wait=lambda within: None)

    monkeypatch.setattr(torch.distributed, "broadcast", sent)
    group_of(SingleProcess((13, 14, 15, 16, 17, 18))).broadcast(torch.zeros(1), reader)
    assert asked == [source]


@pytest.mark.parametrize("source", [0, 1])
def test_the_rank_that_reads_does_not_wait_until_the_others_have_a_piece_but_for_the_piece_before_it(
    source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()

    def begun(memory: torch.Tensor, *_: Any, **__: Any) -> Any:
        number = int(memory)
        done.append(f"begin {number}")
        return SimpleNamespace(wait=lambda within: done.append(f"end {number}"))

    monkeypatch.setattr(torch.distributed, "broadcast", begun)
    group = group_of(SingleProcess())
    with group.phase():
        for number in range(2):
            group.broadcast(torch.tensor(number), source)
            done.append("read")
    expected = [["begin 0", "read", "end 0", "begin 1", "read", "end 1"]]
    expected += [["begin 0", "end 0", "read", "begin 1", "end 1", "read"]]
    assert done == expected[source]


def test_where_ranks_have_no_group_the_first_broadcast_says_why() -> None:
    plan: Any = {"ranks": [0, 1], "files": {}, "name": "load", "leaders": True}
    group = BroadcastGroup(None, SingleProcess(), plan, "no route")
    expected = r"all hosts could not connect to each other with gloo \(no route\)\. Set GLOO_SOCKET_IFNAME"
    with pytest.raises(RanksError, match=expected), group.phase():
        group.broadcast(torch.zeros(1), 0)
    group.dissolve()


def test_a_file_is_described_by_what_is_wanted_of_it_and_when() -> None:
    root = MemoryStorage("described")
    x, y = file_of(root, "x"), file_of(root, "y")
    first = broadcast._described([[Transfer(x, 0, 3), Transfer(y, 1, 2)], []])
    assert first.keys() == {"a/x", "a/y"}
    for other in (
        [[Transfer(x, 0, 4)], []],
        [[Transfer(x, 1, 3)], []],
        [[], [Transfer(x, 0, 3)]],
        [[Transfer(x, 0, 3), Transfer(x, 3, 1)], []],
    ):
        assert broadcast._described(other)["a/x"] != first["a/x"]
    assert broadcast._described([[Transfer(x, 0, 3)], []])["a/x"] == first["a/x"]


def test_what_is_read_for_all_is_apart_and_in_one_order() -> None:
    root, group = MemoryStorage("split"), Passed()
    files = {name: file_of(root, name) for name in ("c", "b", "a")}
    transfers = [Transfer(files[name], start, 2) for start in (0, 2) for name in ("c", "b", "a")]
    shared = Broadcasts(0, {"a/c": 1, "a/a": 0}, (group,))  # type: ignore[arg-type]
    alone, common = shared.split(transfers)
    assert [transfer.reader.stored.key for transfer in alone] == ["a/b", "a/b"]
    assert [(transfer.reader.stored.key, transfer.start) for transfer in common] == [
        ("a/a", 0), ("a/a", 2), ("a/c", 0), ("a/c", 2)
    ]  # fmt: skip
    assert common[0].reader is common[1].reader
    assert (common[0].reader.source, common[2].reader.source, common[2].reader.rank) == (0, 1, 0)
    assert [shared.reads_here(transfer) for transfer in transfers[:3]] == [False, True, True]
    with shared.phase(), Broadcasts(0).phase():
        assert group.phases == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (None, None),
        (TransientError("x"), TransientError),
        (DeniedError("x"), DeniedError),
        (AbsentError("x"), AbsentError),
        (TruncatedError("x"), TruncatedError),
        (StorageError("x"), StorageError),
        (CkptError("x"), CkptError),
        (ValueError("x"), CkptError),
    ],
)
def test_bytes_and_errors_of_the_rank_that_reads_are_those_of_all(error: Exception | None, kind: Any) -> None:
    class Fails(PassedOn):
        reads = 0

        def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
            self.reads += 1
            if error is not None:
                raise error
            super().read_into(key, start, *buffers, again=again)

    storage, group = Fails("memory://broadcast-cases"), Passed()
    storage.inner.write("a/x", [b"012345"])
    file, read = file_of(storage, "x"), list[bytes]()
    for rank in (1, 0):
        shared = Broadcasts(rank, {"a/x": 1}, (group,))  # type: ignore[arg-type]
        (transfer,) = shared.split([Transfer(file, 0, 5)])[1]
        one, two = bytearray(2), bytearray(3)
        if error is None:
            transfer.reader.read_into(1, memoryview(one), memoryview(two))
            read.append(bytes(one + two))
            continue
        with pytest.raises(type(error) if rank == 1 else kind) as raised:
            transfer.reader.read_into(1, memoryview(one), memoryview(two))
        assert (raised.value is error) == (rank == 1)
        assert rank == 1 or type(raised.value) is kind
    assert storage.reads == 1
    assert read == ([b"12345"] * 2 if error is None else [])


class Noted(SingleProcess):
    """Rank 0 of three, of which the others have noted this, and some are silent."""

    world_size, timeout = 3, 7.0

    def __init__(self, quiet: list[int] | None = None, **notes: str) -> None:
        super().__init__()
        self.said, self.quiet, self.watched = notes, quiet or [], list[list[int]]()

    def notes(self, key: str) -> dict[int, str]:
        return {int(rank[1:]): json.dumps(why) for rank, why in self.said.items()}

    def silent(self, ranks: list[int], watch: Any) -> list[int]:
        self.watched.append(ranks)
        return [rank for rank in ranks if rank in self.quiet]


def group_of(ranks: Any, *, leaders: bool = False) -> BroadcastGroup:
    plan: Any = {"ranks": [0, 1, 2], "files": {}, "name": "load", "leaders": leaders}
    return BroadcastGroup(SimpleNamespace(), ranks, plan)  # type: ignore[arg-type]


def test_nobody_waits_for_a_rank_that_has_failed_or_ended_or_is_silent() -> None:
    watch: Any = None
    group_of(Noted())._check_members(watch, late=True)
    ranks = Noted(r1="")
    group_of(ranks)._check_members(watch, late=False)
    assert ranks.watched == [[2]]
    with pytest.raises(FollowingError, match="rank 1 and this rank read different bytes"):
        group_of(Noted(r1=""))._check_members(watch, late=True)
    for leaders, whose in ((False, "the ranks on this host"), (True, "the first ranks of all hosts")):
        with pytest.raises(FollowingError, match=f"{whose} stopped reading .* rank 2: OSError: x"):
            group_of(Noted(r1="", r2="OSError: x"), leaders=leaders)._check_members(watch, late=False)
    group_of(Noted(r0="mine", r9="of another host"))._check_members(watch, late=True)
    with pytest.raises(RanksError, match="rank 2 gave no sign of life for 7 s"):
        group_of(Noted([2]))._check_members(watch, late=False)


def test_the_end_of_every_phase_is_noted_with_its_error() -> None:
    noted: list[tuple[str, str]] = []

    class Store(SingleProcess):
        def note(self, key: str, value: str) -> None:
            noted.append((key, json.loads(value)))
            if len(noted) == 3:
                raise RanksError("the store is gone")

    group = group_of(Store())
    with group.phase():
        pass
    with pytest.raises(ValueError, match="bad"), group.phase():
        raise ValueError("bad")
    with group.phase():
        pass
    assert noted == [("broadcast/load/1", ""), ("broadcast/load/2", "ValueError: bad"), ("broadcast/load/3", "")]


@pytest.mark.parametrize(
    ("pending", "asked", "kept"), [(None, [], 0), ("ended", [5.0], 0), ("waits", [5.0], 1), ("failed", [5.0], 0)]
)
def test_a_group_that_a_member_still_waits_in_is_kept_for_ever_and_others_are_destroyed(
    pending: str | None,
    asked: list[float],
    kept: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    waited, destroyed = list[float](), list[object]()

    class Work:
        def wait(self, within: Any) -> None:
            waited.append(within.total_seconds())
            if pending != "ended":
                raise RuntimeError("timed out")

        def is_completed(self) -> bool:
            return pending == "failed"

    monkeypatch.setattr(torch.distributed, "destroy_process_group", destroyed.append)
    group: Any = group_of(SingleProcess())
    inner, group._pending = group.group, Work() if pending else None
    before = sys.getrefcount(inner)
    with caplog.at_level("DEBUG", "ckpt"):
        group.dissolve()
    assert (waited, destroyed) == (asked, [inner] if pending != "failed" else [])
    assert sys.getrefcount(inner) - before == kept + len(destroyed) - 1  # the group's own reference is gone
    assert (group.group, group._pending) == (None, None)
    assert ("could not destroy" in caplog.text) == (pending == "failed")


def test_numbers_of_ranks_in_the_job() -> None:
    assert broadcast._in_job(SingleProcess(), [0, 1]) == [0, 1]
    assert broadcast._in_job(SingleProcess((4, 7, 9)), [0, 2]) == [4, 9]

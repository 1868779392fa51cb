"""Copies of snapshots between hosts, and the folders they lie in, with both hosts in this process."""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import LockedError, RanksError
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME
from ckpt.memory import place as places
from ckpt.memory import replicas, room
from ckpt.memory.meeting import Meeting, host_identity
from ckpt.memory.place import (
    TOKEN,
    MemoryPlace,
    OpenDescriptors,
    PlaceError,
    identity_of,
    read_step,
    read_token,
    remove_token,
    write_step,
    write_token,
)
from ckpt.memory.replicas import SLOT, Held, HostLink, LinkError, Replicas, Transfer, _keep_newest
from ckpt.memory.room import GIVE_WAY, SAVE, SKIP, Room, TrainingPeak, View, problem, save_unless, verdict_of
from ckpt.memory.slot_storage import REPLICA, remove_files, replica_storage, slot_storage
from ckpt.memory.slots import SlotWriter
from ckpt.memory.statistics import Statistics, crash_facts, saving_of
from ckpt.ranks.consensus import SingleProcess
from ckpt.ranks.hosts import ONE_SHARED_ROOT, Hosts
from ckpt.save.root_writer import RootWriter
from ckpt.storage import Buffer, MemoryStorage, Storage
from ckpt.util.threads import Worker
from tests.helpers.byte_checkpoints import FILES, keys, save
from tests.memory.deserted import create_place, snapshot

WHOLE = {*FILES, FILE_NAME, COPY_NAME}


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(folder))
    monkeypatch.delenv("CKPT_MEMORY_LINGER", raising=False)
    monkeypatch.delenv("CKPT_MEMORY_BANDWIDTH", raising=False)
    return folder


class Wires(dict[tuple[int, int, int], "queue.Queue[bytes]"]):
    """A queue for each key. Unlike a defaultdict's, it is the same one for two threads that ask for it first."""

    def __missing__(self, key: tuple[int, int, int]) -> queue.Queue[bytes]:
        return self.setdefault(key, queue.Queue())


@dataclass
class Network:
    """Stands for gloo: what a rank sends to another with a tag is received in that order."""

    wires: Wires = field(default_factory=Wires)
    alter: int = -1  # which message is altered on its way
    sent: int = 0

    def link(self, rank: int) -> HostLink:
        return HostLink((self, rank), rank, b"k" * 32)

    def isend(self, data: torch.Tensor, receiver: int, group: Any, tag: int) -> Any:
        message = bytearray(data.numpy().tobytes())
        if self.sent == self.alter:
            message[-1] ^= 1
        self.sent += 1
        self.wires[group[1], receiver, tag].put(bytes(message))
        return SimpleNamespace(wait=lambda: None)

    def irecv(self, data: torch.Tensor, sender: int, group: Any, tag: int) -> Any:
        def wait() -> None:
            found = self.wires[sender, group[1], tag].get(timeout=60)
            if len(found) != data.numel() * data.element_size():
                raise RuntimeError("another message than this one was expected")
            data.copy_(torch.frombuffer(bytearray(found), dtype=data.dtype))

        return SimpleNamespace(wait=wait)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    monkeypatch.setattr("torch.distributed.isend", network.isend)
    monkeypatch.setattr("torch.distributed.irecv", network.irecv)
    return network


def transfer(network: Network, source: Storage, target: Storage, name: str = "step-1") -> str:
    """Rank 3 sends a snapshot to rank 5."""
    sending = Worker("sender").start(lambda: network.link(3).send(source, name, 5))
    try:
        received = network.link(5).receive(target, 3)
        sending.wait()
    finally:
        sending.close()
    return received


class Noting(MemoryStorage):
    """Notes what is written and deleted, in its order."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.written: list[str] = []
        self.deleted: list[list[str]] = []

    def write(self, key: str, pieces: Iterable[Buffer], **options: Any) -> None:
        super().write(key, pieces, **options)
        self.written.append(key)

    def delete(self, some: Iterable[str]) -> None:
        listed = list(some)
        self.deleted.append(listed)
        super().delete(listed)


def _send_unconfirmed(sender: HostLink, source: Storage) -> None:
    with suppress(LinkError):
        sender.send(source, "step-1", 5)


class TestLink:
    def test_a_snapshot_arrives_whole_with_its_manifest_last(
        self, network: Network, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(replicas, "_BLOCK", 100)
        source, target = MemoryStorage("link-source"), Noting("link-target")
        manifest = save(source, "step-1")
        assert transfer(network, source, target) == "step-1"
        assert target.written == [*(f"step-1/{file.path}" for file in manifest.files), f"step-1/{FILE_NAME}"]
        assert all(target.read(key) == source.read(key) for key in target.written)
        assert len(FILES["model.safetensors"]) > 200  # so that it came in several blocks
        assert all(one.empty() for one in network.wires.values())

    @pytest.mark.parametrize("same", [True, False])
    def test_another_part_of_the_same_snapshot_is_kept_and_another_snapshot_of_that_name_is_not(
        self, network: Network, same: bool
    ) -> None:
        source, target = MemoryStorage(f"part-source-{same}"), MemoryStorage(f"part-target-{same}")
        save(source, "step-1")
        if same:
            for key in (FILE_NAME, COPY_NAME):
                target.write(f"step-1/{key}", [source.read(f"step-1/{key}")])
        else:
            save(target, "step-1")
        target.write("step-1/other", [b"of another rank"])
        transfer(network, source, target)
        assert ("step-1/other" in keys(target)) == same

    def test_files_that_are_not_there_are_not_sent(self, network: Network) -> None:
        source, target = MemoryStorage("some-source"), Noting("some-target")
        save(source, "step-1")
        source.write("step-1/state.json", [b"of another size"])
        transfer(network, source, target)
        assert target.written == ["step-1/model.safetensors", f"step-1/{FILE_NAME}"]

    @pytest.mark.parametrize("message", range(9))
    def test_what_is_altered_on_its_way_is_never_committed(self, network: Network, message: int) -> None:
        """The header's length, itself and its tag; two files and the manifest, each with its tag."""
        source, target = MemoryStorage(f"altered-source-{message}"), Noting(f"altered-target-{message}")
        save(source, "step-1")
        network.alter = message
        sender = network.link(3)
        sending = Worker("sender").start(lambda: _send_unconfirmed(sender, source))
        try:
            with pytest.raises(LinkError, match=r"claims to be from rank|does not answer|is not a snapshot"):
                network.link(5).receive(target, 3)
        finally:
            network.wires[5, 3, 2].put(bytes(32))  # nobody confirms
            sending.close()
        assert f"step-1/{FILE_NAME}" not in target.written

    def test_a_confirmation_of_somebody_else_is_none(self, network: Network) -> None:
        source = MemoryStorage("unconfirmed")
        save(source, "step-1")
        network.wires[5, 3, 2].put(bytes(32))
        with pytest.raises(LinkError, match="a message claims to be from rank 5, but is not"):
            network.link(3).send(source, "step-1", 5)

    def test_a_confirmation_of_an_earlier_snapshot_is_none(
        self, network: Network, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source, sender, receiver = MemoryStorage("confirmed-twice"), network.link(3), network.link(5)
        for number in (1, 2):
            save(source, f"step-{number}", sequence=number)

        def repeated(data: torch.Tensor, to: int, group: Any, tag: int) -> Any:
            if tag == 2:
                network.isend(data, to, group, tag)  # by somebody else
            return network.isend(data, to, group, tag)

        monkeypatch.setattr("torch.distributed.isend", repeated)
        sending = Worker("sender").start(lambda: sender.send(source, "step-1", 5))
        try:
            assert receiver.receive(MemoryStorage("confirmed-target"), 3) == "step-1"
            sending.wait()
        finally:
            sending.close()
        with pytest.raises(LinkError, match="claims to be from rank 5, but is not"):
            sender.send(source, "step-2", 5)

    @pytest.mark.parametrize("length", [0, -1, (64 << 20) + 1])
    def test_what_is_no_header_is_refused_before_it_takes_memory(self, network: Network, length: int) -> None:
        network.link(0)._send(torch.tensor([length]), 1)
        with pytest.raises(LinkError, match="rank 0 sent something that is not a snapshot"):
            network.link(1).receive(MemoryStorage("header"), 0)

    def test_the_numbers_of_the_job_are_used_and_its_errors_name_the_rank(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[tuple[Any, ...]] = []

        class Work:
            def wait(self) -> None:
                if len(calls) > 2:
                    raise RuntimeError("connection reset")

        def call(*given: Any) -> Work:
            calls.append(given[1:])
            return Work()

        monkeypatch.setattr("torch.distributed.isend", call)
        monkeypatch.setattr("torch.distributed.irecv", call)
        data, key = torch.zeros(1), b"k"
        HostLink("group", 0, key)._send(data, 1)
        HostLink("group", 0, key, members=(4, 7))._receive(data, 1)
        assert calls == [(1, "group", 1), (7, "group", 1)]
        with pytest.raises(LinkError, match="the host of rank 1 does not answer: connection reset"):
            HostLink("group", 0, key)._send_tag(1, 2)
        with pytest.raises(LinkError, match=r"this run ends\."):
            HostLink("group", 0, key, closing=True)._send(data, 1)
        assert calls[2:] == [(1, "group", 2)]

    def test_hosts_are_connected_by_their_numbers_in_the_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[tuple[Any, ...]] = []

        def new_group(*given: Any, use_local_synchronization: bool) -> str:
            made.append((*given, use_local_synchronization))
            return "group"

        monkeypatch.setattr("torch.distributed.new_group", new_group)
        link = HostLink.connect((0, 2), SingleProcess())
        assert link is not None
        assert (link.group, link.rank, len(link.key), link.members) == ("group", 0, 32, None)
        some = HostLink.connect((0, 1), SingleProcess((3, 8)))
        assert some is not None
        assert some.members == (3, 8)
        assert HostLink.connect((1, 2), SingleProcess()) is None
        assert [(one[0], one[2], one[3]) for one in made] == [
            ([0, 2], "gloo", False), ([3, 8], "gloo", True), ([1, 2], "gloo", False),
        ]  # fmt: skip

        def refused(*_: Any, **__: Any) -> str:
            raise ValueError("no group")

        monkeypatch.setattr("torch.distributed.new_group", refused)
        with pytest.raises(LinkError, match="the hosts can't connect to each other: no group"):
            HostLink.connect((0, 2), SingleProcess())


class Recorded(HostLink):
    """What is asked of a link."""

    def __init__(self, fails: str = "") -> None:
        super().__init__(None, 0, b"k")
        self.asked: list[tuple[str, str, int]] = []
        self.fails = fails

    def send(self, storage: Any, name: str, receiver: int) -> None:
        self.asked.append(("send", f"{os.path.basename(storage.url)}/{name}", receiver))
        if self.fails == "send":
            raise LinkError("cut")

    def receive(self, storage: Any, sender: int) -> str:
        self.asked.append(("receive", os.path.basename(storage.url), sender))
        if self.fails == "receive":
            raise LinkError("cut")
        return ""


class Ranks(SingleProcess):
    def __init__(self, rank: int, world_size: int = 6) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size


class TestReplicas:
    @pytest.mark.parametrize(("rank", "following", "previous"), [(0, 2, 5), (2, 5, 0), (5, 0, 2)])
    def test_each_host_sends_to_the_next_and_takes_from_the_one_before(
        self, tmp_path: Path, rank: int, following: int, previous: int
    ) -> None:
        place, link = create_place(tmp_path / "root"), Recorded()
        for number in (1, 2):
            save(replica_storage(place), f"step-{number}", sequence=number)
        found = Replicas(Ranks(rank), 1, _link=link, _owners=(0, 2, 5))
        found.exchange("step-3", place)
        assert sorted(link.asked) == [("receive", REPLICA, previous), ("send", f"{SLOT}/step-3", following)]
        assert {key.partition("/")[0] for key in keys(replica_storage(place))} == {"step-2"}
        assert not found.is_off
        found.exchange("step-4", None)
        replace(found, is_off=True).exchange("step-4", place)
        replace(found, _link=None).exchange("step-4", place)
        assert len(link.asked) == 2
        found.close()
        assert link.closing

    @pytest.mark.parametrize("fails", ["send", "receive"])
    def test_a_copy_that_fails_turns_copies_off_with_one_line(
        self, tmp_path: Path, fails: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        place, link = create_place(tmp_path / "root"), Recorded(fails)
        found = Replicas(Ranks(0), 1, _link=link, _owners=(0, 2))
        found.exchange("step-3", place)
        assert found.is_off
        assert link.closing
        assert [record.message for record in caplog.records] == [
            "Memory(replicas=1) has no effect: cut. Each host keeps only its own snapshots."
        ]

    def test_hosts_are_connected_once_and_only_where_there_are_several(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        connected: list[tuple[int, ...]] = []

        def connect(owners: tuple[int, ...], _: Any) -> HostLink:
            connected.append(owners)
            return Recorded()

        monkeypatch.setattr(HostLink, "connect", connect)
        hosts = Hosts((0, 0, 2, 2), tuple("aabb"))
        for found in (Replicas(Ranks(0), 0), Replicas(Ranks(0), 1, is_off=True)):
            found.prepare(hosts)
        assert connected == []
        found = Replicas(Ranks(0), 1)
        found.prepare(hosts)
        found.prepare(hosts)
        assert connected == [(0, 2)]
        found.prepare(Hosts((0, 1, 1, 1), tuple("abbb")))
        assert connected == [(0, 2), (0, 1)]
        assert caplog.records == []
        found.prepare(ONE_SHARED_ROOT)
        assert found.is_off
        assert "has no effect: all ranks are on one host" in caplog.text

        def refused(*_: Any) -> HostLink:
            raise LinkError("no network")

        monkeypatch.setattr(HostLink, "connect", refused)
        found = Replicas(Ranks(0), 1)
        found.prepare(hosts)
        assert found.is_off
        assert "has no effect: no network" in caplog.text

    def test_transfers_are_carried_out_by_those_they_name(self, tmp_path: Path) -> None:
        place, link = create_place(tmp_path / "root"), Recorded()
        found = Replicas(Ranks(2), 1, _link=link, _owners=(0, 2, 5))
        transfers = [
            Transfer(0, SLOT, "a", 2), Transfer(2, SLOT, "b", 0), Transfer(2, REPLICA, "c", 5),
            Transfer(0, SLOT, "d", 5),
        ]  # fmt: skip
        assert found._carry_out(transfers, place) == ""
        assert link.asked == [("receive", SLOT, 0), ("send", f"{SLOT}/b", 0), ("send", f"{REPLICA}/c", 5)]
        link.fails = "send"
        assert found._carry_out(transfers, place) == "cut"
        assert found._carry_out(transfers, None) == ""
        assert replace(found, _link=None)._carry_out(transfers, place) == ""

    @pytest.mark.parametrize("rank", [0, 2])
    def test_the_main_rank_says_what_was_sent_and_what_was_not(
        self, rank: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "ckpt")
        hosts, found = Hosts((0, 0, 2), ("one", "one", "two")), Replicas(Ranks(rank), 1)
        found._report(hosts, [Transfer(0, SLOT, "step-8", 2)], "")
        found._report(hosts, [Transfer(0, SLOT, "step-8", 2)], "cut")
        told = [
            "the hosts exchanged their snapshots in memory: two has step-8 from one",
            "ckpt can't use the snapshots in the memory of other hosts: cut",
        ]
        assert [record.message for record in caplog.records] == (told if rank == 0 else [])

    @pytest.mark.parametrize("fails", ["", "receive", "make"])
    def test_a_host_that_lacks_a_snapshot_receives_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        link, ranks = Recorded(fails), Ranks(0, 3)
        meeting = Meeting(ranks, MemoryStorage(f"restore-{fails}"), hosts=Hosts((0, 0, 2), ("a", "a", "b")))
        place = create_place(tmp_path / "root")

        def make() -> str:
            meeting.place = place
            return "no room" if fails == "make" else ""

        monkeypatch.setattr(meeting, "make", make)
        monkeypatch.setattr(HostLink, "connect", lambda *_: link)
        found = Replicas(ranks, 1)
        monkeypatch.setattr(found, "_plan", lambda *_: [Transfer(2, SLOT, "step-8", 0)])
        assert found.restore(meeting)
        assert link.asked == ([] if fails == "make" else [("receive", SLOT, 2)])
        assert (found._link is None) == bool(fails)
        assert found._owners == (() if fails else (0, 2))
        assert ("can't use the snapshots" in caplog.text) == bool(fails)
        monkeypatch.setattr(found, "_plan", lambda *_: [])
        assert not found.restore(meeting)
        monkeypatch.setattr(found, "_plan", lambda *_: [Transfer(0, SLOT, "step-8", 2)])
        assert not found.restore(meeting)

    def test_a_rank_that_is_gone_ends_the_search(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def gone() -> str:
            raise RanksError("rank 2 is gone")

        meeting = Meeting(Ranks(0), MemoryStorage("gone"), hosts=Hosts((0, 1), ("a", "b")))
        monkeypatch.setattr(meeting, "make", gone)
        found = Replicas(Ranks(0), 1)
        monkeypatch.setattr(found, "_plan", lambda *_: [Transfer(1, SLOT, "step-8", 0)])
        with pytest.raises(RanksError):
            found.restore(meeting)

    def test_every_host_says_what_it_holds(self, tmp_path: Path) -> None:
        place = create_place(tmp_path / "root")
        snapshot(place, "step-1", sequence=1)
        save(replica_storage(place), "step-2", sequence=2)
        found = Replicas(Ranks(4), 1)
        held = found._held(place)
        assert [(one.owner, one.place, one.name, one.sequence) for one in held] == [
            (4, SLOT, "step-1", 1), (4, REPLICA, "step-2", 2),
        ]  # fmt: skip
        assert found._held(None) == []
        assert found._plan(ONE_SHARED_ROOT, place) == []
        alone = Replicas(SingleProcess(), 1)
        assert alone._plan(Hosts((0, 1), ("a", "b")), place) == [Transfer(0, REPLICA, "step-2", one) for one in (0, 1)]
        os.truncate(place.slots / "step-1" / FILE_NAME, 3)
        os.truncate(place.slots / "step-1" / COPY_NAME, 3)
        assert [one.name for one in found._held(place)] == ["step-2"]

    def test_another_number_of_ranks_needs_every_file(self) -> None:
        ranks = {"all": None, "zero": 0, "one": 1}
        held = Held(0, SLOT, "id", "step", 1, 2, ["all", "zero"], ranks)
        assert held.has_all_for([0], 2)
        assert not held.has_all_for([0, 1], 2)
        assert not held.has_all_for([0], 1)
        assert not replace(held, files=["zero"]).has_all_for([0], 2)
        assert replace(held, files=["all", "zero", "one"]).has_all_for([0], 3)
        assert Held(**held.to_json()) == held

    def test_of_the_copies_the_newest_is_left(self) -> None:
        storage = MemoryStorage("newest")
        for number in (3, 9, 5):
            save(storage, f"step-{number}", sequence=number)
        storage.write("half/file", [b"x"])
        _keep_newest(storage)
        assert {key.partition("/")[0] for key in keys(storage)} == {"step-9"}


class TestSlots:
    def test_a_snapshot_is_removed_with_its_manifests_first(self) -> None:
        storage = Noting("removed")
        save(storage, "step-1")
        save(storage, "step-2")
        storage.deleted.clear()
        remove_files(storage, "step-1")
        assert storage.deleted[0] == [f"step-1/{FILE_NAME}", f"step-1/{COPY_NAME}"]
        assert keys(storage) == {f"step-2/{name}" for name in WHOLE}

    def test_room_is_made_for_the_next_by_removing_the_older_and_what_nobody_can_read(self, tmp_path: Path) -> None:
        place = create_place(tmp_path / "root")
        storage = slot_storage(place)
        for number in (1, 2, 3):
            save(storage, f"step-{number}", sequence=number)
        for name in (FILE_NAME, COPY_NAME):
            os.truncate(place.slots / "step-1" / name, 3)
        writer = SlotWriter(storage, SingleProcess())
        try:
            writer.make_room()
            assert {key.partition("/")[0] for key in keys(storage)} == {".lock", "step-3"}
            with storage.lock("step-3", shared=True):
                writer.make_room()
        finally:
            writer.close()

    def test_it_is_numbered_after_the_newest_of_the_root(self, tmp_path: Path) -> None:
        main = RootWriter(MemoryStorage("numbered"), SingleProcess())
        writer = SlotWriter(
            slot_storage(create_place(tmp_path / "root")), SingleProcess(), numbering=main.numbering, main=main
        )
        main.lineage.sequence = 41
        assert (writer.reserve(), main.reserve(), writer.reserve()) == (42, 43, 44)

    def test_a_damaged_one_is_not_the_one_that_is_kept(self, tmp_path: Path) -> None:
        storage = slot_storage(create_place(tmp_path / "root"))
        for number in (1, 2):
            save(storage, f"step-{number}", sequence=number)
        writer = SlotWriter(storage, SingleProcess(), damaged={"step-2"})
        try:
            writer.make_room()
            assert {key.partition("/")[0] for key in keys(storage)} == {".lock", "step-1"}
        finally:
            writer.close()

    def test_one_that_somebody_reads_is_not_removed(self, tmp_path: Path) -> None:
        storage = slot_storage(create_place(tmp_path / "root"))
        for number in (1, 2):
            save(storage, f"step-{number}", sequence=number)
        writer = SlotWriter(storage, SingleProcess())
        try:
            with storage.lock("step-1", shared=True), pytest.raises(LockedError, match="step-1"):
                writer.make_room()
            assert {key.partition("/")[0] for key in keys(storage)} == {".lock", "step-1", "step-2"}
        finally:
            writer.close()

    @pytest.mark.parametrize("saved", [True, False])
    def test_a_run_that_ends_with_more_in_memory_than_in_its_root_says_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, saved: bool
    ) -> None:
        model = torch.nn.Linear(2, 2)
        with ckpt.StateManager(tmp_path / "root", model=model, save_every=1000, memory=2) as manager:
            manager.resume()
            for _ in range(3):
                manager.step()
            if saved:
                manager.save_state()
        assert ("ckpt removes the snapshot of step 2 from memory" in caplog.text) == (not saved)


class TestPlaces:
    def test_descriptors_are_closed_in_a_child_and_the_next_one_may_fork(self, tmp_path: Path) -> None:
        opened = OpenDescriptors()
        first, second = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
        for descriptor in (first, second):
            opened.add(descriptor)
        opened.discard(second)
        gone = os.dup(second)
        opened.add(gone)
        os.close(gone)  # by somebody else
        opened.guard.acquire()  # as before a fork
        opened._close_in_child()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(first)
        opened.close(first)  # which it is already
        opened.close(second)  # which is not its own any more
        os.close(second)
        free: list[bool] = []

        def ask() -> None:
            free.append(opened.guard.acquire(blocking=False))
            opened.guard.release()

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join()
        assert free == [True]

    def test_a_folder_to_which_somebody_just_adds_a_file_is_removed_all_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place, real, calls = create_place(tmp_path / "root"), shutil.rmtree, []

        def rmtree(path: Path, **options: Any) -> None:
            calls.append(path)
            real(path, **options)
            if len(calls) < removals:
                path.mkdir(mode=0o700)

        monkeypatch.setattr(shutil, "rmtree", rmtree)
        removals = 3
        place.remove()
        assert not place.path.exists()
        assert len(calls) == 3
        calls.clear()
        removals = 1
        other = create_place(tmp_path / "root")
        other.remove()
        assert len(calls) == 1
        assert other._alive is None

    def test_a_run_that_is_being_removed_is_found_by_nobody_from_the_first_moment_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place, seen = create_place(tmp_path / "root"), []
        monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: seen.append(MemoryPlace.open(place.path)))
        place.remove()
        monkeypatch.undo()
        assert seen == [None] * 3
        shutil.rmtree(place.path)

    def test_steps_and_tokens_come_back(self, tmp_path: Path) -> None:
        place = create_place(tmp_path / "root")
        assert read_step(place) is None
        for step in (12345, 7):
            write_step(place, step)
            assert read_step(place) == step
        assert (place.path / "step").stat().st_mode & 0o777 == 0o600
        (tmp_path / "theirs").write_text("theirs")
        (place.path / "step").unlink()
        os.link(tmp_path / "theirs", place.path / "step")
        write_step(place, 3)
        assert (tmp_path / "theirs").read_text() == "theirs"
        assert read_step(place) is None
        before = len(os.listdir("/proc/self/fd"))
        read_step(place)
        assert len(os.listdir("/proc/self/fd")) == before
        root = MemoryStorage("tokens")
        assert read_token(root) == ""
        assert not remove_token(root)
        token = write_token(root)
        assert len(token) == 32
        assert read_token(root) == token
        assert write_token(root, "given") == read_token(root) == "given"
        assert remove_token(root)
        assert keys(root) == set()
        root.write(TOKEN, [b"x" * 100])
        assert read_token(root) == "x" * 64
        assert identity_of(root, "t") == "memory://tokens\nt"

    def test_a_token_that_cannot_be_removed_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        class Stubborn(MemoryStorage):
            def delete(self, some: Iterable[str]) -> None:
                raise PlaceError("not mine.")

        root = Stubborn("stubborn")
        write_token(root)
        assert remove_token(root)
        assert "could not remove memory://stubborn/.memory: not mine. Remove it" in caplog.text

    def test_the_variables_choose_the_folder_and_the_time(self, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert places.memory_directory() == memory
        assert places.linger_seconds() == 3600
        for given, seconds in (("5.5", 5.5), ("", 3600.0), ("soon", 3600.0)):
            monkeypatch.setenv("CKPT_MEMORY_LINGER", given)
            assert places.linger_seconds() == seconds
        assert host_identity() == host_identity()
        monkeypatch.setenv("CKPT_MEMORY_DIR", str(memory / "absent"))
        with pytest.raises(PlaceError, match="absent cannot be used: No such file"):
            host_identity()


def view(**fields: Any) -> View:
    return View(**{"busy": False, "error": "", "full": False, "size": 100, "peak": 0, "room": None, **fields})  # type: ignore[typeddict-item]


MANY = 10 << 40


class TestRoom:
    def test_two_snapshots_must_fit_the_tmpfs_unless_their_memory_is_held(self) -> None:
        for tmpfs, used, held, fits in (
            (200, 0, False, True), (199, 0, False, False), (199, 0, True, True), (150, 50, False, True),
            (149, 50, False, False), (0, 200, False, True),
        ):  # fmt: skip
            found = Room(tmpfs=tmpfs, memory=MANY, used=used, held=held)
            assert (problem(found, [60, 40], "/dev/shm", 0) == "") == fits
            assert room.exceeds_tmpfs(found, [60, 40]) == (2 * 100 - used > tmpfs)
        told = problem(Room(tmpfs=100, memory=MANY, used=10, held=False), [100], "/dev/shm", 0)
        assert told == "2 snapshots take 200 bytes, and /dev/shm has room for 110 bytes"

    def test_training_keeps_what_it_needs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(room, "reserve", lambda free, peak: 1000 + peak)
        for memory, used, peak, fits in (
            (1200, 0, 0, True), (1199, 0, 0, False), (1200, 0, 1, False), (1100, 100, 0, True), (1099, 100, 0, False),
            (1000, 300, 0, True), (999, 300, 0, False),
        ):  # fmt: skip
            found = Room(tmpfs=MANY, memory=memory, used=used, held=False)
            assert (problem(found, [100], "/dev/shm", peak) == "") == fits

    def test_all_ranks_do_what_the_views_of_all_say(self) -> None:
        enough = Room(tmpfs=MANY, memory=MANY, used=0, held=False)
        little = Room(tmpfs=250, memory=MANY, used=0, held=False)
        two = Hosts((0, 0, 2, 2), tuple("aabb"))
        assert verdict_of([view(room=enough), view()], ONE_SHARED_ROOT) == save_unless("", [])
        skipped = {"do": SKIP, "why": "", "free": False, "small": []}
        assert verdict_of([view(busy=True), view(error="x")], ONE_SHARED_ROOT) == skipped
        failed = verdict_of([view(error="x"), view(error="y", full=True), view(error="x")], ONE_SHARED_ROOT)
        assert (failed["do"], failed["why"], failed["free"]) == (GIVE_WAY, "x; y", True)
        assert not verdict_of([view(error="x")], ONE_SHARED_ROOT)["free"]
        assert verdict_of([view(room=little), view(size=25)], ONE_SHARED_ROOT)["do"] == SAVE
        shared = verdict_of([view(room=little), view(size=26)], ONE_SHARED_ROOT)
        assert (shared["do"], shared["free"], shared["small"]) == (GIVE_WAY, True, [0])
        apart = [view(room=little), view(size=25), view(room=enough), view(size=500)]
        assert verdict_of(apart, two)["do"] == SAVE
        assert verdict_of(apart, two, copies=True)["small"] == [0]  # the copies of the other host are too much
        held = [view(room=Room(tmpfs=10, memory=MANY, used=0, held=True)), view()]
        assert verdict_of(held, ONE_SHARED_ROOT) == save_unless("", [0])
        assert save_unless("why") == {"do": GIVE_WAY, "why": "why", "free": True, "small": []}

    def test_the_peak_of_training_counts_once_it_exceeds_that_of_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(room, "most_mapped", lambda: 1024)
        status = tmp_path / "status"
        status.write_text("Name: x\nVmHWM:  100 kB\nVmRSS:  50 kB\n")
        peak = TrainingPeak(status)
        assert peak.more() == 0
        status.write_text("VmHWM:  101 kB\nVmRSS:  40 kB\n")
        assert peak.more() == (101 - 40 - 1) * 1024
        status.write_text("VmHWM:  101 kB\nVmRSS:  101 kB\n")
        assert peak.more() == 0
        for text in ("VmHWM: many kB", "VmHWM:", ""):
            status.write_text(text)
            assert peak.more() == 0


class TestStatistics:
    def test_each_checkpoint_has_what_came_since_the_last(self) -> None:
        found = Statistics(taken=3, skipped=1, waited=0.5, crash={"crashed_at": 9})
        assert found.facts() == {"snapshots": 3, "left_out": 1, "waited": 0.5, "crashed_at": 9}
        assert found.facts() == {}
        found.taken += 2
        assert found.facts() == {"snapshots": 2, "left_out": 0, "waited": 0.0}
        found.crash = {"crashed_at": 1}
        assert found.facts() == {"snapshots": 0, "left_out": 0, "waited": 0.0, "crashed_at": 1}
        assert str(found) == "memory: 5 snapshots, 1 left out, training waited 0.50 s in all"
        assert "left out" not in str(Statistics(taken=1))

    def test_a_crash_is_told_by_what_it_cost_and_would_have(self) -> None:
        assert crash_facts(9, 8, 5) == {"crashed_at": 9, "resumed_at": 8, "root_step": 5}
        assert crash_facts(8, 8, None) == {"crashed_at": 8, "resumed_at": 8, "root_step": 0}
        assert crash_facts(7, 8, 5) == crash_facts(None, 8, 5) == {}
        assert saving_of(crash_facts(9, 8, 5)) == "a crash at step 9 cost 1 step instead of 4"
        assert saving_of(crash_facts(1009, 1000, None)) == "a crash at step 1,009 cost 9 steps instead of 1,009"
        assert saving_of(crash_facts(8, 8, 8)) == "a crash at step 8 cost 0 steps instead of 0"
        assert saving_of({}) == saving_of({"crashed_at": 9}) == saving_of({"crashed_at": 9, "resumed_at": 8}) == ""

"""Snapshots that the next host keeps too: the loss of a machine is cured from memory."""

from __future__ import annotations

import os
import shutil
import socket
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ckpt
from ckpt.memory.replicas import (
    SLOT,
    Conversation,
    Held,
    HostLink,
    LinkError,
    Transfer,
    bandwidth,
    plan_transfers,
)
from ckpt.memory.slot_storage import REPLICA
from ckpt.ranks.find import find_ranks
from ckpt.ranks.hosts import interface_to
from ckpt.root.mirror import Throttle
from ckpt.storage import LocalStorage
from tests.helpers.namespaces import Node, run_on_nodes
from tests.helpers.processes import run_ranks
from tests.memory.host_jobs import Job


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return Job(tmp_path_factory.mktemp("straight"), 0, 0, 0, sharded=True).to(12, None)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 2])
def test_a_host_that_was_replaced_has_its_part_back_from_the_next_one(
    tmp_path: Path, straight: list[str], lost: int
) -> None:
    job = Job(tmp_path, 0, 1, 2, sharded=True, memory=ckpt.Memory(every=2, replicas=1))
    job.to(9, None)
    job.replace_host(lost)
    assert job.to(12, (True, 8)) == straight


@pytest.mark.slow
def test_two_hosts_that_were_replaced_make_all_take_the_roots(tmp_path: Path, straight: list[str]) -> None:
    job = Job(tmp_path, 0, 1, 2, sharded=True, memory=ckpt.Memory(every=2, replicas=1))
    job.to(9, None)
    job.replace_host(0)
    job.replace_host(1)
    assert job.to(12, (False, 5)) == straight


@pytest.mark.slow
def test_without_copies_the_loss_of_a_host_makes_all_take_the_roots(tmp_path: Path, straight: list[str]) -> None:
    job = Job(tmp_path, 0, 1, 2, sharded=True)
    job.to(9, None)
    job.replace_host(1)
    assert job.to(12, (False, 5)) == straight


@pytest.mark.slow
def test_what_every_rank_has_comes_back_from_any_host(tmp_path: Path) -> None:
    (tmp_path / "straight").mkdir()
    straight = Job(tmp_path / "straight", 0, 0, 0).to(12, None)
    job = Job(tmp_path, 0, 1, 2)
    job.to(9, None)
    job.replace_host(0)
    job.replace_host(1)
    assert job.to(12, (True, 8)) == straight


@pytest.mark.slow
def test_a_damaged_copy_makes_all_take_the_roots(tmp_path: Path, straight: list[str]) -> None:
    job = Job(tmp_path, 0, 1, 2, sharded=True, memory=ckpt.Memory(every=2, replicas=1))
    job.to(9, None)
    job.replace_host(1)
    for file in job.memories[2].glob("ckpt-*/replica/*/model/*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    assert job.to(12, (False, 5)) == straight


@pytest.mark.slow
def test_hosts_that_have_changed_places_send_each_other_their_parts(tmp_path: Path, straight: list[str]) -> None:
    job = Job(tmp_path, 0, 1, 2, sharded=True)
    job.to(9, None)
    job.memories = [job.memories[1], job.memories[0], job.memories[2]]
    assert job.to(12, (True, 8)) == straight


@pytest.mark.slow
def test_after_a_replacement_the_next_loss_is_cured_too(tmp_path: Path, straight: list[str]) -> None:
    job = Job(tmp_path, 0, 1, 2, sharded=True, memory=ckpt.Memory(every=2, replicas=1))
    job.to(7, None)
    job.replace_host(1)
    job.to(9, (True, 6))
    job.replace_host(2)
    assert job.to(12, (True, 8)) == straight


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import ckpt
from ckpt.ranks.hosts import interface_to

root, state, last, expected = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo")
assert interface_to(os.environ["MASTER_ADDR"]) == os.environ.pop("GLOO_SOCKET_IFNAME")  # the hosts are connected there
torch.manual_seed(0)
model = fully_shard(nn.Linear(30, 30))
optimizer = torch.optim.AdamW(model.parameters())
with ckpt.StateManager(root, model=model, optimizer=optimizer, memory=ckpt.Memory(every=2, replicas=1)) as manager:
    restored = manager.resume()
    assert (restored.step if restored else 0) == expected, restored
    while manager.progress.step < last:
        optimizer.zero_grad()
        model(torch.ones(3, 30)).pow(2).mean().backward()
        optimizer.step()
        manager.step()
        manager.session.memory.wait()
    if last < 12:
        os._exit(9)
    torch.save([value.to_local() for value in model.state_dict().values()], f"{state}-{dist.get_rank()}")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_machine_that_is_gone_is_replaced_by_another_which_has_the_snapshot_from_its_neighbour(
    nodes: list[Node], tmp_path: Path
) -> None:
    script, states = tmp_path / "script.py", tmp_path / "states"
    script.write_text(SCRIPT)
    states.mkdir()

    def run(name: str, last: int, expected: int) -> None:
        memories = [tmp_path / f"memory-{name}-{node.number}" for node in nodes]
        for memory in memories:
            memory.mkdir(exist_ok=True)
        arguments = (str(tmp_path / name), str(states / name), str(last), str(expected))
        ended = run_on_nodes(nodes, script, *arguments, folders=[tmp_path] * 2, memories=memories)
        assert [status for status, _ in ended] == [0 if last == 12 else 9] * 2, "\n".join(text for _, text in ended)

    run("straight", 12, 0)
    run("replaced", 7, 0)
    (tmp_path / "memory-replaced-1").rename(tmp_path / "gone")  # at once, whoever is still at work in it
    run("replaced", 12, 6)
    for rank in range(2):
        ours, straight = (torch.load(states / f"{name}-{rank}") for name in ("replaced", "straight"))
        assert len(ours) == 2
        assert all(torch.equal(mine, other) for mine, other in zip(ours, straight, strict=True))
    assert not list(tmp_path.glob("memory-*/*")), "something is left in memory"


def held(owner: int, place: str, sequence: int, *parts: int) -> Held:
    """What a host has of a snapshot of three ranks: the file that all have, and those of some ranks."""
    ranks = {"state": None, **{f"rank-{rank}": rank for rank in range(3)}}
    return Held(
        owner,
        place,
        f"id-{sequence}",
        f"step-{sequence}",
        sequence,
        3,
        ["state", *(f"rank-{part}" for part in parts)],
        ranks,
    )


def _send_as_another(rank: int, folder: str) -> None:
    """Rank 0 sends a snapshot as who it is, then as somebody who does not know the secret."""
    storage = LocalStorage(f"{folder}/{rank}")
    link = HostLink.connect([0, 1], find_ranks(folder, 60))
    assert link is not None
    if rank == 0:
        alone = ckpt.RankOptions(alone=True)
        with ckpt.StateManager(f"{folder}/0", model=nn.Linear(4, 4), ranks=alone) as manager:
            manager.save_state("mine")
            manager.save_state("forged")
        link.send(storage, "mine", 1)
        link.key = bytes(32)
        link._conversations.clear()
        with pytest.raises(LinkError):  # the other is gone
            link.send(storage, "forged", 1)
        return
    assert link.receive(storage, 0) == "mine"
    with pytest.raises(LinkError, match="a message claims to be from rank 0, but is not"):
        link.receive(storage, 0)
    assert ckpt.verify(f"{folder}/1") == {"mine": []}
    assert {entry.key.partition("/")[0] for entry in storage.list()} == {"mine"}


@pytest.mark.slow
def test_what_somebody_else_sends_in_the_name_of_a_host_is_refused(tmp_path: Path) -> None:
    run_ranks(2, _send_as_another, str(tmp_path))


class TestConversation:
    def test_both_ends_have_the_same_tag_after_the_same_words_alone(self) -> None:
        words = [torch.arange(9, dtype=torch.uint8), torch.tensor([5])]

        def tag(*said: torch.Tensor, key: bytes = b"k", ends: tuple[int, int] = (0, 1), kind: int = 1) -> bytes:
            conversation = Conversation(key, *ends, kind)
            for data in said:
                conversation.add(data)
            return conversation.tag.numpy().tobytes()

        others = [tag(*words[::-1]), tag(*words, words[0]), tag(words[0]), tag(*words, key=b"l")]
        others += [tag(*words, ends=(1, 0)), tag(*words, kind=2)]
        assert tag(*words) == tag(*words)
        assert len({tag(*words), *others}) == 7


class TestInterface:
    """Between two nodes it is found by the script above."""

    @pytest.mark.parametrize("host", ["127.0.0.1", "", "no such host"])
    def test_it_is_left_to_gloo_where_it_is_the_loopback_or_unknown(self, host: str) -> None:
        assert interface_to(host) == ""

    def test_it_is_the_one_with_the_address_from_which_the_host_is_reached(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[tuple[str, int]] = []
        addresses = {"lo": "127.0.0.1", "down": "", "eth0": "10.0.0.1", "eth1": "10.0.0.2"}

        def ioctl(descriptor: int, request: int, name: bytes) -> bytes:
            assert (descriptor, request, len(name)) == (7, 0x8915, 256)
            address = addresses[name.rstrip(bytes(1)).decode()]
            if not address:
                raise OSError("it has no address")
            return bytes(20) + socket.inet_aton(address) + bytes(232)

        for address, name in (("10.0.0.2", "eth1"), ("10.0.0.1", "eth0"), ("127.0.0.1", ""), ("10.0.0.9", "")):
            probe = SimpleNamespace(
                connect=asked.append, getsockname=lambda address=address: (address, 9), fileno=lambda: 7
            )
            with monkeypatch.context() as patch:
                patch.setattr("socket.socket", lambda *kind, probe=probe: nullcontext(probe))
                patch.setattr("socket.if_nameindex", lambda: [*enumerate(addresses)])
                patch.setattr("fcntl.ioctl", ioctl)
                assert interface_to("another") == name
        assert asked == [("another", 1)] * 4


HOSTS = {0: (0,), 1: (1,), 2: (2,)}
ALL_OWN = [held(rank, SLOT, 8, rank) for rank in range(3)]


class TestPlan:
    def test_nothing_is_sent_where_every_host_has_its_own(self) -> None:
        assert plan_transfers(ALL_OWN, HOSTS, 3) == []

    def test_a_host_that_lacks_it_has_it_from_the_one_that_keeps_it(self) -> None:
        assert plan_transfers([*ALL_OWN[:2], held(0, REPLICA, 8, 2)], HOSTS, 3) == [Transfer(0, REPLICA, "step-8", 2)]

    def test_hosts_whose_ranks_have_changed_places_send_each_other_their_own(self) -> None:
        swapped = [held(0, SLOT, 8, 1), held(1, SLOT, 8, 0), ALL_OWN[2]]
        assert plan_transfers(swapped, HOSTS, 3) == [Transfer(1, SLOT, "step-8", 0), Transfer(0, SLOT, "step-8", 1)]

    def test_the_newest_that_all_can_have_is_taken(self) -> None:
        older = [held(rank, SLOT, 6, rank) for rank in range(2)]
        assert plan_transfers([*ALL_OWN[:2], *older, held(0, REPLICA, 6, 2)], HOSTS, 3) == [
            Transfer(0, REPLICA, "step-6", 2)
        ]

    def test_nothing_is_sent_where_a_part_is_nowhere(self) -> None:
        assert plan_transfers(ALL_OWN[:2], HOSTS, 3) == []

    @pytest.mark.parametrize("size", [0, -1, 1])
    def test_a_file_of_another_size_is_not_held_and_comes_from_the_copy(self, tmp_path: Path, size: int) -> None:
        with ckpt.StateManager(tmp_path / "slots", model=nn.Linear(4, 4)) as manager:
            manager.save_state("step-8")
        shutil.copytree(tmp_path / "slots", tmp_path / "replica")
        file = tmp_path / "slots" / "step-8" / "model.safetensors"
        os.truncate(file, size and file.stat().st_size + size)
        found = [*Held.list(0, SLOT, LocalStorage(tmp_path / "slots"))]
        found += Held.list(1, REPLICA, LocalStorage(tmp_path / "replica"))
        assert plan_transfers(found, {0: (0,)}, 1) == [Transfer(1, REPLICA, "step-8", 0)]

    def test_another_number_of_ranks_needs_every_file(self) -> None:
        assert plan_transfers(ALL_OWN, {0: (0,), 1: (1,)}, 2) == []
        whole = held(2, REPLICA, 8, 0, 1, 2)
        assert plan_transfers([*ALL_OWN, whole], {0: (0,)}, 1) == [Transfer(2, REPLICA, "step-8", 0)]


class TestBandwidth:
    def test_transfers_are_no_faster_than_allowed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
        throttle = Throttle(100.0)
        for _ in range(10):
            throttle.passed(50)
        assert now[0] == pytest.approx(5, abs=0.02)

    @pytest.mark.parametrize(("given", "bytes_per_second"), [("500MB", 500e6), ("", 1e9), ("fast", 1e9)])
    def test_it_can_be_chosen(self, monkeypatch: pytest.MonkeyPatch, given: str, bytes_per_second: float) -> None:
        monkeypatch.setenv("CKPT_MEMORY_BANDWIDTH", given)
        assert bandwidth() == bytes_per_second

"""What all ranks of a host, or of the job, need is read by one of them and broadcast to the others."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.load import broadcast as broadcast_reads
from ckpt.ranks import hosts as host_names
from tests.helpers.namespaces import Node, run_on_nodes
from tests.helpers.places import PassedOn, Place, at
from tests.helpers.processes import run_ranks
from tests.helpers.sharded import MODELS, state, step
from tests.helpers.training import exact

pytestmark = pytest.mark.slow


class CountingStorage(PassedOn):
    """Knows how many bytes of tensors were read."""

    read_in_all = 0

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        self.read_in_all += sum(map(len, buffers))
        super().read_into(key, start, *buffers, again=again)


class NearStorage(CountingStorage):
    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.is_local = True


class FarStorage(CountingStorage):
    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.is_local = False


class BrokenStorage(CountingStorage):
    """A disk that gives the header of the optimizer's file, and fails at its tensors."""

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        if key.endswith("optimizer.safetensors"):
            raise ckpt.StorageError(f"{key}: input/output error")
        super().read_into(key, start, *buffers, again=again)


def large(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(600, 600)


def save(root: Place, *names: str) -> str:
    model = large(1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 600)).sum().backward()
    optimizer.step()
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        for name in names or ["x"]:
            manager.save_state(name)
    return exact([model.state_dict(), optimizer.state_dict()["state"]])


def load(
    rank: int, root: str, notes: str, storage: type[CountingStorage], broadcast: bool | str | None, hosts: Sequence[str]
) -> None:
    host_names.host_name = lambda: hosts[rank]
    model = large(2)
    optimizer = torch.optim.AdamW(model.parameters())
    counting = storage(root)
    with ckpt.StateManager(
        counting, model=model, optimizer=optimizer, ranks=ckpt.RankOptions(broadcast=broadcast, timeout=30)
    ) as manager:
        manager.load_state("x")
    Path(notes, f"rank-{rank}.txt").write_text(exact([model.state_dict(), optimizer.state_dict()["state"]]))
    Path(notes, f"rank-{rank}.json").write_text(json.dumps(counting.read_in_all))


Loaded = Callable[..., list[int]]


@pytest.fixture
def loaded(new_root: Callable[[], Place], tmp_path: Path) -> Loaded:
    """Loads on some ranks, and says how much each has read. All of them have what was saved."""

    def load_on(
        storage: type[CountingStorage], *, broadcast: bool | str | None = None, hosts: Sequence[str] = "aa"
    ) -> list[int]:
        root = new_root()
        saved = save(root)
        assert run_ranks(len(hosts), load, str(root), str(tmp_path), storage, broadcast, hosts) == [0] * len(hosts)
        assert all((tmp_path / f"rank-{rank}.txt").read_text() == saved for rank in range(len(hosts)))
        return [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(len(hosts))]

    return load_on


WHOLE = 3 * 4 * 600 * 600  # weights and two moments


def test_far_away_every_byte_is_read_once_for_all_ranks_of_a_host(loaded: Loaded) -> None:
    near, far = loaded(NearStorage), loaded(FarStorage)
    assert min(near) > WHOLE
    assert sum(far) < sum(near) - WHOLE


def test_every_host_reads_for_itself(loaded: Loaded) -> None:
    shared = loaded(CountingStorage, broadcast=True, hosts="abab")
    apart = loaded(CountingStorage, broadcast=True, hosts="abcd")
    assert sum(shared) < sum(apart) - 2 * WHOLE
    assert min(apart) > WHOLE


@pytest.mark.parametrize("hosts", ["baabbc", "abc", "aa"])  # the first rank need not be on the first host
def test_every_byte_is_read_once_for_the_job(loaded: Loaded, hosts: str) -> None:
    read = loaded(CountingStorage, broadcast="job", hosts=hosts)
    assert WHOLE < sum(read) < 1.1 * WHOLE
    readers = [rank for rank, count in enumerate(read) if count > WHOLE / 4]  # a third of the bytes are the model's
    assert readers == ([0, 1] if hosts == "aa" else sorted(map(hosts.index, "ab")))


def test_the_option_turns_it_off_far_away(loaded: Loaded) -> None:
    assert min(loaded(FarStorage, broadcast=False)) > WHOLE


# what ranks read together, and the host of each rank
TOGETHER = pytest.mark.parametrize(("shared", "hosts"), [(True, "aa"), ("job", "abb")])


def load_from_a_broken_disk(rank: int, root: str, shared: bool | str, hosts: str) -> None:
    host_names.host_name = lambda: hosts[rank]
    model = large(2)
    optimizer = torch.optim.AdamW(model.parameters())
    before = exact(model.state_dict())
    with (
        ckpt.StateManager(
            BrokenStorage(root), model=model, optimizer=optimizer, ranks=ckpt.RankOptions(broadcast=shared, timeout=30)
        ) as manager,
        pytest.raises(ckpt.StorageError, match="input/output error"),
    ):
        manager.load_state("x")
    assert exact(model.state_dict()) == before


@TOGETHER
def test_what_one_rank_cannot_read_no_rank_waits_for(root: Place, shared: bool | str, hosts: str) -> None:
    save(root)
    run_ranks(len(hosts), load_from_a_broken_disk, str(root), shared, hosts)


class UnreachedStorage(CountingStorage):
    """Where the tensors of the newest checkpoint's optimizer, which rank 1 reads for all, cannot be had."""

    failure: Exception = ckpt.TransientError("the server is away")

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        if key == "newer/optimizer.safetensors":
            raise self.failure
        super().read_into(key, start, *buffers, again=again)


def load_what_one_cannot_read(
    rank: int, root: str, failure: Exception, expected: type[Exception], shared: bool | str, hosts: str
) -> None:
    host_names.host_name = lambda: hosts[rank]
    broadcast_reads._DEADLINE = timedelta(seconds=60)  # or the ranks would wait longer than the test
    model = large(2)
    optimizer = torch.optim.AdamW(model.parameters())
    storage = UnreachedStorage(root)
    storage.failure = failure
    with ckpt.StateManager(
        storage, model=model, optimizer=optimizer, ranks=ckpt.RankOptions(broadcast=shared, timeout=30)
    ) as manager:
        with pytest.raises(expected, match=str(failure)) as raised:
            manager.load_state()
        assert raised.type is (expected if rank != 1 else raised.type)
        assert "rank 1 could not read newer/optimizer.safetensors for this rank" in str(raised.value)


@TOGETHER
@pytest.mark.parametrize(
    ("failure", "expected"),
    [(ckpt.TransientError("the server is away"), ckpt.TransientError), (MemoryError("no room"), ckpt.CkptError)],
)
def test_what_another_rank_could_not_read_is_not_passed_over_for_an_older_one(
    root: Place, failure: Exception, expected: type[Exception], shared: bool | str, hosts: str
) -> None:
    save(root, "older", "newer")
    run_ranks(len(hosts), load_what_one_cannot_read, str(root), failure, expected, shared, hosts)


def load_past_damage(rank: int, root: str, damaged: str, shared: bool | str, hosts: str) -> None:
    host_names.host_name = lambda: hosts[rank]
    broadcast_reads._DEADLINE = timedelta(seconds=60)  # or the ranks would wait longer than the test
    model, other = large(1), large(2)
    optimizer, again = (torch.optim.AdamW(module.parameters()) for module in (model, other))
    model(torch.ones(1, 600)).sum().backward()
    optimizer.step()
    with ckpt.StateManager(
        root,
        model=model,
        optimizer=optimizer,
        saving=ckpt.SaveOptions(gradients=True),
        ranks=ckpt.RankOptions(timeout=30),
    ) as manager:
        for name in ("older", "newer"):
            manager.save_state(name, wait=True)
    if rank == 0:
        file = at(root) / "newer" / damaged
        file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    ranks = ckpt.RankOptions(broadcast=shared, timeout=30)
    saving = ckpt.SaveOptions(gradients=True)
    with ckpt.StateManager(root, model=other, optimizer=again, saving=saving, ranks=ranks) as manager:
        assert manager.load_state().name == "older"
    assert exact(other.state_dict()) == exact(model.state_dict())


@TOGETHER
def test_damage_in_what_one_rank_reads_alone_keeps_none_waiting_for_what_they_share(
    root: Place, shared: bool | str, hosts: str
) -> None:
    run_ranks(len(hosts), load_past_damage, str(root), "gradients-00001.safetensors", shared, hosts)


def test_damage_in_what_is_read_once_for_the_job_makes_all_ranks_load_an_older_checkpoint(root: Place) -> None:
    run_ranks(3, load_past_damage, str(root), "model.safetensors", "job", "abb")


def load_as_one_of_two_models(rank: int, root: str, saved: str) -> None:
    host_names.host_name = lambda: "-abb"[rank]
    groups = [dist.new_group(members) for members in ([0], [1, 2, 3])]
    if rank == 0:
        return
    model = large(2)
    optimizer = torch.optim.AdamW(model.parameters())
    storage = CountingStorage(root)
    ranks = ckpt.RankOptions(broadcast="job", timeout=30, process_group=groups[1])
    with ckpt.StateManager(storage, model=model, optimizer=optimizer, ranks=ranks) as manager:
        manager.load_state("x")
    assert exact([model.state_dict(), optimizer.state_dict()["state"]]) == saved
    read: list[Any] = [None] * 3
    dist.all_gather_object(read, storage.read_in_all, group=groups[1])
    assert WHOLE < sum(read) < 1.1 * WHOLE


def test_the_ranks_of_a_process_group_read_once_for_all_of_them(root: Place) -> None:
    run_ranks(4, load_as_one_of_two_models, str(root), save(root))


ON_A_NODE = """
import os, sys
import torch.distributed as dist
from tests.load.test_broadcast import WHOLE, CountingStorage, exact, host_names, large
import ckpt

dist.init_process_group("gloo")
del os.environ["GLOO_SOCKET_IFNAME"]  # ckpt finds the interface: the name of this host is that of the other, too
rank = dist.get_rank()
host_names.host_name = lambda: f"host-{rank}"
model, storage = large(2), CountingStorage(sys.argv[1])
with ckpt.StateManager(storage, model=model, ranks=ckpt.RankOptions(broadcast="job", timeout=30)) as manager:
    manager.load_state("x", strict=False)
assert exact(model.state_dict()) == exact(large(1).state_dict())
assert (storage.read_in_all > WHOLE / 4) == (rank == 0)  # a third of the bytes are the model's
dist.barrier()
dist.destroy_process_group()
"""


def test_between_hosts_bytes_take_the_network_that_connects_the_job(nodes: list[Node], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ON_A_NODE)
    with ckpt.StateManager(tmp_path / "root", model=large(1)) as manager:
        manager.save_state("x")
    ended = run_on_nodes(nodes, script, str(tmp_path / "root"), folders=[tmp_path] * 2)
    assert [status for status, _ in ended] == [0, 0], "\n".join(text for _, text in ended)


def load_without_a_network(rank: int, root: str) -> None:
    broadcast_reads._DEADLINE = timedelta(seconds=5)  # what the others wait for the one that cannot connect
    host_names.host_name = lambda: "aabb"[rank]
    if rank == 2:
        os.environ["GLOO_SOCKET_IFNAME"] = "nothing0"
    model = large(2)
    with (
        ckpt.StateManager(root, model=model, ranks=ckpt.RankOptions(broadcast="job", timeout=30)) as manager,
        pytest.raises(ckpt.RanksError, match=r"all hosts could not connect .* Set GLOO_SOCKET_IFNAME"),
    ):
        manager.load_state("x", strict=False)


def test_hosts_that_cannot_connect_are_an_error_on_all_ranks(root: Place) -> None:
    save(root)
    run_ranks(4, load_without_a_network, str(root))


def round_trip_spread(rank: int, root: str) -> None:
    """Every rank needs other bytes: there is nothing to share, and nothing is lost."""
    model = MODELS["fsdp2"](1)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    with ckpt.StateManager(root, model=model, optimizer=optimizer, ranks=ckpt.RankOptions(timeout=30)) as manager:
        manager.save_state("x")
    other = MODELS["fsdp2"](2)
    again = torch.optim.AdamW(other.parameters())
    with ckpt.StateManager(
        root, model=other, optimizer=again, ranks=ckpt.RankOptions(broadcast=True, timeout=30)
    ) as manager:
        manager.load_state("x")
    assert state(other, again) == state(model, optimizer)


def test_what_is_spread_is_read_by_the_rank_that_needs_it(root: Place) -> None:
    assert run_ranks(2, round_trip_spread, str(root)) == [0, 0]


def load_and_look(rank: int, root: str) -> None:
    made: list[weakref.ref[Any]] = []
    new_group = dist.new_group

    def noted(*args: Any, **options: Any) -> Any:
        group = new_group(*args, **options)
        made.append(weakref.ref(group))
        return group

    dist.new_group = noted
    model = large(2)
    gc.disable()
    manager = ckpt.StateManager(root, model=model, ranks=ckpt.RankOptions(broadcast=True, timeout=30))
    manager.load_state("x", strict=False)
    assert [group() for group in made] == [None]
    manager.close()


def test_the_group_that_shared_is_gone_after_the_load_and_not_cleared_away_by_a_forked_worker(root: Place) -> None:
    """In a child of a process, where a process group has no threads, it would not come to its end."""
    save(root)
    assert run_ranks(2, load_and_look, str(root)) == [0, 0]

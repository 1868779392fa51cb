"""What all ranks of a host need is read by one of them and broadcast to the others."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
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
    rank: int, root: str, notes: str, storage: type[CountingStorage], broadcast: bool | None, hosts: list[str]
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
        storage: type[CountingStorage], *, broadcast: bool | None = None, hosts: list[str] | None = None
    ) -> list[int]:
        hosts, root = hosts or ["a", "a"], new_root()
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
    shared = loaded(CountingStorage, broadcast=True, hosts=["a", "b", "a", "b"])
    apart = loaded(CountingStorage, broadcast=True, hosts=["a", "b", "c", "d"])
    assert sum(shared) < sum(apart) - 2 * WHOLE
    assert min(apart) > WHOLE


def test_the_option_turns_it_off_far_away(loaded: Loaded) -> None:
    assert min(loaded(FarStorage, broadcast=False)) > WHOLE


def load_from_a_broken_disk(rank: int, root: str) -> None:
    model = large(2)
    optimizer = torch.optim.AdamW(model.parameters())
    before = exact(model.state_dict())
    with (
        ckpt.StateManager(
            BrokenStorage(root), model=model, optimizer=optimizer, ranks=ckpt.RankOptions(broadcast=True, timeout=30)
        ) as manager,
        pytest.raises(ckpt.StorageError, match="input/output error"),
    ):
        manager.load_state("x")
    assert exact(model.state_dict()) == before


def test_what_one_rank_cannot_read_no_rank_waits_for(root: Place) -> None:
    save(root)
    assert run_ranks(2, load_from_a_broken_disk, str(root)) == [0, 0]


class UnreachedStorage(CountingStorage):
    """Where the tensors of the newest checkpoint's optimizer, which rank 1 reads for both, cannot be had."""

    failure: Exception = ckpt.TransientError("the server is away")

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        if key == "newer/optimizer.safetensors":
            raise self.failure
        super().read_into(key, start, *buffers, again=again)


def load_what_one_cannot_read(rank: int, root: str, failure: Exception, expected: type[Exception]) -> None:
    broadcast_reads._DEADLINE = timedelta(seconds=60)  # or the ranks would wait longer than the test
    model = large(2)
    optimizer = torch.optim.AdamW(model.parameters())
    storage = UnreachedStorage(root)
    storage.failure = failure
    with ckpt.StateManager(
        storage, model=model, optimizer=optimizer, ranks=ckpt.RankOptions(broadcast=True, timeout=30)
    ) as manager:
        with pytest.raises(expected, match=str(failure)) as raised:
            manager.load_state()
        assert raised.type is (expected if rank == 0 else raised.type)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [(ckpt.TransientError("the server is away"), ckpt.TransientError), (MemoryError("no room"), ckpt.CkptError)],
)
def test_what_another_rank_could_not_read_is_not_passed_over_for_an_older_one(
    root: Place, failure: Exception, expected: type[Exception]
) -> None:
    save(root, "older", "newer")
    assert run_ranks(2, load_what_one_cannot_read, str(root), failure, expected) == [0, 0]


def load_past_damage(rank: int, root: str) -> None:
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
        file = at(root) / "newer" / "gradients-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    ranks = ckpt.RankOptions(broadcast=True, timeout=30)
    saving = ckpt.SaveOptions(gradients=True)
    with ckpt.StateManager(root, model=other, optimizer=again, saving=saving, ranks=ranks) as manager:
        assert manager.load_state().name == "older"
    assert exact(other.state_dict()) == exact(model.state_dict())


def test_damage_in_what_one_rank_reads_alone_keeps_none_waiting_for_what_they_share(root: Place) -> None:
    assert run_ranks(2, load_past_damage, str(root)) == [0, 0]


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

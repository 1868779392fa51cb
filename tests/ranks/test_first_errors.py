"""Ranks that read or write together: one that fails, freezes or differs is named, and the first error is raised."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.formats.native.shard_table import ShardedState
from ckpt.load import broadcast
from ckpt.ranks import hosts as host_names
from ckpt.storage import ANY, Buffer, LocalStorage
from tests.helpers.hosted import ended, hosted_ranks
from tests.helpers.places import PassedOn, Place
from tests.helpers.processes import run_ranks
from tests.helpers.sharded import MODELS
from tests.helpers.training import exact
from tests.load.test_broadcast import large, save

pytestmark = [pytest.mark.slow, pytest.mark.not_on_s3("is about ranks")]


def _differ_in_what_is_live(rank: int, root: str, saved: str) -> None:
    broadcast._DEADLINE = timedelta(seconds=30)  # or the ranks would wait longer than the test
    model = large(2)
    optimizer = torch.optim.AdamW(model.parameters())
    if rank == 1:  # its state is read into where it is, the other's into new memory
        model(torch.ones(1, 600)).sum().backward()
        optimizer.step()
    with ckpt.StateManager(
        root, model=model, optimizer=optimizer, ranks=ckpt.RankOptions(broadcast=True, timeout=60)
    ) as manager:
        manager.load_state("x")
    assert exact([model.state_dict(), optimizer.state_dict()["state"]]) == saved


def test_ranks_that_differ_in_what_they_read_in_place_load_and_do_not_wait_for_each_others_broadcasts(
    root: Place,
) -> None:
    saved = save(root)
    assert run_ranks(2, _differ_in_what_is_live, str(root), saved) == [0, 0]


# Who reads together, and the host of each rank. Rank 1 reads the optimizer's file for the others; in the last job, it
# is not the first rank of its host, and there is a host of one rank.
TOGETHER = pytest.mark.parametrize(("shared", "hosts"), [(True, "aa"), ("job", "abba"), ("job", "aab")])


def _fail_while_reading_together(rank: int, root: str, shared: bool | str, hosts: str) -> None:
    host_names.host_name = lambda: hosts[rank]
    read_into = broadcast._BroadcastFile.read_into

    def fails(self: Any, start: int, *buffers: memoryview) -> None:
        if self.stored.key.endswith("optimizer.safetensors") and rank == 1:
            raise MemoryError("no room on this rank")
        read_into(self, start, *buffers)

    broadcast._BroadcastFile.read_into = fails  # type: ignore[method-assign]
    model = large(2)
    optimizer = torch.optim.AdamW(model.parameters())
    began = time.monotonic()
    with ckpt.StateManager(
        root, model=model, optimizer=optimizer, ranks=ckpt.RankOptions(broadcast=shared, timeout=60)
    ) as manager:
        with pytest.raises(ckpt.CkptError, match="rank 1: MemoryError: no room on this rank") as raised:
            manager.load_state("x")
        assert "given up" not in str(raised.value)
    assert time.monotonic() - began < 50


@TOGETHER
def test_a_rank_that_fails_while_all_read_together_is_named_at_once(
    root: Place, shared: bool | str, hosts: str
) -> None:
    save(root)
    run_ranks(len(hosts), _fail_while_reading_together, str(root), shared, hosts)


def _stop_while_reading_together(rank: int, root: str, shared: bool | str, hosts: str, how: signal.Signals) -> None:
    broadcast._DEADLINE = timedelta(seconds=60)  # or the ranks would wait longer than the test
    host_names.host_name = lambda: hosts[rank]
    read_into = broadcast._BroadcastFile.read_into

    def stops(self: Any, start: int, *buffers: memoryview) -> None:
        if self.stored.key.endswith("optimizer.safetensors") and rank == 1:
            os.kill(os.getpid(), how)
        read_into(self, start, *buffers)

    broadcast._BroadcastFile.read_into = stops  # type: ignore[method-assign]
    model = large(2)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = ckpt.StateManager(
        root, model=model, optimizer=optimizer, ranks=ckpt.RankOptions(broadcast=shared, timeout=4)
    )
    ended = "|a rank ended while it was reading" if how is signal.SIGKILL else ""
    with pytest.raises(ckpt.RanksError, match=f"rank 1 (gave no sign of life for|did not answer within) 4 s{ended}"):
        manager.load_state("x")
    manager.close()


@TOGETHER
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_for_a_rank_that_freezes_or_dies_while_all_read_together_no_other_waits_longer_than_timeout(
    root: Place, shared: bool | str, hosts: str, how: signal.Signals
) -> None:
    save(root)
    with hosted_ranks(len(hosts), _stop_while_reading_together, str(root), shared, hosts, how) as jobs:
        assert [ended(job, within=60) for rank, job in enumerate(jobs) if rank != 1] == [0] * (len(hosts) - 1)
        assert jobs[1].exitcode == (None if how is signal.SIGSTOP else -how)


class _FullDisk(PassedOn):
    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        if key.endswith("model.safetensors"):
            next(iter(pieces))
            raise ckpt.FullError("no space left on this disk")
        super().write(key, pieces, over=over)


def _die_when_gathering(rank: int) -> None:
    """Rank 1 dies at the first tensor that is gathered."""
    gather = ShardedState.gather

    def dies(self: ShardedState, name: str) -> torch.Tensor:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(self, name)

    ShardedState.gather = dies  # type: ignore[method-assign]


def _lose_a_rank_beside_a_full_disk(rank: int, root: str) -> None:
    model = MODELS["fsdp2"](1)
    manager = ckpt.StateManager(
        _FullDisk(root), model=model, saving=ckpt.SaveOptions(layout="full"), ranks=ckpt.RankOptions(timeout=4)
    )
    manager.resume()
    _die_when_gathering(rank)
    with pytest.raises(ckpt.FullError, match="no space left on this disk"):
        manager.save_state("x", wait=True)
    os._exit(0)  # without a farewell to the dead rank


def test_a_full_disk_is_told_even_if_a_rank_dies_while_the_rest_is_gathered(root: Place) -> None:
    assert run_ranks(2, _lose_a_rank_beside_a_full_disk, str(root), dies=True) == [0, -9]


def _export_beside_a_dead_rank(rank: int, folder: str) -> None:
    model = MODELS["fsdp2"](1)
    manager = ckpt.StateManager(Path(folder, "run"), model=model, ranks=ckpt.RankOptions(timeout=4))
    _die_when_gathering(rank)

    def full(self: Any, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        raise ckpt.FullError("no space left on this disk")

    LocalStorage.write = full  # type: ignore[method-assign]
    with pytest.raises(ckpt.FullError, match="no space left on this disk"):
        manager.save_model(Path(folder, "model"))
    os._exit(0)


def test_the_same_for_a_model_that_is_exported(tmp_path: Path) -> None:
    assert run_ranks(2, _export_beside_a_dead_rank, str(tmp_path), dies=True) == [0, -9]
    assert not (tmp_path / "model").exists()

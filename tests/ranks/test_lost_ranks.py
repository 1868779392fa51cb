"""Ranks that are frozen, slow, or gone: the others learn who it was, in time, and healthy jobs are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.ranks import store_group
from tests.helpers.hosted import ended, hosted_ranks, wait_for
from tests.helpers.places import PassedOn, Place
from tests.helpers.processes import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.not_on_s3("is about ranks")]


def _freeze_the_host_of_the_store(rank: int, root: str, notes: str, call: str) -> None:
    manager = ckpt.StateManager(root, model=nn.Linear(2, 2), ranks=ckpt.RankOptions(timeout=4.0))
    manager.resume()
    manager.save_state("before", wait=True)
    Path(notes, f"saved-{rank}").touch()
    if rank == 0:
        for other in (1, 2):
            wait_for(Path(notes, f"saved-{other}"))
        Path(notes, "frozen").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    wait_for(Path(notes, "frozen"))
    time.sleep(0.5)  # it may just be about to stop
    began = time.monotonic()
    with pytest.raises(ckpt.RanksError, match=r"store at 127\.0\.0\.1:\d+ did not answer within 4 s.*rank 0"):
        manager.save_state("after", wait=True) if call == "save" else manager.load_state()
    Path(notes, f"seconds-{rank}").write_text(str(time.monotonic() - began))
    manager.close()


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_frozen_rank_0_that_hosts_the_store_does_not_hang_the_others_past_timeout(
    root: Place, tmp_path: Path, call: str
) -> None:
    with hosted_ranks(3, _freeze_the_host_of_the_store, str(root), str(tmp_path), call) as jobs:
        assert [ended(job) for job in jobs[1:]] == [0, 0]
        assert jobs[0].exitcode is None
    assert all(float((tmp_path / f"seconds-{rank}").read_text()) < 4.0 + 10.0 for rank in (1, 2))
    assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(root)] == ["before"]


class _SlowToDelete(PassedOn):
    """A place where to remove a checkpoint takes longer than the timeout."""

    def delete(self, keys: Iterable[str]) -> None:
        listed = list(keys)
        if any(key.endswith("manifest.json") for key in listed):
            time.sleep(5.0)
        super().delete(listed)


def _retain_slowly(rank: int, root: str) -> None:
    options: dict[str, Any] = {"keep": ckpt.Keep(last=1), "ranks": ckpt.RankOptions(timeout=1.5)}
    with ckpt.StateManager(_SlowToDelete(root), model=nn.Linear(3, 3), **options) as manager:
        for name in "abc":
            manager.save_state(name)
        assert manager.load_state().name == "c"
    with ckpt.StateManager(f"{root}-next", model=nn.Linear(3, 3), ranks=ckpt.RankOptions(timeout=1.5)) as manager:
        manager.resume()
    dist.barrier()


def test_retention_that_is_slower_than_timeout_does_not_kill_a_healthy_job(root: Place) -> None:
    assert run_ranks(2, _retain_slowly, str(root)) == [0, 0]
    assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(root)] == ["c"]


def _close_slowly(rank: int, root: str) -> None:
    mirror = ckpt.Mirror(_SlowToDelete(f"{root}-mirror"), keep=ckpt.Keep(last=1))
    options: dict[str, Any] = {"mirror": mirror, "ranks": ckpt.RankOptions(timeout=1.5)}
    with ckpt.StateManager(root, model=nn.Linear(3, 3), **options) as manager:
        for name in "ab":
            manager.save_state(name, wait=True)
    with ckpt.StateManager(f"{root}-next", model=nn.Linear(3, 3), ranks=ckpt.RankOptions(timeout=1.5)) as manager:
        manager.resume()


def test_a_manager_that_is_long_in_closing_does_not_time_out_the_next_one(root: Place) -> None:
    assert run_ranks(2, _close_slowly, str(root)) == [0, 0]


def _slow_to_read() -> None:
    """This rank looks at the store once a second only: it is the last to read every decision."""
    store_group._SHORTEST = store_group._LONGEST = store_group._LONGEST_PER_RANK = 1.0


def _train_until_told(rank: int, root: str) -> None:
    if rank != 0:
        _slow_to_read()
    with ckpt.StateManager(root, model=nn.Linear(2, 2), ranks=ckpt.RankOptions(timeout=30)) as manager:
        manager.resume()
        for step in range(10_000):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            manager.step()
    raise AssertionError("never stopped")


@pytest.mark.timeout(300)
def test_told_to_terminate_rank_0_does_not_leave_with_the_store_before_the_others_have_read_the_decision(
    root: Place,
) -> None:
    for number in range(3):
        with hosted_ranks(3, _train_until_told, f"{root}/{number}") as jobs:
            assert [ended(job) for job in jobs] == [143, 143, 143]


WITHOUT_CLOSE = """
import sys, time
import torch.distributed as dist
from torch import nn
import ckpt
from ckpt.ranks import store_group

dist.init_process_group("gloo")
wait = store_group.StoreGroup._await

def late(self, keys, call):
    if dist.get_rank() and "files written" in call:
        time.sleep(12)  # longer than an interpreter takes to end
    wait(self, keys, call)

store_group.StoreGroup._await = late

def main():
    manager = ckpt.StateManager(sys.argv[1], model=nn.Linear(2, 2), ranks=ckpt.RankOptions(timeout=30))
    manager.save_state("last", wait=True)

main()
"""


@pytest.mark.timeout(600)
def test_a_script_that_ends_after_its_last_save_without_close_ends_well_on_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_CLOSE)
    port = str(20_000 + os.getpid() % 10_000)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    jobs = [
        subprocess.Popen([sys.executable, script, tmp_path / "run"], env={**os.environ, **group, "RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        assert [job.wait(240) for job in jobs] == [0, 0]
    finally:
        for job in jobs:
            job.kill()
    assert ckpt.verify(tmp_path / "run") == {"last": []}


def _load_on_two_of_three(rank: int, root: str, notes: str) -> None:
    manager = ckpt.StateManager(root, model=nn.Linear(2, 2), ranks=ckpt.RankOptions(timeout=3.0))
    manager.save_state("x", wait=True)
    if rank != 2:
        time.sleep(0 if rank == 1 else 1.5)  # rank 1 waits longest
        with pytest.raises(ckpt.RanksError) as refusal:
            manager.load_state()
        assert "load_state(): " in str(refusal.value)
        assert "rank 2 did not answer" in str(refusal.value)
    Path(notes, f"here-{rank}").touch()
    for other in range(3):
        wait_for(Path(notes, f"here-{other}"))
    assert manager.load_state().name == "x"  # they are in step again
    manager.close()


def test_a_rank_that_itself_waits_is_not_blamed_but_the_one_that_is_missing(root: Place, tmp_path: Path) -> None:
    assert run_ranks(3, _load_on_two_of_three, str(root), str(tmp_path)) == [0, 0, 0]

"""SIGKILL at random moments of copies and commits into memory: resumed where all ranks were.

`make memory-kills` kills 200 times, restarted by torchrun; the tests a few times, and do themselves what it does.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.helpers.processes import DEADLINE, run_ranks, start_rank
from tests.memory.killed_training import Plan, attempt_forked, noted

pytestmark = [pytest.mark.slow, pytest.mark.on_disk]  # a root in memory has saved each step before a kill

KILLS = int(os.environ.get("CKPT_MEMORY_KILLS", "0"))  # in all; 0: a few
STEPS = 60 if KILLS else 44  # past a save into the root
RANKS = 4 if KILLS else 2
REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Campaign:
    """How many ranks there are, which of them are killed, how often in the tests, and their share of all kills."""

    world_size: int
    who: str
    few: int
    share: float

    @property
    def kills(self) -> int:
        return round(KILLS * self.share) if KILLS else self.few

    def run(self, plan: Plan, memory: Path) -> None:
        """Train to the end, restarted after every kill."""
        if KILLS and plan.kills:
            self._run_under_torchrun(plan, memory)
            return
        for attempt in range(plan.kills):
            self._kill(replace(plan, who="by others"), memory, attempt)
        assert not any(run_ranks(self.world_size, attempt_forked, plan, str(memory), plan.kills))

    def _kill(self, plan: Plan, memory: Path, attempt: int) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        jobs = [
            start_rank(rank, self.world_size, store.port, plan.notes, attempt_forked, plan, str(memory), attempt)
            for rank in range(self.world_size)
        ]
        try:
            await_training(plan.notes, attempt, jobs)
            if attempt == plan.kills - 1:
                await_snapshot(memory, jobs)  # or, on a busy machine, nothing at all would be resumed from memory
            time.sleep(random.Random(attempt).uniform(0.0, 0.6))
            if self.who == "one":  # the launcher notices, and ends the others
                jobs[attempt % self.world_size].kill()
                jobs[attempt % self.world_size].join(DEADLINE)
                for job in jobs:
                    job.terminate()
                for job in jobs:
                    job.join(DEADLINE)
        finally:
            for job in jobs:
                job.kill()
            for job in jobs:
                job.join(DEADLINE)

    def _run_under_torchrun(self, plan: Plan, memory: Path) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.world_size)]
        restarts = ["--max-restarts", str(plan.kills), "-m", "tests.memory.killed_training", json.dumps(asdict(plan))]
        done = subprocess.run(
            [sys.executable, *launcher, *restarts],
            env={**os.environ, **ENVIRONMENT, "CKPT_MEMORY_DIR": str(memory)},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=120 + 60 * plan.kills,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-5000:]


def await_training(folder: str, attempt: int, jobs: list[BaseProcess]) -> None:
    """Until the ranks of an attempt have taken a step."""
    deadline = time.monotonic() + DEADLINE
    while not (lines := noted(folder)) or lines[-1].get("step") is None or every(lines, "attempt")[-1] < attempt:
        assert all(job.is_alive() for job in jobs)
        assert time.monotonic() < deadline
        time.sleep(0.005)


def await_snapshot(memory: Path, jobs: list[BaseProcess]) -> None:
    """Until something is committed in memory."""
    deadline = time.monotonic() + DEADLINE
    while not list(memory.glob("ckpt-*/slots/*/manifest.json")):
        assert all(job.is_alive() for job in jobs)
        assert time.monotonic() < deadline
        time.sleep(0.005)


def await_nothing_in(memory: Path) -> None:
    """Until the folder of the run is gone: the keeper removes what a rank has added while it was being removed."""
    deadline = time.monotonic() + DEADLINE
    while left := [str(path) for folder in memory.iterdir() for path in (folder, *folder.rglob("*"))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def every(found: list[dict[str, Any]], key: str) -> list[Any]:
    return [line[key] for line in found if key in line]


@pytest.mark.timeout(120 + 60 * max(KILLS, 10))
@pytest.mark.parametrize(
    "campaign",
    [Campaign(1, "all", 6, 0.4), Campaign(RANKS, "one", 2, 0.3), Campaign(RANKS, "all", 2, 0.3)],
    ids=["one process", "one of several ranks", "all of several ranks"],
)
def test_every_kill_costs_no_more_than_the_steps_since_the_last_snapshot(campaign: Campaign, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("memory", "killed", "straight")]
    for folder in folders:
        folder.mkdir()
    memory, killed, straight = folders
    campaign.run(Plan(str(tmp_path / "root"), str(killed), STEPS, campaign.kills, campaign.who), memory)
    await_nothing_in(memory)
    main = noted(str(killed))
    assert every(main, "attempt")[-1] == campaign.kills
    assert_resumed_where_all_were(campaign, killed)
    final = every(main, "final")[0]
    campaign.run(Plan(str(tmp_path / "straight-root"), str(straight), final), memory)
    for rank in range(campaign.world_size):
        assert_equal_in_every_bit(noted(str(killed), rank), noted(str(straight), rank))
    print(f"{campaign.kills} kills, {final:,} steps, {sum(every(main, 'memory'))} times resumed from memory")


def assert_resumed_where_all_were(campaign: Campaign, killed: Path) -> None:
    """All ranks resume at the same step, which is that of the newest checkpoint that was committed at the kill."""
    main = noted(str(killed))
    resumed = every(main, "resumed")
    assert resumed == every(main, "there")
    assert any(every(main, "memory"))
    for rank in range(1, campaign.world_size):
        assert every(noted(str(killed), rank), "resumed") == resumed


def assert_equal_in_every_bit(killed: list[dict[str, Any]], straight: list[dict[str, Any]]) -> None:
    losses = {line["step"]: line["loss"] for line in straight if "step" in line}
    assert {line["step"]: line["loss"] for line in killed if "step" in line} == losses
    assert all(line["loss"] == losses[line["step"]] for line in killed if "step" in line)
    assert every(killed, "digest") == every(straight, "digest")

"""torchtitan trains with ckpt in place of its checkpointer: killed, resumed, and spread in other ways."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.helpers import processes, titan
from tests.helpers.pipelines import missing, read, write
from tests.helpers.processes import run_ranks

WHY = "torchtitan is not installed: it needs datasets<4.8, so it is in no extra (CONTRIBUTING.md says how to try it)"
pytestmark = [pytest.mark.skipif(not titan.is_installed(), reason=WHY), pytest.mark.slow, pytest.mark.long]


def _train_and_die(rank: int, folder: str) -> None:
    """Every way straight to step 4. Then again, until all ranks are killed after step 3."""
    for way in titan.TRAINED:
        made = titan.trainer(titan.folder_of(folder, f"{way}-straight"), way, steps=4)
        made.checkpointer.after = lambda step, made=made, way=way: write(folder, f"{way}-{step}", titan.digests(made))
        made.train()
        made.close()
    for way in titan.TRAINED:
        made = titan.trainer(titan.folder_of(folder, way), way, steps=3)
        made.train()
        made.checkpointer.maybe_wait_for_saving()
        made.checkpointer.manager.wait()
    titan.synchronise()
    os.kill(os.getpid(), signal.SIGKILL)


def _resume(rank: int, folder: str) -> None:
    for way in titan.TRAINED:
        made = titan.trainer(titan.folder_of(folder, way), way, steps=4, seed=2)
        made.train()
        assert made.checkpointer.restored is not None
        assert not made.checkpointer.restored.approximated, made.checkpointer.restored
        assert not missing(titan.digests(made), read(folder, f"{way}-4")), way
        made.close()


def _load(rank: int, folder: str, ways: dict[str, str]) -> None:
    """`ways`: into what every checkpoint is loaded."""
    for saved, way in ways.items():
        made = titan.trainer(titan.folder_of(folder, f"{saved}-straight"), way, steps=2, seed=3)
        made.checkpointer.manager.load_state("step-00000002")
        assert not missing(titan.digests(made), read(folder, f"{saved}-2")), (saved, way)
        made.close()


@pytest.mark.timeout(1500)
def test_torchtitan_is_killed_resumed_bit_for_bit_and_spread_in_other_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "DEADLINE", 600.0)  # every process imports torchtitan
    folder = str(tmp_path)
    assert run_ranks(4, _train_and_die, folder, dies=True) == [-9] * 4
    run_ranks(4, _resume, folder)
    run_ranks(4, _load, folder, {"pp2-fsdp": "pp2-tp", "tp2-fsdp": "pp2-fsdp"})
    run_ranks(2, _load, folder, dict.fromkeys(titan.TRAINED, "fsdp"))

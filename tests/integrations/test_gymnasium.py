"""The wrapper that the guide shows: environments of gymnasium that play their episodes again. Skipped without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from tests.docs.pages import page

pytest.importorskip("gymnasium")

pytestmark = pytest.mark.slow  # AsyncVectorEnv starts processes

STEPS = 150
NAMES = ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCarContinuous-v0", "Taxi-v4", "FrozenLake-v1"]
CASES = [*((name, "SyncVectorEnv") for name in NAMES), ("CartPole-v1", "AsyncVectorEnv")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_environments_go_on_in_the_middle_of_their_episodes(tmp_path: Path, name: str, kind: str) -> None:
    (code,) = (block.code for block in page("guides/reinforcement-learning.md") if "gymnasium" in block.code)
    shown: dict[str, Any] = {}
    exec(code.replace("SyncVectorEnv", kind), shown)
    straight, resumed = (shown["Environments"](name, count=3, seed=1) for _ in range(2))
    straight.envs.action_space.seed(7)
    actions = [straight.envs.action_space.sample() for _ in range(STEPS)]
    try:
        for step, action in enumerate(actions):
            if step % 30 == 1:
                with ckpt.StateManager(tmp_path / str(step)) as manager:
                    manager.register(environments=straight)
                    manager.save_state("a", wait=True)
                with ckpt.StateManager(tmp_path / str(step)) as manager:  # `resumed` is somewhere else each time
                    manager.register(environments=resumed)
                    manager.load_state("a")
            found, expected = resumed.step(action if step else actions[-1]), straight.step(action)
            if step:
                assert all(map(np.array_equal, found, expected)), step
                assert np.array_equal(resumed.observations, straight.observations), step
    finally:
        for environments in (straight, resumed):
            environments.envs.close()

"""A run that is killed and resumed equals one that was never interrupted, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.places import Place
from tests.helpers.processes import run_ranks
from tests.helpers.training import SAMPLES, Job, records, train
from tests.helpers.variations import cells

pytestmark = pytest.mark.slow

KILLS = ("boundary", "mid-epoch", "mid-accumulation")


def _batches_per_epoch(data: str, world_size: int) -> int:
    share = -(-SAMPLES // world_size) if data == "distributed" else SAMPLES
    return -(-share // 4)


def _doomed(job: Job, kill: str, per_epoch: int) -> Job:
    if kill == "boundary":  # killed after a save at the very end of the first epoch
        return Job(**{**vars(job), "save_every": per_epoch, "kill": (per_epoch, "after")})
    if kill == "mid-epoch":  # killed one step after a save: that step is done again
        return Job(**{**vars(job), "save_every": 2, "kill": (3, "after")})
    # killed between backward and optimizer, in a window of which a part is saved
    return Job(**{**vars(job), "save_every": 1, "kill": (5, "before")})


CELLS = list(
    itertools.product(
        (1, 2), ("shuffle", "distributed", "stateful", "workers"), ("fp32", "scaler", "accumulation"), KILLS
    )
)
OFTEN = [  # every pair of two values
    (1, "shuffle", "accumulation", "boundary"),
    (1, "shuffle", "accumulation", "mid-epoch"),
    (2, "shuffle", "scaler", "mid-accumulation"),
    (1, "distributed", "scaler", "boundary"),
    (1, "distributed", "scaler", "mid-epoch"),
    (2, "distributed", "accumulation", "mid-accumulation"),
    (1, "stateful", "fp32", "mid-epoch"),
    (1, "stateful", "fp32", "mid-accumulation"),
    (2, "stateful", "scaler", "boundary"),
    (1, "workers", "accumulation", "mid-accumulation"),
    (2, "workers", "fp32", "boundary"),
    (2, "workers", "fp32", "mid-epoch"),
]
Straight = Callable[[int, str, str], list[Any]]


@pytest.fixture(scope="module")
def straight(new_root: Callable[[], Place], tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """What ranks record that nobody interrupts, computed once."""
    return cache(lambda *cell: uninterrupted(str(new_root()), tmp_path_factory.mktemp("straight"), *cell))


@pytest.mark.parametrize(("world_size", "data", "numerics", "kill"), cells(CELLS, OFTEN))
def test_killed_and_resumed_equals_uninterrupted(
    straight: Straight, root: Place, tmp_path: Path, world_size: int, data: str, numerics: str, kill: str
) -> None:
    interrupt(straight(world_size, data, numerics), str(root), tmp_path, data, numerics, kill)


@pytest.mark.parametrize(("world_size", "data", "numerics"), [(1, "workers", "scaler"), (2, "distributed", "fp32")])
def test_the_same_holds_on_s3(s3: str, tmp_path: Path, world_size: int, data: str, numerics: str) -> None:
    """Two of all; with CKPT_ROOT=s3 the test above does all of them there."""
    compare(s3, tmp_path, world_size, data, numerics)


def compare(root: str, tmp_path: Path, world_size: int, data: str, numerics: str) -> None:
    """Kill it in the middle of an epoch."""
    expected = uninterrupted(root, tmp_path, world_size, data, numerics)
    interrupt(expected, root, tmp_path, data, numerics, "mid-epoch")


def uninterrupted(root: str, tmp_path: Path, world_size: int, data: str, numerics: str) -> list[Any]:
    straight = Job(f"{root}/straight", data, numerics, record=str(tmp_path / "record"))
    assert run_ranks(world_size, train, straight) == [0] * world_size
    return records(str(tmp_path / "record"), world_size)


def interrupt(expected: list[Any], root: str, tmp_path: Path, data: str, numerics: str, kill: str) -> None:
    world_size = len(expected)
    job = Job(f"{root}/{kill}", data, numerics, record=str(tmp_path / kill))
    doomed = _doomed(job, kill, _batches_per_epoch(data, world_size))
    assert run_ranks(world_size, train, doomed, dies=True) == [-9] * world_size
    assert run_ranks(world_size, train, Job(**{**vars(doomed), "kill": None})) == [0] * world_size
    for was, now in zip(expected, records(str(tmp_path / kill), world_size), strict=True):
        assert 0 < len(now["steps"]) < len(was["steps"])
        assert now["steps"] == {step: was["steps"][step] for step in now["steps"]}
        assert now["final"] == was["final"]
        assert now["samples"] == was["samples"]
        assert now["approximated"] == {}

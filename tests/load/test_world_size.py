"""A run goes on with another number of ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.places import Place
from tests.helpers.processes import run_ranks
from tests.helpers.training import SAMPLES, Job, records, train
from tests.helpers.variations import cells

pytestmark = pytest.mark.slow


def _seen(records: list[Any], epoch: int) -> Counter[int]:
    return Counter(
        index for record in records for at, indices, _ in record["steps"].values() if at == epoch for index in indices
    )


@pytest.mark.parametrize(
    ("save_at", "world_size"),
    cells([(1, 1), (1, 3), (3, 1), (3, 3), (5, 1), (5, 3)], often=[(1, 3), (3, 1), (5, 3)]),
)
def test_saved_by_two_ranks_every_sample_is_seen_once_per_epoch_by_another_number(
    root: Place, tmp_path: Path, world_size: int, save_at: int
) -> None:
    straight = Job(f"{root}/straight", "distributed", record=str(tmp_path / "straight"))
    run_ranks(2, train, straight)
    before = records(straight.record or "", 2)
    for record in before:  # what the killed run will have seen
        record["steps"] = {step: entry for step, entry in record["steps"].items() if int(step) <= save_at}

    job = Job(f"{root}/run", "distributed", save_every=save_at, kill=(save_at, "after"), record=str(tmp_path / "run"))
    assert run_ranks(2, train, job, dies=True) == [-9, -9]
    run_ranks(world_size, train, Job(**{**vars(job), "kill": None}))
    after = records(job.record or "", world_size)

    first = _seen(before, 0) + _seen(after, 0)
    left = SAMPLES - sum(_seen(before, 0).values())
    padding = -left % world_size  # every rank needs as many samples as the others, as with any DistributedSampler
    assert set(first) == set(range(SAMPLES))
    assert sum(first.values()) == SAMPLES + padding
    assert _seen(after, 1) == Counter(range(SAMPLES))
    for record in after:
        assert "2 ranks" in record["approximated"]["rng"]
        assert record["samples"] == 2 * SAMPLES + padding


@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_of_another_number_of_ranks_are_named(root: Place, tmp_path: Path, world_size: int) -> None:
    path = str(tmp_path / "record")
    job = Job(f"{root}/run", "distributed", "accumulation", save_every=2, kill=(2, "after"), record=path)
    assert run_ranks(2, train, job, dies=True) == [-9, -9]
    run_ranks(world_size, train, Job(**{**vars(job), "kill": None}))
    for record in records(path, world_size):
        assert "window starts over" in record["approximated"]["gradients"]


def test_more_ranks_each_get_a_stream_of_their_own(root: Place, tmp_path: Path) -> None:
    job = Job(f"{root}/run", "shuffle", save_every=2, kill=(2, "after"), record=str(tmp_path / "run"))
    assert run_ranks(2, train, job, dies=True) == [-9, -9]
    run_ranks(3, train, Job(**{**vars(job), "kill": None}))
    draws = [record["final"]["rng"] for record in records(job.record or "", 3)]
    assert len(set(draws)) == 3

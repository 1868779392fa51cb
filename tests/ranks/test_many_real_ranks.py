"""`python -m benchmarks ranks` with few ranks: real processes, killed in a save, resumed, frozen, and simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.processes import Script

pytestmark = [pytest.mark.slow, pytest.mark.not_on_s3("counts requests of its own storage")]


def test_a_killed_job_resumes_exactly_on_fewer_ranks_a_frozen_rank_is_named_and_the_simulation_counts_the_same(
    tmp_path: Path,
) -> None:
    numbers = "--ranks 16 --resumed 12 --frozen 16 --freezes 1 --timeout 5 --simulation 16"
    command = ["-m", "benchmarks", "ranks", *numbers.split(), "--kinds", "fsdp", "--results", str(tmp_path / "results")]
    with Script(*command, log=tmp_path / "log", folder=Path(__file__).parents[2]) as script:
        said = script.run()
    (path,) = (tmp_path / "results").glob("*.json")
    found = {(row["subject"], row["metric"]): row["samples"] for row in json.loads(path.read_text())["rows"]}
    (took,) = found["while it writes its files", "the last rank was told"]
    assert 5.0 <= took < 60.0, said
    for metric in ("first save, exchanges", "next save, exchanges", "resume, exchanges", "resume, list"):
        assert found["16 ranks", f"{metric}, real"] == found["16 ranks", f"{metric}, simulated"], said

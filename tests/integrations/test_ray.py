"""Ray Train's workers, with real Ray: killed, brought back, and compared. Skipped without Ray."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import ckpt
from tests.docs.pages import page
from tests.helpers import seaweed
from tests.helpers.processes import Script
from tests.helpers.ray_jobs import EPOCHS, SAMPLES, Run

pytest.importorskip("ray", reason="ray is not installed: it is in no extra (CONTRIBUTING.md says how to try it)")
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

DEADLINE = 600.0
STEPS = EPOCHS * SAMPLES // 8


@contextmanager
def driver(log: Path, *arguments: str, more: Mapping[str, str] | None = None) -> Iterator[tuple[Script, Path]]:
    """A driver that is running, and its folder. Nothing of it is there afterwards."""
    temporary = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a socket's path is short
    environment = {
        "PYTHONPATH": os.pathsep.join(path for path in [os.getcwd(), *sys.path] if path),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # or Ray writes one into the home folder
        "RAY_TMPDIR": str(temporary),
        "TMPDIR": str(temporary),
        "GLOO_SOCKET_IFNAME": "lo",
        **(more or {}),
    }
    try:
        with Script(*arguments, log=log, environment=environment) as script:
            yield script, temporary
    finally:
        end_all(str(temporary))
        shutil.rmtree(temporary, ignore_errors=True)


def end_all(folder: str) -> None:
    """Processes of a cluster that has its files in this folder: they end with the driver, which may take a moment."""
    deadline = time.monotonic() + 30
    while (left := [*_of(folder)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _of(folder: str) -> Iterator[int]:
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"RAY_TMPDIR={folder}".encode() in environment.read_bytes().split(b"\0"):
                yield int(environment.parent.name)


def run_all(log: Path, *runs: Run, more: Mapping[str, str] | None = None) -> None:
    with driver(log, "-m", "tests.helpers.ray_jobs", as_json(*runs), more=more) as (script, temporary):
        assert script.wait(DEADLINE) == 0, log.read_text()[-20_000:]
        assert not list(temporary.glob("ckpt-ray-*"))


def as_json(*runs: Run) -> str:
    return json.dumps([asdict(run) for run in runs])


def seen(run: Run, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run.out, f"rank-{rank}").read_text().splitlines()]


def final(run: Run, rank: int) -> dict[str, Any]:
    """The last that a worker saw of every step, and what its state was in the end."""
    lines = seen(run, rank)
    return {"steps": {line["step"]: line for line in lines if "step" in line}, "end": lines[-1]["end"]}


def attempts(run: Run) -> list[int]:
    """The steps at which its workers resumed."""
    return [line["attempt"] for line in seen(run, 0) if "attempt" in line]


def result(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(run.out, "result.json").read_text())
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What each worker saw in a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    run = Run(out=str(folder / "out"), storage=str(folder / "storage"))
    run_all(folder / "log", run)
    assert attempts(run) == [0]
    return {rank: final(run, rank) for rank in range(2)}


def test_killed_workers_come_back_and_end_as_if_nothing_had_happened(
    tmp_path: Path, straight: dict[int, dict[str, Any]]
) -> None:
    run = Run(
        out=str(tmp_path / "out"),
        storage=str(tmp_path / "storage"),
        kills={"1": [5], "0": [14]},
        failures=2,
        folders=2,
        pause=0.2,
    )
    again = Run(out=str(tmp_path / "again"), storage=run.storage, folders=2)
    run_all(tmp_path / "log", run, again)
    assert len(attempts(run)) == 3
    assert all(step > 0 for step in attempts(run)[1:])
    assert {rank: final(run, rank) for rank in range(2)} == straight
    root, said = tmp_path / "storage" / "run" / "ckpt", result(run)
    assert said["last"] == {"ckpt": str(root / f"step-{STEPS:08}")}
    assert said["step"] == STEPS
    assert 0 < said["loss"] == float.fromhex(straight[0]["steps"][STEPS]["loss"])
    assert len(said["reported"]) == 2  # `folders`
    assert 2 <= len([*root.parent.glob("checkpoint_*-*")]) <= 4  # Ray leaves one where it was killed
    assert all(not wrong for wrong in ckpt.verify(root).values())
    assert len(ckpt.list_checkpoints(root)) == 2  # `Keep(last=2)`
    assert attempts(again) == [STEPS]
    assert result(again)["last"] == said["last"]


def test_a_killed_driver_continues_under_the_same_name(tmp_path: Path, straight: dict[int, dict[str, Any]]) -> None:
    run = Run(out=str(tmp_path / "out"), storage=str(tmp_path / "storage"), pause=0.3)
    with driver(tmp_path / "log", "-m", "tests.helpers.ray_jobs", as_json(run)) as (script, _):
        deadline = time.monotonic() + DEADLINE
        while not _has_come_to(run, 13):
            assert script.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        script.kill()
    run_all(tmp_path / "log again", run)
    assert len(attempts(run)) == 2
    assert attempts(run)[1] > 0
    assert {rank: final(run, rank) for rank in range(2)} == straight
    assert result(run)["step"] == STEPS


def _has_come_to(run: Run, step: int) -> bool:
    return Path(run.out, "rank-0").exists() and any(line.get("step") == step for line in seen(run, 0))


def test_another_number_of_workers_sees_each_sample_once_in_an_epoch(tmp_path: Path) -> None:
    two = Run(out=str(tmp_path / "out"), storage=str(tmp_path / "storage"), kills={"1": [12]}, error="health check")
    run_all(tmp_path / "log", two, Run(out=two.out, storage=two.storage, workers=1))
    first, second = (seen(two, rank) for rank in range(2))
    resumed = attempts(two)[1]
    assert 8 < resumed <= 12  # in the second epoch
    before = [line for line in [*first, *second] if line.get("epoch") == 1 and line["step"] <= resumed]
    start = next(number for number, line in enumerate(first) if line.get("attempt") == resumed)
    after = first[start + 1 :]
    lines = [line for line in before if line not in after] + [line for line in after if line.get("epoch") == 1]
    assert sorted(number for line in lines for number in line["samples"]) == list(range(SAMPLES))
    third = [number for line in after if line.get("epoch") == 2 for number in line["samples"]]
    assert sorted(third) == list(range(SAMPLES))
    assert first[start]["approximated"]  # the generators of a worker that is gone, and what it would have drawn


def test_a_run_whose_storage_is_s3_comes_back(tmp_path: Path, straight: dict[int, dict[str, Any]]) -> None:
    with seaweed.serving() as server:
        storage = f"s3://{seaweed.BUCKET}/runs"
        run = Run(out=str(tmp_path / "out"), storage=storage, kills={"0": [8]}, failures=1, pause=0.2)
        run_all(tmp_path / "log", run, more=seaweed.environment(server.url))
        assert len(attempts(run)) == 2
        assert attempts(run)[1] > 0
        assert {rank: final(run, rank) for rank in range(2)} == straight
        assert result(run)["last"] == {"ckpt": f"{storage}/run/ckpt/step-{STEPS:08}"}


def test_rays_own_loader_neither_repeats_nor_misses_samples(tmp_path: Path) -> None:
    whole = Run(out=str(tmp_path / "whole"), storage=str(tmp_path / "a"), prepared=True)
    killed = Run(
        out=str(tmp_path / "killed"),
        storage=str(tmp_path / "b"),
        prepared=True,
        kills={"1": [13]},
        failures=1,
        pause=0.1,
    )
    run_all(tmp_path / "log", whole, killed)
    assert attempts(killed)[1] > 0
    assert [final(killed, rank) for rank in range(2)] == [final(whole, rank) for rank in range(2)]


def test_the_guide_does_what_it_says(tmp_path: Path) -> None:
    script = next(block for block in page("guides/ray.md") if block.title == "train.py")
    shown = next(block for block in page("guides/ray.md") if block.language == "text")
    (tmp_path / "train.py").write_text(script.code.replace("/mnt/shared/runs", str(tmp_path / "runs")))
    with driver(tmp_path / "log", str(tmp_path / "train.py")) as (process, _):
        assert process.wait(DEADLINE) == 0, (tmp_path / "log").read_text()[-20_000:]
    assert shown.code.strip() in (tmp_path / "log").read_text()

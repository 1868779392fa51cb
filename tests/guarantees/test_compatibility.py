"""Checkpoints outlive versions: those of the last commit before the packages load today, and today's load there."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.guarantees.written_before import jobs
from tests.helpers.processes import run_ranks

BEFORE = "094f117"  # the last commit before the packages
WRITTEN_BEFORE = Path(jobs.__file__).parent
REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.not_on_s3("the files of the old checkpoints are in the repository")]


@pytest.fixture(scope="module")
def code_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code as it was, from the history of this repository."""
    folder = tmp_path_factory.mktemp("before")
    command = ["git", "-C", str(REPOSITORY), "archive", "--format=tar", BEFORE, "ckpt", "formats", "storage"]
    try:
        archive = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"commit {BEFORE} cannot be read here (no git, or not in this clone): {error}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


def run_today(action: str, case: str, root: Path, report: Path) -> None:
    codes = run_ranks(jobs.RANKS[case], jobs.train, action, case, str(root), str(report))
    assert codes == [0] * jobs.RANKS[case]


def reports(report: Path, case: str) -> list[Any]:
    return [json.loads(Path(f"{report}-{rank}.json").read_text()) for rank in range(jobs.RANKS[case])]


def assert_continued(expected: dict[str, str], found: dict[str, str]) -> None:
    """The same state after a step more: in every bit but those in which processors may round differently."""
    assert list(found) == list(expected)
    for name, text in expected.items():
        if text.startswith("float32"):
            torch.testing.assert_close(tensor(found[name]), tensor(text), rtol=1e-4, atol=1e-6, msg=name)
        else:
            assert found[name] == text, name


def tensor(text: str) -> torch.Tensor:
    shape, _, raw = text.removeprefix("float32 ").rpartition(" ")
    return torch.tensor(memoryview(bytes.fromhex(raw)).cast("f").tolist()).reshape(json.loads(shape))


@pytest.mark.parametrize("case", jobs.RANKS)
def test_a_checkpoint_written_before_loads_and_training_continues(tmp_path: Path, case: str) -> None:
    root, report = tmp_path / "root", tmp_path / "report"
    shutil.copytree(WRITTEN_BEFORE / case, root)
    before = {path: path.read_bytes() for path in (root / jobs.NAME).rglob("*") if path.is_file()}
    assert ckpt.verify(root) == {jobs.NAME: []}
    run_today("read", case, root, report)
    for expected, found in zip(reports(WRITTEN_BEFORE / case, case), reports(report, case), strict=True):
        assert found["saved"] == expected["saved"]
        assert found["data"] == expected["data"]
        assert_continued(expected["later"], found["later"])
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("case", jobs.RANKS)
def test_a_checkpoint_written_today_loads_in_the_code_of_before(tmp_path: Path, code_before: Path, case: str) -> None:
    root, written, read = tmp_path / "root", tmp_path / "written", tmp_path / "read"
    run_today("write", case, root, written)
    jobs.launch("read", case, root, read, code_before)
    for expected, found in zip(reports(written, case), reports(read, case), strict=True):
        assert found["saved"] == expected["saved"]
        assert found["data"] == expected["data"]
        assert_continued(expected["later"], found["later"])

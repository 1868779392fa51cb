"""Checkpoints outlive versions: those of the last commit before the packages load today, and today's load there."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

import ckpt
from tests.guarantees.written_before import jobs
from tests.helpers.processes import Script, run_ranks

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


# the server has imported today's `ckpt`: its modules make room for those in a folder, as the job makes sure
_AS_BEFORE = """
import runpy, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "ckpt"]:
    del sys.modules[name]
code, *sys.argv = sys.argv[1:]
sys.path.insert(0, code)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_before(action: str, case: str, places: dict[Path, Path], code: Path, folder: Path) -> None:
    """Run a job for each root, with its report, by the code as it was."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    named = [path for place in places.items() for path in place]
    with ExitStack() as running:
        ranks = [
            running.enter_context(
                Script(
                    "-c", _AS_BEFORE, code, jobs.__file__, action, case, code, str(store.port), str(rank), *named,
                    log=folder / f"log-{rank}", environment={"GLOO_SOCKET_IFNAME": "lo"}, folder=Path("/"),
                )
            )
            for rank in range(jobs.RANKS[case])
        ]  # fmt: skip
        for rank in ranks:
            rank.run()


def reports(report: Path, case: str) -> list[Any]:
    return [json.loads(Path(f"{report}-{rank}.json").read_text()) for rank in range(jobs.RANKS[case])]


def exact(state: dict[str, str]) -> dict[str, str]:
    """What a step makes of a state that is the same on every processor: they may round floats differently."""
    return {name: text for name, text in state.items() if not text.startswith("float32")}


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
        assert list(found["later"]) == list(expected["later"])
        assert exact(found["later"]) == exact(expected["later"])
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("case", [case for case in jobs.RANKS if case not in jobs.SINCE])
def test_today_and_before_training_continues_alike_from_a_checkpoint_of_either(
    tmp_path: Path, code_before: Path, case: str
) -> None:
    """To the last bit, on one machine."""
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(WRITTEN_BEFORE / case, old)
    run_today("write", case, new, tmp_path / "new-today")
    places = {old: tmp_path / "old-before", new: tmp_path / "new-before"}
    run_before("read", case, places, code_before, tmp_path)
    run_today("read", case, old, tmp_path / "old-today")
    for checkpoint in ("old", "new"):
        assert reports(tmp_path / f"{checkpoint}-before", case) == reports(tmp_path / f"{checkpoint}-today", case)

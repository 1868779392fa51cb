"""In a container with little memory the tier gives way to the training, which needs more within a step than between."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy
import pytest

from ckpt.memory.room import TrainingPeak
from ckpt.util.aligned_memory import most_mapped

pytestmark = pytest.mark.on_disk  # files of a tmpfs count as memory

MB = 1 << 20
GROUPS = Path("/sys/fs/cgroup/memory")  # version 1, whose groups a container may be allowed to make
TRAINING = """
import sys, torch, ckpt
from torch import nn

torch.manual_seed(0)
model = nn.Linear(1024, 13 * 1024, bias=False)  # with its moments 160 MB
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
every = 1 if sys.argv[2] == "snapshots" else None
with ckpt.StateManager(sys.argv[1], model=model, optimizer=optimizer, memory=every) as manager:
    manager.resume()
    for _ in range(4):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        optimizer.zero_grad()
        manager.step()
        if manager.session.memory:
            manager.session.memory.wait()
    manager.save_state(wait=True)
print("trained", model.weight.double().sum().item())
"""


class TestPeak:
    @pytest.fixture
    def status(self, tmp_path: Path) -> Path:
        return tmp_path / "status"

    def write(self, status: Path, peak: int, held: int) -> None:
        status.write_text(f"Name:\tpython\nVmHWM:\t{peak // 1024} kB\nVmRSS:\t{held // 1024} kB\n")

    def test_is_what_a_step_has_needed_beside_what_is_held(self, status: Path) -> None:
        self.write(status, 100 * MB, 100 * MB)
        peak = TrainingPeak(status)
        self.write(status, 300 * MB, 120 * MB)
        assert peak.more() == 180 * MB - most_mapped()  # by earlier tests in this process

    def test_of_the_time_before_training_says_nothing(self, status: Path) -> None:
        self.write(status, 300 * MB, 100 * MB)
        peak = TrainingPeak(status)
        self.write(status, 300 * MB, 120 * MB)
        assert peak.more() == 0

    def test_is_nothing_where_the_system_does_not_count(self, status: Path) -> None:
        assert TrainingPeak(status).more() == 0

    def test_of_this_process_is_counted(self) -> None:
        peak = TrainingPeak()
        block = numpy.ones(peak._before + 64 * MB + most_mapped(), dtype=numpy.uint8)
        del block
        assert peak.more() > 32 * MB


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group whose processes have 900 MB."""
    group = GROUPS / f"ckpt-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(900 * MB))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    for pid in map(int, (group / "cgroup.procs").read_text().split()):
        with suppress(ProcessLookupError):
            os.kill(pid, 15)
    until = time.monotonic() + 30
    while (group / "cgroup.procs").read_text() and time.monotonic() < until:
        time.sleep(0.05)
    group.rmdir()


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder in a tmpfs, of which nothing is left however the test ends."""
    folder = tempfile.mkdtemp(prefix="ckpt-test-", dir="/dev/shm")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def run_in(group: Path, memory: str, root: Path, how: str) -> subprocess.CompletedProcess[str]:
    enter = f'echo $$ > {group}/cgroup.procs && exec {sys.executable} -c "$TRAINING" {root} {how}'
    environment = {**os.environ, "TRAINING": TRAINING, "CKPT_MEMORY_DIR": memory}
    return subprocess.run(["sh", "-c", enter], env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no tmpfs")
def test_a_training_that_fits_into_its_container_alone_is_not_killed_for_its_snapshots(
    memory: str, group: Path, tmp_path: Path
) -> None:
    alone = run_in(group, memory, tmp_path / "alone", "none")
    assert alone.returncode == 0, alone.stderr
    beside = run_in(group, memory, tmp_path / "beside", "snapshots")
    assert beside.returncode == 0, beside.stderr
    assert beside.stdout == alone.stdout
    assert "snapshots in memory are off until step" in beside.stderr

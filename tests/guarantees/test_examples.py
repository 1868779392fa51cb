"""The examples, killed and started again: alone and on several ranks, with torchrun and `accelerate launch` too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import safetensors.torch

import ckpt
from tests.helpers.processes import DEADLINE, Script
from tests.helpers.variations import cells

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
ACCELERATE = ("-m", "accelerate.commands.launch", "--num_machines", "1", "--num_processes")
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",  # sums in one order, whatever else runs here
    "ACCELERATE_USE_CPU": "true",
}
TRAINING = ("--epochs", "2", "--save-every", "7")
Process = subprocess.Popen[bytes] | Script
TENSORS = ("model.safetensors", "optimizer.safetensors")


@dataclass(frozen=True)
class Example:
    """One example with its options, in a folder of its own: forked, unless a launcher starts its ranks."""

    folder: Path
    name: str
    options: tuple[str, ...] = ()
    world_size: int = 1
    launcher: tuple[str, ...] = ()

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @contextmanager
    def started(self) -> Iterator[Process]:
        """It runs inside this. Nothing of it does afterwards."""
        self.folder.mkdir(exist_ok=True)
        command = (str(EXAMPLES / self.name), "--root", str(self.root), *self.options)
        process: Process
        if self.launcher:
            process = self._launched(*command)
        else:
            process = Script(*command, log=self.log, ranks=self.world_size, environment=ENVIRONMENT)
        try:
            yield process
        finally:
            kill(process)

    def _launched(self, *command: str) -> subprocess.Popen[bytes]:
        # not a pipe: one that nobody reads would stop it, and a rank that outlives its launcher would keep it open
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *self.launcher, *command],
                stdout=log, stderr=log, env=os.environ | ENVIRONMENT, start_new_session=True,
            )  # fmt: skip

    def run(self) -> str:
        """Let it run to its end, and return what it said."""
        with self.started() as process:
            assert process.wait(DEADLINE) == 0, self.log.read_text()
        return self.log.read_text()

    def interrupt(self, when: Callable[[], bool], how: Callable[[Process], None]) -> int:
        """Start it, do something to it in the middle, and return the status with which it ended."""
        with self.started() as process:
            deadline = time.monotonic() + DEADLINE
            while not when():
                assert process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.002)
            how(process)
            return process.wait(DEADLINE)

    def has(self, checkpoint: str) -> Callable[[], bool]:
        return (self.root / checkpoint / "manifest.json").exists


def kill(process: Process) -> None:
    """SIGKILL the process and its ranks. Each of these leads a group, where a signal to torchrun's does not reach."""
    if isinstance(process, Script):
        process.kill()
    elif process.poll() is None:
        for leader in [process.pid, *children(process.pid)]:
            with suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
        process.wait(DEADLINE)


def children(pid: int) -> list[int]:
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for text in lists for child in text.split()]


def terminate(process: Process) -> None:
    """SIGTERM to what was started, as a scheduler sends it: torchrun tells the ranks."""
    process.terminate()


def training(folder: Path, world_size: int, launcher: tuple[str, ...] = ()) -> Example:
    return Example(folder, "train.py", (*TRAINING, "--losses", str(folder / "losses")), world_size, launcher)


def lines(example: Example) -> list[str]:
    path = example.folder / "losses"
    return path.read_text().splitlines() if path.exists() else []


def last_of_each_step(recorded: list[str]) -> list[str]:
    """Steps that were lost with the process are made again, and then recorded again."""
    latest = {int(line.split()[0]): line for line in recorded}
    return [latest[step] for step in sorted(latest)]


def tensors(example: Example, checkpoint: str, names: tuple[str, ...] = TENSORS) -> dict[str, bytes]:
    return {name: (example.root / checkpoint / name).read_bytes() for name in names}


@pytest.fixture(
    scope="module", params=[pytest.param(1, id="alone"), pytest.param(2, id="two ranks", marks=pytest.mark.long)]
)
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Example:
    """A training that nobody interrupts."""
    example = training(tmp_path_factory.mktemp("straight"), request.param)
    example.run()
    return example


def assert_same_training(straight: Example, interrupted: Example) -> None:
    last = f"step-{len(lines(straight)):08d}"
    assert last_of_each_step(lines(interrupted)) == lines(straight)
    assert tensors(interrupted, last) == tensors(straight, last)


def test_a_killed_training_that_is_started_again_equals_one_that_was_not_killed(
    straight: Example, tmp_path: Path
) -> None:
    middle = len(lines(straight)) // 2
    job = training(tmp_path, straight.world_size)
    assert job.interrupt(lambda: len(lines(job)) > middle, kill) == -signal.SIGKILL
    assert middle < len(lines(job)) < len(lines(straight))
    assert f"resumed from {job.root}/step-" in job.run()
    assert_same_training(straight, job)


def test_a_terminated_training_saves_its_last_step_and_goes_on_from_there(straight: Example, tmp_path: Path) -> None:
    """Two ranks are those of torchrun, which tells them of the signal."""
    middle = len(lines(straight)) // 2
    launcher = (*TORCHRUN, "2") if straight.world_size == 2 else ()
    job = training(tmp_path, straight.world_size, launcher)
    status = job.interrupt(lambda: len(lines(job)) > middle, terminate)
    assert status == (1 if launcher else 128 + signal.SIGTERM), job.log.read_text()
    reached = len(lines(job))
    assert middle < reached < len(lines(straight))
    assert f"asked to terminate: saved step {reached}" in job.log.read_text()
    assert f"resumed from {job.root}/step-{reached:08d}" in replace(job, launcher=()).run()
    assert len(lines(job)) == len(lines(straight))  # no step was made twice
    assert_same_training(straight, job)


def test_a_training_that_is_done_does_nothing_when_it_is_started_again(straight: Example) -> None:
    before = lines(straight)
    assert f"resumed from {straight.root}/step-{len(before):08d}" in straight.run()
    assert lines(straight) == before


def results(said: str) -> list[str]:
    """What an example has printed, without the lines that are said of its saves."""
    return [line for line in said.splitlines() if not line.startswith("saved ")]


def test_two_models_and_their_optimizers_come_back_from_one_step(tmp_path: Path) -> None:
    straight, job = (Example(tmp_path / name, "gan.py", ("--epochs", "10")) for name in ("straight", "killed"))
    said = [straight.run()]
    assert job.interrupt(job.has("step-00000200"), kill) == -signal.SIGKILL
    said.append(job.run())
    for name in ("generator", "critic"):
        files = (f"model.{name}.safetensors", f"optimizer.{name}.safetensors")
        assert tensors(job, "step-00000320", files) == tensors(straight, "step-00000320", files)
    assert len({results(one)[-1] for one in said}) == 1
    assert "off the ring" in results(said[0])[-1]


def course(folder: Path, kind: str) -> Example:
    """The loop of the Hugging Face course: plain, or with Accelerate on so many processes."""
    losses = ("--losses", str(folder / "losses"), "--epochs", "2")
    if kind == "plain":
        return Example(folder, "no_trainer.py", (*losses, "--save-every", "9"))
    accumulating = ("--accumulate", "3", "--save-every", "5")
    return Example(folder, "accelerate_loop.py", (*losses, *accumulating), 1 if kind == "alone" else 2)


@pytest.mark.parametrize("kind", cells(["plain", "alone", "two ranks"], often=["alone"]))
def test_the_loop_of_the_course_killed_and_started_again_equals_one_that_was_not(tmp_path: Path, kind: str) -> None:
    """Two ranks are resumed by Accelerate's launcher."""
    straight, job = (course(tmp_path / name, kind) for name in ("straight", "killed"))
    said = straight.run()
    middle = len(lines(straight)) * 2 // 3  # of the second epoch
    assert job.interrupt(lambda: len(lines(job)) > middle, kill) == -signal.SIGKILL
    assert middle < len(lines(job)) < len(lines(straight))
    again = (replace(job, launcher=(*ACCELERATE, "2", "--multi_gpu")) if kind == "two ranks" else job).run()
    assert f"resumed from {job.root}/" in again
    assert last_of_each_step(lines(job)) == lines(straight)
    assert results(again)[-1] == results(said)[-1]
    assert "accuracy" in results(said)[-1]
    last = f"step-{len(lines(straight)):08d}" if kind == "plain" else "epoch_1"
    assert tensors(job, last) == tensors(straight, last)


def test_a_loop_of_ones_own_comes_back_with_its_objects_and_named_checkpoints(tmp_path: Path) -> None:
    straight, job = (Example(tmp_path / name, "custom_loop.py", ("--steps", "600")) for name in ("straight", "killed"))
    said = [straight.run()]
    assert job.interrupt(job.has("step-00000400"), kill) == -signal.SIGKILL
    said.append(job.run())
    for checkpoint in ("level-1", "level-2", "level-3", "final"):
        assert tensors(job, checkpoint) == tensors(straight, checkpoint)
    levels = [[line for line in one.splitlines() if "on the hardest level" in line] for one in said]
    assert len(levels[0]) == 4
    assert levels[0] == levels[1]


def test_the_sharded_example_goes_on_with_other_ranks_and_becomes_one_file(tmp_path: Path) -> None:
    first = Example(tmp_path, "train_fsdp.py", ("--epochs", "1", "--save-every", "25"), world_size=2)
    assert "done: 960 samples in 60 steps" in first.run()
    second = Example(tmp_path, "train_fsdp.py", ("--epochs", "2", "--save-every", "25"), world_size=3)
    assert "done: 1920 samples in 100 steps" in second.run()
    merged = tmp_path / "model.safetensors"
    ckpt.merge(second.root / "step-00000100", merged)
    assert safetensors.torch.load_file(merged)["0.0.weight"].shape == (64, 64)


def test_agents_with_their_environments_and_a_replay_buffer_come_back_and_only_what_changed_is_written(
    tmp_path: Path,
) -> None:
    """Killed while the buffer grows, and again when it overwrites its oldest rows."""
    straight, job = (
        Example(tmp_path / name, "rl.py", ("--losses", str(tmp_path / name / "losses")))
        for name in ("straight", "killed")
    )
    straight.run()
    for is_time in (lambda: len(lines(job)) > 130, job.has("step-00000250")):
        assert job.interrupt(is_time, kill) == -signal.SIGKILL
    assert f"resumed from {job.root}/step-" in job.run()
    assert last_of_each_step(lines(job)) == lines(straight)
    assert len(lines(straight)) == 320 < len(lines(job))
    before, last = (job.root / f"step-{step:08d}" for step in (300, 320))
    differences = {found.name for found in ckpt.diff(straight.root / last.name, last).differences}
    assert differences <= {"rank-00000.rng.python"}  # which the example neither seeds nor uses
    for name, is_linked in (("model.reference", True), ("replay+chunks.0", True), ("replay+chunks.1", False)):
        inodes = {(folder / f"{name}.safetensors").stat().st_ino for folder in (before, last)}
        assert (len(inodes) == 1) == is_linked, name


SAME_MODELS = """
import sys, torch
from transformers import GPT2LMHeadModel

first, second = (GPT2LMHeadModel.from_pretrained(folder).state_dict() for folder in sys.argv[1:])
assert first and all(torch.equal(first[name], second[name]) for name in first)
"""


def test_adapters_come_back_the_frozen_base_is_written_once_and_both_are_merged(tmp_path: Path) -> None:
    straight, job = (
        Example(tmp_path / name, "lora.py", ("--epochs", "2", "--merged", str(tmp_path / name / "merged")))
        for name in ("straight", "killed")
    )
    said = [straight.run()]
    assert job.interrupt(job.has("step-00000030"), kill) == -signal.SIGKILL
    said.append(job.run())
    files = (*TENSORS, "model+frozen.safetensors")
    assert tensors(job, "step-00000060", files) == tensors(straight, "step-00000060", files)
    inodes = {path.stat().st_ino for path in job.root.glob("step-*/model+frozen.safetensors")}
    assert len(inodes) == 1
    ends = [[line for line in one.splitlines() if line.startswith("epoch 1")] for one in said]
    assert ends[0] == ends[1] != []
    Script("-c", SAME_MODELS, straight.folder / "merged", job.folder / "merged", log=tmp_path / "log").run()
    assert (job.folder / "merged" / "config.json").exists()


def test_a_log_of_metrics_goes_on_in_the_same_run_with_every_step_once(tmp_path: Path) -> None:
    straight, job = (
        Example(tmp_path / name, "tracked.py", ("--log", str(tmp_path / name / "metrics")))
        for name in ("straight", "killed")
    )
    straight.run()
    assert job.interrupt(job.has("step-00000150"), kill) == -signal.SIGKILL
    (begun,) = (job.folder / "metrics").iterdir()
    job.run()
    assert list((job.folder / "metrics").iterdir()) == [begun]
    (whole,) = (straight.folder / "metrics").iterdir()
    assert begun.read_text() == whole.read_text()
    assert whole.read_text().count("\n") == 320

"""What launchers say about the processes of a job in the environment, for those that have no process group."""

from __future__ import annotations

import os
from typing import NamedTuple

from ckpt.errors import RanksError

_SIZES = {  # how many processes were started together, and by what
    "WORLD_SIZE": "torchrun, or a launcher like it",
    "SLURM_STEP_NUM_TASKS": "srun",  # not SLURM_NTASKS, which a batch script has too that starts one process
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
}


class Launched(NamedTuple):
    """How many processes were started together, which variable says so, and who sets it."""

    size: int
    variable: str
    launcher: str


def started_together() -> Launched | None:
    """The job that this process is one of several of; None where nothing says that there are others."""
    for variable, launcher in _SIZES.items():
        text = os.environ.get(variable, "")
        if text.isdecimal() and int(text) > 1:
            return Launched(int(text), variable, launcher)
    return None


def require_process_group(*, reads_only: bool) -> None:
    """Refuse to work as if alone where other processes were started too: each of them would save for itself.

    With `reads_only`, only where they are ranks of PyTorch: several programs of one job may read the same file.
    """
    job = started_together()
    if job is None or (reads_only and job.variable != "WORLD_SIZE"):
        return
    ways = "call torch.distributed.init_process_group() before StateManager(...)"
    if job.variable != "WORLD_SIZE":
        ways += ", with the rank and the number of processes that the launcher has set, or start them with torchrun"
    raise RanksError(
        f"this is one of {job.size} processes that {job.launcher} has started ({job.variable}={job.size}), but they "
        f"have no process group: every one would write on its own. If they train one model together, {ways}. If every "
        "one trains a model of its own, give each its own root and ranks=ckpt.RankOptions(alone=True)."
    )

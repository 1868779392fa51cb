"""Finds the ranks of this job: a single process, those of the default process group, or what a launcher tells."""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

import torch.distributed as dist

from ckpt.compat.torch import default_store
from ckpt.errors import ConfigError, RanksError, UnsupportedError
from ckpt.formats.layout import Members
from ckpt.formats.native.manifest import digest
from ckpt.ranks.consensus import Ranks, SingleProcess
from ckpt.ranks.store_and_heartbeats import TimedStore
from ckpt.ranks.store_group import StoreGroup, built_here

_LAUNCHERS = [  # the variables that say how many processes were started together, and how many of them on each host
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "torchrun, or a launcher like it"),
    # not SLURM_NTASKS, which a batch script has too that starts one process
    ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "srun"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "mpirun"),
    ("PMI_SIZE", "MPI_LOCALNRANKS", "mpiexec"),
]


class Launched(NamedTuple):
    """How many processes were started together, which variable says so, and who sets it."""

    size: int
    variable: str
    launcher: str


def started_together() -> Launched | None:
    """The job that this process is one of several of; None where nothing says that there are others."""
    for variable, _, launcher in _LAUNCHERS:
        text = os.environ.get(variable, "")
        if text.isdecimal() and int(text) > 1:
            return Launched(int(text), variable, launcher)
    return None


def ranks_per_host() -> int | None:
    """How many ranks there are on each host.

    None if no launcher says it, if hosts have different numbers, or if the ranks are not the processes that it started:
    one process per host may have started the ranks there."""
    ranks = f"{dist.get_world_size()}" if dist.is_available() and dist.is_initialized() else None
    for variable, per_host, _ in _LAUNCHERS:
        found = re.fullmatch(r"([1-9]\d{0,8})(\(x\d+\))?", os.environ.get(per_host, ""))  # "8(x4)": on each of 4 hosts
        if found and (ranks is None or os.environ.get(variable, ranks) == ranks):
            return int(found[1])
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
        f"this job has {job.size} processes, started by {job.launcher} ({job.variable}={job.size}), but no process "
        f"group, so each process would write its own checkpoints. If all processes train one model together, {ways}. "
        "If each process trains its own model, give each process its own root and ranks=ckpt.RankOptions(alone=True)."
    )


OWN_ROOTS = "own roots"  # the name under which managers meet whose hosts may have separate roots


def find_ranks(
    root: str,
    timeout: float,
    *,
    own_root: bool = False,
    alone: bool = False,
    reads_only: bool = False,
    process_group: Any = None,
) -> Ranks:
    """The ranks of this job, for a manager of `root`; with `alone`, this process, whatever others there are; with a
    process group, the ranks in it.

    The n-th manager of a root on each rank meets the n-th of the same root on the others. Where hosts may have
    separate roots (`own_root`), paths may differ between ranks: the n-th such manager meets the others' n-th.
    """
    there_is_a_job = dist.is_available() and dist.is_initialized()
    if alone:
        return SingleProcess((dist.get_rank(),) if there_is_a_job and dist.get_world_size() > 1 else None)
    if not there_is_a_job:
        require_process_group(reads_only=reads_only)
        return SingleProcess()
    members = _members(process_group)
    numbers = members or range(dist.get_world_size())
    if len(numbers) == 1:
        return SingleProcess(members)
    store = default_store()
    if store is None:
        raise UnsupportedError(
            "in this release of PyTorch, ckpt can't find the store that connects the ranks. Set MASTER_ADDR and "
            "MASTER_PORT to the store's address, as torchrun does."
        )
    job = TimedStore(store, timeout).below(_attempt())
    built = built_here()
    key = built.add(meeting_name(OWN_ROOTS if own_root else root, members), root)
    built.publish(job, dist.get_rank())
    return StoreGroup(job.below(key), numbers.index(dist.get_rank()), len(numbers), timeout, job, built, members)


def meeting_name(name: str, members: Members) -> str:
    """The name under which managers meet: those of different process groups never do, even with the same root."""
    return name if members is None else f"{name} of ranks {digest(repr(members).encode())}"


def _members(process_group: Any) -> Members:
    """The ranks in a process group, by their numbers in the job; None for all of them."""
    if process_group is None or process_group is dist.group.WORLD:
        return None
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the process_group that you passed to this manager. Build the manager "
            "only on the ranks of the group."
        )
    members = tuple(dist.get_process_group_ranks(process_group))
    return None if members == tuple(range(dist.get_world_size())) else members


def _attempt() -> str:
    """A prefix for the keys of this attempt: after a restart by torchrun the store has those of killed ranks still."""
    return f"ckpt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

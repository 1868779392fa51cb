"""Finds the ranks of this job: a single process, or those of the default process group."""

from __future__ import annotations

import os

import torch.distributed as dist

from ckpt.ranks.built_managers import built_here
from ckpt.ranks.group import Ranks, SingleProcess
from ckpt.ranks.launchers import require_process_group
from ckpt.ranks.store import TimedStore
from ckpt.ranks.store_group import StoreGroup

OWN_ROOTS = "own roots"  # the name under which managers meet whose hosts may have separate roots


def find_ranks(
    root: str, timeout: float, *, own_root: bool = False, alone: bool = False, reads_only: bool = False
) -> Ranks:
    """The ranks of this job, for a manager of `root`; with `alone`, this process, whatever others there are.

    The n-th manager of a root on each rank meets the n-th of the same root on the others. Where hosts may have
    separate roots (`own_root`), paths may differ between ranks: the n-th such manager meets the others' n-th.
    """
    if alone:
        return SingleProcess()
    if not (dist.is_available() and dist.is_initialized()):
        require_process_group(reads_only=reads_only)
        return SingleProcess()
    if dist.get_world_size() == 1:
        return SingleProcess()
    job = TimedStore(dist.distributed_c10d._get_default_store(), timeout).below(_attempt())
    built = built_here()
    key = built.add(OWN_ROOTS if own_root else root, root)
    built.publish(job, dist.get_rank())
    return StoreGroup(job.below(key), dist.get_rank(), dist.get_world_size(), timeout, job, built)


def _attempt() -> str:
    """A prefix for the keys of this attempt: after a restart by torchrun the store has those of killed ranks still."""
    return f"ckpt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

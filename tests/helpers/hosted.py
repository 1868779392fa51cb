"""Ranks of a job whose rank 0 hosts the store, as with `env://` without torchrun: the store ends with that process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.helpers.processes import start_rank


@contextmanager
def hosted_ranks(world_size: int, function: Callable[..., None], *args: Any) -> Iterator[list[BaseProcess]]:
    """Running processes of `function(rank, *args)`, in a process group; killed when the context is left."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            start_rank(rank, 1, 0, folder, _joined, rank, world_size, folder, function, *args)
            for rank in range(world_size)
        ]
        try:
            yield jobs
        finally:
            for job in jobs:
                job.kill()
                job.join()
            failures = [path.read_text() for path in sorted(Path(folder).glob("failure-*"))]
            assert not failures, "\n".join(failures)


def ended(job: BaseProcess, within: float = 120.0) -> int:
    """The exit code of a process."""
    job.join(within)
    assert job.exitcode is not None, f"a process was still there after {within:g} s"
    return job.exitcode


def wait_for(path: Path, within: float = 120.0) -> None:
    """Until a file is there."""
    deadline = time.monotonic() + within
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come within {within:g} s"
        time.sleep(0.01)


def _joined(_: int, rank: int, world_size: int, folder: str, function: Callable[..., None], *args: Any) -> None:
    port = Path(folder, "port")
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        Path(folder, "port.new").write_text(str(store.port))
        Path(folder, "port.new").rename(port)
    else:
        wait_for(port)
        store = TCPStore("127.0.0.1", int(port.read_text()), is_master=False, timeout=timedelta(minutes=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    del store
    function(rank, *args)

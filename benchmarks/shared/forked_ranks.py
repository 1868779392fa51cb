"""Real ranks by the hundred: processes forked from one that has imported torch, whose memory they share."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

_PR_SET_PDEATHSIG = 1
_PAUSE = 0.02


class ForkedRanks:
    """The running ranks of a job. Its store has a process of its own, as it has torchrun's agent: it outlasts them."""

    def __init__(self, processes: Mapping[int, int], folder: Path) -> None:
        self.processes = dict(processes)  # ids by rank, of those that have not ended
        self.codes: dict[int, int] = {}
        self._folder = folder

    def wait(self, within: float, *, but: Collection[int] = ()) -> None:
        """Until all ranks have ended well, or all but those."""
        deadline = time.monotonic() + within
        while self.processes.keys() - set(but):
            self._reap()
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {sorted(self.processes)} have not ended within {within:g} s")
            time.sleep(_PAUSE)

    def wait_for(self, file: str, within: float) -> None:
        """Until a rank has left that file in the folder of the job."""
        deadline = time.monotonic() + within
        while not (self._folder / file).exists():
            self._reap()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{file} did not come within {within:g} s")
            time.sleep(_PAUSE)

    def kill(self) -> None:
        """SIGKILL to all that are left; returns when they are gone."""
        for process in self.processes.values():
            os.kill(process, signal.SIGKILL)
        for process in self.processes.values():
            os.waitpid(process, 0)
        self.processes.clear()

    def _reap(self) -> None:
        for rank, process in list(self.processes.items()):
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                del self.processes[rank]
                if status:
                    raise RuntimeError(f"rank {rank} has failed:\n{self._failure(rank)}")

    def _failure(self, rank: int) -> str:
        with suppress(OSError):
            return Path(self._folder, f"failure-{rank}").read_text()
        return "it said nothing"


@contextmanager
def forked(ranks: int, folder: Path, function: Callable[..., None], *arguments: Any) -> Iterator[ForkedRanks]:
    """Run `function(rank, folder, *arguments)` on so many ranks, with gloo. Those left at the end are killed."""
    if threading.active_count() > 1:
        raise RuntimeError(f"a process that runs threads cannot be forked: {threading.enumerate()}")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or the first collection of each rank would copy every page that holds an object
    job = ForkedRanks({}, folder)
    store, port = _fork_store()
    try:
        for rank in range(ranks):
            process = os.fork()
            if not process:
                _run(rank, ranks, port, folder, function, *arguments)
            job.processes[rank] = process
        yield job
    finally:
        job.kill()
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)


def _fork_store() -> tuple[int, int]:
    """The process of a store, and its port."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        _die_with_parent()
        os.close(reading)
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(server.port).encode())
        while True:
            signal.pause()
    os.close(writing)
    with open(reading) as said:
        os.set_blocking(said.fileno(), True)
        return process, int(os.read(said.fileno(), 16))


def _run(rank: int, ranks: int, port: int, folder: Path, function: Callable[..., None], *arguments: Any) -> None:
    """All that a rank does: it never returns."""
    status = 1
    try:
        _die_with_parent()
        torch.manual_seed(100 + rank)
        random.seed(100 + rank)
        store = TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        function(rank, folder, *arguments)
        dist.destroy_process_group()
        status = 0
    except BaseException:
        Path(folder, f"failure-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        os._exit(status)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def memory() -> dict[str, int]:
    """Bytes that this process has in memory, and those that it has for itself: forked processes share the others."""
    text = Path("/proc/self/smaps_rollup").read_text()
    found = {key: 1024 * int(value) for key, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return {"resident": found["Rss"], "own": found["Private_Clean"] + found["Private_Dirty"]}

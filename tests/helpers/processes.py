"""Real processes for tests: ranks of a job, forked from a server that has imported torch once."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

DEADLINE = 240.0  # seconds: on a busy machine, and less than a test may take
_OF_STORES = ("AWS_", "AZURE_STORAGE_", "STORAGE_EMULATOR_HOST", "NO_GCE_CHECK")

_context: ForkServerContext = multiprocessing.get_context("forkserver")
# what ranks import: once here, or seconds in each of them. Not Lightning and DeepSpeed, which change others on import
_PRELOADED = """
    tests.helpers.fork_server
    torch._dynamo torch._inductor.compile_fx torch.distributed.checkpoint torch.distributed.fsdp torch.distributed.optim
    torch.distributed.pipelining numpy s3fs
    accelerate peft transformers.trainer torchdata.stateful_dataloader
    ckpt.manager ckpt.export ckpt.memory.tier ckpt.storage.clouds.s3 ckpt.integrations.accelerate
    tests.helpers.processes tests.helpers.training
"""
# some of it touches CUDA, which no forked process could use any more
_context.set_forkserver_preload([] if torch.cuda.is_available() else _PRELOADED.split())


def run_ranks(world_size: int, function: Callable[..., None], *args: Any, dies: bool = False) -> list[int]:
    """Run `function(rank, *args)` in as many processes, and return their exit codes (-9 for a killed one).

    A rank that ends with another code than 0 fails the test, whether it compares them or not, unless it is to die.
    """
    # the store lives here, as it lives in torchrun's agent: it outlasts any rank
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [start_rank(rank, world_size, store.port, folder, function, *args) for rank in range(world_size)]
        try:
            for job in jobs:
                job.join(DEADLINE)
            late = [rank for rank, job in enumerate(jobs) if job.exitcode is None]
        finally:
            for job in jobs:
                job.kill()
        failures = [path.read_text() for path in sorted(Path(folder).glob("failure-*"))]
    waiting = [f"ranks {late} did not end within {DEADLINE:g} s"] if late else []
    assert not failures + waiting, "\n".join(failures + waiting)
    codes = [job.exitcode for job in jobs if job.exitcode is not None]
    assert dies or not any(codes), f"the ranks ended with {codes}"
    return codes


def run_alone(function: Callable[..., None], *args: Any, dies: bool = False) -> int:
    """Run `function(rank, *args)` in one process, without a process group."""
    return run_ranks(1, function, *args, dies=dies)[0]


def run_here(function: Callable[..., None], *args: Any) -> int:
    """Run `function(0, *args)` in this process as `run_alone` would: where a new one would import for long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seed_everything(0)
    try:
        function(0, *args)
    finally:
        torch.set_num_threads(threads)
    return 0


def start_alone(folder: str, function: Callable[..., None], *args: Any) -> BaseProcess:
    """Start `function(rank, *args)` in one process, and return it running."""
    return start_rank(0, 1, 0, folder, function, *args)


def start_rank(
    rank: int, world_size: int, port: int, folder: str, function: Callable[..., None], *args: Any
) -> BaseProcess:
    # the server was started earlier, so that its environment may be another
    storage = {name: value for name, value in os.environ.items() if name.startswith(_OF_STORES)}
    job = _context.Process(target=_main, args=(storage, rank, world_size, port, folder, function, *args))
    job.start()
    return job


def fork(function: Callable[..., None], *args: Any) -> BaseProcess:
    """Start `function(*args)` in a process forked from the server, as it is: without seeds or a process group."""
    job = _context.Process(target=function, args=args)
    job.start()
    return job


class Script:
    """`python ARGUMENTS`, forked from the server and not started: with Popen's methods, in a session of its own.

    It takes a tenth of a second where a new interpreter takes seconds. Several ranks are told what torchrun tells them,
    and end up in one log. `before` is called in the new process, which may enter a namespace.
    """

    def __init__(
        self, *arguments: str | Path, log: Path, errors: Path | None = None, ranks: int = 1,
        environment: Mapping[str, str] | None = None, folder: Path | None = None, before: Callable[[], object] = int,
    ) -> None:  # fmt: skip
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
        self.log, self.errors = log, errors or log
        self.errors.write_bytes(b"")
        log.write_bytes(b"")
        reader, self._input = _context.Pipe(duplex=False)
        words, logs = [str(argument) for argument in arguments], (str(self.log), str(self.errors))
        self._jobs = [
            fork(
                _run_script, words, reader, logs, {**os.environ, **self._told(rank, ranks), **(environment or {})},
                str(folder or os.getcwd()), before,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        reader.close()

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _told(self, rank: int, ranks: int) -> dict[str, str]:
        if self._store is None:
            return {}
        store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "TORCHELASTIC_RESTART_COUNT": "0"}
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        return {**store, "TORCHELASTIC_USE_AGENT_STORE": "True", **{name: str(value) for name, value in world.items()}}

    def poll(self) -> int | None:
        codes = [job.exitcode for job in self._jobs]
        return None if None in codes else next(filter(None, codes), 0)

    def wait(self, timeout: float = DEADLINE) -> int:
        deadline = time.monotonic() + timeout
        for job in self._jobs:
            job.join(max(0.0, deadline - time.monotonic()))
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self._jobs), timeout)
        return code

    def terminate(self) -> None:
        for job in self._jobs:
            job.terminate()

    def kill(self) -> None:
        """SIGKILL to all of it and what it has started; nothing of it is there afterwards."""
        for job in self._jobs:
            with suppress(ProcessLookupError):
                os.killpg(job.pid or 0, signal.SIGKILL)
            job.kill()  # if it was too early for a session of its own
            job.join()

    def run(self, timeout: float = DEADLINE) -> str:
        """Let it run to its end, which must be a good one, and return what it said."""
        try:
            assert self.wait(timeout) == 0, self.errors.read_text()
        finally:
            self.kill()
        return self.log.read_text()


def _run_script(
    arguments: Sequence[str], reader: Connection, logs: Sequence[str], environment: Mapping[str, str], folder: str,
    before: Callable[[], object],
) -> None:  # fmt: skip
    os.setsid()
    os.dup2(reader.fileno(), 0)
    sys.stdin = open(0)  # noqa: SIM115
    for number, log in enumerate(logs, 1):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    before()
    torch.set_num_threads(1)  # OMP_NUM_THREADS is read when torch is imported
    random.seed()
    torch.seed()
    try:
        _run_python(*arguments)
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends a process without them


def _run_python(first: str, *rest: str) -> None:
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv, sys.path[0] = list(rest), os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *rest], os.path.dirname(first)
        runpy.run_path(first, run_name="__main__")


def interrupt(call: Callable[[], object], and_then: Callable[[], object] = lambda: None) -> None:
    """Make a call that waits for something, and interrupt it after a moment, as Ctrl-C does."""

    def handler(*_: Any) -> None:
        and_then()
        raise KeyboardInterrupt

    def begin() -> None:
        timer.start()
        call()

    previous = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    try:
        with pytest.raises(KeyboardInterrupt):
            begin()
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, previous)


def _main(
    storage: dict[str, str],
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    function: Callable[..., None],
    *args: Any,
) -> None:
    os.environ.update(storage)
    torch.set_num_threads(1)
    seed_everything(rank)
    try:
        if world_size > 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            store = TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        function(rank, *args)
        if world_size > 1:
            dist.destroy_process_group()
    except SystemExit:
        raise
    except BaseException:
        Path(folder, f"failure-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        sys.exit(1)


def seed_everything(rank: int) -> None:
    """Every rank its own streams, so that a rank that took another's would be noticed."""
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(100 + rank)

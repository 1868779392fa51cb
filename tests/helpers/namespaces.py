"""Two network namespaces with a cable between them: as far from each other as two hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_DEADLINE = 240.0  # seconds


@dataclass(frozen=True)
class Node:
    """One of two hosts."""

    number: int
    namespace: str
    interface: str

    def launch(
        self, script: Path, *arguments: str, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a script with torchrun, one rank on each node, in a session of its own."""
        command = ["ip", "netns", "exec", self.namespace, sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += ["--nproc-per-node=1", f"--node-rank={self.number}"]
        command += ["--master-addr=10.77.0.1", "--master-port=29511", str(script), *arguments]
        own = {"GLOO_SOCKET_IFNAME": self.interface, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **own, **(environment or {})},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


@contextmanager
def cabled_nodes() -> Iterator[list[Node]]:
    """Two nodes that reach each other and nobody else."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"ckpt-{os.getpid()}-{end}" for end in "ab"]
    cable = [f"ck{os.getpid() % 100_000}{end}" for end in "ab"]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", cable[0], "netns", names[0], "type", "veth", "peer", "name", cable[1], "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        for number, (name, end) in enumerate(zip(names, cable, strict=True), 1):
            _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield [Node(number, name, end) for number, (name, end) in enumerate(zip(names, cable, strict=True))]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def ends_of(jobs: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """The exit status of each job, and what it wrote to its standard error."""
    try:
        ended = [(job.wait(_DEADLINE), job) for job in jobs]
        return [(status, job.stderr.read() if job.stderr else "") for status, job in ended]
    finally:
        for job in jobs:
            job.kill()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)

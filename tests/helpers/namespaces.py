"""Namespaces: two networks with a cable between them, as far apart as two hosts; a small tmpfs, as in a container."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.processes import Script

_STORE = ("10.77.0.1", "29511")  # on the first of them
_HOST_STORE = """
import sys, time, torch.distributed as dist
store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
time.sleep(600)
"""


@dataclass(frozen=True)
class Node:
    """One of two hosts."""

    number: int
    namespace: str
    interface: str

    def start(self, script: Path, *arguments: str, folder: Path, environment: Mapping[str, str]) -> Script:
        """A rank of this node, told what torchrun would tell it."""
        world = {"RANK": str(self.number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        store = {"MASTER_ADDR": _STORE[0], "MASTER_PORT": _STORE[1], "TORCHELASTIC_USE_AGENT_STORE": "True"}
        own = {"GLOO_SOCKET_IFNAME": self.interface, "TORCHELASTIC_RESTART_COUNT": "0"}
        return Script(
            script,
            *arguments,
            log=folder / f"log-{self.number}",
            environment={**world, **store, **own, **environment},
            folder=folder,
            before=partial(_enter_network, self.namespace),
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


def run_on_nodes(
    nodes: Sequence[Node], script: Path, *arguments: str, folders: Sequence[Path], memories: Sequence[Path] = ()
) -> list[tuple[int, str]]:
    """Run a script with a rank on each node, in a folder of its own: the exit status of each, and what it wrote."""
    enter = partial(_enter_network, nodes[0].namespace)
    launcher = Script("-c", _HOST_STORE, *_STORE, log=script.with_suffix(".store"), before=enter)
    environments = [{"CKPT_MEMORY_DIR": str(memory)} for memory in memories] or [{} for _ in nodes]
    jobs = [
        node.start(script, *arguments, folder=folder, environment=environment)
        for node, folder, environment in zip(nodes, folders, environments, strict=True)
    ]
    try:
        return [(job.wait(), job.log.read_text()) for job in jobs]
    finally:
        for job in (*jobs, launcher):
            job.kill()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _enter_network(name: str) -> None:
    """As `ip netns exec` does; os.setns comes with Python 3.12."""
    namespace = os.open(f"/run/netns/{name}", os.O_RDONLY)
    _call("setns", namespace, 0)
    os.close(namespace)


def with_tmpfs(folder: Path, size: int, *arguments: str, cwd: Path) -> Script:
    """Start `python ARGUMENTS`, to which alone a folder is a tmpfs of so many bytes; what it says is below `cwd`."""
    if shutil.which("unshare") is None:
        pytest.skip("a mount of its own needs unshare")
    tried = subprocess.run(
        ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else []), "mount", "-t", "tmpfs", "ckpt", folder],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if tried.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {tried.stderr.strip()}")
    mount = partial(_mount_tmpfs, str(folder), size)
    return Script(*arguments, log=cwd / "stdout", errors=cwd / "stderr", before=mount)


def _mount_tmpfs(folder: str, size: int) -> None:
    """As `unshare --mount` does, and then mount: nobody else sees it."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", 0x20000 | (0x10000000 if user else 0))  # CLONE_NEWNS, CLONE_NEWUSER
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path("/proc/self", name).write_text(text)
    _call("mount", b"none", b"/", None, 0x44000, None)  # MS_REC, MS_PRIVATE
    _call("mount", b"ckpt", os.fsencode(folder), b"tmpfs", 0, b"size=%d" % size)


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), name)

"""Two ranks on the loopback interface, forked like everything else."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.campaign.children import DEADLINE, Child, Voice
from tests.campaign.trials import Trial
from tests.campaign.verdicts import BROKEN, Ended, Found

WORLD = 2
STORES = ("agent", "rank 0")  # who hosts the store: a process of its own, as torchrun does, or a rank
_LOCAL = "127.0.0.1"


class Job:
    """Ranks that run `function(voice, rank, *args)` in a process group of gloo."""

    def __init__(self, trial: Trial, function: Callable[..., Any], *args: Any, store: str = "agent") -> None:
        self.agent = trial.start(_host_store) if store == "agent" else None
        self.ranks = [trial.start(_rank, rank, store, function, args) for rank in range(WORLD)]
        port = self._port_of(self.agent or self.ranks[0])
        for rank in self.ranks[0 if self.agent else 1 :]:
            rank.say(port)

    def _port_of(self, host: Child) -> str:
        port = host.hear("port ")
        if port is None:
            raise Found(BROKEN, f"no store: {host.wait('its host').failure}")
        return port

    def ready(self) -> None:
        """Until every rank has resumed."""
        for number, rank in enumerate(self.ranks):
            if rank.hear("ready") is None:
                ended = rank.wait("a rank")
                raise Found(BROKEN, f"rank {number} ended with {ended.status} before it was ready: {ended.failure}")

    def kill(self) -> list[Ended]:
        """SIGKILL to all at once."""
        for rank in self.ranks:
            rank.signal(signal.SIGSTOP)
        return [rank.kill() for rank in self.ranks]

    def wait(self, what: str, seconds: float = DEADLINE) -> list[Ended]:
        return [rank.wait(f"{what}, rank {number}", seconds) for number, rank in enumerate(self.ranks)]


def _host_store(voice: Voice) -> None:
    store = TCPStore(_LOCAL, 0, is_master=True, wait_for_workers=False)
    voice.tell(f"port {store.port}")
    voice.heed()


def _rank(voice: Voice, rank: int, store: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if store == "rank 0" and rank == 0:
        found = TCPStore(_LOCAL, 0, is_master=True, wait_for_workers=False)
        voice.tell(f"port {found.port}")
    else:
        found = TCPStore(_LOCAL, int(voice.heed()), is_master=False)
    dist.init_process_group("gloo", store=found, rank=rank, world_size=WORLD)
    return function(voice, rank, *args)

"""Saves and loads a model sharded with FSDP 2 over two ranks: ckpt beside torch.distributed.checkpoint.

Both in one run, by turns, model and AdamW state, on the CPU with gloo; torchrun is started by this command. Ours is
fsynced and hashed, and verified when it is loaded; DCP fsyncs. Loads are timed twice: with every file in the page
cache, and with none. Every load is compared bit for bit with what was saved.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ckpt
from benchmarks.shared import measure
from benchmarks.shared.fsdp import build, local_shards
from benchmarks.shared.plot import bars
from benchmarks.shared.report import Run, in_seconds, parser, ratio, table
from benchmarks.shared.results import Samples

RANKS = 2
METRICS = ("save", "load, warm", "load, cold")


class Ours:
    name = "ckpt (hashed, fsynced)"

    def save(self, root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
            manager.save_state("x", wait=True)

    def load(self, root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
            manager.load_state("x")


class Theirs:
    name = "torch.distributed.checkpoint"

    def save(self, root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        states = get_state_dict(model, optimizer)
        dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=root)

    def load(self, root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=root)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


Library = Ours | Theirs
LIBRARIES: tuple[Library, ...] = (Ours(), Theirs())


def timed(do: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    do()
    dist.barrier()
    return time.perf_counter() - began


def turn(library: Library, folder: Path, megabytes: int) -> list[float]:
    """Seconds of a save, of a load from the page cache, and of one from the disk."""
    saved = build(megabytes, 1)
    found = [timed(lambda: library.save(folder, *saved))]
    for prepare in measure.CACHES.values():
        if dist.get_rank() == 0:
            prepare(folder)
        target = build(megabytes, 2)
        found.append(timed(lambda: library.load(folder, *target)))  # noqa: B023
        shards = zip(local_shards(*saved), local_shards(*target), strict=True)
        assert all(torch.equal(left, right) for left, right in shards), f"{library.name} loaded something else"
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return found


def measure_all(options: argparse.Namespace, samples: Samples) -> None:
    with ExitStack() as stack:
        shared = [stack.enter_context(measure.folder_in(options.root)) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(shared)
        folder = Path(str(shared[0]), "run")
        for _ in range(options.repeats):
            for library in LIBRARIES:
                for metric, took in zip(METRICS, turn(library, folder, options.megabytes), strict=True):
                    samples.add(library.name, metric, took)


def body(samples: Samples) -> str:
    head = ["", *(title for metric in METRICS for title in (metric, "to DCP"))]
    return f"""{table(head, [row(library, samples) for library in LIBRARIES])}

Warm: every file was read once just before; cold: no file is in the page cache. Ours is hashed, fsynced and verified.
"""


def row(library: Library, samples: Samples) -> list[str]:
    cells = [library.name]
    for metric in METRICS:
        best = samples.best(library.name, metric)
        cells += [in_seconds(best), ratio(best, samples.best(Theirs.name, metric))]
    return cells


def plot(samples: Samples) -> str:
    names = [library.name for library in LIBRARIES]
    groups = {metric: {name: min(samples.all(name, metric)) for name in names} for metric in METRICS}
    return bars("FSDP 2 over two ranks", groups)


def main(arguments: Sequence[str]) -> int:
    options_parser = parser("sharded", __doc__)
    options_parser.add_argument("--megabytes", type=int, default=1500, help="size of model and optimizer state")
    options_parser.add_argument("--repeats", type=int, default=3, help="turns of each")
    options = options_parser.parse_args(arguments)
    if "RANK" not in os.environ:
        return launch(arguments)
    dist.init_process_group("gloo")
    run = Run("sharded", options, "torch")
    measure_all(options, run.samples)
    if dist.get_rank() == 0:
        title = f"A model sharded with FSDP 2 over two ranks, {options.megabytes} MB with AdamW: save and load"
        note = (
            f"Two processes with gloo, started by torchrun; the best of {options.repeats} turns; every load was equal"
        )
        run.keep(title, body(run.samples), plot(run.samples), note)
    dist.destroy_process_group()
    return 0


def launch(arguments: Sequence[str]) -> int:
    """Run this benchmark on two ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
    return subprocess.call([*torchrun, "-m", "benchmarks", "sharded", *arguments], env=environment)

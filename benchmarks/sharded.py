"""Saving and loading a model sharded with FSDP 2 over two ranks: ours against torch.distributed.checkpoint.

    torchrun --nproc_per_node 2 benchmarks/sharded.py [--megabytes 1500] [--repeats 3]

Both in one run, in turns, model and AdamW state, on the CPU with gloo. Ours is fsynced and hashed, and verified when it
is loaded; DCP fsyncs. Loads are timed twice: with every file in the page cache, and with none. Every load is compared
bit for bit with what was saved. The table is printed, and kept in `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import ckpt
from benchmarks.shared import measure

WIDTH = 1024


def build(megabytes: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = max(2, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))  # weights and two moments
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return model, optimizer


def pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's piece of everything, in one order."""
    found = []
    for parameter in model.parameters():
        moments = optimizer.state[parameter]
        found += [one.to_local() for one in (parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"])]
    return found


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


def timed(do: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    do()
    dist.barrier()
    return time.perf_counter() - began


def turn(who: Ours | Theirs, folder: Path, megabytes: int) -> tuple[float, float, float]:
    """The time of a save, of a load from the page cache, and of one from the disk."""
    model, optimizer = build(megabytes, 1)
    saving = timed(lambda: who.save(folder, model, optimizer))
    loading = []
    for prepare in (measure.warm, measure.cold):
        if dist.get_rank() == 0:
            prepare(folder)
        other, fresh = build(megabytes, 2)
        loading.append(timed(lambda: who.load(folder, other, fresh)))  # noqa: B023
        same = all(torch.equal(a, b) for a, b in zip(pieces(model, optimizer), pieces(other, fresh), strict=True))
        assert same, f"{who.name} gave back something else"
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return saving, loading[0], loading[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path())
    options = parser.parse_args()
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp(dir=options.root) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    contestants = (Ours(), Theirs())
    results: dict[str, list[tuple[float, float, float]]] = {one.name: [] for one in contestants}
    for _ in range(options.repeats):
        for one in contestants:
            results[one.name].append(turn(one, Path(str(folder[0]), "run"), options.megabytes))
    if dist.get_rank() == 0:
        report(results, options)
        shutil.rmtree(str(folder[0]), ignore_errors=True)
    dist.destroy_process_group()


def report(results: dict[str, list[tuple[float, float, float]]], options: argparse.Namespace) -> None:
    best = {name: [min(column) for column in zip(*turns, strict=True)] for name, turns in results.items()}
    theirs = best[Theirs.name]
    head = ["", "save", "to DCP", "load, warm", "to DCP", "load, cold", "to DCP"]
    rows = [
        [
            name,
            *(
                cell
                for mine, other in zip(times, theirs, strict=True)
                for cell in (f"{mine:.2f} s", f"{mine / other:.2f}")
            ),
        ]
        for name, times in best.items()
    ]
    command = f"sharded.py --megabytes {options.megabytes} --repeats {options.repeats}"
    text = f"""# A model sharded with FSDP 2 over two ranks, {options.megabytes} MB with AdamW: save and load

{measure.preamble(command, options.root, "torch")}
- Two processes with gloo (`torchrun --nproc_per_node 2`); the best of {options.repeats} turns; every load was equal

{measure.table(head, rows)}

Warm: every file was read once just before; cold: no file is in the page cache. Ours is hashed, fsynced and verified.
"""
    print(text)
    plot = measure.bars(
        "FSDP 2 over two ranks",
        {
            "save": {n: t[0] for n, t in best.items()},
            "load, warm": {n: t[1] for n, t in best.items()},
            "load, cold": {n: t[2] for n, t in best.items()},
        },
    )
    print("kept in", measure.keep("sharded", measure.processor(), text, plot, None))


if __name__ == "__main__":
    main()

"""How long the command `ckpt` takes: to start, to list many checkpoints, to show one of many tensors.

Each is a process of its own, on a local disk, with warm files. What is printed must be what is there, or there are no
figures.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import ckpt
from benchmarks.shared.many_checkpoints import build
from benchmarks.shared.report import Run, Target, in_seconds, parser, table, table_of_targets

HELP, LS, LS_MANY, SHOW = "--help", "ls of one", "ls of many", "show of many tensors"
MOST = {HELP: 0.3, LS: 0.3, LS_MANY: 1.0, SHOW: 1.0}  # seconds
NOTES = ("From the start of the process to its end, Python's own start included",)


def wide(count: int) -> nn.Module:
    """A model of so many tensors, in modules of ten."""
    blocks = [nn.ParameterDict({f"w{part}": torch.zeros(2) for part in range(10)}) for _ in range(count // 10)]
    return nn.ModuleDict({"layers": nn.ModuleList(blocks)})


def seconds(*arguments: str, expect: str) -> float:
    began = time.perf_counter()
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ckpt")), *arguments], capture_output=True, text=True, check=True
    )
    took = time.perf_counter() - began
    assert expect in done.stdout, done.stdout[-500:]
    return took


def main(arguments: Sequence[str]) -> None:
    options_parser = parser("commands", __doc__)
    options_parser.add_argument("--checkpoints", type=int, default=1000)
    options_parser.add_argument("--tensors", type=int, default=10_000)
    options_parser.add_argument("--repeats", type=int, default=5)
    options = options_parser.parse_args(arguments)
    run = Run("commands", options, "torch", "click")
    with tempfile.TemporaryDirectory(dir=options.root) as folder:
        one, many, large = (f"{folder}/{name}" for name in ("one", "many", "large"))
        build(one, 1)
        build(many, options.checkpoints)
        with ckpt.StateManager(large, model=wide(options.tensors)) as manager:
            manager.save_state("step-1", wait=True)
        commands = {
            HELP: (["--help"], "Commands:"),
            LS: (["ls", one], "step-00000000"),
            LS_MANY: (["ls", many], f"step-{options.checkpoints - 1:08d}"),
            SHOW: (["show", f"{large}/step-1"], f" {options.tensors} "),
        }
        for _ in range(options.repeats):
            for task, (words, expect) in commands.items():
                run.samples.add("ckpt", task, seconds(*words, expect=expect))
    best = {task: run.samples.best("ckpt", task) or 0.0 for task in commands}
    rows = [[task, in_seconds(best[task]), in_seconds(run.samples.median("ckpt", task))] for task in commands]
    targets = table_of_targets([Target(task, best[task], MOST[task], unit=" s") for task in commands])
    title = f"{options.checkpoints:,} checkpoints, {options.tensors:,} tensors"
    run.keep(title, f"{table(['', 'best', 'median'], rows)}\n\n{targets}", None, *NOTES)

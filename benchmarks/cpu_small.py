"""Saves of small models on the CPU, where the fixed cost of a save is all that counts: part of the benchmark `cpu`.

Every save is of a state that has changed since the last one. The medians of all saves count.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from benchmarks.shared import checkpointers
from benchmarks.shared.checkpointers import Checkpointer, time_a_save
from benchmarks.shared.measure import folder_in, in_a_new_process
from benchmarks.shared.page_cache import wait_until_resident
from benchmarks.shared.report import Target, divided, in_milliseconds, ratio, table
from benchmarks.shared.results import Samples
from benchmarks.shared.state import State, fingerprints

DURABLE, BACKGROUND, RIVAL = checkpointers.Ours, checkpointers.OursInBackground, checkpointers.WithAccelerate
KINDS: tuple[type[Checkpointer], ...] = (DURABLE, BACKGROUND, RIVAL)
SAVES, UNCOUNTED = 10, 2
BLOCKED_LIMITS = {1: 3.0, 60: 8.0}  # milliseconds, by megabytes of weights
DURABLE_LIMITS = {1: 1.2}  # to Accelerate's


def metric(what: str, megabytes: int) -> str:
    return f"{what}, {megabytes} MB model"


def measure_small(sizes: Sequence[int], options: argparse.Namespace, samples: Samples) -> None:
    """By turns, each in a new process."""
    kinds = [kind for kind in KINDS if not kind.missing()]
    for turn in range(options.repeats):
        first = turn % len(kinds)
        for megabytes in sizes:
            for kind in (*kinds[first:], *kinds[:first]):
                for blocked, saved in in_a_new_process(save_often, kind, megabytes, options.root):
                    samples.add(kind.name, metric("blocked", megabytes), blocked)
                    samples.add(kind.name, metric("saved", megabytes), saved)


def save_often(kind: type[Checkpointer], megabytes: int, root: Path) -> list[tuple[float, float]]:
    """Seconds that each save blocked for, and until it was written. The last is loaded and compared."""
    size = 3 * megabytes * 1e6  # with AdamW's moments
    state = State.trained(size)
    with folder_in(root) as folder, closing(kind(state, folder)) as checkpointer:
        checkpointer.prepare()
        times = [save_changed(checkpointer, f"save-{number:03d}") for number in range(UNCOUNTED + SAVES)]
        target = State.to_load_into(size, moments=kind.needs_moments)
        checkpointers.time_a_load(kind, target, folder, f"save-{UNCOUNTED + SAVES - 1:03d}")
    for read in (lambda of: fingerprints(of.tensors()), lambda of: of.groups):
        assert read(target) == read(state), f"{kind.name}: what was loaded is not what was saved"
    return times[UNCOUNTED:]


def save_changed(checkpointer: Checkpointer, name: str) -> tuple[float, float]:
    """After a step, on a disk at rest, beside no other checkpoint but the one before."""
    step(checkpointer.state)
    os.sync()
    times = time_a_save(checkpointer, name)
    if checkpointer.reads_back:
        wait_until_resident(checkpointer.root / name, 1)
    for earlier in sorted(path for path in checkpointer.root.glob("save-*") if path.name < name)[:-1]:
        shutil.rmtree(earlier)
    return times


def step(state: State) -> None:
    for parameter in state.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    state.optimizer.step()
    state.optimizer.zero_grad()


def targets(sizes: Sequence[int], samples: Samples) -> list[Target]:
    found = []
    for megabytes in sizes:
        if limit := BLOCKED_LIMITS.get(megabytes):
            blocked = divided(samples.median(BACKGROUND.name, metric("blocked", megabytes)), 1e-3)
            found.append(Target(f"blocked per save of a {megabytes} MB model", blocked, limit, " ms"))
    for megabytes in sizes:
        if limit := DURABLE_LIMITS.get(megabytes):
            saved = [samples.median(kind.name, metric("saved", megabytes)) for kind in (DURABLE, RIVAL)]
            text = f"durable save of a {megabytes} MB model to Accelerate's, which is not durable"
            found.append(Target(text, divided(*saved), limit))
    return found


def table_of_small(sizes: Sequence[int], samples: Samples) -> str:
    metrics = [metric(what, megabytes) for megabytes in sizes for what in ("blocked", "saved")]
    head = ["", *(cell for name in metrics for cell in (name, "to Accelerate's"))]
    return table(head, [row(kind, metrics, samples) for kind in KINDS])


def row(kind: type[Checkpointer], metrics: Sequence[str], samples: Samples) -> list[str]:
    cells = [kind.name]
    for name in metrics:
        took = samples.median(kind.name, name)
        cells += [in_milliseconds(took), ratio(took, samples.median(RIVAL.name, name))]
    return cells


def body(sizes: Sequence[int], samples: Samples) -> str:
    return f"""{table_of_small(sizes, samples)}

Small models, their weights in MB, with AdamW's moments three times as much: medians of {SAVES} saves in every turn,
each after a step and on a disk at rest, in a process that has made {UNCOUNTED} before. Milliseconds are of this
machine; Accelerate's saves block until they are written, and are not on the disk then.
"""

"""Many checkpoints in one root on S3, behind a proxy that adds time to every request: listing them, and resuming.

A SeaweedFS server on this machine, and the proxy in a process of its own, which counts the requests. The checkpoints
are tiny: one is saved, and written again under other names. The index is that which a run leaves in such a root; the
same is measured without it. What is listed and loaded must be equal each time, or there are no figures.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import nn

import ckpt
from benchmarks.shared.delaying_proxy import delaying, requests_of
from benchmarks.shared.many_checkpoints import build, model
from benchmarks.shared.measure import in_a_new_process
from benchmarks.shared.report import Run, Target, in_seconds, parser, table, table_of_targets
from benchmarks.shared.results import Samples
from ckpt.cli import ls
from ckpt.root.catalog import INDEX
from ckpt.storage import open_storage
from tests.helpers.seaweed import BUCKET, environment, serving

ROOT = f"s3://{BUCKET}/run"
RESUME, LS, LIST = "resume", "ckpt ls", "list_checkpoints"
WITH, WITHOUT = "with its index", "without"
MOST_SECONDS = 2.0  # of a resume from 1,000, at 30 ms
NOTES = (
    "Real: SeaweedFS on this machine, whose pages of a listing take 0.1 s and more. Simulated: the latency",
    "A resume is that of a manager that is built: listing, lock, load of a tiny model, sweep",
)

Figures = dict[str, tuple[float, int]]  # by task: seconds, and requests


def measure(count: int, url: str) -> Figures:
    """In a process of its own. What is there must be what was written."""
    os.environ["AWS_ENDPOINT_URL"] = url
    figures: Figures = {}
    names = [f"step-{number:08d}" for number in range(count)][::-1]

    def measured(task: str, do: Callable[[], Any]) -> Any:
        before, began = requests_of(url), time.perf_counter()
        found = do()
        took = time.perf_counter() - began
        figures[task] = (took, requests_of(url) - before)
        return found

    list(open_storage(ROOT).list("nothing"))  # imports, and the first connection
    shown = io.StringIO()
    with redirect_stdout(shown):
        measured(LS, lambda: ls.show_checkpoints(ROOT))
    assert [line.split()[0] for line in shown.getvalue().splitlines() if line.startswith("step-")] == names
    assert [found.name for found in measured(LIST, lambda: ckpt.list_checkpoints(ROOT))] == names
    loaded = nn.Linear(2, 2)
    manager = ckpt.StateManager(ROOT, model=loaded)
    restored = measured(RESUME, manager.resume)
    assert restored.name == names[0]
    assert torch.equal(loaded.weight, model().weight)
    manager.close()
    return figures


def body(samples: Samples, count: int) -> str:
    rows = []
    for task in (RESUME, LS, LIST):
        cells = [task]
        for subject in (WITH, WITHOUT):
            cells += [f"{samples.best(subject, f'{task}, requests') or 0:.0f}"]
            cells += [in_seconds(samples.best(subject, task)), in_seconds(samples.median(subject, task))]
        rows.append(cells)
    head = [f"{subject}: {what}" for subject in (WITH, WITHOUT) for what in ("requests", "best", "median")]
    target = Target(f"resume from {count:,}", samples.best(WITH, RESUME) or 0.0, MOST_SECONDS, unit=" s")
    return f"{table(['', *head], rows)}\n\n{table_of_targets([target])}"


def main(arguments: Sequence[str]) -> None:
    options_parser = parser("listing", __doc__)
    options_parser.add_argument("--checkpoints", type=int, default=1000)
    options_parser.add_argument("--latency", type=float, default=0.03, help="seconds that each request takes longer")
    options_parser.add_argument("--repeats", type=int, default=3)
    options = options_parser.parse_args(arguments)
    run = Run("listing", options, "torch", "s3fs", "aiobotocore")
    with serving() as server, delaying(server.port, options.latency) as url:
        os.environ.update(environment(server.url))
        build(ROOT, options.checkpoints)
        for subject in (WITH, WITHOUT):
            for _ in range(options.repeats):
                if subject == WITHOUT:
                    open_storage(ROOT).delete([INDEX])
                found = in_a_new_process(measure, options.checkpoints, url)
                for task, (seconds, count) in found.items():
                    run.samples.add(subject, task, seconds)
                    run.samples.add(subject, f"{task}, requests", count, "requests")
                print(subject, found, flush=True)
    milliseconds = 1000 * options.latency
    run.keep(
        f"{options.checkpoints:,} checkpoints on S3, {milliseconds:g} ms more for each request",
        body(run.samples, options.checkpoints), None, *NOTES,
    )  # fmt: skip

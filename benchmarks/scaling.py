"""How the cost of a save grows: with the bytes of the state, and with the number of earlier checkpoints.

Every save is `save_state(wait=True)`: hashed, and on the disk when it returns. The largest state needs four thirds of
its size as memory.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from benchmarks.shared import checkpointers, raw
from benchmarks.shared.checkpointers import Checkpointer
from benchmarks.shared.measure import folder_in, seconds
from benchmarks.shared.plot import bars
from benchmarks.shared.report import Run, in_seconds, parser, ratio, table
from benchmarks.shared.results import Samples
from benchmarks.shared.state import State

SIZES = (10, 30, 100, 300, 1000, 3000, 10_000)  # megabytes
COUNTS = (1, 3, 10, 30, 100, 300, 1000)
WINDOW = 9  # saves whose median counts
OURS, LIMIT, GROWING, SINGLE = (
    "ckpt",
    "raw direct write + fsync",
    "ckpt, beside earlier checkpoints",
    "ckpt, beside one",
)


def measure_sizes(options: argparse.Namespace, samples: Samples) -> list[int]:
    """Saves of each size, and raw direct writes if there is memory for their image. Returns the sizes in bytes."""
    sizes = []
    for megabytes in SIZES:
        if megabytes <= options.max_megabytes:
            state = State.trained(megabytes * 1e6)
            sizes.append(state.size)
            if 3 * state.size < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                measure_saves(raw.RawDirect, state, options, samples, LIMIT)
            measure_saves(checkpointers.Ours, state, options, samples, OURS)
            print(f"{megabytes} MB: {in_seconds(samples.best(OURS, of_bytes(state.size)))}", flush=True)
            del state
    return sizes


def of_bytes(size: int) -> str:
    return f"save of {size / 1e6:.0f} MB"


def of_checkpoints(count: int) -> str:
    return f"save after {count} checkpoints"


def measure_saves(
    kind: type[Checkpointer], state: State, options: argparse.Namespace, samples: Samples, subject: str
) -> None:
    with folder_in(options.root) as root, closing(kind(state, root)) as checkpointer:
        checkpointer.prepare()
        for number in range(options.repeats):
            samples.add(subject, of_bytes(state.size), time_a_save(checkpointer, f"save-{number}"))


def time_a_save(checkpointer: Checkpointer, name: str) -> float:
    """Seconds of a save whose checkpoint is removed afterwards."""
    os.sync()
    took = seconds(lambda: checkpointer.save(name))
    shutil.rmtree(checkpointer.root / name)
    return took


def measure_counts(options: argparse.Namespace, samples: Samples) -> list[int]:
    """Saves of a tiny state beside some numbers of earlier checkpoints, and by turns beside a single one."""
    counts = [*(count for count in COUNTS if count < options.checkpoints), options.checkpoints]
    names = map("save-{:05d}".format, itertools.count())
    with run_of_a_tiny_state(options.root) as growing, run_of_a_tiny_state(options.root) as single:
        single.save("only")
        for before, count in itertools.pairwise([0, *counts]):
            for _ in range(count - before):
                growing.save(next(names))
            for _ in range(WINDOW):
                samples.add(GROWING, of_checkpoints(count), time_a_save(growing, next(names)))
                samples.add(SINGLE, of_checkpoints(count), time_a_save(single, next(names)))
    return counts


@contextmanager
def run_of_a_tiny_state(root: Path) -> Iterator[Checkpointer]:
    model = torch.nn.Linear(8, 8)
    state = State(model, torch.optim.AdamW(model.parameters()))
    with folder_in(root) as folder, closing(checkpointers.Ours(state, folder)) as checkpointer:
        yield checkpointer


def table_of_sizes(sizes: Sequence[int], samples: Samples) -> str:
    rows = []
    for size in sizes:
        ours, limit = min(samples.all(OURS, of_bytes(size))), samples.best(LIMIT, of_bytes(size))
        per_gigabyte = in_seconds(ours / size * 1e9)
        rows.append([f"{size / 1e6:.0f} MB", in_seconds(ours), per_gigabyte, in_seconds(limit), ratio(ours, limit)])
    return table(["state", "save", "per GB", LIMIT, "ours to raw"], rows)


def table_of_counts(counts: Sequence[int], samples: Samples) -> str:
    rows = []
    for count in counts:
        growing, single = (samples.median(subject, of_checkpoints(count)) or 0.0 for subject in (GROWING, SINGLE))
        rows.append([str(count), f"{growing * 1e3:.1f} ms", f"{single * 1e3:.1f} ms", ratio(growing, single)])
    return table(["earlier checkpoints", "save", "beside one, by turns", "ratio"], rows)


def body(sizes: Sequence[int], counts: Sequence[int], samples: Samples) -> str:
    small, large = min(sizes), max(sizes)
    grown = min(samples.all(OURS, of_bytes(large))) / min(samples.all(OURS, of_bytes(small)))
    many = of_checkpoints(max(counts))
    return f"""{table_of_sizes(sizes, samples)}

{large / small:.0f} times the bytes took {grown:.0f} times as long. The best of each size's saves.

{table_of_counts(counts, samples)}

With {max(counts)} earlier checkpoints in the root a save takes \
{ratio(samples.median(GROWING, many), samples.median(SINGLE, many))} of the time with one. The state is tiny; the median
of {WINDOW} saves.
"""


def plot(sizes: Sequence[int], counts: Sequence[int], samples: Samples) -> str:
    per_gigabyte = {f"ckpt, {size / 1e6:.0f} MB": min(samples.all(OURS, of_bytes(size))) / size * 1e9 for size in sizes}
    earlier = {
        f"ckpt, {count} earlier checkpoints": samples.median(GROWING, of_checkpoints(count)) or 0.0 for count in counts
    }
    return bars("The cost of a save", {"seconds per GB": per_gigabyte, "seconds, tiny state": earlier})


def main(arguments: Sequence[str]) -> None:
    options_parser = parser("scaling", __doc__)
    options_parser.add_argument("--max-megabytes", type=int, default=10_000)
    options_parser.add_argument("--checkpoints", type=int, default=1000)
    options_parser.add_argument("--repeats", type=int, default=3, help="saves of each size")
    options = options_parser.parse_args(arguments)
    run = Run("scaling", options, "torch")
    sizes, counts = measure_sizes(options, run.samples), measure_counts(options, run.samples)
    note = "`save_state(wait=True)`, hashed and fsynced, one process, CPU"
    figures = (sizes, counts, run.samples)
    run.keep("How the cost of a save grows", body(*figures), plot(*figures), note)

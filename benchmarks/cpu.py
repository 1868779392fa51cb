"""Saves and loads a model with its AdamW state on the CPU, with ckpt and with other libraries, and compares.

The libraries take turns, and the best of all turns counts. Every save and load is in a new process, and each timed
section starts on a disk at rest. In each turn a run saves twice: at once after it began, and again. Two new runs load
what was saved: with its files in the page cache, and without. It must equal what was saved in every bit, or there are
no figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.shared import checkpointers, measure, raw
from benchmarks.shared.checkpointers import Checkpointer
from benchmarks.shared.measure import folder_in, in_a_new_process, peak, seconds, settle
from benchmarks.shared.plot import bars
from benchmarks.shared.report import (
    Run,
    Target,
    divided,
    in_megabytes,
    in_seconds,
    parser,
    ratio,
    table,
    table_of_targets,
    yes_or_no,
)
from benchmarks.shared.results import Samples
from benchmarks.shared.state import State, fingerprints

ALL: tuple[type[Checkpointer], ...] = (
    checkpointers.Ours,
    checkpointers.OursInBackground,
    checkpointers.WithAccelerate,
    checkpointers.TorchSave,
    checkpointers.Dcp,
    checkpointers.DcpAsync,
    checkpointers.TorchCheckpointing,
    checkpointers.Safetensors,
    checkpointers.DurableSafetensors,
    raw.Raw,
    raw.RawDirect,
    raw.RawDirectParallel,
)
PACKAGES = ("torch", "accelerate", "safetensors", "torch_checkpointing")
COLUMNS: dict[str, type[Checkpointer]] = {  # metrics, and which of ours the others are compared with
    "blocked, first": checkpointers.OursInBackground,
    "blocked, later": checkpointers.OursInBackground,
    "saved": checkpointers.Ours,
    "load, warm": checkpointers.Ours,
    "load, cold": checkpointers.Ours,
}
MEMORY = ("memory, save", "memory, load")


def take_turn(kind: type[Checkpointer], options: argparse.Namespace, samples: Samples) -> int:
    """Save in a new process, load in others. Returns the size of the state in bytes."""
    with folder_in(options.root) as folder:
        saves, size, prints, groups = in_a_new_process(save, kind, folder, options.megabytes)
        for metric, took in saves:
            samples.add(kind.name, metric, took)
        for cache in measure.CACHES:
            took, loaded = in_a_new_process(load, kind, folder, options.megabytes, cache, size)
            assert loaded == (prints, groups), f"{kind.name}: what was loaded is not what was saved"
            samples.add(kind.name, f"load, {cache}", took)
    return size


def save(kind: type[Checkpointer], folder: Path, megabytes: int) -> tuple[list[tuple[str, float]], int, Any, Any]:
    state = State.trained(megabytes * 1e6)
    found: list[tuple[str, float]] = []
    settle(state.size)
    with closing(kind(state, folder)) as checkpointer:
        checkpointer.prepare()
        for name in ("first", "later"):
            blocked, saved = time_a_save(checkpointer, name)
            found += [(f"blocked, {name}", blocked), ("saved", saved)]
            settle(state.size)
    return found, state.size, fingerprints(state.tensors()), state.groups


def load(
    kind: type[Checkpointer], folder: Path, megabytes: int, cache: str, size: int
) -> tuple[float, tuple[Any, Any]]:
    target = State.to_load_into(megabytes * 1e6, moments=kind.needs_moments)
    measure.CACHES[cache](folder / "later")
    settle(size)
    took = checkpointers.time_a_load(kind, target, folder, "later")
    return took, (fingerprints(target.tensors()), target.groups)


def time_a_save(checkpointer: Checkpointer, name: str) -> tuple[float, float]:
    """Seconds until `optimizer.step()` may change the state, and until everything is written."""

    def block() -> None:
        checkpointer.save(name)
        with checkpointer.guard():
            pass

    blocked = seconds(block)
    return blocked, blocked + seconds(checkpointer.wait)


def memory(kind: type[Checkpointer], megabytes: int, root: Path) -> tuple[int | None, int | None]:
    """Peaks of extra memory in bytes, of two saves and of a load."""
    with folder_in(root) as folder:
        state = State.trained(megabytes * 1e6)
        saving = peak(lambda: save_twice(kind, state, folder))
        target = State.to_load_into(megabytes * 1e6, moments=kind.needs_moments)
        return saving, peak(lambda: checkpointers.time_a_load(kind, target, folder, "later"))


def save_twice(kind: type[Checkpointer], state: State, folder: Path) -> None:
    with closing(kind(state, folder)) as checkpointer:
        checkpointer.prepare()
        for name in ("first", "later"):
            checkpointer.save(name)
            checkpointer.wait()


def measure_all(kinds: Sequence[type[Checkpointer]], options: argparse.Namespace, samples: Samples) -> int:
    size = 0
    for turn in range(options.repeats):
        first = turn % len(kinds)
        for kind in (*kinds[first:], *kinds[:first]):
            print(f"turn {turn + 1} of {options.repeats}: {kind.name}", flush=True)
            size = take_turn(kind, options, samples)
    for kind in kinds:
        for metric, count in zip(MEMORY, in_a_new_process(memory, kind, options.megabytes, options.root), strict=True):
            samples.add(kind.name, metric, count, "B")
    return size


def targets(samples: Samples, size: int) -> list[Target]:
    ours, background = checkpointers.Ours.name, checkpointers.OursInBackground.name

    def to(metric: str, rival: type[Checkpointer], subject: str = ours) -> float | None:
        return divided(samples.best(subject, metric), samples.best(rival.name, metric))

    accelerate, dcp = checkpointers.WithAccelerate, checkpointers.DcpAsync
    blocked = "in the background, blocked, to DCP's async_save"
    copies = divided(samples.best(background, "memory, save"), size)
    megabytes = divided(samples.best(ours, "memory, save"), 1e6)
    return [
        Target("save_state(wait=True) to Accelerate's save_state without fsync", to("saved", accelerate), 0.8),
        Target("save_state(wait=True) to a raw direct write with fsync", to("saved", raw.RawDirect), 1.15),
        Target(f"first save {blocked}", to("blocked, first", dcp, background), 0.5),
        Target(f"later save {blocked}", to("blocked, later", dcp, background), 0.5),
        Target("load, page cache warm, to Accelerate's", to("load, warm", accelerate), 0.8),
        Target("load, page cache cold, to Accelerate's", to("load, cold", accelerate), 0.8),
        Target("extra memory in the background, in copies of the state", copies, 1.01),
        Target("extra memory of save_state(wait=True)", megabytes, 256, " MB"),
    ]


def table_of_times(kinds: Sequence[type[Checkpointer]], samples: Samples) -> str:
    """Times, and beside each its ratio to ours."""
    head = [""] + [title for column in COLUMNS for title in (column, "to ours")]
    head += ["fsync", "hashes", *MEMORY]
    absent = [[kind.name, "not installed", *[""] * (len(head) - 2)] for kind in ALL if kind not in kinds]
    return table(head, [row(kind, samples) for kind in kinds] + absent)


def row(kind: type[Checkpointer], samples: Samples) -> list[str]:
    cells = [kind.name]
    for column, ours in COLUMNS.items():
        best = samples.best(kind.name, column)
        cells += [in_seconds(best), ratio(best, samples.best(ours.name, column))]
    cells += [yes_or_no(kind.durable), yes_or_no(kind.hashed)]
    return cells + [in_megabytes(samples.best(kind.name, metric)) for metric in MEMORY]


def body(kinds: Sequence[type[Checkpointer]], samples: Samples, size: int) -> str:
    return f"""{table_of_times(kinds, samples)}

{table_of_targets(targets(samples, size))}

Blocked: until the call has returned and `optimizer.step()` may change the state. Saved: until all is written, and on
the disk where it says fsync. The first save comes at once after the run began. Load: constructing what loads is part
of it. Warm: every file was read once just before; cold: no file is in the page cache. Ratios above 1 are slower than
ckpt: blocked to `save_state()`, the others to `save_state(wait=True)`.

Memory: the peak of what the process needs beyond what it had before. A load creates {size * 2 / 3e6:.0f} MB of moments,
which the optimizer of a new process does not have yet; only the raw reads create none. `safetensors` maps the file, and
reads a moment's bytes after the load, when they are first used. `torch_checkpointing` writes from another process. The
raw direct writes have a second copy of the state, made before the time is taken.
"""


def plot(kinds: Sequence[type[Checkpointer]], samples: Samples, size: int) -> str:
    titles = {"saved": "save, until everything is written", "blocked, later": "save, until training continues"}
    groups = {
        titles.get(column, f"{column} page cache"): {kind.name: min(samples.all(kind.name, column)) for kind in kinds}
        for column in ("saved", "blocked, later", "load, warm", "load, cold")
    }
    return bars(f"{size / 1e9:.2f} GB of model and AdamW state, one process, CPU", groups)


def main(arguments: Sequence[str]) -> None:
    options_parser = parser("cpu", __doc__)
    options_parser.add_argument("--megabytes", type=int, default=1500, help="size of model and optimizer state")
    options_parser.add_argument("--repeats", type=int, default=3, help="turns of every library")
    options = options_parser.parse_args(arguments)
    run = Run("cpu", options, *PACKAGES)
    kinds = [kind for kind in ALL if not kind.missing()]
    size = measure_all(kinds, options, run.samples)
    title = f"Saving and loading {size / 1e6:.0f} MB: model and AdamW state in fp32, one process, CPU"
    note = f"The best of {options.repeats} turns; every load equal to what was saved, bit for bit."
    run.keep(title, body(kinds, run.samples, size), plot(kinds, run.samples, size), note)

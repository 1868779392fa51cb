"""Saves and loads a model with its AdamW state on the CPU, with ckpt and with other libraries, and compares.

The libraries take turns, and the best of all turns counts. Every save and load is in a new process, and each timed
section starts on a disk at rest. In each turn a run saves twice: at once after it began, and again. Three new runs load
what was saved: with the page cache as the save left it, with all files in it, and with none. It must equal what was
saved in every bit, or there are no figures. Small models are saved many times, with ckpt and Accelerate alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks import cpu_small
from benchmarks.shared import checkpointers, measure, raw
from benchmarks.shared.checkpointers import Checkpointer
from benchmarks.shared.measure import folder_in, in_a_new_process, peak, settle
from benchmarks.shared.page_cache import wait_until_resident
from benchmarks.shared.plot import bars
from benchmarks.shared.report import (
    Run,
    Target,
    divided,
    in_megabytes,
    in_seconds,
    parser,
    ratio,
    refuse_unknown_libraries,
    table,
    table_of_targets,
    yes_or_no,
)
from benchmarks.shared.results import Samples
from benchmarks.shared.state import State, fingerprints

LIBRARIES: dict[str, type[Checkpointer]] = {
    "ours": checkpointers.Ours,
    "ours-background": checkpointers.OursInBackground,
    "accelerate": checkpointers.WithAccelerate,
    "torch": checkpointers.TorchSave,
    "dcp": checkpointers.Dcp,
    "dcp-async": checkpointers.DcpAsync,
    "torch_checkpointing": checkpointers.TorchCheckpointing,
    "safetensors": checkpointers.Safetensors,
    "safetensors-durable": checkpointers.DurableSafetensors,
    "raw": raw.Raw,
    "raw-direct": raw.RawDirect,
    "raw-parallel": raw.RawDirectParallel,
}
PACKAGES = ("torch", "accelerate", "safetensors", "torch_checkpointing")
COLUMNS: dict[str, type[Checkpointer]] = {  # metrics, and which of ours the others are compared with
    "blocked, first": checkpointers.OursInBackground,
    "blocked, later": checkpointers.OursInBackground,
    "saved": checkpointers.Ours,
    "load, after a save": checkpointers.Ours,
    "load, warm": checkpointers.Ours,
    "load, cold": checkpointers.Ours,
}
LOADS: dict[str, Callable[[Path], None]] = {"after a save": lambda folder: None, **measure.CACHES}
MEMORY = ("memory, save", "memory, load")


def take_turn(kind: type[Checkpointer], options: argparse.Namespace, samples: Samples) -> int:
    """Save in a new process, load in others. Returns the size of the state in bytes."""
    with folder_in(options.root) as folder:
        saves, size, prints, groups = in_a_new_process(save, kind, folder, options.megabytes, options.warm_seconds)
        for metric, took in saves:
            samples.add(kind.name, metric, took)
        for cache in LOADS:
            took, loaded = in_a_new_process(load, kind, folder, options.megabytes, cache, size)
            assert loaded == (prints, groups), f"{kind.name}: what was loaded is not what was saved"
            samples.add(kind.name, f"load, {cache}", took)
    return size


def save(
    kind: type[Checkpointer], folder: Path, megabytes: int, warm_seconds: float
) -> tuple[list[tuple[str, float | None]], int, Any, Any]:
    state = State.trained(megabytes * 1e6)
    found: list[tuple[str, float | None]] = []
    settle(state.size)
    with closing(kind(state, folder)) as checkpointer:
        checkpointer.prepare()
        for name in ("first", "later"):
            blocked, saved = checkpointers.time_a_save(checkpointer, name)
            found += [(f"blocked, {name}", blocked), ("saved", saved)]
            if kind.reads_back:
                found.append(("read back", time_reading_back(folder / name, warm_seconds)))
            settle(state.size)
    return found, state.size, fingerprints(state.tensors()), state.groups


def time_reading_back(folder: Path, at_most: float) -> float | None:
    """Seconds after a save until its files are in the page cache; None if they are not there in time."""
    started = time.perf_counter()
    return time.perf_counter() - started if wait_until_resident(folder, at_most) else None


def load(
    kind: type[Checkpointer], folder: Path, megabytes: int, cache: str, size: int
) -> tuple[float, tuple[Any, Any]]:
    target = State.to_load_into(megabytes * 1e6, moments=kind.needs_moments)
    LOADS[cache](folder / "later")
    settle(size)
    took = checkpointers.time_a_load(kind, target, folder, "later")
    return took, (fingerprints(target.tensors()), target.groups)


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
        Target("load right after a save to Accelerate's", to("load, after a save", accelerate), 0.8),
        Target("load, page cache warm, to Accelerate's", to("load, warm", accelerate), 0.8),
        Target("load, page cache cold, to Accelerate's", to("load, cold", accelerate), 0.8),
        Target("extra memory in the background, in copies of the state", copies, 1.01),
        Target("extra memory of save_state(wait=True)", megabytes, 256, " MB"),
    ]


def table_of_times(kinds: Sequence[type[Checkpointer]], samples: Samples) -> str:
    """Times, and beside each its ratio to ours."""
    head = [""] + [title for column in COLUMNS for title in (column, "to ours")]
    head += ["fsync", "hashes", *MEMORY]
    absent = [[kind.name, "not installed", *[""] * (len(head) - 2)] for kind in LIBRARIES.values() if kind.missing()]
    return table(head, [row(kind, samples) for kind in kinds] + absent)


def row(kind: type[Checkpointer], samples: Samples) -> list[str]:
    cells = [kind.name]
    for column, ours in COLUMNS.items():
        best = samples.best(kind.name, column)
        cells += [in_seconds(best), ratio(best, samples.best(ours.name, column))]
    cells += [yes_or_no(kind.durable), yes_or_no(kind.hashed)]
    return cells + [in_megabytes(samples.best(kind.name, metric)) for metric in MEMORY]


def body(kinds: Sequence[type[Checkpointer]], samples: Samples, size: int, small: Sequence[int]) -> str:
    return f"""{table_of_times(kinds, samples)}

{table_of_targets(targets(samples, size) + cpu_small.targets(small, samples))}

{cpu_small.body(small, samples) if small else ""}

Blocked: until the call has returned and `optimizer.step()` may change the state. Saved: until all is written, and on
the disk where it says fsync. The first save comes at once after the run began. Load: constructing what loads is part
of it. After a save: the page cache as the save left it; ckpt reads its files back after the commit, and was waited for
({in_seconds(samples.median(checkpointers.Ours.name, "read back")) or "not in time"}). Warm: every file was read once \
just before; cold: no file is in the page cache. Ratios above 1
are slower than ckpt: blocked to `save_state()`, the others to `save_state(wait=True)`.

Memory: the peak of what the process needs beyond what it had before. A load creates {size * 2 / 3e6:.0f} MB of moments,
which the optimizer of a new process does not have yet; only the raw reads create none. `safetensors` maps the file, and
reads a moment's bytes after the load, when they are first used. `torch_checkpointing` writes from another process. The
raw direct writes have a second copy of the state, made before the time is taken.
"""


def plot(kinds: Sequence[type[Checkpointer]], samples: Samples, size: int) -> str:
    titles = {
        "saved": "save, until everything is written",
        "blocked, later": "save, until training continues",
        "load, after a save": "load right after a save",
    }
    groups = {
        titles.get(column, f"{column} page cache"): {kind.name: min(samples.all(kind.name, column)) for kind in kinds}
        for column in ("saved", "blocked, later", "load, after a save", "load, warm", "load, cold")
    }
    return bars(f"{size / 1e9:.2f} GB of model and AdamW state, one process, CPU", groups)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    options_parser = parser("cpu", __doc__)
    add = options_parser.add_argument
    add("--libraries", default=",".join(LIBRARIES), help=f"some of {','.join(LIBRARIES)}")
    add("--megabytes", type=int, default=1500, help="size of model and optimizer state")
    add("--small", default="1,60", help="small models, in megabytes of weights; empty: none (default: %(default)s)")
    add("--repeats", type=int, default=3, help="turns of every library")
    add("--warm-seconds", type=float, default=20.0, help="how long ckpt may take to read a checkpoint back")
    options = options_parser.parse_args(arguments)
    refuse_unknown_libraries(options_parser, options.libraries, LIBRARIES)
    return options


def main(arguments: Sequence[str]) -> None:
    options = parsed(arguments)
    run = Run("cpu", options, *PACKAGES)
    kinds = [LIBRARIES[name] for name in options.libraries.split(",") if not LIBRARIES[name].missing()]
    small = [int(megabytes) for megabytes in options.small.split(",") if megabytes]
    cpu_small.measure_small(small, options, run.samples)
    size = measure_all(kinds, options, run.samples)
    title = f"Saving and loading {size / 1e6:.0f} MB: model and AdamW state in fp32, one process, CPU"
    note = f"The best of {options.repeats} turns; every load equal to what was saved, bit for bit."
    run.keep(title, body(kinds, run.samples, size, small), plot(kinds, run.samples, size), note)

"""Saves and loads one model with its AdamW state in every way that people use, on the CPU, and compares.

    python benchmarks/cpu.py [--megabytes 1500] [--repeats 3] [--root .]

The ways take turns, and the best of all turns counts. Runs are processes of their own, as those of training are, and
each timed section starts on a disk at rest. In each turn a run saves twice: first at once after it began, then again.
What was saved is loaded by two new runs: with its files in the page cache, and without. It must equal what was saved in
every bit, or there are no figures. The tables are printed, and kept with a plot in `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.shared import checkpointers as ways
from benchmarks.shared import measure, raw
from benchmarks.shared.checkpointers import Way
from benchmarks.shared.measure import (
    Target,
    divided,
    folder_in,
    in_a_new_process,
    in_megabytes,
    in_seconds,
    peak,
    ratio,
    seconds,
    settle,
)
from benchmarks.shared.state import State, fingerprints

WAYS: tuple[type[Way], ...] = (
    ways.Ours,
    ways.OursInBackground,
    ways.WithAccelerate,
    ways.TorchSave,
    ways.Dcp,
    ways.DcpAsync,
    ways.TorchCheckpointing,
    ways.Safetensors,
    ways.DurableSafetensors,
    raw.Raw,
    raw.RawDirect,
    raw.RawDirectParallel,
)
PACKAGES = ("torch", "accelerate", "safetensors", "torch_checkpointing")


@dataclass
class Figures:
    """The best of one way's turns in seconds, by what was done, and its peaks of extra memory in bytes."""

    best: dict[str, float] = field(default_factory=dict)
    save_memory: int | None = None
    load_memory: int | None = None

    def add(self, what: str, took: float) -> None:
        self.best[what] = min(took, self.best.get(what, took))


def take_turn(kind: type[Way], options: argparse.Namespace, figures: Figures) -> int:
    """Save in one new process, load in others. Returns how many bytes that were."""
    with folder_in(options.root) as folder:
        saved, size, prints, groups = in_a_new_process(save, kind, folder, options.megabytes)
        for what, took in saved.items():
            figures.add(what, took)
        os.sync()
        for cache in measure.CACHES:
            took, found = in_a_new_process(load, kind, folder, options.megabytes, cache, size)
            assert found == (prints, groups), f"{kind.name}: what was loaded is not what was saved"
            figures.add(f"load, {cache}", took)
    return size


def save(kind: type[Way], folder: Path, megabytes: int) -> tuple[dict[str, float], int, Any, Any]:
    state, figures = State.trained(megabytes * 1e6), Figures()
    settle(state.size)
    with closing(kind(state, folder)) as way:
        way.prepare()
        time_a_save(way, "first", figures)
        settle(state.size)
        time_a_save(way, "later", figures)
    return figures.best, state.size, fingerprints(state.tensors()), state.groups


def load(kind: type[Way], folder: Path, megabytes: int, cache: str, size: int) -> tuple[float, tuple[Any, Any]]:
    target = State.to_load_into(megabytes * 1e6, moments=kind.needs_moments)
    measure.CACHES[cache](folder / "later")
    settle(size)
    took = ways.time_a_load(kind, target, folder, "later")
    return took, (fingerprints(target.tensors()), target.groups)


def time_a_save(way: Way, name: str, figures: Figures) -> None:
    """How long training stands still, that is until `optimizer.step()` may change the state, and until all is done."""

    def blocked() -> None:
        way.save(name)
        with way.guard():
            pass

    stood_still = seconds(blocked)
    figures.add(f"blocked, {name}", stood_still)
    figures.add("saved", stood_still + seconds(way.wait))


def memory(kind: type[Way], megabytes: int, root: Path) -> tuple[int | None, int | None]:
    with folder_in(root) as folder:
        state = State.trained(megabytes * 1e6)
        saving = peak(lambda: save_twice(kind, state, folder))
        target = State.to_load_into(megabytes * 1e6, moments=kind.needs_moments)
        return saving, peak(lambda: ways.time_a_load(kind, target, folder, "later"))


def save_twice(kind: type[Way], state: State, folder: Path) -> None:
    with closing(kind(state, folder)) as way:
        way.prepare()
        for name in ("first", "later"):
            way.save(name)
            way.wait()


def take_all(options: argparse.Namespace) -> tuple[dict[type[Way], Figures], int]:
    figures = {kind: Figures() for kind in WAYS if not kind.missing()}
    kinds, size = list(figures), 0
    for turn in range(options.repeats):
        first = turn % len(kinds)
        for kind in (*kinds[first:], *kinds[:first]):
            size = take_turn(kind, options, figures[kind])
    for kind, one in figures.items():
        one.save_memory, one.load_memory = in_a_new_process(memory, kind, options.megabytes, options.root)
    return figures, size


def targets(figures: Mapping[type[Way], Figures], size: int) -> list[Target]:
    ours, background = figures[ways.Ours], figures[ways.OursInBackground]

    def to(what: str, rival: type[Way], mine: Figures = ours) -> float | None:
        return divided(mine.best[what], figures[rival].best[what]) if rival in figures else None

    blocked = "in the background, blocked, to DCP's async_save"
    return [
        Target("save_state(wait=True) to Accelerate's save_state without fsync", to("saved", ways.WithAccelerate), 0.8),
        Target("save_state(wait=True) to a raw direct write with fsync", to("saved", raw.RawDirect), 1.15),
        Target(f"first save {blocked}", to("blocked, first", ways.DcpAsync, background), 0.5),
        Target(f"later save {blocked}", to("blocked, later", ways.DcpAsync, background), 0.5),
        Target("load, page cache warm, to Accelerate's", to("load, warm", ways.WithAccelerate), 0.8),
        Target("load, page cache cold, to Accelerate's", to("load, cold", ways.WithAccelerate), 0.8),
        Target("extra memory in the background, in copies of the state", divided(background.save_memory, size), 1.01),
        Target("extra memory of save_state(wait=True)", divided(ours.save_memory, 1e6), 256, " MB"),
    ]


COLUMNS = {"blocked, first": ways.OursInBackground, "blocked, later": ways.OursInBackground} | {
    "saved": ways.Ours,
    "load, warm": ways.Ours,
    "load, cold": ways.Ours,
}


def table(figures: Mapping[type[Way], Figures]) -> str:
    """Times, and next to each its ratio to ours."""
    head = [""] + [title for column in COLUMNS for title in (column, "to ours")]
    head += ["fsync", "hashes", "memory, save", "memory, load"]
    absent = [[kind.name, "not installed", *[""] * (len(head) - 2)] for kind in WAYS if kind not in figures]
    return measure.table(head, [row(kind, figures) for kind in figures] + absent)


def row(kind: type[Way], figures: Mapping[type[Way], Figures]) -> list[str]:
    one = figures[kind]
    cells = [kind.name]
    for column, ours in COLUMNS.items():
        cells += [in_seconds(one.best[column]), ratio(one.best[column], figures[ours].best[column])]
    cells += ["yes" if promised else "no" for promised in (kind.durable, kind.hashed)]
    return [*cells, in_megabytes(one.save_memory), in_megabytes(one.load_memory)]


def report(figures: Mapping[type[Way], Figures], size: int, preamble: str, options: argparse.Namespace) -> str:
    return f"""# Saving and loading {size / 1e6:.0f} MB: model and AdamW state in fp32, one process, CPU

{preamble}, {os.getloadavg()[0]:.1f} at the end, this run included
- The best of {options.repeats} turns; every load equal to what was saved, bit for bit.

{table(figures)}

{measure.table_of_targets(targets(figures, size))}

Blocked: until the call has returned and `optimizer.step()` may change the state. Saved: until all is written, and on
the disk where it says fsync. The first save comes at once after the run began. Load: building what loads is part of it.
Warm: every file was read once just before; cold: no file is in the page cache. Ratios above 1 are slower than ckpt:
blocked to `save_state()`, the others to `save_state(wait=True)`.

Memory: the peak of what the process needs beyond what it had before. A load brings {size * 2 / 3e6:.0f} MB of moments
along, which the optimizer of a new process does not have yet; only the raw reads need none of their own. `safetensors`
maps the file, and reads a moment's bytes after the load, when they are first used. `torch_checkpointing` writes from
another process. The raw direct writes have a second copy of the state, made before the time is taken.
"""


def plot(figures: Mapping[type[Way], Figures], size: int) -> str:
    titles = {"saved": "save, until all is written", "blocked, later": "save, until training goes on"}
    groups = {
        titles.get(column, f"{column} page cache"): {kind.name: one.best[column] for kind, one in figures.items()}
        for column in ("saved", "blocked, later", "load, warm", "load, cold")
    }
    return measure.bars(f"{size / 1e9:.2f} GB of model and AdamW state, one process, CPU", groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1500, help="size of model and optimizer state together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--results", type=Path, help="where to leave the report and its plot")
    options = parser.parse_args()
    command = f"cpu.py --megabytes {options.megabytes} --repeats {options.repeats}"
    preamble = measure.preamble(command, options.root, *PACKAGES)
    figures, size = take_all(options)
    text = report(figures, size, preamble, options)
    print(text)
    path = measure.keep("cpu", measure.processor(), text, plot(figures, size), options.results)
    print(f"kept in {os.path.relpath(path)}")


if __name__ == "__main__":
    main()

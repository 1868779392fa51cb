"""Training time that a checkpoint costs on one GPU, and how long a load takes: ours and the others', on the same state.

    python benchmarks/gpu.py [--ways ours,torch,...] [--gigabytes 14.9] [--steps 120] [--root .] [--results FOLDER]
    python benchmarks/gpu.py --device cpu --gigabytes 0.05 --steps 5 --pause 1     # tries it without a GPU

A transformer trains; lost is the time of the steps with one save among them, less the time of as many steps without. A
run of each way saves at once after it began, and again; a way that makes its buffers ready beforehand is also measured
with a first save some time after the run began. Training goes on while a save is written, and what is loaded must equal
the state at the moment of the save in every bit, or there are no figures. The tables are printed, and kept with a plot.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.shared import checkpointers as ways
from benchmarks.shared import measure
from benchmarks.shared.checkpointers import Way
from benchmarks.shared.measure import PIECE, Target, divided, folder_in, in_seconds, ratio
from benchmarks.shared.raw import RawReader
from benchmarks.shared.state import State, assert_equal
from benchmarks.shared.training import LENGTH, Training

WAYS: dict[str, type[Way]] = {
    "ours": ways.OursInBackground,
    "torch": ways.TorchSave,
    "dcp": ways.Dcp,
    "dcp-async": ways.DcpAsync,
    "dcp-pinned": ways.DcpAsyncPinned,
    "accelerate": ways.WithAccelerate,
    "torch_checkpointing": ways.TorchCheckpointing,
}
OURS = ways.OursInBackground
AT_ONCE, PREPARED, LATER = "first, at once", "first, prepared", "later"
PACKAGES = ("torch", "accelerate", "safetensors", "torch_checkpointing")


@dataclass
class Save:
    """One save during training, in seconds."""

    kind: type[Way]
    which: str
    returned: float | None = None
    lost: float | None = None
    done: float | None = None
    error: str = ""

    @property
    def slower(self) -> float | None:
        """By how much training was slower until the save was done, if that is where all of it was lost, in percent."""
        part = divided(self.lost, self.done)
        return None if part is None else 100 * part


@dataclass
class Found:
    saves: list[Save] = field(default_factory=list)
    preparing: dict[type[Way], float] = field(default_factory=dict)  # lost while buffers are made ready
    loads: dict[tuple[str, str], list[float]] = field(default_factory=dict)  # by name and state of the page cache

    def load(self, name: str, cache: str) -> float | None:
        return min(self.loads.get((name, cache), []), default=None)

    def worst(self, which: str | None, what: str) -> float | None:
        """Of our saves: a target holds for each of them."""
        ours = [one for one in self.saves if one.kind is OURS and which in (None, one.which)]
        values = [getattr(one, what) for one in ours]
        return None if not values or None in values else max(values)


class Benchmark:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.training = Training(options)
        self.reader = RawReader(options.device)
        self.found = Found()
        self.caches = itertools.cycle(measure.CACHES)

    def take(self, kind: type[Way]) -> None:
        """A run that saves at once and then again; and one with a pause first, for a way that makes use of it."""
        later = self.options.later if kind is OURS else int(kind.background)
        self.scenario(kind, [AT_ONCE, *[LATER] * later])
        if kind.prepares:
            self.scenario(kind, [PREPARED])

    def scenario(self, kind: type[Way], saves: Sequence[str]) -> None:
        with ExitStack() as stack:
            root = stack.enter_context(folder_in(self.options.root))
            os.sync()
            way = kind(self.training.state, root)
            stack.callback(close, way)
            way.prepare()
            if saves[0] == PREPARED:
                self.pause(way)
            for number, which in enumerate(saves):
                name = f"save-{number}"
                save = self.save(way, which, name)
                if save.error:
                    break
                if kind is OURS or number == len(saves) - 1:
                    self.load(kind, root, name)
                shutil.rmtree(root / name)  # a few of them fill a disk
                os.sync()

    def pause(self, way: Way) -> None:
        """Train without saves until buffers may be expected to be ready. What that costs is counted too."""
        steps = math.ceil(self.options.pause / self.training.baselines[-1])
        took = self.training.run(steps, guard=way.guard)
        self.found.preparing[type(way)] = took - steps * self.training.baselines[-1]

    def save(self, way: Way, which: str, name: str) -> Save:
        one = Save(type(way), which)
        with Watch(way, name, one) as save:
            try:
                one.lost = self.lost(way, save)
            except Exception as error:
                one.error = f"{type(error).__name__}: {error}".splitlines()[0]
        self.found.saves.append(one)
        print(*row(one, self.found), sep=" | ", flush=True)
        return one

    def lost(self, way: Way, save: Callable[[], None]) -> float:
        """Seconds that a save costs. The wait for what is still being written is not among them."""
        before = self.training.baselines[-1]
        steps = self.options.steps if way.background else quarter(self.options.steps)
        took = self.training.run(steps, save, way.guard)
        way.wait()
        after = self.training.rest(quarter(steps)) if way.background else before
        return took - steps * (before + after) / 2

    def load(self, kind: type[Way], root: Path, name: str) -> None:
        """Ours from a warm and from a cold page cache, beside a raw read of the same files; the others' from a warm."""
        cache = next(self.caches) if kind is OURS else "warm"
        measure.CACHES[cache](root / name)
        self.add_load(kind.name, cache, self.time_a_load(kind, root, name))
        if kind is OURS:
            measure.CACHES[cache](root / name)
            past_the_cache = cache == "cold" and len(self.found.loads.get((RawReader.name, "cold"), [])) % 2 == 1
            self.add_load(RawReader.name, cache, self.reader.read(measure.files_in(root / name), past_the_cache))
        self.training.give_back_memory()

    def time_a_load(self, kind: type[Way], root: Path, name: str) -> float:
        target = State.to_load_into(self.options.gigabytes * 1e9, self.options.device, moments=kind.needs_moments)
        self.training.synchronize()
        took = ways.time_a_load(kind, target, root, name, self.training.synchronize)
        assert_equal(self.training.remembered, self.training.state.groups, target, kind.name)
        return took

    def add_load(self, name: str, cache: str, took: float) -> None:
        self.found.loads.setdefault((name, cache), []).append(took)
        print(f"{name}, load, {cache}: {took:.3f} s", flush=True)


def close(way: Way) -> None:
    """What failed to save may fail to close; it was reported. Nothing may write on when its folder goes."""
    with suppress(Exception):
        way.wait()
    with suppress(Exception):
        way.close()


class Watch:
    """Notes when a save returns and when it is done, while training goes on. Gives what saves."""

    def __init__(self, way: Way, name: str, into: Save) -> None:
        self.way, self.name, self.into = way, name, into
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self) -> Callable[[], None]:
        return self.save

    def __exit__(self, *error: object) -> None:
        if self.into.error:
            self.over.set()
        if self.thread.ident is not None:
            self.thread.join()

    def save(self) -> None:
        self.started = time.perf_counter()
        self.way.save(self.name)
        self.into.returned = time.perf_counter() - self.started
        self.thread.start()

    def watch(self) -> None:
        while not self.way.saved(self.name):
            if self.over.wait(0.01):
                return
        self.into.done = time.perf_counter() - self.started


def row(one: Save, found: Found) -> list[str]:
    ours = found.worst(one.which, "lost")
    times = [in_seconds(one.returned), in_seconds(one.lost), ratio(one.lost, ours), in_seconds(one.done)]
    promises = ["yes" if promised else "no" for promised in (one.kind.durable, one.kind.hashed)]
    return [one.kind.name, one.which, *times, *promises, one.error]


def table_of_saves(found: Found, missing: Mapping[type[Way], str]) -> str:
    head = ["", "save", "call returns after", "training lost", "to ours", "written after", "fsync", "hashes", ""]
    absent = [[kind.name, *[""] * (len(head) - 2), why] for kind, why in missing.items()]
    return measure.table(head, [row(one, found) for one in found.saves] + absent)


def table_of_loads(found: Found) -> str:
    names = dict.fromkeys(name for name, _ in found.loads)
    cells = [[name, *(cell for cache in measure.CACHES for cell in load_cells(found, name, cache))] for name in names]
    return measure.table(["", *(cell for cache in measure.CACHES for cell in (f"load, {cache}", "to raw"))], cells)


def load_cells(found: Found, name: str, cache: str) -> list[str]:
    took = found.load(name, cache)
    return [in_seconds(took), ratio(took, found.load(RawReader.name, cache))]


def targets(found: Found) -> list[Target]:
    loaded, raw = found.load(OURS.name, "cold"), found.load(RawReader.name, "cold")
    return [
        Target("training lost, from the second save on", found.worst(LATER, "lost"), 0.25, " s"),
        Target("training lost, first save after a pause", found.worst(PREPARED, "lost"), 0.6, " s"),
        Target("training lost, first save at once", found.worst(AT_ONCE, "lost"), 3.0, " s"),
        Target("training slower while a later save is written", found.worst(LATER, "slower"), 3, " %"),
        Target("save_state returns after", found.worst(None, "returned"), 0.03, " s"),
        Target("load, verified, page cache warm", found.load(OURS.name, "warm"), 1.0, " s"),
        Target("load, verified, page cache cold, to a raw parallel read", divided(loaded, raw), 1.2),
    ]


def report(benchmark: Benchmark, preamble: str, missing: Mapping[type[Way], str]) -> str:
    options, found, training = benchmark.options, benchmark.found, benchmark.training
    size, parameters = training.state.size, sum(one.numel() for one in training.state.model.parameters())
    steps = f"{min(training.baselines):.4f} to {max(training.baselines):.4f} s"
    preparing = ", ".join(f"{kind.name} {in_seconds(lost)}" for kind, lost in found.preparing.items())
    return f"""# Training time lost per checkpoint: {parameters / 1e9:.2f} B parameters, {size / 1e9:.1f} GB with AdamW

{preamble}
- A step without saves: {steps}, {training.samples} samples of {LENGTH} tokens
- Every state that was loaded was equal to the one at the moment of the save, bit for bit, while training went on.

{table_of_saves(found, missing)}

{table_of_loads(found)}

{measure.table_of_targets(targets(found))}

Lost: the time of {options.steps} steps with one save among them ({quarter(options.steps)} for ways that block), less
that of as many without, measured just before and just after. {in_seconds(training.remembering)} of it are a copy of the
state on the device, to compare with. "{AT_ONCE}": what saves was built just before. "{PREPARED}": after
{options.pause:g} s of training, which itself lost: {preparing or "not measured"}. Ratios are to the worst of ours.

Load: the best; building what loads is part of it. Warm: every file was read once just before; cold: no file is in the
page cache. Raw: {RawReader.threads} threads read the same files into pinned rings of {RawReader.slots} times \
{PIECE >> 20} MB and copy to the device; of cold reads the better of through the page cache and past it.
"""


def quarter(steps: int) -> int:
    """One that blocks has no effect later on, and its cost is far above noise: fewer steps around it will do."""
    return max(1, steps // 4)


def plot(found: Found, title: str) -> str:
    lost = {which: bars_of(found, which) for which in (AT_ONCE, PREPARED, LATER)}
    groups = {f"training lost, {which}": values for which, values in lost.items() if values}
    names = dict.fromkeys(name for name, _ in found.loads)
    for cache in measure.CACHES:
        took = {name: found.load(name, cache) for name in names}
        groups[f"load, page cache {cache}"] = {name: one for name, one in took.items() if one is not None}
    return measure.bars(title, groups)


def bars_of(found: Found, which: str) -> dict[str, float]:
    """The worst of each way."""
    known = [(one.kind.name, one.lost) for one in found.saves if one.which == which and one.lost is not None]
    return dict(sorted(known, key=lambda pair: pair[1]))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(WAYS), help=f"some of {','.join(WAYS)}")
    parser.add_argument("--gigabytes", type=float, default=14.9, help="size of model and optimizer state together")
    parser.add_argument("--steps", type=int, default=120, help="steps of training around a save")
    parser.add_argument("--step-seconds", type=float, default=0.142, help="how long a step is to take, about")
    parser.add_argument("--pause", type=float, default=10.0, help="seconds of training before a prepared first save")
    parser.add_argument("--later", type=int, default=2, help="how many later saves of ours")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--root", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after so many no other way is begun")
    parser.add_argument("--results", type=Path, help="where to leave the report and its plot")
    options = parser.parse_args()
    unknown = set(options.ways.split(",")) - WAYS.keys()
    if unknown:
        parser.error(f"--ways: there is no {', '.join(sorted(unknown))}; there are {', '.join(WAYS)}")
    return options


def main() -> None:
    options = parsed()
    started = time.monotonic()
    chosen = [WAYS[name] for name in options.ways.split(",")]
    hardware = torch.cuda.get_device_name() if options.device == "cuda" else measure.processor()
    told = f"--ways {options.ways} --gigabytes {options.gigabytes:g} --steps {options.steps} --device {options.device}"
    accelerator = f"{hardware}, " if options.device == "cuda" else ""
    preamble = measure.preamble(f"gpu.py {told}", options.root, *PACKAGES, accelerator=accelerator)
    benchmark = Benchmark(options)
    left = [kind for kind in chosen if not kind.missing()]
    while left and time.monotonic() < started + options.seconds:
        benchmark.take(left.pop(0))
    missing = {kind: "not installed" for kind in chosen if kind.missing()} | dict.fromkeys(left, "no time left")
    text = report(benchmark, preamble, missing)
    print(text)
    title = f"{benchmark.training.state.size / 1e9:.1f} GB of model and AdamW state, {hardware}"
    path = measure.keep("gpu", hardware, text, plot(benchmark.found, title), options.results)
    print(f"kept in {os.path.relpath(path)}")


if __name__ == "__main__":
    main()

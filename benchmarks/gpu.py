"""Training time that a checkpoint costs on one GPU, and how long a load takes: ckpt beside others, on the same state.

    python -m benchmarks gpu --device cpu --gigabytes 0.05 --steps 5 --pause 1     # tries it without a GPU

A transformer trains; lost is the time of the steps with one save among them, less the time of as many steps without.
Each library saves at once after the run began, and again; one that allocates its buffers beforehand is also measured
with a first save some time after the run began. Training continues while a save is written, and what is loaded must
equal the state at the moment of the save in every bit, or there are no figures.
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

from benchmarks.shared import checkpointers, measure
from benchmarks.shared.checkpointers import Checkpointer
from benchmarks.shared.measure import PIECE, folder_in
from benchmarks.shared.plot import bars
from benchmarks.shared.raw import RawReader
from benchmarks.shared.report import (
    Run,
    Target,
    divided,
    in_seconds,
    parser,
    ratio,
    table,
    table_of_targets,
    yes_or_no,
)
from benchmarks.shared.results import Samples
from benchmarks.shared.state import State, assert_equal
from benchmarks.shared.training import LENGTH, Training

LIBRARIES: dict[str, type[Checkpointer]] = {
    "ours": checkpointers.OursInBackground,
    "torch": checkpointers.TorchSave,
    "dcp": checkpointers.Dcp,
    "dcp-async": checkpointers.DcpAsync,
    "dcp-pinned": checkpointers.DcpAsyncPinned,
    "accelerate": checkpointers.WithAccelerate,
    "torch_checkpointing": checkpointers.TorchCheckpointing,
}
OURS = checkpointers.OursInBackground
AT_ONCE, PREPARED, LATER = "first, at once", "first, prepared", "later"
PACKAGES = ("torch", "accelerate", "safetensors", "torch_checkpointing")


@dataclass
class Save:
    """A save during training, in seconds."""

    kind: type[Checkpointer]
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
    preparing: dict[type[Checkpointer], float] = field(default_factory=dict)  # lost while buffers are made ready
    loads: dict[tuple[str, str], list[float]] = field(default_factory=dict)  # by name and state of the page cache

    def load(self, name: str, cache: str) -> float | None:
        return min(self.loads.get((name, cache), []), default=None)

    def worst(self, which: str | None, what: str) -> float | None:
        """Of our saves: a target holds for each of them."""
        ours = [save for save in self.saves if save.kind is OURS and which in (None, save.which)]
        values = [getattr(save, what) for save in ours]
        return None if not values or None in values else max(values)


class Benchmark:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.training = Training(options)
        self.reader = RawReader(options.device)
        self.found = Found()
        self.caches = itertools.cycle(measure.CACHES)

    def measure(self, kind: type[Checkpointer]) -> None:
        """A run that saves at once and then again; and one with a pause first, if it allocates its buffers then."""
        later = self.options.later if kind is OURS else int(kind.background)
        self.scenario(kind, [AT_ONCE, *[LATER] * later])
        if kind.prepares:
            self.scenario(kind, [PREPARED])

    def scenario(self, kind: type[Checkpointer], saves: Sequence[str]) -> None:
        with ExitStack() as stack:
            root = stack.enter_context(folder_in(self.options.root))
            os.sync()
            checkpointer = kind(self.training.state, root)
            stack.callback(close, checkpointer)
            checkpointer.prepare()
            if saves[0] == PREPARED:
                self.pause(checkpointer)
            for number, which in enumerate(saves):
                name = f"save-{number}"
                save = self.save(checkpointer, which, name)
                if save.error:
                    break
                if kind is OURS or number == len(saves) - 1:
                    self.load(kind, root, name)
                shutil.rmtree(root / name)  # a few of them fill a disk
                os.sync()

    def pause(self, checkpointer: Checkpointer) -> None:
        """Train without saves until buffers may be expected to be ready. What that costs is counted too."""
        steps = math.ceil(self.options.pause / self.training.baselines[-1])
        took = self.training.run(steps, guard=checkpointer.guard)
        self.found.preparing[type(checkpointer)] = took - steps * self.training.baselines[-1]

    def save(self, checkpointer: Checkpointer, which: str, name: str) -> Save:
        found = Save(type(checkpointer), which)
        with Watch(checkpointer, name, found) as save:
            try:
                found.lost = self.lost(checkpointer, save)
            except Exception as error:
                found.error = f"{type(error).__name__}: {error}".splitlines()[0]
        self.found.saves.append(found)
        print(*row(found, self.found), sep=" | ", flush=True)
        return found

    def lost(self, checkpointer: Checkpointer, save: Callable[[], None]) -> float:
        """Seconds that a save costs. The wait for what is still being written is not among them."""
        before = self.training.baselines[-1]
        steps = self.options.steps if checkpointer.background else quarter(self.options.steps)
        took = self.training.run(steps, save, checkpointer.guard)
        checkpointer.wait()
        after = self.training.rest(quarter(steps)) if checkpointer.background else before
        return took - steps * (before + after) / 2

    def load(self, kind: type[Checkpointer], root: Path, name: str) -> None:
        """Ours from a warm and from a cold page cache, beside a raw read of the same files; the others' from a warm."""
        cache = next(self.caches) if kind is OURS else "warm"
        measure.CACHES[cache](root / name)
        self.add_load(kind.name, cache, self.time_a_load(kind, root, name))
        if kind is OURS:
            measure.CACHES[cache](root / name)
            past_the_cache = cache == "cold" and len(self.found.loads.get((RawReader.name, "cold"), [])) % 2 == 1
            self.add_load(RawReader.name, cache, self.reader.read(measure.files_in(root / name), past_the_cache))
        self.training.give_back_memory()

    def time_a_load(self, kind: type[Checkpointer], root: Path, name: str) -> float:
        target = State.to_load_into(self.options.gigabytes * 1e9, self.options.device, moments=kind.needs_moments)
        self.training.synchronize()
        took = checkpointers.time_a_load(kind, target, root, name, self.training.synchronize)
        assert_equal(self.training.remembered, self.training.state.groups, target, kind.name)
        return took

    def add_load(self, name: str, cache: str, took: float) -> None:
        self.found.loads.setdefault((name, cache), []).append(took)
        print(f"{name}, load, {cache}: {took:.3f} s", flush=True)


def close(checkpointer: Checkpointer) -> None:
    """What failed to save may fail to close too, and was reported. Nothing may write when its folder is removed."""
    with suppress(Exception):
        checkpointer.wait()
    with suppress(Exception):
        checkpointer.close()


class Watch:
    """Records when a save returns and when it is complete, while training continues. Yields what saves."""

    def __init__(self, checkpointer: Checkpointer, name: str, into: Save) -> None:
        self.checkpointer, self.name, self.into = checkpointer, name, into
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
        self.checkpointer.save(self.name)
        self.into.returned = time.perf_counter() - self.started
        self.thread.start()

    def watch(self) -> None:
        while not self.checkpointer.saved(self.name):
            if self.over.wait(0.01):
                return
        self.into.done = time.perf_counter() - self.started


def row(save: Save, found: Found) -> list[str]:
    ours = found.worst(save.which, "lost")
    times = [in_seconds(save.returned), in_seconds(save.lost), ratio(save.lost, ours), in_seconds(save.done)]
    promises = [yes_or_no(save.kind.durable), yes_or_no(save.kind.hashed)]
    return [save.kind.name, save.which, *times, *promises, save.error]


def table_of_saves(found: Found, missing: Mapping[type[Checkpointer], str]) -> str:
    head = ["", "save", "call returns after", "training lost", "to ours", "written after", "fsync", "hashes", ""]
    absent = [[kind.name, *[""] * (len(head) - 2), why] for kind, why in missing.items()]
    return table(head, [row(save, found) for save in found.saves] + absent)


def table_of_loads(found: Found) -> str:
    names = dict.fromkeys(name for name, _ in found.loads)
    cells = [[name, *(cell for cache in measure.CACHES for cell in load_cells(found, name, cache))] for name in names]
    return table(["", *(cell for cache in measure.CACHES for cell in (f"load, {cache}", "to raw"))], cells)


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


def body(benchmark: Benchmark, missing: Mapping[type[Checkpointer], str]) -> str:
    options, found, training = benchmark.options, benchmark.found, benchmark.training
    preparing = ", ".join(f"{kind.name} {in_seconds(lost)}" for kind, lost in found.preparing.items())
    return f"""{table_of_saves(found, missing)}

{table_of_loads(found)}

{table_of_targets(targets(found))}

Lost: the time of {options.steps} steps with one save among them ({quarter(options.steps)} where the save blocks), less
that of as many without, measured just before and just after. {in_seconds(training.remembering)} of it are a copy of the
state on the device, to compare with. "{AT_ONCE}": what saves was built just before. "{PREPARED}": after
{options.pause:g} s of training, which itself lost: {preparing or "not measured"}. Ratios are to the worst of ours.

Load: the best; constructing what loads is part of it. Warm: every file was read once just before; cold: no file is in
the page cache. Raw: {RawReader.threads} threads read the same files into pinned rings of {RawReader.slots} times \
{PIECE >> 20} MB and copy to the device; of cold reads the better of through the page cache and past it.
"""


def collect(found: Found, samples: Samples) -> None:
    """Every sample, for the JSON."""
    for save in found.saves:
        times = {"call returns": save.returned, "training lost": save.lost, "written": save.done}
        for metric, took in times.items():
            samples.add(save.kind.name, f"{metric}, {save.which}", took)
    for (name, cache), loads in found.loads.items():
        for took in loads:
            samples.add(name, f"load, {cache}", took)


def quarter(steps: int) -> int:
    """A save that blocks has no later effect, and its cost is far above noise: fewer steps around it suffice."""
    return max(1, steps // 4)


def plot(found: Found, title: str) -> str:
    lost = {which: bars_of(found, which) for which in (AT_ONCE, PREPARED, LATER)}
    groups = {f"training lost, {which}": values for which, values in lost.items() if values}
    names = dict.fromkeys(name for name, _ in found.loads)
    for cache in measure.CACHES:
        took = {name: found.load(name, cache) for name in names}
        groups[f"load, page cache {cache}"] = {name: best for name, best in took.items() if best is not None}
    return bars(title, groups)


def bars_of(found: Found, which: str) -> dict[str, float]:
    """The worst of each checkpointer."""
    known = [(save.kind.name, save.lost) for save in found.saves if save.which == which and save.lost is not None]
    return dict(sorted(known, key=lambda pair: pair[1]))


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    options_parser = parser("gpu", __doc__)
    add = options_parser.add_argument
    add("--libraries", default=",".join(LIBRARIES), help=f"some of {','.join(LIBRARIES)}")
    add("--gigabytes", type=float, default=14.9, help="size of model and optimizer state")
    add("--steps", type=int, default=120, help="steps of training around a save")
    add("--step-seconds", type=float, default=0.142, help="how long a step is to take, about")
    add("--pause", type=float, default=10.0, help="seconds of training before a prepared first save")
    add("--later", type=int, default=2, help="how many later saves of ours")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--seconds", type=float, default=math.inf, help="after so many no other library is begun")
    options = options_parser.parse_args(arguments)
    unknown = set(options.libraries.split(",")) - LIBRARIES.keys()
    if unknown:
        listed = ", ".join(sorted(unknown))
        options_parser.error(f"--libraries: there is no {listed}; there are {', '.join(LIBRARIES)}")
    return options


def main(arguments: Sequence[str]) -> None:
    options = parsed(arguments)
    accelerator = torch.cuda.get_device_name() if options.device == "cuda" else ""
    run = Run("gpu", options, *PACKAGES, accelerator=accelerator)
    chosen = [LIBRARIES[name] for name in options.libraries.split(",")]
    benchmark = Benchmark(options)
    missing = measure_all(benchmark, chosen, time.monotonic() + options.seconds)
    collect(benchmark.found, run.samples)
    training = benchmark.training
    size, parameters = training.state.size, sum(parameter.numel() for parameter in training.state.model.parameters())
    steps = f"{min(training.baselines):.4f} to {max(training.baselines):.4f} s"
    notes = (
        f"A step without saves: {steps}, {training.samples} samples of {LENGTH} tokens",
        "Every state that was loaded was equal to that at the moment of the save, bit for bit; training continued.",
    )
    title = f"Training time lost per checkpoint: {parameters / 1e9:.2f} B parameters, {size / 1e9:.1f} GB with AdamW"
    plotted = plot(benchmark.found, f"{size / 1e9:.1f} GB of model and AdamW state, {accelerator or 'CPU'}")
    run.keep(title, body(benchmark, missing), plotted, *notes)


def measure_all(
    benchmark: Benchmark, chosen: Sequence[type[Checkpointer]], deadline: float
) -> dict[type[Checkpointer], str]:
    """Returns the libraries that were not measured, and why."""
    left = [kind for kind in chosen if not kind.missing()]
    while left and time.monotonic() < deadline:
        benchmark.measure(left.pop(0))
    return {kind: "not installed" for kind in chosen if kind.missing()} | dict.fromkeys(left, "no time left")

"""Training time that a checkpoint costs on one GPU, and how long a load takes: ckpt beside others, on the same state.

    python -m benchmarks gpu --device cpu --gigabytes 0.05 --steps 5                 # tries it without a GPU
    python -m benchmarks gpu --libraries ours --gigabytes 42.7 --compare checksums   # three copies would not fit

A transformer trains; lost is the time of the steps with one save among them, less the time of as many steps without.
Each library saves at once after the run began, and again; with --pause, one that allocates its buffers beforehand is
also measured with a first save some time after the run began. Training continues while a save is written, and what is
loaded must equal the state at the moment of the save in every bit, or there are no figures. The disk has one
checkpoint at a time.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from benchmarks.gpu_report import (
    AFTER,
    AT_ONCE,
    LATER,
    OURS,
    PREPARED,
    Found,
    Save,
    body,
    collect,
    plot,
    plot_of_steps,
    row,
)
from benchmarks.shared import checkpointers, measure
from benchmarks.shared.checkpointers import Checkpointer
from benchmarks.shared.measure import files_in, folder_in
from benchmarks.shared.page_cache import resident, wait_until_resident
from benchmarks.shared.raw import RawReader, RawWriter
from benchmarks.shared.reference import REFERENCES, assert_equal
from benchmarks.shared.report import Run, parser, refuse_unknown_libraries
from benchmarks.shared.state import State
from benchmarks.shared.training import LENGTH, Training, lead_of

LIBRARIES: dict[str, type[Checkpointer]] = {
    "ours": OURS,
    "torch_checkpointing": checkpointers.TorchCheckpointing,
    "accelerate": checkpointers.WithAccelerate,
    "dcp-async": checkpointers.DcpAsync,
    "torch": checkpointers.TorchSave,
    "dcp": checkpointers.Dcp,
    "dcp-pinned": checkpointers.DcpAsyncPinned,
}
EQUAL = {"copy": "equal, bit for bit, to that", "checksums": "equal in the checksum of every tensor to that"}
PACKAGES = ("torch", "accelerate", "safetensors", "torch_checkpointing")


class Benchmark:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.training = Training(options)
        self.reader, self.writer = RawReader(options.device), RawWriter()
        self.found = Found(self.training.state.size)
        self.caches = itertools.cycle(measure.CACHES)

    def measure(self, kind: type[Checkpointer]) -> None:
        """A run that saves at once and then again; and one with a pause first, if it allocates its buffers then."""
        later = self.options.later if kind is OURS else int(kind.background)
        self.scenario(kind, [AT_ONCE, *[LATER] * later])
        if kind.prepares and self.options.pause:
            self.scenario(kind, [PREPARED])

    def scenario(self, kind: type[Checkpointer], saves: Sequence[str]) -> None:
        with ExitStack() as stack:
            root = stack.enter_context(folder_in(self.options.root))
            os.sync()
            self.rest()
            checkpointer = kind(self.training.state, root)
            stack.callback(close, checkpointer)
            checkpointer.prepare()
            if saves[0] == PREPARED:
                self.pause(checkpointer)
            for number, which in enumerate(saves):
                if which != AT_ONCE:
                    self.rest()
                save = self.save(checkpointer, which, f"save-{number}")
                if save.error:
                    break
                self.after_save(kind, root / f"save-{number}", last=number == len(saves) - 1)

    def rest(self) -> float:
        return self.training.rest(quarter(self.options.steps))

    def pause(self, checkpointer: Checkpointer) -> None:
        """Train without saves until buffers may be expected to be ready. What that costs is counted too."""
        steps = math.ceil(self.options.pause / self.training.baselines[-1])
        took = sum(self.training.run(steps, guard=checkpointer.guard))
        self.found.preparing[type(checkpointer)] = took - steps * self.training.baselines[-1]

    def save(self, checkpointer: Checkpointer, which: str, name: str) -> Save:
        found = Save(type(checkpointer), which)
        with Watch(checkpointer, name, found, self.options.warm_seconds) as watch:
            try:
                self.train_and_save(checkpointer, watch, found)
            except Exception as error:
                found.error = f"{type(error).__name__}: {error}".splitlines()[0]
        self.found.saves.append(found)
        print(*row(found, self.found), sep=" | ", flush=True)
        return found

    def train_and_save(self, checkpointer: Checkpointer, watch: Watch, found: Save) -> None:
        """The wait for what is still being written, or read back, after the last step is not among what was lost."""
        before = self.training.baselines[-1]
        steps = self.options.steps if checkpointer.background else quarter(self.options.steps)
        found.lead = lead_of(steps)
        found.steps = self.training.run(steps, watch.save, checkpointer.guard, watch.thread.is_alive)
        checkpointer.wait()
        watch.thread.join()
        after = self.rest() if checkpointer.background else before
        found.lost = sum(found.steps) - len(found.steps) * (before + after) / 2

    def after_save(self, kind: type[Checkpointer], folder: Path, last: bool) -> None:
        """Load what was saved, and remove it: a few of them fill a disk. Beside ours, a raw write of as many bytes."""
        if kind is OURS or last:
            self.found.resident.setdefault(kind.name, []).append(resident(folder))
            self.load(kind, folder, AFTER)
        if kind is OURS:
            self.load_beside_raw(kind, folder, next(self.caches))
        size = sum(path.stat().st_size for path in files_in(folder))
        shutil.rmtree(folder)
        os.sync()
        if kind is OURS:
            took = self.writer.write(folder.parent, size)
            self.found.raw_writes.append(took)
            print(f"{RawWriter.name}: {took:.3f} s", flush=True)

    def load_beside_raw(self, kind: type[Checkpointer], folder: Path, cache: str) -> None:
        """From a warm or a cold page cache, and a raw read of the same files."""
        measure.CACHES[cache](folder)
        self.load(kind, folder, cache)
        measure.CACHES[cache](folder)
        past_the_cache = cache == "cold" and len(self.found.loads.get((RawReader.name, "cold"), [])) % 2 == 1
        self.add_load(RawReader.name, cache, self.reader.read(files_in(folder), past_the_cache))
        self.training.give_back_memory()

    def load(self, kind: type[Checkpointer], folder: Path, cache: str) -> None:
        self.add_load(kind.name, cache, self.time_a_load(kind, folder))
        self.training.give_back_memory()

    def time_a_load(self, kind: type[Checkpointer], folder: Path) -> float:
        target = State.to_load_into(self.options.gigabytes * 1e9, self.options.device, moments=kind.needs_moments)
        self.training.synchronize()
        took = checkpointers.time_a_load(kind, target, folder.parent, folder.name, self.training.synchronize)
        assert_equal(self.training.reference, self.training.state.groups, target, kind.name)
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
    """Records when a save returns, is complete, and is in the page cache again, while training continues."""

    def __init__(self, checkpointer: Checkpointer, name: str, into: Save, warm_seconds: float) -> None:
        self.checkpointer, self.name, self.into, self.warm_seconds = checkpointer, name, into, warm_seconds
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self) -> Watch:
        return self

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
        folder = self.checkpointer.root / self.name
        if self.checkpointer.reads_back and wait_until_resident(folder, self.warm_seconds, self.over.wait):
            self.into.read_back = time.perf_counter() - self.started


def quarter(steps: int) -> int:
    """A save that blocks has no later effect, and its cost is far above noise: fewer steps around it suffice."""
    return max(1, steps // 4)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    options_parser = parser("gpu", __doc__)
    add = options_parser.add_argument
    add("--libraries", default=",".join(LIBRARIES), help=f"some of {','.join(LIBRARIES)}")
    add("--gigabytes", type=float, default=14.9, help="size of model and optimizer state")
    add("--steps", type=int, default=80, help="steps of training around a save, at least")
    add("--step-seconds", type=float, default=0.142, help="how long a step is to take, about")
    add("--read-loss", default="every", choices=("every", "never"), help="in which steps the loop calls loss.item()")
    add(
        "--compare",
        default="copy",
        choices=tuple(REFERENCES),
        help="what a load is compared with: copy needs as much memory on the device as the state",
    )
    add("--pause", type=float, default=0.0, help="seconds of training before a prepared first save; 0: no such save")
    add("--later", type=int, default=2, help="how many later saves of ours")
    add("--warm-seconds", type=float, default=20.0, help="how long ckpt may take to read a checkpoint back")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--seconds", type=float, default=380.0, help="after so many no other library is begun (default: %(default)g)")
    options = options_parser.parse_args(arguments)
    refuse_unknown_libraries(options_parser, options.libraries, LIBRARIES)
    return options


def main(arguments: Sequence[str]) -> None:
    options = parsed(arguments)
    accelerator = torch.cuda.get_device_name() if options.device == "cuda" else ""
    run = Run("gpu", options, *PACKAGES, accelerator=accelerator)
    chosen = [LIBRARIES[name] for name in options.libraries.split(",")]
    benchmark = Benchmark(options)
    missing = measure_all(benchmark, chosen, time.monotonic() + options.seconds)
    collect(benchmark.found, run)
    keep(run, benchmark, missing, accelerator or "CPU")


def keep(run: Run, benchmark: Benchmark, missing: dict[type[Checkpointer], str], device: str) -> None:
    training, found = benchmark.training, benchmark.found
    parameters = sum(parameter.numel() for parameter in training.state.model.parameters())
    steps = f"{min(training.baselines):.4f} to {max(training.baselines):.4f} s"
    notes = (
        f"A step without saves: {steps}, {training.samples} samples of {LENGTH} tokens",
        f"Every state that was loaded was {EQUAL[run.options.compare]} at the moment of the save; training continued.",
    )
    state = f"{found.size / 1e9:.1f} GB of model and AdamW state, {device}"
    title = (
        f"Training time lost per checkpoint: {parameters / 1e9:.2f} B parameters, {found.size / 1e9:.1f} GB with AdamW"
    )
    drawn = plot_of_steps(found, f"Time per step around a save: {state}", training.baselines[0])
    plots = {} if drawn is None else {"steps": drawn}
    run.keep(title, body(run.options, found, training, missing), plot(found, state), *notes, plots=plots)


def measure_all(
    benchmark: Benchmark, chosen: Sequence[type[Checkpointer]], deadline: float
) -> dict[type[Checkpointer], str]:
    """Returns the libraries that were not measured, and why."""
    left = [kind for kind in chosen if not kind.missing()]
    while left and time.monotonic() < deadline:
        benchmark.measure(left.pop(0))
    return {kind: "not installed" for kind in chosen if kind.missing()} | dict.fromkeys(left, "no time left")

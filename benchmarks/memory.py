"""What snapshots in memory cost the training, and how fast a killed run is back: `StateManager(..., memory=10)`.

    python -m benchmarks memory --root /tmp --seconds 240                                # on a GPU
    python -m benchmarks memory --device cpu --gigabytes 1.5                             # without one
    python -m benchmarks memory --device cpu --gigabytes 0.05 --steps 5 --loop-steps 20  # tries it

A transformer trains in a process of its own. Lost is the time of the steps with one snapshot among them, less the time
of as many steps without. Then a loop takes a snapshot every few steps, between the same loop without. At the end the
same state is saved to the root and taken into memory, and the process is killed. New processes load it, from memory
and from the root with every file in the page cache, in turn. What they load must equal in the checksum of every tensor
what the killed process had, or there are no figures. Where DLRover is installed, its snapshots are measured in the same
run.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import ckpt
from benchmarks.shared.checkpointers import time_a_load
from benchmarks.shared.flash import FlashCheckpoint, clean_up
from benchmarks.shared.measure import folder_in, in_a_new_process, seconds, settle, warm
from benchmarks.shared.reference import checksum, described
from benchmarks.shared.report import Run, Target, divided, parser, table, table_of_targets
from benchmarks.shared.results import Samples
from benchmarks.shared.state import State
from benchmarks.shared.training import LENGTH, Training
from ckpt.memory.held_memory import memory_of
from ckpt.memory.tier import MemoryTier

SUBJECT = "ckpt memory"
RIVAL = FlashCheckpoint.name
FIRST, LATER, NOISE = "lost, first", "lost, later", "lost, none taken"
CALL, COMMITTED, FIRST_COMMITTED = "call returns", "committed", "committed, first"
SLOWER, LEFT_OUT = "slower", "left out"
MEMORY, ROOT = "load, memory", "load, root, warm"
TEXTS = {
    FIRST: "training lost by each of a run's first two snapshots",
    LATER: "training lost per later snapshot",
    NOISE: "the same measured where no snapshot was taken: the noise",
    CALL: "`step()` with a snapshot returns after",
    FIRST_COMMITTED: "each of a run's first two snapshots is committed after",
    COMMITTED: "a later snapshot is committed after",
    SLOWER: "training slower with a snapshot every {every} steps",
    LEFT_OUT: "snapshots left out of {loop_steps} steps, as the one before was under way",
    MEMORY: "load from memory, after SIGKILL",
    ROOT: "load of the same state from the root, page cache warm",
}
SLOTS = 2  # as many snapshots write to memory that is new
SNAPSHOTS, LOOPS, ROOTS = 0.3, 0.65, 0.75  # of the seconds: until when repeats of a part, or the part, may begin
Prints = dict[str, tuple[str, int]]


class Trainer(Training):
    """A training whose loop calls `step()` of a manager while it has one."""

    manager: ckpt.StateManager | None = None

    def step(self, guard: Callable[[], Any]) -> None:
        super().step(guard)
        if self.manager is not None:
            self.manager.step()


class Measurement:
    """Everything that is measured in the process that is killed. A sample is sent as soon as it is known."""

    def __init__(self, options: argparse.Namespace, root: Path, began: float, pipe: Connection) -> None:
        self.options, self.root, self.began, self.pipe = options, root, began, pipe
        self.rival: FlashCheckpoint | None = None
        self.without_rival = ""
        compare = "checksums"  # a copy on the device would be as large as the state
        self.training = Trainer(argparse.Namespace(**vars(options), compare=compare))
        self.manager, self.tier = manager_of(self.training.state, root, options.every)
        with redirect_stderr(io.StringIO()):
            self.manager.resume()

    def has_time(self, share: float) -> bool:
        return time.time() < self.began + share * self.options.seconds

    def add(self, metric: str, sample: float, unit: str = "s", subject: str = SUBJECT) -> None:
        print(f"{subject}, {metric}: {sample:.4g} {unit}", flush=True)
        self.pipe.send((subject, metric, sample, unit))

    def measure(self) -> None:
        for _ in range(SLOTS if self.options.repeats else 0):
            self.snapshot(FIRST)
        for count in range(self.options.repeats):
            if count == 0 or self.has_time(SNAPSHOTS):
                self.snapshot(LATER)
                self.no_snapshot()
        for count in range(self.options.loops):
            if count == 0 or self.has_time(LOOPS):
                self.loop()
        self.without_rival = FlashCheckpoint.problem()
        if not self.without_rival:
            self.measure_rival(FlashCheckpoint(self.training.state, self.root.with_name("dlrover")))

    def measure_rival(self, rival: FlashCheckpoint) -> None:
        self.rival = rival
        self.pipe.send((rival.saver,))
        for number in range(1, 2 + self.options.repeats) if self.options.repeats else ():
            if number <= 2 or self.has_time(ROOTS):
                self.rival_snapshot(rival, number)

    def snapshot(self, metric: str) -> None:
        """One snapshot, among so many steps that whatever it costs later is in them."""
        around = max(1, self.options.steps // 2)
        before = self.training.rest(around)
        if not self.tier.statistics.taken:
            self.manager.step()  # a run's first: memory is made ready from then on
        with watched(self.tier) as watch:
            steps = self.training.run(self.options.steps, lambda: watch.take(self.take), more=lambda: self.tier.busy)
        self.add(metric, sum(steps) - len(steps) * (before + self.training.rest(around)) / 2)
        self.add(CALL, watch.returned)
        self.add(FIRST_COMMITTED if metric == FIRST else COMMITTED, watch.committed)

    def no_snapshot(self) -> None:
        """What the same arithmetic says of steps among which there is no snapshot."""
        around = max(1, self.options.steps // 2)
        before = self.training.rest(around)
        steps = self.training.run(self.options.steps)
        self.add(NOISE, sum(steps) - len(steps) * (before + self.training.rest(around)) / 2)

    def rival_snapshot(self, rival: FlashCheckpoint, number: int) -> None:
        """The same with the other library, whose call returns when its snapshot is complete."""
        around, took = max(1, self.options.steps // 2), list[float]()
        before = self.training.rest(around)
        steps = self.training.run(self.options.steps, lambda: took.append(seconds(lambda: rival.save(str(number)))))
        lost = sum(steps) - len(steps) * (before + self.training.rest(around)) / 2
        self.add(FIRST if number == 1 else LATER, lost, subject=RIVAL)
        self.add(CALL, took[0], subject=RIVAL)

    def take(self) -> None:
        """A step that is due: a snapshot is taken after it."""
        every, progress, taken = self.options.every, self.manager.progress, self.tier.statistics.taken
        progress.step = (progress.step // every + 1) * every - 1
        self.manager.step()
        assert self.tier.statistics.taken == taken + 1, "no snapshot was taken: the log says why"

    def loop(self) -> None:
        """Many steps with snapshots among them, between as many without."""
        count, every, statistics = self.options.loop_steps, self.options.every, self.tier.statistics
        before = self.training.rest(count)
        tried, skipped = statistics.taken + statistics.skipped, statistics.skipped
        self.manager.progress.step += -self.manager.progress.step % every + every // 2
        self.training.manager = self.manager
        steps = self.training.run(count)
        self.training.manager = None
        self.tier.wait()
        due = (count + every // 2) // every
        assert statistics.taken + statistics.skipped == tried + due, "snapshots were not taken: the log says why"
        usual = (before + self.training.rest(count)) / 2
        self.add(SLOWER, 100 * (sum(steps) / len(steps) / usual - 1), "%")
        self.add(LEFT_OUT, statistics.skipped - skipped, "")

    def leave(self) -> tuple[Prints, Any]:
        """The state in memory; before that in the root too, if there is time. Returns what a load must bring back."""
        if self.has_time(ROOTS):
            self.manager.save_state(wait=True)
        self.take()
        self.tier.wait()
        if self.rival is not None:
            self.rival.save(str(2 + self.options.repeats))
        return prints_of(self.training.state), self.training.state.groups


class Watch:
    """When the call that takes a snapshot returns, and when the snapshot is committed."""

    def __init__(self, tier: MemoryTier) -> None:
        self.tier, self.returned, self.committed = tier, 0.0, 0.0
        self.thread = threading.Thread(target=self.wait, daemon=True)

    def take(self, call: Callable[[], None]) -> None:
        self.began = time.perf_counter()
        self.returned = seconds(call)
        self.thread.start()

    def wait(self) -> None:
        while self.tier.busy:
            time.sleep(0.005)
        self.committed = time.perf_counter() - self.began


@contextmanager
def watched(tier: MemoryTier) -> Iterator[Watch]:
    watch = Watch(tier)
    yield watch
    watch.thread.join()
    tier.wait()


def manager_of(state: State, root: Path, every: int | None) -> tuple[ckpt.StateManager, Any]:
    """A manager of this state, and its memory tier, if any."""
    both = {"model": state.model, "optimizer": state.optimizer}
    manager = ckpt.StateManager(root, **both, memory=every)
    return manager, manager.session.memory


def prints_of(state: State) -> Prints:
    return {name: (str(described(tensor)), int(checksum(tensor))) for name, tensor in state.tensors().items()}


def train(options: argparse.Namespace, root: Path, began: float, pipe: Connection) -> None:
    """In the process that is killed: measure, leave a state, and wait for the kill, or for the end of the parent."""
    measurement = Measurement(options, root, began, pipe)
    measurement.measure()
    facts = {
        "size": measurement.training.state.size,
        "steps": measurement.training.baselines,
        "samples": measurement.training.samples,
        "without rival": measurement.without_rival,
    }
    pipe.send((measurement.leave(), facts))
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()


def train_and_kill(
    options: argparse.Namespace, root: Path, began: float, samples: Samples, stack: ExitStack
) -> tuple[tuple[Prints, Any], dict[str, Any]]:
    """Train in a new process until it has left its state, and kill it there. The stack cleans up what it leaves."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(options, root, began, send))
    process.start()
    send.close()
    try:
        while len(message := receive.recv()) != 2:
            if len(message) == 4:
                samples.add(*message)
            else:
                stack.callback(clean_up, *message)
    finally:
        process.kill()
        process.join()
    left, facts = message
    return left, facts


def load(options: argparse.Namespace, root: Path, subject: str, metric: str) -> tuple[float, tuple[Prints, Any]]:
    """In a new process, as a run that is started again. From memory, the manager is abandoned as by a kill."""
    state = State.to_load_into(options.gigabytes * 1e9, options.device)
    if metric == ROOT:
        warm(root)
    if options.device == "cpu":
        settle(int(options.gigabytes * 1e9))
    synchronize()
    if subject == RIVAL:
        FlashCheckpoint.find_saver()
        took = time_a_load(FlashCheckpoint, state, root.with_name("dlrover"), "", synchronize)
    else:
        with redirect_stderr(io.StringIO()) as said:
            took = seconds(lambda: resume(state, root, options.every if metric == MEMORY else None, said))
    return took, (prints_of(state), state.groups)


def resume(state: State, root: Path, every: int | None, said: io.StringIO) -> None:
    manager, _ = manager_of(state, root, every)
    # a run that resumes without the tier would leave the snapshots for good, and the next load could not have them
    restored = manager.resume() if every is not None else manager.load_state()
    synchronize()
    assert restored, "nothing was resumed"
    assert restored.from_memory == (every is not None), f"it came from elsewhere:\n{said.getvalue()}"
    if every is None:
        manager.close()


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def time_loads(
    options: argparse.Namespace, root: Path, left: object, deadline: float, samples: Samples, with_rival: bool
) -> None:
    ways = [(SUBJECT, MEMORY)]
    ways += [(SUBJECT, ROOT)] if any(root.glob("*/manifest.json")) else []
    ways += [(RIVAL, MEMORY)] if with_rival else []
    longest = 0.0
    for count in range(options.loads):
        for subject, metric in ways if count % 2 == 0 else ways[::-1]:
            began = time.time()
            if samples.all(SUBJECT, MEMORY) and began + 1.5 * longest > deadline:
                return
            took, loaded = in_a_new_process(load, options, root, subject, metric)
            assert loaded == left, f"{subject}, {metric}: what was loaded is not what was left"
            samples.add(subject, metric, took)
            longest = max(longest, time.time() - began)
            print(f"{subject}, {metric}: {took:.3f} s", flush=True)


def measure_all(options: argparse.Namespace, samples: Samples) -> dict[str, Any]:
    """Returns facts of the training. Nothing is left in memory."""
    began = time.time()
    with folder_in(options.root) as folder, ExitStack() as stack:
        root = folder / "run"
        stack.callback(clear, root)
        left, facts = train_and_kill(options, root, began, samples, stack)
        time_loads(options, root, left, began + 0.95 * options.seconds, samples, not facts["without rival"])
    return facts


def clear(root: Path) -> None:
    for held in memory_of(str(root)):
        held.clear()


def targets(samples: Samples, device: str) -> list[Target]:
    if device == "cpu":
        best = divided(samples.best(SUBJECT, MEMORY), samples.best(SUBJECT, ROOT))
        return [Target("load from memory to load from the root, page cache warm", best, 1.0)]
    return [
        Target("training lost per later snapshot, median", samples.median(SUBJECT, LATER), 0.03, " s"),
        Target(TEXTS[SLOWER].format(every="few") + ", median", samples.median(SUBJECT, SLOWER), 1, " %"),
        Target("first snapshots committed after, worst", samples.worst(SUBJECT, FIRST_COMMITTED), 5.0, " s"),
        Target("later snapshots committed after, median", samples.median(SUBJECT, COMMITTED), 0.5, " s"),
        Target("load from memory, worst", samples.worst(SUBJECT, MEMORY), 1.0, " s"),
    ]


def body(options: argparse.Namespace, samples: Samples) -> str:
    rows = [
        [
            row.subject,
            TEXTS[row.metric].format(**vars(options)),
            *(spelled(value, row.unit) for value in found),
            str(len(row.samples)),
        ]
        for row in samples.rows()
        for found in [(row.best, row.median, max(row.samples))]
    ]
    return f"""{table(["", "", "best", "median", "worst", "samples"], rows)}

{table_of_targets(targets(samples, options.device))}

Lost: the steps around a snapshot, less as many without. A run's first two snapshots write to memory that
nobody has used. ckpt begins to make it ready after the first step, five steps before the first snapshot. Later ones
overwrite the memory of the one before the last. A load is in a
new process, whose objects exist: the manager's construction is part of it, imports and the start of the process are
not. DLRover, where it was measured, runs without its launcher, computes no checksums and has one snapshot; its call
returns when that is complete.
"""


def spelled(value: float, unit: str) -> str:
    return f"{value:.3f} s" if unit == "s" else f"{value:.2f} {unit}".strip()


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    options_parser = parser("memory", __doc__)
    add = options_parser.add_argument
    add("--gigabytes", type=float, default=14.9, help="size of model and optimizer state")
    add("--every", type=int, default=10, help="steps between the snapshots of a loop")
    add("--steps", type=int, help="steps of training around a single snapshot, at least (default: 40, on the CPU 6)")
    add("--step-seconds", type=float, default=0.144, help="how long a step is to take on a GPU, about")
    add("--read-loss", default="every", choices=("every", "never"), help="in which steps the loop calls loss.item()")
    add("--repeats", type=int, default=4, help="single snapshots after the first; 0: none at all")
    add("--loop-steps", type=int, help="steps of the loop with a snapshot every few (default: 100, on the CPU 20)")
    add("--loops", type=int, default=2, help="such loops; 0: none")
    add("--loads", type=int, default=4, help="loads from memory, and as many from the root")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add(
        "--seconds", type=float, default=600.0, help="how long it may take; repeats are left out (default: %(default)g)"
    )
    options = options_parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    options.steps = options.steps or (40 if on_gpu else 6)
    options.loop_steps = options.loop_steps or (100 if on_gpu else 20)
    return options


def main(arguments: Sequence[str]) -> None:
    options = parsed(arguments)
    accelerator = torch.cuda.get_device_name() if options.device == "cuda" else ""
    run = Run("memory", options, "torch", "dlrover", accelerator=accelerator)
    facts = measure_all(options, run.samples)
    steps = f"{min(facts['steps']):.4f} to {max(facts['steps']):.4f} s"
    notes = (
        f"A step without snapshots: {steps}, {facts['samples']} samples of {LENGTH} tokens",
        "Every state that was loaded was equal in the checksum of every tensor to that of the killed process.",
        *([f"{RIVAL} was not measured: {facts['without rival']}"] if facts["without rival"] else []),
    )
    title = f"Snapshots in memory: {facts['size'] / 1e9:.2f} GB of model and AdamW state"
    run.keep(title, body(options, run.samples), None, *notes)

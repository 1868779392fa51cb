"""Simulates 90 days of training on 64, 1,024 and 16,384 GPUs whose nodes fail at random, with ckpt and with others.

A simulation of discrete events: a run trains, saves, fails, starts again, and repeats what was not durable. It has the
measured costs of each library, and, for `save_every="auto"`, the very code that decides in a run. The same seed gives
the same page: nothing is measured here, and no clock is read.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpt.save.cadence import DAY, PUBLISHED, Cadence, Failures, Past, bounded, spelled

DAYS = 90
GPUS = (64, 1_024, 16_384)
PER_NODE = 8
RATES = {"Meta's RSC-1": PUBLISHED, "Llama 3": 0.0038, "ten times RSC-1": 10 * PUBLISHED}
RESTART = 190.0  # seconds: to notice, schedule, start and compile, and to load 15 GB from a cold disk
WRITE_BACK = 30.0  # seconds after which Linux has written what nobody has synced
LOST_MACHINES = 0.5  # share of failures
FAILURES = 2_000  # for each figure, at least: jobs that fail rarely are simulated more often
GRID = [60 * 1.1**n for n in range(-25, 62)]  # seconds: fixed intervals that are tried, 6 s to 5.5 h


@dataclass(frozen=True)
class Library:
    """What a checkpoint of 14.9 GB on each GPU costs training, in seconds; the first of a process may cost more.

    `durable`: from the call until a failure of the process can't take it; `synced`: whether one of the machine can't
    either. A process that fails while it saves continues from the checkpoint before.
    """

    name: str
    save: float
    durable: float
    synced: bool = True
    first: float = 0.0

    def costs(self, is_first: bool) -> float:
        return max(self.save, self.first) if is_first else self.save


CKPT = Library("ckpt", 0.03, 10.2)
LIBRARIES = (
    CKPT,
    Library("torch_checkpointing", 0.3, 10.2, synced=False, first=7.1),
    Library("DCP `async_save`", 11.4, 21.7),
    Library("`torch.save`", 11.9, 11.9, synced=False),
    Library("Accelerate `save_state`", 16.1, 16.1, synced=False),
    Library("DCP `save`", 19.0, 19.0),
)


@dataclass
class Totals:
    """Seconds of one simulated job, or of several."""

    all: float = 0.0
    waiting: float = 0.0
    repeated: float = 0.0
    restarting: float = 0.0
    failures: int = 0

    def add(self, other: Totals) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def by_saving(self) -> float:
        """The share that depends on when a run saves."""
        return (self.waiting + self.repeated) / self.all

    @property
    def lost(self) -> float:
        return (self.waiting + self.repeated + self.restarting) / self.all


Interval = Callable[[], float]  # asked again whenever some saves are done


@dataclass
class Auto:
    """`save_every="auto"` as a run has it: what a process measured is in the history of its next one."""

    library: Library
    failures: Failures
    past: Past = field(default_factory=Past)
    intervals: list[float] = field(default_factory=list)

    def start(self) -> Cadence:
        cadence = Cadence(self.failures, lambda: self.past, tell=lambda interval, why: self.intervals.append(interval))
        cadence.begin()
        return cadence

    def end(self, lived: float, saves: int, is_failure: bool = True) -> None:
        kept = (*self.past.saves, *[(self.library.save, self.library.durable)] * min(saves, 20))[-20:]
        self.past = Past(kept, self.past.seconds + lived, self.past.failures + is_failure)


def live(library: Library, until: float, takes_machine: bool, interval: float | Cadence) -> tuple[Totals, int, float]:
    """A process trains until it fails: what that took, the saves, and the work that the next one need not repeat.

    Saves are taken one by one, or, once the interval stays, twice as many at a time.
    """
    spent, now, work, saved, saves = Totals(), 0.0, 0.0, 0.0, 0
    at_once = 1
    settles = library.durable + (0 if library.synced or not takes_machine else WRITE_BACK)
    while True:
        gap = interval.interval if isinstance(interval, Cadence) else interval
        cost = library.costs(saves == 0)
        fit = math.floor((until - now) / (gap + cost))
        taken = min(fit, at_once if saves else 1)
        if taken < 1:
            break
        now, work, saves = now + taken * (gap + cost), work + taken * gap, saves + taken
        spent.waiting += taken * cost
        late = now - cost + settles > until  # the newest is not durable when it fails
        saved = work - gap if late else work
        if isinstance(interval, Cadence):
            interval.saved(cost, library.durable, now)
            at_once *= 2
        else:
            at_once = fit
    left = until - now
    trained = min(left, gap)
    spent.waiting += left - trained  # in a save that it does not survive
    return spent, saves, work + trained - saved


def run_job(library: Library, nodes: int, rate: float, seed: str, interval: float | Auto) -> Totals:
    """90 days of a job. Failures come at the same moments whatever the library and the interval are."""
    moments, total = random.Random(seed), Totals(all=DAYS * DAY)
    left = total.all
    while left > 0:
        until, takes_machine = moments.expovariate(nodes * rate / DAY), moments.random() < LOST_MACHINES
        is_failure = until < left
        until = min(until, left)
        starting = min(until, RESTART)
        began = interval.start() if isinstance(interval, Auto) else interval
        spent, saves, repeated = live(library, until - starting, takes_machine, began)
        if isinstance(interval, Auto):
            interval.end(until, saves, is_failure)
        total.waiting += spent.waiting
        total.restarting += starting
        if is_failure:
            total.repeated += repeated
            total.failures += 1
        left -= until
    return total


def simulate(
    library: Library, gpus: int, rate: float, seed: int, interval: float | Callable[[], Auto], share: float = 1.0
) -> Totals:
    """As many jobs as it takes until enough has failed."""
    nodes = gpus // PER_NODE
    jobs = max(1, math.ceil(share * FAILURES / (nodes * rate * DAYS)))
    found = Totals()
    for job in range(jobs):
        each = interval() if callable(interval) else interval
        found.add(run_job(library, nodes, rate, f"{seed}/{gpus}/{rate}/{job}", each))
    return found


def search(library: Library, gpus: int, rate: float, seed: int, least: float = 0.0) -> tuple[float, Totals]:
    """The fixed interval that loses least, found by trying. A save takes its time, so none is shorter."""
    tried = [one for one in GRID if one >= max(least, library.durable)]
    loses = {one: simulate(library, gpus, rate, seed, one, 0.25).by_saving for one in tried}
    near = sorted(loses, key=loses.__getitem__)[:6]
    found = {one: simulate(library, gpus, rate, seed, one) for one in {*near, max(least, library.durable)}}
    best = min(found, key=lambda one: found[one].by_saving)
    return best, found[best]


def auto_of(library: Library, gpus: int, rate: float) -> Callable[[], Auto]:
    return lambda: Auto(library, Failures(gpus // PER_NODE, rate))


def settled(library: Library, gpus: int, rate: float) -> float:
    """The interval of `auto` with the true rate."""
    cadence = Cadence(Failures(gpus // PER_NODE, rate), lambda: Past(((library.save, library.durable),)), tell=_ignore)
    cadence.begin()
    return cadence.interval


def _ignore(interval: float, why: str) -> None:
    pass


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * left + "---:|" * (len(head) - left)
    yield from (f"| {' | '.join(row)} |" for row in rows)


def percent(share: float) -> str:
    return f"{100 * share:.3f} %" if share < 0.01 else f"{100 * share:.2f} %"


def libraries_table(rate: float, seed: int) -> Iterator[str]:
    head = ["library", "`save_every`"]
    rows: list[list[str]] = []
    for library in LIBRARIES:
        ways = {
            '`"1h"`': [simulate(library, gpus, rate, seed, 3600.0) for gpus in GPUS],
            '`"10min"`': [simulate(library, gpus, rate, seed, 600.0) for gpus in GPUS],
            "the best interval, by search": [search(library, gpus, rate, seed)[1] for gpus in GPUS],
        }
        if library is CKPT:
            ways['`"auto"`'] = [simulate(library, gpus, rate, seed, auto_of(library, gpus, rate)) for gpus in GPUS]
        for way, found in ways.items():
            rows.append([library.name, way, *(percent(one.by_saving) for one in found)])
    yield from table([*head, *(f"{gpus:,} GPUs" for gpus in GPUS)], rows, 2)


@dataclass(frozen=True)
class Case:
    """A rate and a size, with the best fixed interval and what is lost: by it, by `auto`, by `auto` that must learn the
    rate, and by the best interval without bounds."""

    failures: str
    gpus: int
    library: Library
    best: float
    fixed: Totals
    chosen: float
    told: Totals
    learns: Totals
    free: Totals

    @property
    def more(self) -> float:
        return self.told.by_saving / self.fixed.by_saving - 1


def cases(seed: int) -> list[Case]:
    found = []
    for name, rate in RATES.items():
        for gpus in GPUS:
            for library in (CKPT, Library("a save that costs 2 s", 2.0, 10.2)):
                least = bounded(0.0, library.save, library.durable)
                best, lost = search(library, gpus, rate, seed, least)
                told = simulate(library, gpus, rate, seed, auto_of(library, gpus, rate))
                learns = simulate(library, gpus, rate, seed, auto_of(library, gpus, PUBLISHED))
                free = search(library, gpus, rate, seed)[1]
                chosen = settled(library, gpus, rate)
                found.append(Case(name, gpus, library, best, lost, chosen, told, learns, free))
    return found


def auto_table(found: Sequence[Case]) -> Iterator[str]:
    head = [
        "failures",
        "GPUs",
        "a save costs",
        "best fixed",
        "loses",
        "`auto`",
        "loses",
        "more",
        "unaware",
        "no bounds",
    ]
    rows = [
        [
            case.failures, f"{case.gpus:,}", f"{case.library.save:g} s", spelled(case.best),
            percent(case.fixed.by_saving), spelled(case.chosen), percent(case.told.by_saving),
            f"{100 * case.more:+.1f} %", percent(case.learns.by_saving), percent(case.free.by_saving),
        ]
        for case in found
    ]  # fmt: skip
    yield from table(head, rows)


PAGE = """# Goodput: how much of its time a run loses

This page shows how much of its time a run loses to saves and failures, and how close `save_every="auto"` comes to the
best interval. The figures come from a simulation that uses the measured costs of ckpt and of other libraries.

- command: `python -m benchmarks goodput --seed {seed} --report docs/goodput.md`
- seed: {seed}; the same seed gives the same page
- {days} days on 64, 1,024 and 16,384 GPUs, {per_node} GPUs per node; a job that rarely fails is simulated several
  times, until there are about {failures:,} failures in all

## Libraries

The table shows what share of its time a run loses by waiting for saves, and by repeating training that a failure
undid. The table leaves out restarts, which cost the same with every library: {restarts}. Nodes fail as often as on
Meta's cluster RSC-1: 6.5 times in 1,000 node-days ([arXiv 2410.21680](https://arxiv.org/abs/2410.21680)).

{libraries}

{costs}

These costs were measured on one H200 with 14.9 GB of model and AdamW state, in the same loop for every library: see
[Performance](performance.md), which also has newer figures: ckpt's saves now cost 0.03 to 0.08 s. A save may begin only
when the previous one is durable, so no interval is shorter than the time that a save takes to become durable.

## `save_every="auto"` beside the best fixed interval

The simulation chooses intervals with the same code as a real run (`ckpt/save/cadence.py`), and compares them with the
best of {grid} fixed intervals for the same failures. Llama 3's run had 3.8 failures in 1,000 node-days: 419 unexpected
interruptions in 54 days on 2,048 nodes ([arXiv 2407.21783](https://arxiv.org/abs/2407.21783)). All figures leave
restarts out.

{auto}

- **best fixed**: the best interval within the bounds of `auto`: at least a minute, and at least twice as long as a
  save takes to become durable.
- **more**: how much more `auto` loses than the best fixed interval, as a share of what that interval loses. A negative
  figure is due to chance: the failures are the same, but they fall at different moments between two saves.
- **unaware**: what `auto` loses if you tell it only the published failure rate, so that it must learn the true rate
  from the failures of its run.
- **no bounds**: what the best interval loses if the bounds of `auto` do not apply. The difference from
  **best fixed** is the price of leaving the disk idle for at least half of the time. To reduce this loss, take
  snapshots in memory ([memory](memory.md)).

In the worst of these {cases} cases, `auto` loses {worst} more than the best fixed interval, without restarts.

## Assumptions

- Failures come at random and at a constant rate, and each failure stops the whole job. Half of the failures also take a
  machine down.
- Every GPU holds 14.9 GB and writes at the speed of the measured disk, however large the job is: storage grows with the
  job, and waiting for the slowest rank costs nothing. Both assumptions favour short intervals, to the same degree for
  all libraries.
- A restart takes {restart:g} s: the time to notice the failure, schedule and start the job, compile, and load. In the
  simulation, all libraries load equally fast; in reality, some are a few seconds faster than others.
- If a library doesn't sync its files, losing a machine also destroys the files of the last {write_back:g} seconds. A
  failure in the middle of a save costs only that save. In our tests, some libraries did not resume at all after a
  failure in the middle of a save; in the simulation, they do.
- Background saves slow training down only as much as we measured. The simulation leaves out the time that you need to
  check or repair a checkpoint by hand.
"""


def page(seed: int) -> str:
    found = cases(seed)
    restarts = [simulate(CKPT, gpus, PUBLISHED, seed, 3600.0, 0.25) for gpus in GPUS]
    costs = [
        [one.name, f"{one.save:g} s", f"{one.first:g} s" if one.first else "", "yes" if one.synced else "no"]
        for one in LIBRARIES
    ]
    return PAGE.format(
        seed=seed, days=DAYS, per_node=PER_NODE, failures=FAILURES, restart=RESTART, write_back=WRITE_BACK,
        grid=len(GRID), cases=len(found), worst=f"{100 * max(case.more for case in found):.1f} %",
        restarts=", ".join(
            f"{percent(one.restarting / one.all)} on {gpus:,} GPUs" for one, gpus in zip(restarts, GPUS, strict=True)
        ),
        libraries="\n".join(libraries_table(PUBLISHED, seed)),
        costs="\n".join(table(["library", "a save costs training", "the first save of a process", "synced"], costs)),
        auto="\n".join(auto_table(found)),
    )  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks goodput", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="the file to write; otherwise the page goes to standard output")
    options = parser.parse_args(arguments)
    text = page(options.seed)
    if options.report is None:
        print(text, end="")
    else:
        options.report.write_text(text)

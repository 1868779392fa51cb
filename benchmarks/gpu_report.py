"""The figures of the benchmark on a GPU: tables, targets, samples, plots."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from benchmarks.shared import checkpointers, measure
from benchmarks.shared.checkpointers import Checkpointer
from benchmarks.shared.plot import Line, bars, steps
from benchmarks.shared.raw import RawReader, RawWriter
from benchmarks.shared.report import Run, Target, divided, in_seconds, ratio, table, table_of_targets, yes_or_no
from benchmarks.shared.results import Series
from benchmarks.shared.training import HICCUP, LEAD, Training

OURS = checkpointers.OursInBackground
AT_ONCE, PREPARED, LATER = "first, at once", "first, prepared", "later"
AFTER = "after a save"  # a load from a page cache that nobody has touched since
LOADS = (AFTER, *measure.CACHES)
LARGE = 30e9  # bytes of a state: other targets apply, and fewer


@dataclass
class Save:
    """A save during training, in seconds."""

    kind: type[Checkpointer]
    which: str
    returned: float | None = None
    lost: float | None = None
    done: float | None = None
    read_back: float | None = None  # after the call: everything is in the page cache
    steps: list[float] = field(default_factory=list)
    lead: int = 0  # the number of the step that begins with the save
    error: str = ""

    @property
    def slower(self) -> float | None:
        """By how much training was slower until the save was done, if that is where all of it was lost, in percent."""
        part = divided(self.lost, self.done)
        return None if part is None else 100 * part

    @property
    def written_in(self) -> int | None:
        """The step, counted from the save, in which it was complete."""
        ends = accumulate(self.steps[self.lead :])
        return None if self.done is None else next((step for step, end in enumerate(ends) if end >= self.done), None)


@dataclass
class Found:
    size: int  # bytes of the state
    saves: list[Save] = field(default_factory=list)
    preparing: dict[type[Checkpointer], float] = field(default_factory=dict)  # lost while buffers are made ready
    loads: dict[tuple[str, str], list[float]] = field(default_factory=dict)  # by name and state of the page cache
    resident: dict[str, list[float]] = field(default_factory=dict)  # by name: in the page cache at a load after a save
    raw_writes: list[float] = field(default_factory=list)

    def load(self, name: str, cache: str) -> float | None:
        return min(self.loads.get((name, cache), []), default=None)

    @property
    def raw_write(self) -> float | None:
        return statistics.median(self.raw_writes) if self.raw_writes else None

    def ours(self, which: str | None, what: str) -> list[float] | None:
        """None if one of our saves failed, or there was none."""
        values = [getattr(save, what) for save in self.saves if save.kind is OURS and which in (None, save.which)]
        return None if not values or None in values else values

    def worst(self, which: str | None, what: str) -> float | None:
        """Of our saves: a target holds for each of them."""
        values = self.ours(which, what)
        return None if values is None else max(values)


def row(save: Save, found: Found) -> list[str]:
    ours = found.worst(save.which, "lost")
    times = [in_seconds(save.returned), in_seconds(save.lost), ratio(save.lost, ours)]
    times += [in_seconds(save.done), ratio(save.done, found.raw_write), in_seconds(save.read_back)]
    promises = [yes_or_no(save.kind.durable), yes_or_no(save.kind.hashed)]
    return [save.kind.name, save.which, *times, *promises, save.error]


def table_of_saves(found: Found, missing: Mapping[type[Checkpointer], str]) -> str:
    head = ["", "save", "call returns after", "training lost", "to ours", "written after", "to a raw write"]
    head += ["read back after", "fsync", "hashes", ""]
    absent = [[kind.name, *[""] * (len(head) - 2), why] for kind, why in missing.items()]
    return table(head, [row(save, found) for save in found.saves] + absent)


def table_of_loads(found: Found) -> str:
    names = dict.fromkeys(name for name, _ in found.loads)
    head = ["", "in the page cache after a save", *(cell for cache in LOADS for cell in (f"load, {cache}", "to raw"))]
    return table(head, [load_row(found, name) for name in names])


def load_row(found: Found, name: str) -> list[str]:
    shares = found.resident.get(name, [])
    took = {cache: found.load(name, cache) for cache in LOADS}
    raw = {cache: found.load(RawReader.name, "warm" if cache == AFTER else cache) for cache in LOADS}
    cells = [cell for cache in LOADS for cell in (in_seconds(took[cache]), ratio(took[cache], raw[cache]))]
    return [name, f"{100 * min(shares):.0f} %" if shares else "", *cells]


def targets(found: Found) -> list[Target]:
    written = found.ours(LATER, "done")
    durable = divided(statistics.median(written) if written else None, found.raw_write)
    slower = Target("training slower until a later save is durable", found.worst(LATER, "slower"), 0.5, " %")
    to_raw = Target("later saves durable after, to a raw direct write of as many bytes (medians)", durable, 1.1)
    if found.size >= LARGE:
        lost = Target("training lost, later saves of a large state", found.worst(LATER, "lost"), 0.1, " s")
        return [lost, slower, to_raw]
    after = max(found.loads.get((OURS.name, AFTER), []), default=None)
    cold, raw = found.load(OURS.name, "cold"), found.load(RawReader.name, "cold")
    return [
        Target("training lost, later saves", found.worst(LATER, "lost"), 0.03, " s"),
        Target("training lost, first save at once", found.worst(AT_ONCE, "lost"), 0.1, " s"),
        Target("save_state returns after", found.worst(None, "returned"), 0.01, " s"),
        slower,
        to_raw,
        Target("load right after a save on the same machine, verified, the slowest", after, 1.0, " s"),
        Target("load, verified, page cache cold, to a raw parallel read", divided(cold, raw), 1.2),
    ]


def body(
    options: argparse.Namespace, found: Found, training: Training, missing: Mapping[type[Checkpointer], str]
) -> str:
    stood = " to ".join(in_seconds(choose(training.remembering, default=0.0)) for choose in (min, max))
    return f"""{table_of_saves(found, missing)}

{table_of_loads(found)}

{table_of_targets(targets(found))}

Lost: the time of the steps from {LEAD} before a save on, less that of as many without, measured just before and just
after (their mean without steps above {HICCUP:g} medians; beside a save every step counts). At least {options.steps}
steps, and up to twice as many until the save is written and read back; {options.steps // 4} where the save blocks.
{LOSS[options.read_loss]} Not counted: what the benchmark records just before the call, to compare with
({RECORDED[options.compare]}). The clock stood still for it, {stood}, with the device idle at either end; runs
without a save wait for the device at the same place. "{AT_ONCE}": what saves was built just before.\
{prepared(options, found)} Ratios are to the worst of ours.

Raw write: {RawWriter.threads} threads write a file of as many bytes past the page cache, into reserved space, with one
fsync, after every save of ours while training rests; the median is {in_seconds(found.raw_write) or "not known"}.

Load: the best; constructing what loads is part of it. After a save: the page cache as the save left it. ckpt had up to
{options.warm_seconds:g} s after the commit to read its files back; the least share of bytes that were there is given.
Warm: every file was read once just before; cold: no file is in the page cache. Raw: {RawReader.threads} threads read
the same files into pinned rings of {RawReader.slots} times {measure.PIECE >> 20} MB and copy to the device; of cold
reads the better of through the page cache and past it.
"""


LOSS = {
    "every": "The loop reads its loss with `.item()` in every step.",
    "never": "The loop never reads its loss: times of steps are the device's.",
}
RECORDED = {"copy": "a copy of the state on the device", "checksums": "checksums of all tensors"}


def prepared(options: argparse.Namespace, found: Found) -> str:
    if not options.pause:
        return ""
    lost = ", ".join(f"{kind.name} {in_seconds(lost)}" for kind, lost in found.preparing.items())
    return f' "{PREPARED}": after {options.pause:g} s of training, which itself lost: {lost or "not measured"}.'


def collect(found: Found, run: Run) -> None:
    """Every sample and every step, for the JSON."""
    for number, save in enumerate(found.saves):
        times = {"call returns": save.returned, "training lost": save.lost, "written": save.done}
        for metric, took in {**times, "read back": save.read_back}.items():
            run.samples.add(save.kind.name, f"{metric}, {save.which}", took)
        name = f"steps around save {number}, {save.which}"
        run.series.append(Series(save.kind.name, name, -save.lead, tuple(save.steps)))
    for (name, cache), loads in found.loads.items():
        for took in loads:
            run.samples.add(name, f"load, {cache}", took)
    for took in found.raw_writes:
        run.samples.add(RawWriter.name, "written", took)


def plot(found: Found, title: str) -> str:
    lost = {which: bars_of(found, which) for which in (AT_ONCE, PREPARED, LATER)}
    groups = {f"training lost, {which}": values for which, values in lost.items() if values}
    names = dict.fromkeys(name for name, _ in found.loads)
    for cache in LOADS:
        took = {name: found.load(name, cache) for name in names}
        heading = f"load right {AFTER}" if cache == AFTER else f"load, page cache {cache}"
        groups[heading] = {name: best for name, best in took.items() if best is not None}
    return bars(title, groups)


def bars_of(found: Found, which: str) -> dict[str, float]:
    """The worst of each checkpointer."""
    known = [(save.kind.name, save.lost) for save in found.saves if save.which == which and save.lost is not None]
    return dict(sorted(known, key=lambda pair: pair[1]))


def plot_of_steps(found: Found, title: str, usual: float) -> str | None:
    """One line for each checkpointer; none if no save succeeded."""
    lines = [
        Line(f"{save.kind.name} ({save.which})", -save.lead, save.steps, save.written_in)
        for save in typical_saves(found.saves)
    ]
    return steps(title, lines, usual) if lines else None


def typical_saves(saves: Sequence[Save]) -> Iterator[Save]:
    """For each checkpointer the later save, or else the first, that cost most."""
    complete = [save for save in saves if save.lost is not None]
    for kind in dict.fromkeys(save.kind for save in complete):
        own = [save for save in complete if save.kind is kind]
        later = [save for save in own if save.which == LATER]
        yield max(later or own, key=lambda save: save.lost or 0.0)

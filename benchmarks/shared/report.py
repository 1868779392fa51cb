"""Reports: the header with machine, versions and command, tables, targets; Markdown, JSON and a plot of each run."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared import machine
from benchmarks.shared.results import Results, Samples, Series, Value

RESULTS = Path(__file__).resolve().parent.parent / "results"


def parser(benchmark: str, description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    found = argparse.ArgumentParser(
        f"python -m benchmarks {benchmark}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument("--root", type=Path, default=Path(), help="a folder on the disk to measure")
    found.add_argument("--results", type=Path, default=RESULTS, help="the folder of reports (default: %(default)s)")
    return found


def refuse_unknown_libraries(found: argparse.ArgumentParser, chosen: str, known: Collection[str]) -> None:
    """End with an error that names every library which there is not."""
    unknown = set(chosen.split(",")) - set(known)
    if unknown:
        found.error(f"--libraries: there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")


def settings_of(options: argparse.Namespace) -> dict[str, Value]:
    """What decides the figures. Paths are of one machine only, and limits that do not limit say nothing."""
    return {
        name.replace("_", "-"): value
        for name, value in vars(options).items()
        if value is not None and not isinstance(value, Path) and value != math.inf
    }


class Run:
    """One run of a benchmark. Create it before anything is measured: it reads how busy the machine is."""

    def __init__(
        self,
        benchmark: str,
        options: argparse.Namespace,
        *packages: str,
        accelerator: str = "",
        operands: str = "",
        file: str = "",
    ) -> None:
        self.benchmark, self.options = benchmark, options
        self.settings = settings_of(options)
        given = [operands, *(f"--{name} {value}" for name, value in self.settings.items())]
        self.command = " ".join(["python -m benchmarks", benchmark, *filter(None, given)])
        self.machine = {**({"accelerator": accelerator} if accelerator else {}), **machine.describe(options.root)}
        hardware = re.sub(r"[^a-z0-9]+", "-", str(accelerator or self.machine["processor"]).lower()).strip("-")
        self.file = f"{file or benchmark}_{hardware}_{machine.today()}"
        self.versions = machine.versions(*packages)
        self.load_at_start = os.getloadavg()[0]
        self.samples = Samples()
        self.series: list[Series] = []

    def results(self) -> Results:
        load_average = (self.load_at_start, os.getloadavg()[0])
        return Results(
            benchmark=self.benchmark,
            command=self.command,
            date=machine.today(),
            machine=self.machine,
            versions=self.versions,
            settings=self.settings,
            load_average=load_average,
            rows=self.samples.rows(),
            series=tuple(self.series),
        )

    def keep(
        self, title: str, body: str, plot: str | None = None, *notes: str, plots: Mapping[str, str] | None = None
    ) -> Path:
        """Print the report, and keep it with its JSON and its plots in the folder of results. Returns its path.

        Files of the further `plots` have the keys at the end of their names.
        """
        results = self.results()
        text = f"# {title}\n\n{header(results, *notes)}\n\n{body.strip()}\n"
        print(f"\n{text}")
        path = Path(self.options.results, f"{self.file}.md")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{self.file}.json").write_text(results.to_json())
        first = {} if plot is None else {self.file: plot}
        for file, drawn in {**first, **{f"{self.file}_{key}": drawn for key, drawn in (plots or {}).items()}}.items():
            path.with_name(f"{file}.svg").write_text(drawn)
            text += f"\n![plot]({file}.svg)\n"
        path.write_text(text)
        print(f"kept in {os.path.relpath(path)}, with every sample in {self.file}.json")
        return path


def header(results: Results, *notes: str) -> str:
    """Without this a figure is worth nothing."""
    hardware = ", ".join(_spelled(name, value) for name, value in results.machine.items())
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    start, end = results.load_average
    lines = [
        f"Command: `{results.command}`",
        f"Date: {results.date}",
        f"Machine: {hardware}",
        f"Versions: {versions}",
        f"Load of the machine: {start:.1f} at the beginning, {end:.1f} at the end, this run included",
        *notes,
    ]
    return "\n".join(f"- {line}" for line in lines)


def _spelled(name: str, value: Value) -> str:
    return f"{value} cores" if name == "cores" else f"{value} GB memory" if name == "memory, GB" else str(value)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def in_seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f} s" if abs(value) < 0.1 else f"{value:.2f} s"


def in_milliseconds(value: float | None) -> str:
    return "" if value is None else f"{1000 * value:.1f} ms"


def in_megabytes(count: float | None) -> str:
    return "unknown" if count is None else f"{count / 1e6:.0f} MB"


def yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def divided(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else value / reference


def ratio(value: float | None, reference: float | None) -> str:
    """Empty where noise made one of them negative."""
    if value is None or reference is None or value < 0 or reference <= 0:
        return ""
    return f"{value / reference:.2f}"


@dataclass(frozen=True)
class Target:
    """A limit that a figure is to keep: at most `limit`. What could not be measured is not reached."""

    text: str
    measured: float | None
    limit: float
    unit: str = ""

    def row(self) -> list[str]:
        limit = f"at most {self.limit:g}{self.unit}"
        if self.measured is None:
            return [self.text, limit, "not measured", ""]
        return [self.text, limit, f"{self.measured:.3g}{self.unit}", "yes" if self.measured <= self.limit else "NO"]


def table_of_targets(targets: Sequence[Target]) -> str:
    return table(["target", "limit", "measured", "reached"], [target.row() for target in targets])

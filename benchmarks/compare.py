"""Compares two runs of a benchmark, row by row, by the JSON that each of them left.

Every metric is of the kind where less is better. A ratio is new to old; a row whose ratio exceeds 1 by more than the
threshold is marked, and the exit status is then 1. Only runs on one machine can be compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared.report import table
from benchmarks.shared.results import Results, Row

STATISTICS = ("best", "median")
THRESHOLD = 3.0  # percent


@dataclass(frozen=True)
class Change:
    """The same row of two runs."""

    old: Row
    new: Row

    def ratio(self, statistic: str) -> float | None:
        """New to old; none where noise made a difference of two measurements negative."""
        old: float = getattr(self.old, statistic)
        new: float = getattr(self.new, statistic)
        return new / old if old > 0 and new >= 0 else None

    def exceeds(self, threshold: float, statistic: str) -> bool:
        """Whether the new samples are worse by more than `threshold` percent."""
        ratio = self.ratio(statistic)
        return ratio is not None and ratio > 1 + threshold / 100


def changes(old: Sequence[Row], new: Sequence[Row]) -> tuple[list[Change], list[str]]:
    """The rows that both runs have, and a line for each row that only one of them has."""
    before = {(row.subject, row.metric): row for row in old}
    after = {(row.subject, row.metric): row for row in new}
    both = [Change(before[key], row) for key, row in after.items() if key in before]
    lost = [f"only in the old run: {', '.join(key)}" for key in before if key not in after]
    added = [f"only in the new run: {', '.join(key)}" for key in after if key not in before]
    return both, lost + added


def differences(old: Results, new: Results) -> list[str]:
    """Why the two runs may not be comparable at all."""
    kinds = {"benchmark": (old.benchmark, new.benchmark), "machine": (old.machine, new.machine)}
    kinds |= {"settings": (old.settings, new.settings), "versions": (_rivals(old), _rivals(new))}
    return [f"the runs differ in {kind}: {a}, then {b}" for kind, (a, b) in kinds.items() if a != b]


def _rivals(results: Results) -> dict[str, str]:
    return {name: version for name, version in results.versions.items() if name not in ("ckpt", "commit")}


def table_of_changes(found: Sequence[Change], threshold: float, statistic: str) -> str:
    head = ["", "metric", "samples", "old, best", "new, best", "ratio of the best", "ratio of the medians", ""]
    return table(head, [_cells(change, threshold, statistic) for change in found])


def _cells(change: Change, threshold: float, statistic: str) -> list[str]:
    old, new = change.old, change.new
    count = f"{len(old.samples)}, {len(new.samples)}"
    figures = [spelled(old.best, old.unit), spelled(new.best, new.unit)]
    ratios = ["" if ratio is None else f"{ratio:.3f}" for ratio in map(change.ratio, STATISTICS)]
    mark = f"OVER {threshold:g} %" if change.exceeds(threshold, statistic) else ""
    return [new.subject, new.metric, count, *figures, *ratios, mark]


def spelled(value: float, unit: str) -> str:
    return f"{value / 1e6:.1f} MB" if unit == "B" else f"{value:.4g} {unit}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of everything that compares."""
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="percent (default: %(default)g)")
    parser.add_argument("--statistic", choices=STATISTICS, default="best", help="what the threshold applies to")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks compare", description=__doc__)
    parser.add_argument("old", type=Path, metavar="OLD.json")
    parser.add_argument("new", type=Path, metavar="NEW.json")
    parser.add_argument("--subject", default="", help="only rows whose subject contains this text, such as ckpt")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    old, new = Results.read(options.old), Results.read(options.new)
    rows = ([row for row in results.rows if options.subject in row.subject] for results in (old, new))
    found, notes = changes(*rows)
    print(table_of_changes(found, options.threshold, options.statistic))
    for note in differences(old, new) + notes:
        print(note)
    worse = [change for change in found if change.exceeds(options.threshold, options.statistic)]
    print(f"{len(worse)} of {len(found)} rows are worse by more than {options.threshold:g} %")
    return 1 if worse else 0

"""The figures of a run: every sample, with machine, versions and command; as JSON they can be compared."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
Value = str | int | float


@dataclass(frozen=True)
class Row:
    """All samples of one metric (what was measured) of one subject (who was measured). Less is better."""

    subject: str
    metric: str
    samples: tuple[float, ...]
    unit: str = "s"

    @property
    def best(self) -> float:
        return min(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


@dataclass(frozen=True)
class Series:
    """Values in their order, such as the time of every step around a save. The first has the number `start`."""

    subject: str
    name: str
    start: int
    values: tuple[float, ...]
    unit: str = "s"


@dataclass(frozen=True)
class Results:
    """What one run of a benchmark measured, and everything without which a figure is worth nothing."""

    benchmark: str
    command: str
    date: str
    machine: Mapping[str, Value]
    versions: Mapping[str, str]
    settings: Mapping[str, Value]
    load_average: tuple[float, float]  # at the beginning and at the end, this run included
    rows: tuple[Row, ...]
    series: tuple[Series, ...] = ()  # to be drawn; not compared

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "these results") -> Results:
        fields: dict[str, Any] = json.loads(text)
        found = fields.pop("format", None)
        if found != FORMAT:
            raise ValueError(f"{where}: results of format {found}, but this version reads format {FORMAT} only")
        rows = tuple(Row(**{**row, "samples": tuple(row["samples"])}) for row in fields.pop("rows"))
        series = tuple(Series(**{**line, "values": tuple(line["values"])}) for line in fields.pop("series", ()))
        return cls(**{**fields, "load_average": tuple(fields["load_average"])}, rows=rows, series=series)

    @classmethod
    def read(cls, path: Path) -> Results:
        return cls.from_json(path.read_text(), str(path))


@dataclass
class Samples:
    """Collects samples while a benchmark runs."""

    _samples: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    _units: dict[str, str] = field(default_factory=dict)

    def add(self, subject: str, metric: str, sample: float | None, unit: str = "s") -> None:
        """Add a sample, unless there is none: not everything can be measured everywhere."""
        if sample is not None:
            self._samples.setdefault((subject, metric), []).append(sample)
            self._units[metric] = unit

    def all(self, subject: str, metric: str) -> Sequence[float]:
        return self._samples.get((subject, metric), [])

    def best(self, subject: str, metric: str) -> float | None:
        return min(self.all(subject, metric), default=None)

    def worst(self, subject: str, metric: str) -> float | None:
        return max(self.all(subject, metric), default=None)

    def median(self, subject: str, metric: str) -> float | None:
        found = self.all(subject, metric)
        return statistics.median(found) if found else None

    def rows(self) -> tuple[Row, ...]:
        return tuple(
            Row(subject, metric, tuple(samples), self._units[metric])
            for (subject, metric), samples in self._samples.items()
        )

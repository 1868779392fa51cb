"""A Markdown page about a run: its checkpoints, its metrics by step, and the time that saves took.

Imports no torch, for the command line.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from ckpt.errors import MissingError
from ckpt.export.card import curves
from ckpt.formats.native.manifest import Manifest
from ckpt.memory.statistics import Statistics, saving_of
from ckpt.root import catalog
from ckpt.root.catalog import Checkpoint
from ckpt.root.history import History, PastSave
from ckpt.root.summary import Summary
from ckpt.root.verify import size_problems, without_other_hosts
from ckpt.shown import markdown
from ckpt.storage import Storage, open_storage
from ckpt.util.console import format_duration, format_number, format_size
from ckpt.util.option_values import settings

_LEVELS = "▁▂▃▄▅▆▇█"
_MAX_POINTS = 60  # of a curve
_METRICS = ("metric", "by step", "first", "last", "lowest", "highest")
_CHECKPOINTS = ("name", "step", "saved", "size", "metrics", "training waited", "durable after", "intact")


def report(root: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> str:
    """The page, in Markdown. Reads only manifests and the sizes of files."""
    storage = open_storage(root, **settings(options))
    found = catalog.scan(storage)
    manifests = [checkpoint.manifest for checkpoint in reversed(found) if checkpoint.manifest is not None]
    if not manifests:
        raise MissingError(f"there are no checkpoints in {storage.url}.")
    removed = History.of(storage).without(manifests)
    rows = [*(_row(storage, checkpoint) for checkpoint in found), *map(_removed_row, reversed(removed))]
    sections = (
        ("", _table(("", ""), _summary(manifests, removed))),
        ("## Metrics", _table(_METRICS, _metrics([*manifests, *(save.summary for save in removed)]))),
        ("## Checkpoints", _table(_CHECKPOINTS, rows)),
        ("## Crashes", _crashes(manifests)),
        ("## Went back", _went_back(manifests)),
    )
    pages = [
        f"# {markdown(storage.url)}",
        *(text for title, lines in sections if lines for text in (title, "\n".join(lines))),
    ]
    return "\n\n".join(filter(None, pages)) + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(map(markdown, row))} |" for row in rows]
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *lines] if lines else []


def _summary(oldest_first: Sequence[Manifest], removed: Sequence[PastSave]) -> Iterator[tuple[str, str]]:
    all_saves = sorted([*map(PastSave.of, oldest_first), *removed], key=lambda save: save.summary.created)
    first, last = all_saves[0].summary, oldest_first[-1]
    span = (datetime.fromisoformat(last.created) - datetime.fromisoformat(first.created)).total_seconds()
    waited = [save.seconds.get("blocked", 0.0) for save in all_saves]
    durable = [save.seconds["total"] for save in all_saves if "total" in save.seconds] or [0.0]
    yield "runs", ", ".join(dict.fromkeys(save.summary.run for save in all_saves))
    gone = f"; {len(removed)} more were removed" if removed else ""
    yield "checkpoints", f"{len(oldest_first)}, {format_size(sum(manifest.size for manifest in oldest_first))}{gone}"
    yield "from", f"step {first.step:,}, {first.created}"
    yield "to", f"step {last.step:,}, {last.created}, {format_duration(span)} later"
    yield "training waited", f"{sum(waited):.2f} s for these, at most {max(waited):.2f} s for one"
    yield "durable after", f"{sum(durable) / len(durable):.2f} s on average, at most {max(durable):.2f} s"
    yield from _memory(oldest_first)
    ranks = f"{last.world_size} ranks" if last.world_size > 1 else "one process"
    yield "saved by", ", ".join(filter(None, [ranks, f"{last.layout} layout", last.hardware]))
    yield "versions", ", ".join(f"{name} {version}" for name, version in last.versions.items())


def _memory(oldest_first: Sequence[Manifest]) -> Iterator[tuple[str, str]]:
    """What snapshots in memory cost before these checkpoints; nothing if there were none."""
    each = [manifest.memory for manifest in oldest_first if manifest.memory]
    taken, skipped, waited = (sum(facts.get(key, 0) for facts in each) for key in ("snapshots", "left_out", "waited"))
    if taken or skipped:
        yield "memory", str(Statistics(int(taken), int(skipped), waited)).removeprefix("memory: ")


def _crashes(oldest_first: Sequence[Manifest]) -> list[str]:
    """Crashes that a resume from memory has cured."""
    return [f"- {markdown(said)}" for manifest in oldest_first if (said := saving_of(manifest.memory))]


def _metrics(saved: Sequence[Manifest | Summary]) -> Iterator[tuple[str, ...]]:
    for name, points in curves(saved).items():
        values = [value for _, value in points]
        finite = [value for value in values if math.isfinite(value)] or [math.nan]
        ends = (format_number(value) for value in (values[0], values[-1], min(finite), max(finite)))
        yield (name, _sparkline(values), *ends)


def _sparkline(values: Sequence[float]) -> str:
    """A curve of block characters. Values that are not finite are gaps."""
    step = max(1, -(-len(values) // _MAX_POINTS))
    some = [*values[::step], *(values[-1:] if (len(values) - 1) % step else ())]
    finite = [value for value in some if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(
        _LEVELS[round((value - low) / span * (len(_LEVELS) - 1)) if span else 0] if math.isfinite(value) else " "
        for value in some
    )


def _row(storage: Storage, checkpoint: Checkpoint) -> tuple[str, ...]:
    manifest = checkpoint.manifest
    if manifest is None:
        return (checkpoint.name, *("-",) * 6, f"no: {checkpoint.problem}")
    wrong = size_problems(storage, without_other_hosts(storage, manifest))
    return (*_fields(PastSave.of(manifest)), f"no: {'; '.join(wrong)}" if wrong else "yes")


def _removed_row(save: PastSave) -> tuple[str, ...]:
    return (*_fields(save), "removed")


def _fields(save: PastSave) -> tuple[str, ...]:
    summary, waited, durable = save.summary, save.seconds.get("blocked"), save.seconds.get("total")
    return (
        summary.name,
        f"{summary.step:,}",
        summary.created,
        format_size(summary.size),
        ", ".join(f"{name} {format_number(value)}" for name, value in summary.metrics.items()) or "-",
        *("-" if seconds is None else f"{seconds:.2f} s" for seconds in (waited, durable)),
    )


def _went_back(oldest_first: Sequence[Manifest]) -> list[str]:
    """Checkpoints that were saved after one of a later step: the steps between were trained twice."""
    return [f"- {markdown(b.name)} came after {markdown(a.name)}" for a, b in pairwise(oldest_first) if b.step < a.step]

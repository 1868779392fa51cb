"""Retention: which checkpoints are kept, and which may be removed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from ckpt.errors import MetricError
from ckpt.formats.native.manifest import Manifest
from ckpt.root.catalog import Summary
from ckpt.util.option_values import Must, Options, Steps, is_count, is_kind, one_of, said


@dataclass(frozen=True, kw_only=True)
class Keep(Options):
    """Choose which checkpoints to keep. ckpt keeps a checkpoint if any rule keeps it, and always keeps the newest.

        Keep(last=3)
        Keep(last=2, best=1, metric="accuracy", mode="max", every=10_000)

    If you set `best` and no checkpoint has the metric, ckpt removes nothing and warns once: a mistyped name must not
    cost you the best checkpoints.

    Args:
        last: Keep this many of the newest.
        best: Keep this many of the best by the metric.
        metric: A name that you pass to `step(metrics=...)` or `save_state(metrics=...)`.
        mode: "min" if the lowest values are the best, "max" if the highest are.
        every: Keep each checkpoint whose step is a multiple of this number.
    """

    last: Annotated[int, Must(is_count, "1 or more: the newest checkpoint is never removed")] = 1
    best: Annotated[int, Must(partial(is_count, least=0), "0 or more")] = 0
    metric: Annotated[str, Must(is_kind(str), "the name of a metric")] | None = None
    mode: Annotated[str, one_of("min", "max")] = "min"
    every: Steps | None = None

    example = "last: 3"

    def contradictions(self, wrong: Collection[str]) -> list[str]:
        if "best" in wrong or "metric" in wrong:
            return []
        if self.best and not self.metric:
            return [f'best={self.best} needs metric="...", the name under which step(metrics=...) gives it']
        return [f"metric={said(self.metric)} needs best=1 or more"] if self.metric and not self.best else []

    def check(self, metrics: Mapping[str, float], where: str) -> None:
        """Refuse a metric that is NaN before anything is written: no checkpoint can be ranked by it."""
        if self.metric is not None and math.isnan(metrics.get(self.metric, 0.0)):
            raise MetricError(
                f"nothing was saved, because the metric {self.metric!r} is NaN at {where}, and Keep(best={self.best}) "
                "ranks checkpoints by it. Earlier checkpoints are kept. Find out why the metric is NaN. To save "
                "anyway, leave the metric out."
            )

    def removable(self, newest_first: Sequence[Manifest | Summary], damaged: Collection[str] = ()) -> list[str]:
        """The names of the checkpoints that may be removed.

        Damaged ones do not count as kept. They are removable when they are older than all that `last` keeps.
        """
        intact = [manifest for manifest in newest_first if manifest.name not in damaged]
        if self.cannot_rank(intact):
            return []
        last = intact[: self.last]
        kept = {manifest.name for manifest in [*last, *self.best_of(intact), *self._milestones(intact)]}
        oldest = last[-1].sequence if last else 0
        removable = (manifest for manifest in newest_first if manifest.sequence < oldest)
        return [manifest.name for manifest in removable if manifest.name not in kept]

    def cannot_rank(self, intact: Sequence[Manifest | Summary]) -> str:
        """Why the best ones are not known: no checkpoint has the metric. Empty if they are known, or not asked for."""
        if not self.best or not intact or self._ranked(intact):
            return ""
        names = (name for manifest in intact for name in manifest.metrics if name != self.metric)
        known = ", ".join(dict.fromkeys(names))
        return f"no checkpoint has a metric {self.metric!r}; there are: {known or 'none'}"

    def _ranked(self, intact: Sequence[Manifest | Summary]) -> list[Manifest | Summary]:
        if not self.metric:
            return []
        return [manifest for manifest in intact if not math.isnan(manifest.metrics.get(self.metric, math.nan))]

    def best_of(self, intact: Sequence[Manifest | Summary]) -> list[Manifest | Summary]:
        """The `best` checkpoints by the metric, best first. Of equal ones, the first in `intact` is preferred."""
        sign = 1 if self.mode == "min" else -1
        name = self.metric or ""
        return sorted(self._ranked(intact), key=lambda manifest: sign * manifest.metrics[name])[: self.best]

    def _milestones(self, intact: Sequence[Manifest | Summary]) -> list[Manifest | Summary]:
        return [manifest for manifest in intact if self.every and manifest.step % self.every == 0]

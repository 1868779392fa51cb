"""Retention: which checkpoints are kept, and which may be removed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckpt.errors import ConfigError, MetricError
from ckpt.formats.native.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Keep the `last` newest checkpoints, the `best` by a metric, and each whose step `every` divides.

    A checkpoint is kept if any of the three keeps it; the newest is always kept. While `best` is set and no checkpoint
    has the metric, nothing is removed, and a warning is logged once: a mistyped name must not cost the best ones.

        Keep(last=3)
        Keep(last=2, best=1, metric="accuracy", mode="max", every=10_000)
    """

    last: int = 1
    best: int = 0
    metric: str | None = None
    mode: str = "min"
    every: int | None = None

    def __post_init__(self) -> None:
        wrong = []
        if not isinstance(self.last, int) or self.last < 1:
            wrong.append(f"last={self.last!r} must be 1 or more: the newest checkpoint is never removed")
        if not isinstance(self.best, int) or self.best < 0:
            wrong.append(f"best={self.best!r} must be 0 or more")
        if self.best and not self.metric:
            wrong.append(f'best={self.best} needs metric="...", the name under which step(metrics=...) gives it')
        if self.metric and not self.best:
            wrong.append(f"metric={self.metric!r} needs best=1 or more")
        if self.mode not in ("min", "max"):
            wrong.append(f'mode={self.mode!r} must be "min" or "max"')
        if self.every is not None and (not isinstance(self.every, int) or self.every < 1):
            wrong.append(f"every={self.every!r} must be a number of steps")
        if wrong:
            raise ConfigError("Keep: " + "; ".join(wrong) + ".")

    def check(self, metrics: Mapping[str, float], where: str) -> None:
        """Refuse a metric that is NaN before anything is written: no checkpoint can be ranked by it."""
        if self.metric is not None and math.isnan(metrics.get(self.metric, 0.0)):
            raise MetricError(
                f"metric {self.metric!r} is NaN at {where}, and Keep(best={self.best}) ranks by it. Nothing was saved, "
                "and earlier checkpoints are kept: look at the run from there. To save all the same, leave it out."
            )

    def removable(self, newest_first: Sequence[Manifest], damaged: Collection[str] = ()) -> list[str]:
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

    def cannot_rank(self, intact: Sequence[Manifest]) -> str:
        """Why the best ones are not known: no checkpoint has the metric. Empty if they are known, or not asked for."""
        if not self.best or not intact or self._ranked(intact):
            return ""
        names = (name for manifest in intact for name in manifest.metrics if name != self.metric)
        known = ", ".join(dict.fromkeys(names))
        return f"no checkpoint has a metric {self.metric!r}; there are: {known or 'none'}"

    def _ranked(self, intact: Sequence[Manifest]) -> list[Manifest]:
        if not self.metric:
            return []
        return [manifest for manifest in intact if not math.isnan(manifest.metrics.get(self.metric, math.nan))]

    def best_of(self, intact: Sequence[Manifest]) -> list[Manifest]:
        """The `best` checkpoints by the metric, best first. Of equal ones, the first in `intact` is preferred."""
        sign = 1 if self.mode == "min" else -1
        name = self.metric or ""
        return sorted(self._ranked(intact), key=lambda manifest: sign * manifest.metrics[name])[: self.best]

    def _milestones(self, intact: Sequence[Manifest]) -> list[Manifest]:
        return [manifest for manifest in intact if self.every and manifest.step % self.every == 0]

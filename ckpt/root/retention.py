"""Which checkpoints stay."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckpt.errors import ConfigError, MetricError
from ckpt.formats.native.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Keep the `last` newest checkpoints, the `best` by a metric, and each whose step `every` divides.

    Whatever any of the three keeps, stays. The newest one always stays. As long as `best` is asked for and no
    checkpoint has the metric, nothing is removed: a mistyped name must not cost the best ones. It is warned of once.

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
        """Refuse a metric that no checkpoint can be ranked by, before anything is written."""
        if self.metric is not None and math.isnan(metrics.get(self.metric, 0.0)):
            raise MetricError(
                f"metric {self.metric!r} is NaN at {where}, and Keep(best={self.best}) ranks by it. Nothing was saved "
                "and earlier checkpoints stand: look at the run from there. To save all the same, leave it out."
            )

    def removable(self, newest_first: Sequence[Manifest], damaged: Collection[str] = ()) -> list[str]:
        """The names that may go. Damaged ones do not count, and go when they are older than all that `last` keeps."""
        intact = [one for one in newest_first if one.name not in damaged]
        if self.cannot_rank(intact):
            return []
        last = intact[: self.last]
        kept = {one.name for one in [*last, *self._best(intact), *self._milestones(intact)]}
        oldest = last[-1].sequence if last else 0
        return [one.name for one in newest_first if one.name not in kept and one.sequence < oldest]

    def cannot_rank(self, intact: Sequence[Manifest]) -> str:
        """Why the best cannot be told from the others: none has the metric. Empty if they can be, or need not be."""
        if not self.best or not intact or self._ranked(intact):
            return ""
        known = ", ".join(dict.fromkeys(name for one in intact for name in one.metrics if name != self.metric))
        return f"no checkpoint has a metric {self.metric!r}; there are: {known or 'none'}"

    def _ranked(self, intact: Sequence[Manifest]) -> list[Manifest]:
        return [one for one in intact if self.metric and not math.isnan(one.metrics.get(self.metric, math.nan))]

    def _best(self, intact: Sequence[Manifest]) -> list[Manifest]:
        sign = 1 if self.mode == "min" else -1
        return sorted(self._ranked(intact), key=lambda one: sign * one.metrics[self.metric or ""])[: self.best]

    def _milestones(self, intact: Sequence[Manifest]) -> list[Manifest]:
        return [one for one in intact if self.every and one.step % self.every == 0]

"""A position restored by index: map-style data, whose sampler draws the order again and skips what was handed out.

No sample that was handed out before the save is read again. The sampler starts with the generators of the epoch's
start, so it draws the same order; a digest of the skipped indices shows whether it did.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from ckpt.data import sampling
from ckpt.data.cursor import Cursor
from ckpt.data.following import MakeIterator
from ckpt.data.remaining_order import RemainingIndices
from ckpt.data.repartition import Repartition
from ckpt.data.restore_base import RestoreStrategy
from ckpt.data.sampling import EpochPlan
from ckpt.errors import ConfigError
from ckpt.state import rng


class ByIndex(RestoreStrategy):
    """Puts an `EpochPlan` into the loader's sampler, which skips the indices of the batches that were handed out."""

    lands_with_order = True

    def __init__(self, cursor: Cursor, make_iterator: MakeIterator, repartition: Repartition, epoch: int) -> None:
        super().__init__(cursor, make_iterator)
        self._loader: DataLoader[Any] = cursor.reader
        self._repartition = repartition
        self._epoch = epoch
        self._plan: EpochPlan | None = None  # none where rank 0 reads for all

    def open(self) -> Iterator[Any]:
        if not getattr(self._loader, "in_order", True):
            raise ConfigError(
                "a DataLoader with in_order=False gives batches in an order that depends on timing: no run can "
                "continue from the middle of it. Build it with in_order=True."
            )
        if not self._cursor.reads:
            self._cursor.begin()
            return self._make_iterator()
        rest = self._repartition.rest(self._cursor.position)
        if self._cursor.reads_ahead and not self._loader.num_workers:  # workers read with generators of their own
            self._look_ahead()
        self._plan = self._make_plan(rest)
        sampling.install(self._loader).plan = self._plan
        return self._make_iterator()

    def update_position(self) -> None:
        if self._plan is not None:
            self._cursor.position.digest, self._cursor.position.indices = "", self._plan.digest.hexdigest()
        super().update_position()

    def close(self) -> None:
        if self._plan is not None:
            self._plan.forget()
        super().close()

    def arrive(self) -> None:
        if not self._cursor.arrive() or self._plan is None:
            return
        position = self._cursor.position
        if not self._loader.num_workers:
            # with workers the sampler is ahead of the loop: drawing the order again has moved these already
            self._cursor.set_generators(position.generators_now)
        if not position.ahead:
            self._cursor.restore_keeper()
        position.samples = max(position.samples, self._plan.left_out if self._cursor.reads == 1 else 0)
        why = self._plan.problem(self._cursor.name)
        if why:
            self._cursor.warn(why)

    def _count_samples(self, batch: Any) -> int:
        read = self._plan.taken(self._cursor.reads) if self._plan is not None else 0
        return read if self._plan is not None and self._cursor.reads == 1 else super()._count_samples(batch)

    def _restore_before_reads_ahead(self) -> None:
        super()._restore_before_reads_ahead()
        self._cursor.restore_keeper()

    def _make_plan(self, rest: RemainingIndices | None) -> EpochPlan:
        position = self._cursor.position
        return EpochPlan(
            self._begin,
            self.land,
            skip=position.batches * self._cursor.reads,
            samples=position.samples if position.samples and self._repartition.skips_samples else None,
            rest=rest,
            batched=self._loader.batch_sampler is not None,
            expected=position.indices,
            expected_batches=position.digest,
            skips_inside=position.skipped > 0 and position.batches == 0 and self._cursor.has_saved_position,
        )

    def _begin(self) -> int | None:
        """Called when the sampler is first asked: what the workers' generators are seeded from, if there are any."""
        self._cursor.begin()
        if not self._loader.num_workers:
            return None
        position = self._cursor.position
        since = (position.start,) if position.start else ()  # or batches would draw as the epoch's first ones did
        return rng.number(position.rng["torch"], self._epoch, self._cursor.rank, *since)

"""A resume in mid-epoch with another number of ranks or another batch size: the position is converted by samples."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch.utils.data import IterableDataset

from ckpt.data.epoch_layout import Batcher, Layout, batcher_of, distributed_sampler_of, layout_of, saved_layout
from ckpt.data.loader_info import goes_by_index, keeper_of, size_of, splits
from ckpt.data.position import Position
from ckpt.data.remaining_order import ConsumedSamples, RemainingIndices
from ckpt.state import samplers
from ckpt.state.parts import has_state

_DRAWN = "Augmentations and dropout are drawn per rank and batch, so they differ from an unchanged run"


@dataclass
class Repartition:
    """Converts a saved position of a loader to the loader's current layout."""

    loader: Any
    reads: int  # batches that Accelerate's loader reads here for each that it hands out
    rank: int
    world_size: int
    consumed: ConsumedSamples | None = None  # by this rank under the saved layout, to verify the order

    def __post_init__(self) -> None:
        self.reader = samplers.reader(self.loader)
        self.now = layout_of(self.loader)
        self._ahead = self.reader is not self.loader
        self._sampler = None if self._ahead else distributed_sampler_of(self.loader)

    def carry_over(self, position: Position) -> dict[str, str]:
        """Convert the position in place. Returns what will differ from an unchanged run, and why."""
        shared = self._ahead or self._sampler is not None
        then = saved_layout(position, self.now, self.world_size, shared=shared)
        ranks, position.world_size, position.layout = position.world_size, self.world_size, asdict(self.now)
        by_index = goes_by_index(self.reader)
        if ranks != self.world_size and not by_index:
            position.state = None
        if position.done or position.exhausted or not (position.batches or position.start):
            return {}
        layouts = [layout for layout in (then, self.now) if layout.batch is not None]
        sizes = {(layout.replicas, layout.batch, layout.window) for layout in layouts}
        if ranks == self.world_size and len(sizes) < 2 and then.replicas == self.now.replicas:
            return {}
        if not by_index:
            return self._carry_stream(position, then, ranks)
        return self._carry_order(position, then, ranks)

    @property
    def skips_samples(self) -> bool:
        """Whether a custom batch sampler makes the batches, whose length may have changed: samples are skipped then."""
        return self.reader.batch_sampler is not None and batcher_of(self.reader) is None and not self._ahead

    def rest(self, position: Position) -> RemainingIndices | None:
        """The order after the samples that earlier layouts consumed in this epoch; None if the layout never changed."""
        if not position.start:
            return None
        batcher = batcher_of(self.reader)
        owner = self._owner() if batcher is None else batcher
        if owner is None:
            return None  # another kind of loader than the one that was saved
        sampler = samplers.unwrapped(owner.sampler)
        return RemainingIndices(
            owner, sampler, position.start, self._sampler is sampler, self.consumed, may_bypass_sampler=batcher is None
        )

    def _owner(self) -> Batcher | None:
        """A custom batch sampler around a DistributedSampler."""
        found = samplers.unwrapped(self.reader.batch_sampler)
        return found if self._sampler is not None and getattr(found, "sampler", None) is self._sampler else None

    def _carry_order(self, position: Position, then: Layout, ranks: int) -> dict[str, str]:
        changes = self._order_changes(position) if self._ahead and ranks != self.world_size else {}
        batcher = batcher_of(self.reader)
        if batcher is None and (self._owner() is None or then.replicas == self.now.replicas):
            return changes | self._carry_batches(position, ranks)
        if self._ahead and then.window is None:
            return changes | self._carry_batches(position, ranks)
        if batcher is not None and self._sampler is None and not self._ahead and ranks != self.world_size:
            changes["data"] = self._own_order(position, ranks, samplers.unwrapped(batcher.sampler))
            if then.batch in (None, self.now.batch):
                return changes
        gone = position.batches * (then.window or 0) if self._ahead else position.samples * then.replicas
        taken = gone if self.reads != 1 else position.samples
        self.consumed = ConsumedSamples(then, position.start, taken, position.indices)
        position.start += gone
        position.before += position.batches
        position.batches = position.samples = position.ahead = 0
        position.digest = position.indices = ""
        if self._ahead:
            position.state = None
        if "data" not in changes:
            changes["data"] = _describe(then, self.now, position.start)
        return changes

    def _carry_batches(self, position: Position, ranks: int) -> dict[str, str]:
        """Custom batch samplers: only whole batches can be converted to another number of ranks."""
        if ranks == self.world_size:
            return {}  # the plan skips by samples, whatever the batches are
        position.digest, position.indices, position.ahead = "", "", 0
        if not self._ahead:
            name = type(samplers.unwrapped(self.reader.batch_sampler)).__name__
            return {
                "data": f"{name} is a custom batch sampler: which samples {ranks} ranks consumed is unknown to "
                f"{self.world_size}, so samples of this epoch repeat or are missed. Change the number of ranks between "
                "epochs"
            }
        split = splits(self.loader) or position.split  # a single rank gets all batches either way
        gone = position.batches * (1 if split else ranks)
        position.batches, again = divmod(gone, 1 if split else self.world_size)
        return {"data": f"the last {again} batches before the resume are seen again"} if again else {}

    def _order_changes(self, position: Position) -> dict[str, str]:
        if len(samplers.generators(self.loader)) == len(position.generators):
            return {}
        return {
            "order": "drawn anew: Accelerate gives a sampler its own generator where there are several ranks, and only "
            "there. With DataLoaderConfiguration(use_seedable_sampler=True) it is the same for any number"
        }

    def _own_order(self, position: Position, ranks: int, sampler: object) -> str:
        """A sampler that is no DistributedSampler: by its length, each rank has all samples or a custom share."""
        size, total = position.sampler_size, position.dataset_size
        if ranks == 1:
            ranks, size = self.world_size, size_of(sampler)
        if size is not None and total is not None and ranks > 1 and abs(size * ranks - total) < ranks:
            return (
                f"{type(sampler).__name__} divides the samples among ranks by a rule of its own, so which ones were "
                f"consumed is unknown to {self.world_size} ranks: samples of this epoch repeat or are missed. Use a "
                "DistributedSampler, or change the number of ranks between epochs"
            )
        return (
            "the sampler is not distributed: every rank continues in an order of its own, as before, and new ranks "
            "in that of rank 0"
        )

    def _carry_stream(self, position: Position, then: Layout, ranks: int) -> dict[str, str]:
        if ranks != self.world_size and not self._ahead:
            changes = {"data": f"each of {self.world_size} ranks continues at batch {position.batches} of its own data"}
            position.contents = {}
        elif self._keeps_samples(position):
            position.ahead = 0
            return {"data": _describe(then, self.now, position.batches * (then.window or 0))}
        else:
            changes = {}
        position.state, position.ahead = None, 0
        if None in (then.window, self.now.window):
            return changes
        unit = (then.batch, self.now.batch) if changes else (then.window, self.now.window)
        gone = position.batches * int(unit[0] or 0)
        position.batches, again = divmod(gone, int(unit[1] or 1))
        if changes:
            return changes
        if again:
            position.contents = {}
        position.samples = position.batches * int(self.now.batch or 0)
        repeated = f". The last {again} of them are seen again" if again else ""
        return {"data": _describe(then, self.now, gone) + repeated}

    def _keeps_samples(self, position: Position) -> bool:
        """Whether the saved state counts samples, so that it holds for any batch size."""
        keeper = keeper_of(self.reader)
        if keeper is None or position.state is None or self.reader.num_workers:
            return False
        dataset = self.reader.dataset
        return keeper is dataset or has_state(dataset) or not isinstance(dataset, IterableDataset)


def _describe(then: Layout, now: Layout, gone: int) -> str:
    sizes = f"{then} samples in a batch before, {now} now"
    if then.window == now.window:
        return f"{sizes}: the same {now.window} samples in each step, from sample {gone} of the epoch on. {_DRAWN}"
    return f"{sizes}: continues after the {gone} samples of this epoch that were seen. {_DRAWN}"

"""A run goes on in mid-epoch with another number of ranks, or with batches of another size: by samples."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch.utils.data import IterableDataset

from ckpt import order
from ckpt.layout import Layout, batcher_of, dealing_sampler, layout_of
from ckpt.loaders import goes_by_index, keeper_of, size_of
from ckpt.parts import has_state
from ckpt.position import Position
from ckpt.rest import Past, Rest

_DRAWN = "What is drawn at random for them, as for augmentations and dropout, is not what it would have been"


@dataclass
class Regrouping:
    """Brings a saved position of a loader over to how the loader deals out its samples now."""

    loader: Any
    reads: int  # batches that Accelerate's loader reads here for each that it hands out
    rank: int
    world_size: int
    past: Past | None = None  # what this rank had been given, to be compared with the order

    def __post_init__(self) -> None:
        self.reader = order.reader(self.loader)
        self.now = layout_of(self.loader, self.reads, self.rank)
        self._ahead = self.reader is not self.loader
        self._sampler = None if self._ahead else dealing_sampler(self.loader)

    def carry_over(self, position: Position) -> dict[str, str]:
        """Change the position. Returns what will not be as it was, and why."""
        ranks, position.world_size = position.world_size, self.world_size
        then = Layout.of_saved(position, dealt=self._ahead or self._sampler is not None)
        position.layout = asdict(self.now)
        by_index = goes_by_index(self.reader)
        if ranks != self.world_size and not by_index:
            position.state = None
        if position.done or position.exhausted or not (position.batches or position.start):
            return {}
        sizes = {(one.replicas, one.batch, one.window) for one in (then, self.now) if one.batch is not None}
        if ranks == self.world_size and len(sizes) < 2 and then.replicas == self.now.replicas:
            return {}
        if not by_index:
            return self._carry_stream(position, then, ranks)
        return self._carry_order(position, then, ranks)

    def rest(self, position: Position) -> Rest | None:
        """What is left of the order after the samples that earlier layouts took; none if there was no other."""
        if not position.start:
            return None
        batcher = batcher_of(self.reader)
        owner = self._owner() if batcher is None else batcher
        if owner is None:
            return None  # the loader was another one when samples were counted
        sampler = order.unsteered(owner.sampler)
        return Rest(owner, sampler, position.start, self._sampler is sampler, self.past, unsure=batcher is None)

    def _owner(self) -> Any:
        """A batch sampler of another kind around a DistributedSampler."""
        found = order.unsteered(self.reader.batch_sampler)
        return found if self._sampler is not None and getattr(found, "sampler", None) is self._sampler else None

    def _carry_order(self, position: Position, then: Layout, ranks: int) -> dict[str, str]:
        changes = self._order_changes(position) if self._ahead and ranks != self.world_size else {}
        if batcher_of(self.reader) is None and (self._owner() is None or then.replicas == self.now.replicas):
            return changes | self._carry_batches(position, ranks)
        if self._ahead and then.window is None:
            return changes | self._carry_batches(position, ranks)
        if self._sampler is None and not self._ahead and ranks != self.world_size:
            changes["data"] = self._own_order(position, ranks)
            if then.batch in (None, self.now.batch):
                return changes
        gone = position.batches * (then.window or 0) if self._ahead else position.samples * then.replicas
        taken = gone if self.reads != 1 else position.samples
        self.past = Past(then, position.start, taken, position.indices)
        position.start += gone
        position.before += position.batches
        position.batches = position.samples = position.ahead = 0
        position.digest = position.indices = ""
        if self._ahead:
            position.state = None
        if "data" not in changes:
            changes["data"] = _told(then, self.now, position.start)
        return changes

    def _carry_batches(self, position: Position, ranks: int) -> dict[str, str]:
        """Batches that somebody else puts together: they are counted, not their samples."""
        if ranks == self.world_size:
            return {}  # found by the number of samples when the batches are gone through
        position.digest, position.indices, position.ahead = "", "", 0
        if not self._ahead:
            return {
                "data": f"{type(order.unsteered(self.reader.batch_sampler)).__name__} makes batches in a way of its own, which nobody can "
                f"follow from {ranks} ranks to {self.world_size}: samples of this epoch may repeat or be missed. Change "
                "the number of ranks between epochs"
            }
        gone = position.batches * (1 if position.split else ranks)
        position.batches, again = divmod(gone, 1 if self.now.replicas == 1 else self.world_size)
        return {"data": f"the last {again} batches before the resume are seen again"} if again else {}

    def _order_changes(self, position: Position) -> dict[str, str]:
        if len(order.generators(self.loader)) == len(position.generators):
            return {}
        return {
            "order": "drawn anew: Accelerate gives a sampler its own generator where there are several ranks, and only "
            "there. With DataLoaderConfiguration(use_seedable_sampler=True) it is the same for any number"
        }

    def _own_order(self, position: Position, ranks: int) -> str:
        """A sampler that is no DistributedSampler: has every rank all samples, or has it some way to share them out?"""
        sampler = order.unsteered(batcher_of(self.reader).sampler)
        size, total = position.sampler_size, position.dataset_size
        if ranks == 1:
            ranks, size = self.world_size, size_of(sampler)
        if size is not None and total is not None and ranks > 1 and abs(size * ranks - total) < ranks:
            return (
                f"{type(sampler).__name__} shares samples out to the ranks in a way of its own, "
                f"which nobody can follow to {self.world_size} ranks: samples of this epoch may repeat or be missed. "
                "Take a DistributedSampler, or change the number of ranks between epochs"
            )
        return (
            "the sampler is not distributed: every rank goes on in an order of its own, as before, and a rank that is "
            "new in that of rank 0"
        )

    def _carry_stream(self, position: Position, then: Layout, ranks: int) -> dict[str, str]:
        if ranks != self.world_size and not self._ahead:
            changes = {"data": f"each of {self.world_size} ranks goes on at batch {position.batches} of its own data"}
            position.contents = {}
        elif self._keeps_samples(position):
            position.ahead = 0
            return {"data": _told(then, self.now, position.batches * (then.window or 0))}
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
        return {"data": _told(then, self.now, gone) + repeated}

    def _keeps_samples(self, position: Position) -> bool:
        """Whether the saved state goes by samples, and holds for batches of any size."""
        keeper = keeper_of(self.reader)
        if keeper is None or position.state is None or getattr(self.reader, "num_workers", 0):
            return False
        dataset = self.reader.dataset
        return keeper is dataset or has_state(dataset) or not isinstance(dataset, IterableDataset)


def _told(then: Layout, now: Layout, gone: int) -> str:
    sizes = f"{then} samples in a batch before, {now} now"
    if then.window == now.window:
        return f"{sizes}: the same {now.window} samples in each step, from sample {gone} of the epoch on. {_DRAWN}"
    return f"{sizes}: goes on after the {gone} samples of this epoch that were seen. {_DRAWN}"

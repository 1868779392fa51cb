"""A rank's replicas of tensors that another rank writes. Those that turn out to differ are saved by this rank too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from ckpt.formats.layout import Layout
from ckpt.formats.native import tensor_file
from ckpt.formats.native.shard_table import ShardedState
from ckpt.formats.native.tensor_file import View, untie
from ckpt.formats.sharded_tensors import is_sharded, local_tensor
from ckpt.formats.tensors import FilePlan, PartState, Shard
from ckpt.ranks.group import MAIN
from ckpt.root.file_names import own_key, whole_file


@dataclass(frozen=True)
class ReplicaTensors:
    """Live replicas of a part's tensors, laid out as the file that would hold all of them."""

    path: str
    shards: Mapping[str, Shard]

    @classmethod
    def of(cls, key: str, rank: int, shards: Mapping[str, Shard]) -> ReplicaTensors:
        return cls(whole_file(own_key(key, rank)), shards)

    @cached_property
    def file(self) -> FilePlan:
        return tensor_file.plan_file(self.path, self.shards)

    @cached_property
    def stored(self) -> list[str]:
        """The names of tensors that have bytes of their own in the file, in the file's order."""
        return [content[0] for content in self.file.contents or () if isinstance(content, tuple)]

    @cached_property
    def views(self) -> dict[str, View]:
        """Tensors that are views of another tensor. Only that other one has bytes in the file."""
        return untie({name: shard.tensor for name, shard in self.shards.items()})[1]

    def names(self, stored: Collection[str]) -> list[str]:
        """The stored tensors, and all that are views of them."""
        return [name for name in self.shards if name in stored or self._base(name) in stored]

    def file_of(self, stored: Collection[str], snapshot: FilePlan | None) -> FilePlan:
        """The file with these tensors alone: out of the snapshot's file of all of them, or live."""
        if snapshot is None:
            return tensor_file.plan_file(self.path, {name: self.shards[name] for name in self.names(stored)})
        if set(self.stored) <= set(stored):
            return snapshot
        copied = dict(self._copied(snapshot))
        shards = {name: self._from(copied, name) for name in self.names(stored)}
        return tensor_file.plan_file(self.path, shards)

    def _base(self, name: str) -> str | None:
        return self.views[name].of if name in self.views else None

    def _from(self, copied: Mapping[str, torch.Tensor], name: str) -> Shard:
        view = self.views.get(name)
        tensor = view.on(copied[view.of]) if view else copied[name]
        return self.shards[name]._replace(tensor=tensor)

    def _copied(self, snapshot: FilePlan) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as they lie in the snapshot, by name."""
        data, start = bytearray(), 0
        for piece in snapshot.pieces():  # one at a time: a piece may be valid until the next is asked for
            data += piece
        for content in self.file.contents or ():
            if isinstance(content, bytes):
                start += len(content)
                continue
            name, tensor = content
            stop = start + tensor.nbytes
            view = memoryview(data)[start:stop]
            flat = torch.frombuffer(view, dtype=torch.uint8) if stop > start else torch.empty(0).byte()
            yield name, flat.view(tensor.dtype).view(tensor.shape)
            start = stop


def unsharded_replicas(part: PartState, is_uncertain: Callable[[str], bool]) -> dict[str, Shard]:
    """Of a part that the main rank writes: all tensors that are not guaranteed to be the same there."""
    return {name: shard for name, shard in part.tensors.items() if is_uncertain(name)}


@torch.no_grad()
def sharded_replicas(
    part: ShardedState, written: Collection[str], is_uncertain: Callable[[str], bool], rank: int, *, gathered: bool
) -> dict[str, Shard]:
    """Of a sharded part: plain tensors that another rank writes for all, and shards of which it writes a replica.

    `written`: the names that this rank writes itself.
    """
    found = {}
    for name, entry in part.table.tensors.items():
        tensor = part.tensors[name]
        if name in written or not entry.layout.holds(rank) or not is_uncertain(name):
            continue
        if not is_sharded(tensor):
            if not (gathered and rank == MAIN):
                found[name] = Shard.whole(tensor)
        elif not (gathered and _is_gathered(entry.layout, rank)):
            found[name] = Shard(local_tensor(tensor), entry.shape, entry.layout.box(entry.shape, rank).offsets)
    return found


def _is_gathered(layout: Layout, rank: int) -> bool:
    """Whether the main rank gathers this rank's shard."""
    return layout.holds(MAIN) and layout.copy_of(MAIN) == layout.copy_of(rank)

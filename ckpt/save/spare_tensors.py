"""What a rank holds of a part that another rank writes. It is kept by this rank too if it turns out to differ."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from ckpt.formats.layout import Layout, is_sharded, local_tensor, on_part_of_mesh
from ckpt.formats.native import tensor_file_plan
from ckpt.formats.native.shard_table import ShardedState
from ckpt.formats.native.shared_storage import View, untie
from ckpt.formats.state import FilePlan, PartState, Shard
from ckpt.ranks.group import MAIN
from ckpt.root.file_names import own_key, whole_file
from ckpt.state.replicated import Replication


@dataclass(frozen=True)
class SpareTensors:
    """Live tensors of a part, laid out as the file that holds all of them."""

    path: str
    shards: Mapping[str, Shard]

    @classmethod
    def of(cls, key: str, rank: int, shards: Mapping[str, Shard]) -> SpareTensors:
        return cls(whole_file(own_key(key, rank)), shards)

    @cached_property
    def image(self) -> FilePlan:
        return tensor_file_plan.plan_file(self.path, self.shards)

    @cached_property
    def views(self) -> dict[str, View]:
        """Tensors that lie in the memory of another one. Only that one has bytes of its own in the file."""
        return untie({name: shard.tensor for name, shard in self.shards.items()})[1]

    def names(self, stored: Collection[str]) -> list[str]:
        """The tensors that come with the stored ones."""
        return [name for name in self.shards if name in stored or self._base(name) in stored]

    def chosen(self, stored: Collection[str], copy: FilePlan | None) -> FilePlan:
        """The file with these tensors alone: out of the copy that was made of all of them, or live."""
        if copy is None:
            return tensor_file_plan.plan_file(self.path, {name: self.shards[name] for name in self.names(stored)})
        copied = dict(self._copied(copy))
        if copied.keys() <= set(stored):
            return copy
        found = {name: self._from(copied, name) for name in self.names(stored)}
        return tensor_file_plan.plan_file(self.path, found)

    def _base(self, name: str) -> str | None:
        return self.views[name].of if name in self.views else None

    def _from(self, copied: Mapping[str, torch.Tensor], name: str) -> Shard:
        view = self.views.get(name)
        tensor = view.on(copied[view.of]) if view else copied[name]
        return self.shards[name]._replace(tensor=tensor)

    def _copied(self, copy: FilePlan) -> Iterator[tuple[str, torch.Tensor]]:
        data, start = next(copy.pieces()), 0
        for content in self.image.contents or ():
            if isinstance(content, bytes):
                start += len(content)
                continue
            name, tensor = content
            stop = start + tensor.nbytes
            row = torch.frombuffer(data[start:stop], dtype=torch.uint8) if stop > start else torch.empty(0).byte()
            yield name, row.view(tensor.dtype).view(tensor.shape)
            start = stop


def spare_of_whole(part: PartState, guarantee: Replication) -> dict[str, Shard]:
    """Of a part that the main rank writes: all that is not known to be the same there."""
    return {name: shard for name, shard in part.tensors.items() if guarantee.is_uncertain(name)}


@torch.no_grad()
def spare_of_spread(
    part: ShardedState, written: Collection[str], guarantee: Replication, rank: int, *, gathered: bool
) -> dict[str, Shard]:
    """Of a part in pieces: plain tensors that another rank writes for all, and pieces on a part of the mesh that are
    taken to be the same on the other parts of it."""
    found = {}
    for name, entry in part.table.tensors.items():
        tensor = part.tensors[name]
        if name in written or not entry.layout.holds(rank):
            continue
        if not is_sharded(tensor):
            if guarantee.is_uncertain(name) and not (gathered and rank == MAIN):
                found[name] = Shard.whole(tensor)
        elif on_part_of_mesh(tensor) and not (gathered and _beside_main(entry.layout, rank)):
            found[name] = Shard(local_tensor(tensor), entry.shape, entry.layout.box(entry.shape, rank).offsets)
    return found


def _beside_main(layout: Layout, rank: int) -> bool:
    """Whether the main rank gathers this rank's piece."""
    return layout.holds(MAIN) and layout.copy_of(MAIN) == layout.copy_of(rank)

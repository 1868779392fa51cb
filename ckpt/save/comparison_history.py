"""What the ranks of a job have learned about each other's state in earlier saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ckpt.formats.sharded_tensors import is_sharded
from ckpt.formats.state import Shard
from ckpt.save.captured_state import CapturedState
from ckpt.save.checksums import checksum
from ckpt.state.replicated import Replication


@dataclass
class ComparisonHistory:
    """The same on every rank. What was guaranteed to be equal is compared once; from then on only if it was not."""

    equal: dict[str, set[str]] = field(default_factory=dict)  # by part: tensors guaranteed to be equal, and found so
    doubted: dict[str, set[str]] = field(default_factory=dict)  # guaranteed to be equal, and found to differ
    reported: set[str] = field(default_factory=set)  # parts whose differences have been logged

    def with_doubts(self, key: str, guarantee: Replication) -> Replication:
        """The guarantee of a part, less what was found to differ."""
        return replace(guarantee, doubted=frozenset(self.doubted[key])) if key in self.doubted else guarantee

    def pending_checksums(self, captured: CapturedState) -> dict[str, dict[str, Callable[[], str]]]:
        """Checksums of what is guaranteed to be equal and has not been compared yet: all of it at the first save."""
        tensors: dict[str, Mapping[str, torch.Tensor]] = {
            **{key: _tensors_of(part.tensors) for key, part in captured.parts.items()},
            **{key: part.tensors for key, part in {**captured.sharded, **captured.gathered}.items()},
        }
        pending: dict[str, dict[str, Callable[[], str]]] = {}
        for key, named in tensors.items():
            known, guarantee = self.equal.get(key, set()), captured.guarantees[key]
            new = [name for name in named if name not in known and guarantee.is_equal(name)]
            pending[key] = {name: checksum(named[name]) for name in new if not is_sharded(named[name])}
        return pending

    def doubt(self, names: Iterable[Sequence[str]]) -> bool:
        """Compare these at every save from now on. Returns whether any of them was not doubted before."""
        new = [(key, name) for key, name in names if name not in self.doubted.get(key, ())]
        for key, name in new:
            self.doubted.setdefault(key, set()).add(name)
        return bool(new)

    def record_equal(self, captured: CapturedState) -> None:
        """All ranks have the same bytes of what they compared in this save: it is not compared again."""
        for key, names in captured.checksums.items():
            self.equal.setdefault(key, set()).update(names)


def _tensors_of(shards: Mapping[str, Shard]) -> dict[str, torch.Tensor]:
    return {name: shard.tensor for name, shard in shards.items()}

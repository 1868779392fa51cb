"""The managers that each rank has built, so that an error about ranks that never meet can say why.

Ranks meet by the order in which they build managers: one that builds another one, or in another order, waits in vain.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ckpt.errors import RanksError
from ckpt.ranks.liveness import format_ranks, ranks_by_value
from ckpt.ranks.shutdown import UnreadBroadcast
from ckpt.ranks.store import TimedStore

_SHOWN = 5  # managers of a rank that an error lists


class BuiltManagers:
    """The managers of this rank, in order. Every rank publishes its list, and reads the others' only for an error."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._labels: dict[str, str] = {}  # by the key under which the ranks meet
        self.unread: set[UnreadBroadcast] = set()  # broadcasts that other ranks are to read before this process ends

    def add(self, name: str, label: str) -> str:
        """Count one more manager of that name. Returns the key under which the n-th of each rank meet."""
        self._counts[name] += 1
        key = f"{self._counts[name]}/{name}"
        self._labels[key] = label
        return key

    def labels(self, name: str) -> list[str]:
        """The labels of this rank's managers of that name, in order."""
        return [self._labels[f"{number}/{name}"] for number in range(1, self._counts[name] + 1)]

    def publish(self, store: TimedStore, rank: int) -> None:
        store.set(f"built/{rank}", json.dumps(self._labels))

    def difference(self, store: TimedStore, rank: int, others: list[int]) -> str:
        """A sentence about what this rank and the others have built; empty where it is the same, or not known."""
        built = {rank: self._labels}
        with suppress(RanksError):
            built |= {other: _read(store, other) for other in others}
        if all(labels.keys() == self._labels.keys() for labels in built.values()):
            return ""
        opened = ranks_by_value({number: _listed(labels) for number, labels in sorted(built.items())})
        listed = "; ".join(f"{format_ranks(found)} opened {labels}" for labels, found in opened.items())
        return (
            f" The ranks have not opened the same roots: {listed}. Build the same managers on every rank, for the same "
            "root; where every host has a root of its own, give them ranks=ckpt.RankOptions(shared=False)."
        )


def _read(store: TimedStore, rank: int) -> dict[str, str]:
    key = f"built/{rank}"
    found: dict[str, str] = json.loads(store.get(key)) if store.check([key]) else {}
    return found


def _listed(labels: dict[str, str]) -> str:
    shown = [repr(label) for label in labels.values()]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more if shown else "none"


_by_process_group: WeakKeyDictionary[dist.ProcessGroup, BuiltManagers] = WeakKeyDictionary()


def built_here() -> BuiltManagers:
    """The managers that this process has built since it joined the default process group."""
    assert dist.group.WORLD is not None
    return _by_process_group.setdefault(dist.group.WORLD, BuiltManagers())

"""What each rank has built that meets the other ranks, so that ranks that never meet can be told why."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ckpt.errors import RanksError
from ckpt.ranks.shutdown import Unread
from ckpt.ranks.store import TimedStore

_SHOWN = 5  # of what a rank has built, in an error


class BuiltManagers:
    """The managers of this rank, in order. Every rank publishes its list; nobody waits for it."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._labels: dict[str, str] = {}  # by the key under which the ranks meet
        self.unread: set[Unread] = set()  # decisions that other ranks are to read before this process ends

    def add(self, name: str, label: str) -> str:
        """Count one more of that name. Returns the key under which the n-th of each rank meet."""
        self._counts[name] += 1
        key = f"{self._counts[name]}/{name}"
        self._labels[key] = label
        return key

    def labels(self, name: str) -> list[str]:
        """What this rank has built of that name, in order."""
        return [self._labels[f"{number}/{name}"] for number in range(1, self._counts[name] + 1)]

    def publish(self, store: TimedStore, rank: int) -> None:
        store.set(f"built/{rank}", json.dumps(self._labels))

    def compared(self, store: TimedStore, rank: int, others: list[int]) -> str:
        """A sentence about what this rank and the others have built; empty where it is the same, or not known."""
        told = {rank: self._labels}
        with suppress(RanksError):
            told |= {other: _read(store, other) for other in others}
        if all(one.keys() == self._labels.keys() for one in told.values()):
            return ""
        listed = "; ".join(f"rank {one} opened {_listed(labels)}" for one, labels in sorted(told.items()))
        return (
            f" The ranks have not opened the same roots: {listed}. Build the same managers on every rank, for the same "
            "root; where every host has a root of its own, say shared=False."
        )


def _read(store: TimedStore, rank: int) -> dict[str, str]:
    key = f"built/{rank}"
    found: dict[str, str] = json.loads(store.get(key)) if store.check([key]) else {}
    return found


def _listed(labels: dict[str, str]) -> str:
    shown = [repr(label) for label in labels.values()]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more if shown else "none"


_of_groups: WeakKeyDictionary[Any, BuiltManagers] = WeakKeyDictionary()


def built_here() -> BuiltManagers:
    """What this process has built since it joined the process group."""
    return _of_groups.setdefault(dist.distributed_c10d._get_default_group(), BuiltManagers())

"""A position restored by state: the loader or its dataset has a `state_dict` that says where it is.

Taken for streams whose dataset, or whose loader (such as torchdata's StatefulDataLoader), keeps its own position. Which
one that is, and whose state cannot be trusted, is decided by `loader_info.keeper_of`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpt.data.restore_base import RestoreStrategy


class ByState(RestoreStrategy):
    """Loads the saved state into its keeper before the iterator is made."""

    def open(self) -> Iterator[Any]:
        cursor = self._cursor
        cursor.begin()
        if not cursor.reads:
            return self._make_iterator()
        cursor.restore_keeper()
        if cursor.reads_ahead:
            self._look_ahead()
            return self._make_iterator()
        iterator = self._make_iterator()
        self.arrive()
        return iterator

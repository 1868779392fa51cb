"""How a loader is taken to its saved position: by index, by its own state, or by replay; and why."""

from __future__ import annotations

from ckpt.data.cursor import Cursor
from ckpt.data.following import MakeIterator
from ckpt.data.loader_info import goes_by_index, only_counts
from ckpt.data.repartition import Repartition
from ckpt.data.restore_base import RestoreStrategy
from ckpt.data.restore_by_index import ByIndex
from ckpt.data.restore_by_replay import ByReplay
from ckpt.data.restore_by_state import ByState


def choose_strategy(
    cursor: Cursor, make_iterator: MakeIterator, repartition: Repartition, epoch: int
) -> RestoreStrategy:
    """By index where the data is map-style: no sample is read again. By state where the loader or its dataset has a
    `state_dict` that was saved and still holds. By replay otherwise: `restore_by_replay` lists the reasons."""
    if goes_by_index(cursor.reader):
        return ByIndex(cursor, make_iterator, repartition, epoch)
    state = cursor.position.state if cursor.keeper is not None and cursor.has_saved_position else None
    if state is not None and not only_counts(state):
        return ByState(cursor, make_iterator)
    return ByReplay(cursor, make_iterator)

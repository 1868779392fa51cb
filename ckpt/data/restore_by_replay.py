"""A position restored by replay: the stream is read again from the start of the epoch up to its position.

This costs as much reading as was done before the save, and is used where nothing cheaper is exact. A loader is replayed

- if its data is a stream and neither the loader nor the dataset has `state_dict` and `load_state_dict`, or if only the
  dataset has them but lives in worker processes (`loader_info.keeper_of`);
- if it is a Hugging Face stream whose `state_dict` drops samples: those in a shuffle buffer, or in a batch of a `map`
  with table output (`loader_info.loses_samples`);
- if the state of torchdata's loader is a number alone (`loader_info.only_counts`);
- if the saved state does not hold any more, because the number of ranks or the batch size has changed
  (`repartition`), or if none was saved;
- if `accelerator.skip_first_batches` asked for a number of batches to be skipped.

Digests of the data show whether the replay yielded the same as before. An epoch that starts from the beginning is a
replay of no batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ckpt.data.batch_digest import Contents
from ckpt.data.position import Position
from ckpt.data.restore_base import RestoreStrategy
from ckpt.state import rng
from ckpt.util.console import progress_bar


class ByReplay(RestoreStrategy):
    """Takes the batches that were handed out from a new iterator once more, and drops them."""

    def open(self) -> Iterator[Any]:
        cursor = self._cursor
        cursor.begin()
        self._contents = Contents() if cursor.keeper is None and cursor.reads else None
        if cursor.reads_ahead:
            self._look_ahead(again=cursor.position.batches * cursor.reads)
        iterator = self._make_iterator()
        if cursor.position.batches:
            self._replay(iterator)
        if not cursor.reads_ahead:
            self.arrive()
        return iterator

    def _replay(self, iterator: Iterator[Any]) -> None:
        cursor, position = self._cursor, self._cursor.position
        replay = Replay(iterator, position.batches, self._note_contents)
        replay.run(cursor.name)
        if cursor.has_saved_position and self._contents is not None and position.layout:
            drawn = cursor.reads_ahead or replay.drawn
            why = mismatch(self._contents, position, found=replay.found, drawn=drawn)
            if why:
                cursor.warn(f"{cursor.name} {why}")


@dataclass
class Replay:
    """Takes `batches` batches from an iterator and gives each to `note`."""

    iterator: Iterator[Any]
    batches: int
    note: Callable[[Any], None]
    found: int = 0
    drawn: bool = False  # whether reading moved the global generators

    def run(self, name: str) -> None:
        before = rng.capture()
        with progress_bar(f"replaying {self.batches} batches of {name}", self.batches) as advance:
            for batch in itertools.islice(self.iterator, self.batches):
                self.found += 1
                self.note(batch)
                advance(1)
        self.drawn = rng.differ(before, rng.capture())


def mismatch(now: Contents, position: Position, *, found: int, drawn: bool) -> str:
    """Why a replayed stream did not yield what it had yielded before the save; empty if it did.

    `drawn`: reading the stream moved the global generators, which training moves as well. Augmentations are then drawn
    anew during a replay, so a single leaf that agrees (a label, an index) is enough.
    """
    saved = position.contents
    if found < position.batches:
        return (
            f"ended after {found} of the {position.batches} batches it had yielded before the save: it is other "
            "data, and samples of this epoch repeat or are missed."
        )
    if not saved:
        return (
            "was replayed without a check: its batches hold nothing that can be compared (tensors on a device, or the "
            "same values in every batch). If its order is not repeatable, samples of this epoch repeat or are missed."
        )
    different = now.differing(saved)
    if not different or (drawn and len(different) < len(saved)):
        return ""
    where = ", ".join(path or "the batch" for path in different[:3])
    return (
        f"yielded other data in its replay than before the save (in {where}), so samples of this epoch repeat or are "
        "missed: its order depends on something that is not restored, such as OS entropy or a global generator. Seed "
        "it, or give it state_dict and load_state_dict."
    )

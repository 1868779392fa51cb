"""Going through a stream again up to its position, and whether it yielded the same data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ckpt.data.batch_digest import Contents
from ckpt.data.position import Position
from ckpt.state import rng
from ckpt.util.console import progress_bar


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
        with progress_bar(f"going through {self.batches} batches of {name} again", self.batches) as advance:
            for batch in itertools.islice(self.iterator, self.batches):
                self.found += 1
                self.note(batch)
                advance(1)
        self.drawn = rng.differ(before, rng.capture())


def unrepeated(now: Contents, position: Position, *, found: int, drawn: bool) -> str:
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

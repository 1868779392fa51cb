"""Patterns of the script's loop: how it counts epochs and steps, and what of it a checkpoint cannot restore."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.data.batch_usage import HandedBatches
from ckpt.data.progress import Progress
from ckpt.state.caveats import Caveats

NOT_FOLLOWED = (
    "the data: this loop takes its batches from nothing that ckpt follows, so after a resume its data begins anew. "
    "Iterate over manager.batches(loader), which takes any iterable, or over a DataLoader; where there is nothing to "
    "follow, use StateManager(follow=False)."
)
READ_AHEAD = (
    "something reads batches ahead of the loop, and those are lost at every resume. Let it read inside: "
    "manager.batches(Prefetcher(loader)), not Prefetcher(manager.batches(loader))."
)
IN_TURN = (
    "the loop's own count of epochs and that of the checkpoint drift apart, as when several loaders are trained on in "
    "one epoch. Use `for epoch in manager.epochs(n)`, so that a resume finds the right one."
)
NESTED = (
    "an iterator of one loader is kept open while another loader is trained on, so their positions are unknown. Use "
    "manager.batches(loader) for the loaders that are to be followed."
)
ENUMERATED = (
    "enumerate() counts from 0 again, though this epoch continues at batch {0}: what depends on the number differs. "
    "Write `for i, batch in manager.enumerate(loader)`."
)
SKIPPED = (
    "{0} batches were handed out after the resume before any was trained on, and are lost. The loader begins where the "
    "checkpoint was: do not skip batches by hand, and do not read ahead around it; or use StateManager(follow=False)."
)
OTHER_LOADER = (
    "training continues with other data than the checkpoint was in the middle of, and that data begins anew: a"
)
NO_TRAINING = (
    "a loop without training read the rest of the epoch after batch {0}, where training will continue, not all of it. "
    "Evaluate under torch.no_grad(): then the loop begins at the start of the epoch."
)
TAKEN_BACK = (
    "this script skips the first {0} batches by hand, which its loader had skipped already: the loader was taken "
    "back, and no batch is lost. To save the time, remove the skipping, or use StateManager(follow=False)."
)


@dataclass
class LoopPatterns:
    """What is known of the loop so far. Its `caveats` are reported to the user, and to a run that resumes.

    `quiet`: the script restores its position in the data itself, so that caveats about the data are left out.
    """

    caveats: Caveats
    quiet: bool = False
    plain_epochs: int = 0  # counted for passes in a plain `for`
    asked: bool = False  # the script has read the progress of the checkpoint
    _steps: int = 0  # of this epoch: calls of `manager.step`
    _updates: int = 0  # of this epoch: steps of the first optimizer
    _per_epoch: int | None = None  # in the epochs before
    _offset: int | None = None  # from the checkpoint's epoch to the loop's own variable
    resumed: bool = False  # and no plain pass has been trained on since
    _followed: bool = False  # a pass through a loader was trained on
    _thread: int | None = None  # that took the last batch

    def state(self, *, without_loader: bool, over: bool) -> dict[str, Any]:
        """What a run that resumes must know; of a checkpoint in an epoch without a loader, also what is uncertain."""
        uncertain = self._uncertain(over=over) if without_loader else {}
        return {
            "remarks": {**self.caveats.lasting, **uncertain},
            "steps_per_epoch": self._per_epoch,
            "epoch_offset": self._offset,
            "plain_epochs": self.plain_epochs,
        }

    def go_back(self, state: Mapping[str, Any], approximated: dict[str, str]) -> None:
        self.caveats.resumed(approximated)
        approximated.update(state.get("remarks", {}))
        self._per_epoch, self._offset = state.get("steps_per_epoch"), state.get("epoch_offset")
        self.plain_epochs = state.get("plain_epochs", 0)
        self.asked, self.resumed = False, True
        self._steps = self._updates = 0

    def note_asked(self) -> None:
        self.asked = True

    def hands_out(self) -> None:
        self._thread = threading.get_ident()

    def stepped(self, *, fed: bool, in_epochs: bool, has_data: bool) -> None:
        """`manager.step` was called; `fed`: a loader was read in this epoch."""
        self._steps += 1
        if fed and self._thread not in (None, threading.get_ident()):
            self.caveats.note("prefetching", READ_AHEAD)
        self._check_followed(fed=fed, in_epochs=in_epochs, has_data=has_data)

    def updated(self, *, fed: bool, in_epochs: bool, has_data: bool) -> None:
        """The first optimizer has made a step."""
        self._updates += 1
        self._check_followed(fed=fed, in_epochs=in_epochs, has_data=has_data)

    def _check_followed(self, *, fed: bool, in_epochs: bool, has_data: bool) -> None:
        self._followed = self._followed or fed
        once_an_epoch = in_epochs and self.steps_in_epoch < 2
        if not (self._followed or self.quiet or once_an_epoch or has_data):
            self.caveats.note("data", NOT_FOLLOWED)

    @property
    def steps_in_epoch(self) -> int:
        return self._steps or self._updates

    def ends_epoch(self, *, plain: bool) -> None:
        """The loop has reached its next epoch; after a `plain` pass through a loader."""
        self.plain_epochs += plain
        self._per_epoch = self.steps_in_epoch or self._per_epoch
        self._steps = self._updates = 0

    def is_over(self) -> bool:
        """Whether an epoch without a loader has made all its steps: as many as the one before, or one."""
        return self.steps_in_epoch >= (self._per_epoch or 1) and not (self._per_epoch is None and self._steps > 1)

    def _uncertain(self, *, over: bool) -> dict[str, str]:
        if not self.steps_in_epoch or self.quiet:
            return {}
        if not over:
            return {"epoch": f"begins anew: {self.steps_in_epoch} steps of it were made, without a loader"}
        if self._per_epoch is None:
            return {"epoch": "taken for finished: one step of it was made, without a loader"}
        return {}

    def begins_pass(self, progress: Progress, counted: int | None, *, in_epochs: bool) -> None:
        """The first step in a plain pass: compare the loop's own count of epochs with the checkpoint's."""
        if in_epochs or self.quiet:
            return
        if counted is None:
            if self.resumed and progress.epoch and not self.asked:
                self.caveats.differs("epoch", _counts_anew(progress.epoch, "from its beginning"))
        elif self._offset is None:
            self._offset = counted - progress.epoch
        elif counted - progress.epoch != self._offset and self.resumed:
            self.caveats.differs("epoch", _counts_anew(progress.epoch + self._offset, f"from {counted}"))
            self._offset = counted - progress.epoch
        elif counted - progress.epoch != self._offset:
            self.caveats.note("epoch", IN_TURN)
        self.resumed = False

    def is_ahead(self, progress: Progress, counted: int | None) -> bool:
        """Whether the resumed loop begins with the epoch after the checkpoint's, by its own count."""
        if not self.resumed or self._offset is None or counted is None:
            return False
        return counted == progress.epoch + self._offset + 1

    def settled(self, handed: HandedBatches, before: int, *, enumerated: bool, in_windows: bool) -> None:
        """The first step in a pass. `before`: how many batches were unused when its checkpoint was saved. `in_windows`:
        as many are read for every step, and trained on together."""
        if handed.skipped:
            self.caveats.tell("skipped", TAKEN_BACK.format(handed.skipped))
        elif handed.left_out and handed.unused and not self.quiet and not in_windows:
            reads_ahead = handed.unused == before
            self.caveats.differs("data", READ_AHEAD if reads_ahead else SKIPPED.format(handed.unused))
        elif handed.left_out and enumerated:
            self.caveats.differs("enumerate", ENUMERATED.format(handed.left_out))


def _counts_anew(epoch: int, how: str) -> str:
    return (
        f"the run is in epoch {epoch}, but the loop counts its epochs {how}, so that it trains more of them. Write "
        "`for epoch in manager.epochs(n)`, or `range(manager.progress.epoch, n)`."
    )

"""The Trainer's passes through its training data, handed out by the manager, so that positions are saved and restored.

A Trainer saves no position: it skips as many batches as it has trained on. That draws what a sampler, a dataset or a
collator takes from the global generators from other states than before, and reads the first batches after a resume
with the wrong ones. So `iter()` of its loader is answered with `manager.batches`, whatever the version of Trainer; and
`skip_first_batches`, as this Trainer calls it, returns that same loader.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer

from ckpt.data import loader_info
from ckpt.data.loader_info import MakeIterator, size_of
from ckpt.data.loop import Batches
from ckpt.manager import StateManager

_log = logging.getLogger("ckpt")


class TrainerData:
    """Follows the Trainer's training loader (see `loader_info.Follower`); every pass through it is an epoch.

    `is_exact`: the first pass was continued from a saved position, with the generators of that moment.
    """

    def __init__(self, trainer: Trainer, manager: StateManager) -> None:
        self.is_exact = False
        self.is_followed = False
        self._trainer = trainer
        self._manager = manager
        self._epochs = manager.epochs(sys.maxsize)
        self._pass: Batches[Any] | None = None
        self._resumes = False
        self._same_steps = True
        self._warned = False
        self._skips = 0  # batches, by the Trainer's count, before the next pass
        self._followed: Any = None

    def begin(self) -> None:
        """The Trainer has prepared its loader. Of one that is no DataLoader, what reads ahead inside is not known."""
        if isinstance(self._loader, DataLoader) and loader_info.follow(self._loader, self):
            self._followed = self._loader

    def skip(self, loader: Any, batches: int) -> bool:
        """The Trainer skips batches of a loader: whether that is left to the next pass through it."""
        if loader is not self._followed:
            return False
        self._skips = batches
        return True

    def resumes(self, *, same_steps: bool) -> None:
        """A checkpoint of the root was loaded. `same_steps`: a step of it has as many samples as one has now."""
        self._resumes, self._same_steps = True, same_steps

    @property
    def has_position(self) -> bool:
        """Whether a position was loaded for the first pass."""
        return bool(self._manager.session.loop.state())

    def warn_unfollowed(self) -> None:
        """Name a loader of a kind whose position is not known, once, before a checkpoint lacks it."""
        if not self.is_followed and not self._warned:
            self._warned = True
            _log.warning(
                "the training data of this Trainer is a %s, which ckpt can't follow. After a resume, the Trainer "
                "counts batches to find its place. For the rest of the epoch, random numbers from the global "
                "generators then differ from those of an uninterrupted run. Return a DataLoader from "
                "get_train_dataloader.",
                type(self._loader).__name__,
            )

    def release(self) -> None:
        if self._followed is not None:
            loader_info.unfollow(self._followed, self)
        self._leave()

    def takes(self, loader: Any) -> bool:
        return loader is self._loader

    def follow(self, loader: Any, own: MakeIterator) -> Iterator[Any]:
        mine, skipped, self._skips = self._loader, self._skips, 0
        self._leave()
        if self._resumes and self._same_steps and self.has_position and (skipped or self._is_at_end):
            self.is_exact = skipped > 0
            if self._is_at_end:  # of a stream, Trainer does not know it
                for _ in self._manager.batches(mine):  # no batch: it takes the generators to the end of the epoch
                    pass
        elif self._resumes or not self.is_followed:
            self._begin_by_count(loader, skipped)
        self._resumes, self.is_followed = False, True
        next(self._epochs)
        self._pass = self._manager.batches(mine)
        return self._pass

    def _begin_by_count(self, loader: Any, skipped: int) -> None:
        """Begin where the Trainer does, by its own count of epochs and batches."""
        loop = self._manager.session.loop
        loop.forget_positions()
        loop.progress.epoch = getattr(loader, "iteration", 0)
        if skipped:
            loop.skip(self._loader, skipped)

    @property
    def _loader(self) -> Any:
        return self._trainer.callback_handler.train_dataloader

    @property
    def _is_at_end(self) -> bool:
        """Whether the position that was loaded is the end of an epoch."""
        saved = next(iter(self._manager.session.loop.state().values()))
        size = size_of(self._loader)
        return bool(saved.get("done") or saved.get("exhausted") or saved.get("batches", 0) == size)

    def _leave(self) -> None:
        if self._pass is not None:
            self._pass.close()
        self._pass = None

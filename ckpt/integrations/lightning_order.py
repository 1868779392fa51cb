"""The order of the data in an epoch that Lightning resumes in its middle."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from ckpt.compat.lightning import begin_data

_log = logging.getLogger("ckpt")


@dataclass(frozen=True)
class LoaderPosition:
    """Where the loaders were that save their position: `epoch` is the one to go on with, from its start or within."""

    epoch: int
    is_new: bool  # whether the epoch begins
    states: list[dict[str, Any]]  # of the loaders

    @classmethod
    def of(cls, checkpoint: dict[str, Any]) -> LoaderPosition | None:
        """That of a checkpoint of Lightning; None if it has none."""
        fit: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
        states = fit.get("state_dict", {}).get("combined_loader")
        begun = fit.get("epoch_progress", {}).get("current", {}).get("started")
        if not states or not begun:
            return None
        batches = fit.get("epoch_loop.batch_progress", {})
        if batches.get("is_last_batch") or not batches.get("current", {}).get("processed"):
            return cls(begun, True, [_at_the_last_batch(state) for state in states])
        return cls(begun - 1, False, states)

    def go_there(self, trainer: Trainer, restore_generators: Callable[[], None]) -> None:
        """Draw the order of the epoch again, and go to the position.

        Lightning has done so already, but before it tells samplers the epoch: in the order of the first one. And of a
        checkpoint after the last batch of an epoch it takes a loader that has nothing left for the next epoch.
        """
        loaders = _loaders(trainer)
        for sampler in (sampler for loader in loaders for sampler in _samplers(loader)):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(self.epoch)
        for loader, state in zip(filter(_has_state, loaders), self.states, strict=True):
            loader.load_state_dict(state)
        begin_data(trainer)
        if self.is_new:  # that was the end of the epoch before, from which a sampler's own generator goes on
            restore_generators()
            begin_data(trainer)


def _at_the_last_batch(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a loader that has given its last batch: torchdata begins a new epoch where it was asked for more."""
    return {**state, "_iterator_finished": False} if "_iterator_finished" in state else state


def warn_of_unknown_order(trainer: Trainer) -> None:
    """Name a loader that has a position, in an order that is saved nowhere."""
    samplers = [sampler for loader in _loaders(trainer) if _has_state(loader) for sampler in _samplers(loader)]
    wrapped = any(isinstance(sampler, DistributedSamplerWrapper) for sampler in samplers)
    if wrapped and trainer.is_global_zero:
        _log.warning(
            "resumed in the middle of an epoch, this fit would see another order of the data: Lightning has divided "
            "the samples of a sampler among the ranks, and saves the position in it, not the order. Give the loader "
            "one that draws its order from seed and epoch: sampler=torch.utils.data.DistributedSampler(dataset).",
        )


def _loaders(trainer: Trainer) -> list[Any]:
    return list(CombinedLoader(trainer.train_dataloader).flattened)


def _has_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _samplers(loader: Any) -> list[Any]:
    """A loader's own sampler, and that of its batches; the same one once."""
    found = [getattr(place, "sampler", None) for place in (loader, getattr(loader, "batch_sampler", None))]
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())

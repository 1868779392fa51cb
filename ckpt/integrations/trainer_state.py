"""The part of a checkpoint that holds a Trainer's own state, and retention as its arguments define it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import ExportableState, TrainerState

from ckpt.compat.transformers import continue_log, last_logged
from ckpt.formats.native.manifest import Manifest
from ckpt.load.restored import Restored
from ckpt.root.catalog import Summary
from ckpt.root.retention import Keep

_log = logging.getLogger("ckpt")
PART = "trainer_state"
NO_POSITION = (
    "the checkpoint has no position in the data, so Trainer's own count of steps decides: what samplers, datasets and "
    "collators draw from the global generators for the rest of this epoch differs"
)


class TrainerPart:
    """The Trainer's state, and what a Trainer does not save itself: every rank's loss since the last log.

    The state is saved by the main rank for all, as in a Trainer's own checkpoints: ranks log different times.
    """

    of_main_rank = True

    def __init__(self, trainer: Trainer) -> None:
        self.loss: torch.Tensor | None = None  # on this rank, since the last log
        self.files: dict[str, bytes] = {}  # that an override of `_save_checkpoint` has written
        self._trainer = trainer
        self._batch: int | None = None  # samples in a step of all ranks when the checkpoint was saved
        self._grouped: int | None = None  # samples for which the sampler grouped lengths then
        self._continues = False  # the run that was saved
        self._unlogged: list[float] = []
        self._since = 0

    def gather(self) -> None:
        """Gather every rank's loss since the last log. A collective call, so not part of `state_dict`."""
        assert self.loss is not None
        self._unlogged = self._trainer.accelerator.gather(self.loss).reshape(-1).tolist()
        self._since = last_logged(self._trainer)

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        owners = (*trainer.callback_handler.callbacks, trainer.control)
        stateful = [owner for owner in owners if isinstance(owner, ExportableState)]
        state = dataclasses.asdict(dataclasses.replace(trainer.state, stateful_callbacks=stateful))
        return {
            "state": state,
            "unlogged": self._unlogged,
            "since": self._since,
            "batch": _samples_in_a_step(trainer),
            "grouped": _samples_in_a_group(trainer),
            "files": self.files,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._unlogged, self._since = saved["unlogged"], saved["since"]
        self._continues = True
        self._batch, self._grouped = saved.get("batch"), saved.get("grouped")

    @property
    def has_same_steps(self) -> bool:
        """Whether a step has as many samples as one had when the checkpoint was saved."""
        return self._batch in (None, _samples_in_a_step(self._trainer))

    def report_data(self, restored: Restored, *, has_position: bool) -> None:
        """Report what the data does not continue exactly from: Trainer finds its place by the number of steps then."""
        if not self.has_same_steps:
            restored.approximated["data"] = (
                f"a step had {self._batch} samples and has {_samples_in_a_step(self._trainer)} now. Trainer finds its "
                "place in the data by the number of steps, so samples of this epoch repeat or are missed. Choose "
                "per_device_train_batch_size and gradient_accumulation_steps so that a step of all ranks has as many "
                "samples as before"
            )
        elif not has_position:
            restored.approximated["data"] = NO_POSITION
        elif self._grouped != _samples_in_a_group(self._trainer):
            restored.approximated["data"] = (
                f"lengths were grouped for {self._grouped} samples and are for {_samples_in_a_group(self._trainer)} "
                "now, which is another order: samples of this epoch repeat or are missed. Resume with as many samples "
                "on each rank"
            )
        if "data" in restored.approximated and self._trainer.args.process_index == 0:
            _log.warning("the resumed run is not exact: data: %s", restored.approximated["data"])

    def first_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of a batch. To that of the first one, what the run before has not logged yet is added, so that the
        next loss is logged over the same steps as in an uninterrupted run, and has the same sum to the last digit. It
        is left out of this run's mean loss."""
        if not self._continues:
            return loss
        self._continues = False
        trainer, rank = self._trainer, self._trainer.args.process_index
        mean = sum(self._unlogged) / len(self._unlogged)
        same_ranks = len(self._unlogged) == trainer.args.world_size
        more = self._unlogged[rank] if same_ranks else mean
        return more + loss if continue_log(trainer, self._since, mean) else loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class TotalLimit(Keep):
    """Retention by `save_total_limit`: so many in all, the best one among them. The newest is always kept."""

    def check(self, metrics: Mapping[str, float], where: str) -> None:
        """Accept NaN: such a checkpoint is never the best, and no reason to stop."""

    def cannot_rank(self, intact: Sequence[Manifest | Summary]) -> str:
        """Trainer itself raises where an evaluation lacks its metric; before the first, the newest are kept."""
        return ""

    def removable(self, newest_first: Sequence[Manifest | Summary], damaged: Collection[str] = ()) -> list[str]:
        intact = [manifest for manifest in newest_first if manifest.name not in damaged]
        best = self.best_of(intact[::-1])  # of equal ones, the first that was reached
        others = [manifest for manifest in intact if manifest not in best]
        kept = {manifest.name for manifest in [*intact[:1], *best, *others[: self.last - len(best)]]}
        newest = intact[0].sequence if intact else 0
        older = (manifest for manifest in newest_first if manifest.sequence < newest)
        return [manifest.name for manifest in older if manifest.name not in kept]


def total_limit(args: TrainingArguments) -> Keep | None:
    """The retention that a Trainer's arguments ask for; None if they set no limit."""
    if args.save_total_limit is None:
        return None
    limit, metric = max(1, args.save_total_limit), args.metric_for_best_model
    if metric is None:
        return TotalLimit(last=limit)
    mode = "max" if args.greater_is_better else "min"
    return TotalLimit(last=limit, best=1, metric=f"eval_{metric.removeprefix('eval_')}", mode=mode)


def _samples_in_a_step(trainer: Trainer) -> int:
    return int(trainer.get_total_train_batch_size(trainer.args))


def _samples_in_a_group(trainer: Trainer) -> int | None:
    """The number of samples for which `group_by_length` finds similar lengths: its order depends on it."""
    args = trainer.args
    grouped = getattr(args, "group_by_length", False) or "length" in str(getattr(args, "train_sampling_strategy", ""))
    return int(args.train_batch_size * args.gradient_accumulation_steps) if grouped else None


def logged_metrics(state: TrainerState) -> dict[str, float]:
    """The numbers that have been logged at this step."""
    entries = [entry for entry in state.log_history if entry.get("step") == state.global_step]
    found = {key: value for entry in entries for key, value in entry.items() if key not in ("step", "epoch")}
    return {key: value for key, value in found.items() if isinstance(value, int | float)}

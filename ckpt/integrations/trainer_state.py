"""What a Trainer keeps in its checkpoints beside weights and optimizer, and how many checkpoints it keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers.trainer_callback import ExportableState

from ckpt.formats.native.manifest import Manifest
from ckpt.integrations.epoch_start import EpochStart
from ckpt.load.restored import Restored
from ckpt.root.retention import Keep
from ckpt.util.console import say

PART = "trainer_state"


class TrainerPart:
    """The Trainer's state, and what it does not keep itself: the loss since it was last logged, of every rank.

    The main rank's is that of all, as in a Trainer's own checkpoints: ranks log different times.
    """

    of_main_rank = True

    def __init__(self, trainer: Any, start: EpochStart) -> None:
        self._trainer = trainer
        self._start = start
        self._batch: int | None = None  # samples in a step of all ranks, when it was saved
        self._unlogged: list[float] = []
        self._since = 0

    def gather(self) -> None:
        self._unlogged = self._trainer.accelerator.gather(self._trainer._tr_loss).reshape(-1).tolist()
        self._since = self._trainer._globalstep_last_logged

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        stateful = [one for one in (*trainer.callback_handler.callbacks, trainer.control) if _has_state(one)]
        state = dataclasses.asdict(dataclasses.replace(trainer.state, stateful_callbacks=stateful))
        return {
            "state": state,
            "unlogged": self._unlogged,
            "since": self._since,
            "start": self._start.state_dict(),
            "batch": _samples_in_a_step(trainer),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._unlogged, self._since = saved["unlogged"], saved["since"]
        self._start.load_state_dict(saved.get("start", {}))
        self._batch = saved.get("batch")

    def say_what_changed(self, restored: Restored) -> None:
        """Trainer finds its place by the number of steps, which is another place if a step has other samples."""
        now = _samples_in_a_step(self._trainer)
        if self._batch in (None, now):
            return
        restored.approximated["data"] = (
            f"a step had {self._batch} samples and has {now} now. Trainer finds its place in the data by the number of "
            "steps, so samples of this epoch repeat or are missed. Choose per_device_train_batch_size and "
            "gradient_accumulation_steps so that a step of all ranks has as many samples as before"
        )
        if self._trainer.args.process_index == 0:
            say(f"ckpt: data: {restored.approximated['data']}")

    def go_on(self) -> None:
        """Log the next loss over the same steps as an uninterrupted run. In the mean of this one it does not count."""
        trainer, rank = self._trainer, self._trainer.args.process_index
        mean = sum(self._unlogged) / len(self._unlogged)
        same_ranks = len(self._unlogged) == trainer.args.world_size
        trainer._tr_loss += self._unlogged[rank] if same_ranks else mean
        trainer._total_loss_scalar -= mean
        trainer._globalstep_last_logged = self._since


@dataclasses.dataclass(frozen=True, kw_only=True)
class TotalLimit(Keep):
    """As `save_total_limit` has it: so many in all, the best one among them. The newest stays in any case."""

    def check(self, metrics: Mapping[str, float], where: str) -> None:
        """A NaN is never the best, and no reason to stop."""

    def cannot_rank(self, intact: Sequence[Manifest]) -> str:
        """Trainer itself raises where an evaluation lacks its metric; before the first one, the newest stay."""
        return ""

    def removable(self, newest_first: Sequence[Manifest], damaged: Collection[str] = ()) -> list[str]:
        intact = [one for one in newest_first if one.name not in damaged]
        best = self._best(intact[::-1])  # of equals, the first that was reached
        others = [one for one in intact if one not in best]
        kept = {one.name for one in [*intact[:1], *best, *others[: self.last - len(best)]]}
        newest = intact[0].sequence if intact else 0
        return [one.name for one in newest_first if one.name not in kept and one.sequence < newest]


def total_limit(args: Any) -> Keep | None:
    if args.save_total_limit is None:
        return None
    limit, metric = max(1, args.save_total_limit), args.metric_for_best_model
    if metric is None:
        return TotalLimit(last=limit)
    mode = "max" if args.greater_is_better else "min"
    return TotalLimit(last=limit, best=1, metric=f"eval_{metric.removeprefix('eval_')}", mode=mode)


def _samples_in_a_step(trainer: Any) -> int:
    args = trainer.args
    return int(trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size)


def logged_metrics(state: Any) -> dict[str, float]:
    """What has been logged at this step."""
    logged = [one for one in state.log_history if one.get("step") == state.global_step]
    found = {key: value for one in logged for key, value in one.items() if key not in ("step", "epoch")}
    return {key: value for key, value in found.items() if isinstance(value, int | float)}


def _has_state(callback: Any) -> bool:
    return isinstance(callback, ExportableState)

"""What a checkpoint holds of a Trainer itself, and of its subclasses, such as TRL's; retention as its arguments say."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import shutil
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ckpt.compat.transformers import OF_THESE_RANKS, SAVE, continue_log, last_logged, names_of_subclass
from ckpt.errors import ConfigError
from ckpt.formats.native.manifest import Manifest
from ckpt.load.load_state import Restored
from ckpt.ranks.consensus import Ranks, Result, decide_together
from ckpt.root.catalog import Summary
from ckpt.root.retention import Keep
from ckpt.util.console import format_size

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
        """Bring the Trainer's state up to date, as its own save does, and gather every rank's loss since the last log.

        The latter is a collective call, so not part of `state_dict`.
        """
        trainer = self._trainer
        owners = (*trainer.callback_handler.callbacks, trainer.control)
        stateful = [owner for owner in owners if isinstance(owner, ExportableState)]
        current = dataclasses.replace(trainer.state, stateful_callbacks=stateful)
        trainer.state.stateful_callbacks = current.stateful_callbacks
        assert self.loss is not None
        self._unlogged = trainer.accelerator.gather(self.loss).reshape(-1).tolist()
        self._since = last_logged(trainer)

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "state": dataclasses.asdict(trainer.state),
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
                "per_device_train_batch_size and gradient_accumulation_steps so that a step of all ranks has the same "
                "number of samples as before"
            )
        elif not has_position:
            restored.approximated["data"] = NO_POSITION
        elif self._grouped != _samples_in_a_group(self._trainer):
            restored.approximated["data"] = (
                f"lengths were grouped for {self._grouped} samples and are for {_samples_in_a_group(self._trainer)} "
                "now, which changes the order: samples of this epoch repeat or are missed. Resume with the same number "
                "of samples on each rank"
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
    """Retention by `save_total_limit`: so many in all, the best one among them. The newest is always kept.

    The best is the Trainer's choice: it also evaluates between saves, and `evaluate` may not log the metric.
    """

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
    limit = max(1, args.save_total_limit)
    if args.metric_for_best_model is None:
        return TotalLimit(last=limit)
    return TotalLimit(last=limit, best=1, metric=_BEST, mode="max" if args.greater_is_better else "min")


def _samples_in_a_step(trainer: Trainer) -> int:
    return int(trainer.get_total_train_batch_size(trainer.args))


def _samples_in_a_group(trainer: Trainer) -> int | None:
    """The number of samples for which `group_by_length` finds similar lengths: its order depends on it."""
    args = trainer.args
    grouped = getattr(args, "group_by_length", False) or "length" in str(getattr(args, "train_sampling_strategy", ""))
    return int(args.train_batch_size * args.gradient_accumulation_steps) if grouped else None


_BEST = "best_metric"  # of a checkpoint that was the Trainer's best when it was saved


def logged_metrics(state: TrainerState) -> dict[str, float]:
    """The numbers that have been logged at this step, and the Trainer's best metric if it is of this step."""
    entries = [entry for entry in state.log_history if entry.get("step") == state.global_step]
    found = {key: value for entry in entries for key, value in entry.items() if key not in ("step", "epoch")}
    best = {_BEST: state.best_metric} if state.best_global_step == state.global_step else {}
    return {key: value for key, value in {**found, **best}.items() if isinstance(value, int | float)}


STATE_FILE = "trainer_state.json"
_MOST_BYTES = 16_000_000  # of an override's files: they are part of a checkpoint's JSON
SUBCLASS_PART = "trainer_subclass"


def insert_methods(
    trainer: Trainer, methods: Mapping[str, Callable[..., Any]], functions: Mapping[str, Callable[..., Any]]
) -> None:
    """Put methods between a trainer's class and `Trainer`: overrides run, and their `super()` reaches these.

    The trainer gets a subclass of its own class. Methods set on the trainer itself would hide overrides instead.
    `functions` replace those that the Trainer's methods call by a name of their module: this trainer gets copies of
    such methods, which find them under that name. No other trainer of the process changes.
    """
    own = type(trainer)
    if trainer.args.process_index == 0:
        _warn_of_uncalled(own, methods)
    members: dict[str, Any] = {name: _calling(method, functions) for name, method in _callers(functions).items()}
    members |= {name: _without_self(method) for name, method in methods.items()}
    inserted = type("CkptTrainer", (Trainer,), members)
    described = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    trainer.__class__ = type(own.__name__, (inserted,) if own is Trainer else (own, inserted), described)


def _callers(functions: Mapping[str, Any]) -> dict[str, FunctionType]:
    """The methods of Trainer that call one of these functions. Those without any would leave the data to chance."""
    methods = {name: method for name, method in vars(Trainer).items() if isinstance(method, FunctionType)}
    found = {name: method for name, method in methods.items() if functions.keys() & {*method.__code__.co_names}}
    uncalled = functions.keys() - {name for method in found.values() for name in method.__code__.co_names}
    if uncalled:
        raise ConfigError(
            f"the Trainer in transformers {transformers.__version__} does not call {', '.join(sorted(uncalled))}, so "
            "CkptCallback can't skip to its place in the data. CkptCallback works with transformers 4.56 and newer, "
            "and is tested up to 5.22."
        )
    return found


def _calling(method: FunctionType, functions: Mapping[str, Any]) -> FunctionType:
    names = {**method.__globals__, **functions}
    copied = FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)
    copied.__kwdefaults__ = method.__kwdefaults__
    return copied


def _without_self(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *given, **named: method(*given, **named)


def _is_overridden(own: type[Trainer], name: str) -> bool:
    return getattr(own, name) is not getattr(Trainer, name)


def _warn_of_uncalled(own: type[Trainer], methods: Mapping[str, Callable[..., Any]]) -> None:
    """Name overrides of methods that only the Trainer's own saving and loading call, which ckpt replaces."""
    called = {name for method in methods for name in inspect.unwrap(getattr(Trainer, method)).__code__.co_names}
    private = (name for name in called - methods.keys() if name.startswith(("_save", "_load")))
    uncalled = sorted(name for name in private if hasattr(Trainer, name) and _is_overridden(own, name))
    if uncalled:
        _log.warning(
            "%s overrides %s, which the Trainer calls for its own checkpoints but ckpt never calls. Move your code to "
            "_save_checkpoint and _load_optimizer_and_scheduler, which ckpt calls.", own.__name__, ", ".join(uncalled),
        )  # fmt: skip


class OverriddenSave:
    """Calls a trainer's `_save_checkpoint`, if its class overrides it, and keeps the files that it writes.

    Such a method writes into the folder `checkpoint-N` of `output_dir`. Its files become part of the checkpoint, and
    are in the folder that a resume gives to the Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.files: dict[str, bytes] = {}
        self._trainer = trainer
        self._own = type(trainer)
        self._reached_trainer = False

    def reach(self, *_: Any, **__: Any) -> None:
        """In place of the Trainer's own `_save_checkpoint`. The save follows, when the override has returned."""
        self._reached_trainer = True

    def call(self, ranks: Ranks) -> None:
        if not _is_overridden(self._own, SAVE.name):
            return
        trainer, name = self._trainer, f"{self._own.__name__}._save_checkpoint"
        folder = Path(trainer.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")
        decide_together(ranks, f"{name} (folder)", Result(), lambda _: _empty(folder))
        folder.mkdir(parents=True, exist_ok=True)
        self._reached_trainer = False
        SAVE.of(self._own)(trainer, trainer.model_wrapped, None)
        if not self._reached_trainer:
            raise ConfigError(
                f"{name} does not call super()._save_checkpoint(model, trial), so ckpt can't know what it saves. Call "
                f"super() in that method, or train without CkptCallback."
            )
        written = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        decide_together(ranks, f"{name} (files)", Result(written), lambda each: self._read(name, folder, each))
        shutil.rmtree(folder, ignore_errors=True)  # of every host; what was in it is part of the checkpoint

    def _read(self, name: str, folder: Path, written: list[list[str]]) -> None:
        elsewhere = sorted({path for paths in written for path in paths} - set(written[0]))
        if elsewhere:
            raise ConfigError(
                f"{name} wrote {', '.join(elsewhere)} to {folder} on another host, where the main process can't see "
                "them, so a resume would lack these files. Write the files on the main process, or to a shared "
                "output_dir."
            )
        sizes = {path: (folder / path).stat().st_size for path in written[0]}
        if sum(sizes.values()) > _MOST_BYTES:
            largest = max(sizes, key=lambda path: sizes[path])
            raise ConfigError(
                f"{name} wrote {format_size(sum(sizes.values()))} into {folder} (mostly in {largest}), but "
                f"CkptCallback saves such files only up to {format_size(_MOST_BYTES)} in total. Register large "
                "tensors as parameters or buffers of the model, which ckpt saves."
            )
        self.files = {path: (folder / path).read_bytes() for path in written[0]}


def _empty(folder: Path) -> None:
    """Remove what a save that was killed has left. A checkpoint that a Trainer itself wrote is not touched."""
    if (folder / STATE_FILE).exists():
        raise ConfigError(
            f"a Trainer without ckpt wrote the checkpoint {folder}, and this run would overwrite its files. Choose "
            "another output_dir, or move the folder away."
        )
    shutil.rmtree(folder, ignore_errors=True)


class SubclassState:
    """The attributes of a trainer that its class adds to those of Trainer; each rank has its own."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def names(self) -> list[str]:
        return names_of_subclass(self._trainer)

    def state_dict(self) -> dict[str, Any]:
        values = {name: _plain(getattr(self._trainer, name)) for name in self.names}
        return {"world_size": self._trainer.args.world_size, "values": values}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        same_ranks = saved["world_size"] == self._trainer.args.world_size
        for name in self.names:
            if name in saved["values"] and (same_ranks or name not in OF_THESE_RANKS):
                own = getattr(self._trainer, name)
                setattr(self._trainer, name, _restored(own, saved["values"][name], self._trainer.args.device))


def beside(trainer: Trainer) -> dict[str, Any]:
    """What is saved of a trainer beside what every Trainer has: attributes of its class, and models that change as
    well as the one that is trained (TRL's reference model with `sync_ref_model`)."""
    found: dict[str, Any] = {}
    state = SubclassState(trainer)
    if state.names:
        found[SUBCLASS_PART] = state
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__name__ == "SyncRefModelCallback" and callback.ref_model is not None:
            found["ref_model"] = callback.ref_model
    return found


def _plain(value: Any) -> Any:
    """The same as dicts and lists."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_plain(each) for each in value]
    return value


def _restored(own: Any, saved: Any, device: torch.device) -> Any:
    """What was saved, in the containers that the trainer has: a defaultdict or a bounded deque stays one."""
    if isinstance(own, dict) and isinstance(saved, dict):
        for key, each in saved.items():
            own[key] = _restored(own[key] if key in own or hasattr(own, "default_factory") else None, each, device)
        return own
    if isinstance(own, deque):
        own.clear()
        own.extend(_moved(saved, device))
        return own
    return _moved(saved, device)


def _moved(saved: Any, device: torch.device) -> Any:
    if isinstance(saved, torch.Tensor):
        return saved.to(device)
    if isinstance(saved, dict):
        return {key: _moved(each, device) for key, each in saved.items()}
    return [_moved(each, device) for each in saved] if isinstance(saved, list) else saved

"""Hugging Face Trainer: a callback through which it saves and resumes with ckpt."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeVar

import torch
import transformers
from accelerate import skip_first_batches
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import deepspeed_load_checkpoint
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

from ckpt.compat.private import Private
from ckpt.compat.transformers import (
    LOAD_BEST,
    LOAD_MODEL,
    LOAD_OPTIMIZER,
    LOG_SAVE_EVALUATE,
    SAVE,
)
from ckpt.errors import ConfigError, MissingError, Preempted
from ckpt.export.load_model import load_checkpoint_model
from ckpt.formats.checkpoint_name import name_of_step
from ckpt.integrations.trainer_data import TrainerData
from ckpt.integrations.trainer_push import TrainerPush
from ckpt.integrations.trainer_resume import ResumeSource
from ckpt.integrations.trainer_state import (
    PART,
    OverriddenSave,
    TrainerPart,
    beside,
    insert_methods,
    logged_metrics,
    total_limit,
)
from ckpt.manager import StateManager
from ckpt.options import ManagerOptions, inside, resolve_options
from ckpt.ranks.schedule_and_signals import EXIT_STATUS
from ckpt.root import catalog
from ckpt.state import rng
from ckpt.state.objects import KINDS
from ckpt.storage import Storage
from ckpt.util.option_values import names_of, refuse_unknown

T = TypeVar("T", bound=Trainer)


def trained_model(trainer: Trainer) -> nn.Module:
    """The model that is trained; under DeepSpeed the engine, whose master weights are loaded with it."""
    model: nn.Module = trainer.model_wrapped if trainer.is_deepspeed_enabled else trainer.model
    return model


def managed_objects(trainer: Trainer) -> dict[str, Any]:
    """What `StateManager` is given. An engine's optimizer and its own scheduler come with it."""
    model = trained_model(trainer)
    if trainer.args.save_only_model:
        return {"model": model}
    scheduler = trainer.lr_scheduler
    if trainer.is_deepspeed_enabled:
        in_engine = type(scheduler).__name__ == "DeepSpeedSchedulerWrapper"
        return {"model": model} if in_engine else {"model": model, "scheduler": scheduler}
    return {
        "model": model,
        "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
        "scheduler": scheduler,
        "scaler": trainer.accelerator.scaler,
    }


_NOT_ATTACHED = (
    "a callback can't see which Trainer it belongs to. Leave CkptCallback out of callbacks=[...], and attach it: "
    "trainer = CkptCallback(root).attach(Trainer(...))."
)
_DECIDED_ELSEWHERE = {"root", "save_every", "accelerator", *KINDS}  # by the Trainer and its arguments


class _CallbackOptions(ManagerOptions):
    called = "CkptCallback"


def refuse_foreign_options(options: Mapping[str, Any]) -> None:
    """Refuse options of a manager that the Trainer and its arguments decide, and those that do not exist."""
    taken = {*names_of(ManagerOptions)} - _DECIDED_ELSEWHERE
    if decided := sorted(options.keys() & _DECIDED_ELSEWHERE):
        raise ConfigError(
            f"CkptCallback has no option {', '.join(decided)}. Its options are {', '.join(sorted(taken))}. Set "
            f"all other options in the Trainer and its TrainingArguments."
        )
    refuse_unknown("CkptCallback", options, taken, inside())


def refuse_unsupported(trainer: Trainer, methods: Collection[str]) -> None:
    if trainer.is_deepspeed_enabled and trainer.args.save_only_model:
        raise ConfigError(
            "save_only_model=True has no effect with DeepSpeed, because CkptCallback always saves the complete engine. "
            "Leave out save_only_model, and get the model from a checkpoint with `ckpt merge`."
        )
    missing = [name for name in methods if not hasattr(trainer, name)]
    if missing:
        raise ConfigError(
            f"the Trainer in transformers {transformers.__version__} has no {', '.join(missing)}. CkptCallback works "
            "with transformers 4.56 and newer, and is tested up to 5.22."
        )


class CkptCallback(TrainerCallback):  # type: ignore[misc]
    """Lets a Trainer save and resume through ckpt: each save is atomic, verified, and written while training continues.

        trainer = CkptCallback("runs/mrpc").attach(Trainer(model, args, train_dataset=data))
        trainer.train(resume_from_checkpoint=True)      # the newest intact checkpoint, or a fresh start

    As usual, the Trainer's arguments decide when to save and what to keep: `save_strategy`, `save_steps`,
    `save_total_limit`, `load_best_model_at_end`. The Trainer writes no checkpoints of its own.

    `resume_from_checkpoint` may also be the name of a checkpoint, or a folder that a Trainer without this callback
    wrote. If the root has no checkpoint yet, `resume_from_checkpoint=True` loads the last checkpoint that the Trainer
    itself wrote to `output_dir`.

    Args:
        root: The place for the checkpoints: a path, a URL or a storage.
        **options: Options of `StateManager`: `keep`, `mirror`, `storage_options`, `saving`, `ranks`, `memory`,
            `signing`.
    """

    def __init__(self, root: str | os.PathLike[str] | Storage, **options: Any) -> None:
        refuse_foreign_options(options)
        self._options = resolve_options(options, _CallbackOptions)
        self._tiers = self._options.open_tiers(root)
        self._storage = self._tiers[0]
        self._trainer: Trainer = None
        self._own: dict[str, Callable[..., Any]] = {}  # the trainer's methods that ours call
        self._override: OverriddenSave
        self._manager: StateManager | None = None
        self._part: TrainerPart | None = None
        self._data: TrainerData | None = None
        self._source = ResumeSource(self._options, self._tiers)
        self._push: TrainerPush | None = None
        self._saved: set[str] = set()
        self._told_to_stop = False
        self._rng_is_due = False  # of a checkpoint that was loaded

    def attach(self, trainer: T) -> T:
        """Let a trainer save and resume through ckpt, and return the trainer."""
        around = {
            "train": self._train,
            "training_step": self._training_step,
            SAVE.name: self._save,
            LOG_SAVE_EVALUATE.name: self._log_save_evaluate,
        }
        self._override = OverriddenSave(trainer)
        beneath = {  # overrides of these are called, and reach them by super()
            SAVE.name: self._override.reach,
            LOAD_MODEL.name: self._unless_ours(LOAD_MODEL, lambda: None),  # part of _load
            LOAD_OPTIMIZER.name: self._unless_ours(LOAD_OPTIMIZER, self._load),
            LOAD_BEST.name: self._restore_best,
        }
        called: dict[str, Callable[..., Any]] = {
            "skip_first_batches": self._skip_first_batches,
            "deepspeed_load_checkpoint": self._load_engine,
        }
        if hasattr(
            transformers.trainer, "sort_checkpoints"
        ):  # since 5.5: of its own folders, to remove all but the best
            called["sort_checkpoints"] = lambda *_, **__: []
        refuse_unsupported(trainer, around.keys() | beneath.keys())
        self._push = TrainerPush(trainer)
        self._trainer = trainer
        self._own = {name: getattr(trainer, name) for name in around}
        insert_methods(trainer, beneath, called)
        for name, method in around.items():
            setattr(trainer, name, method)
        trainer.add_callback(self)
        return trainer

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        raise ConfigError(_NOT_ATTACHED)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._trainer is None:
            raise ConfigError(_NOT_ATTACHED)
        if self._source.name is None:
            self._open().resume()
        elif self._manager is None:
            raise ConfigError(
                f"{type(self._trainer).__name__}._load_optimizer_and_scheduler does not call super(), so ckpt could "
                f"not load {self._source.name}. Call super()._load_optimizer_and_scheduler(checkpoint) in your method."
            )
        assert self._data is not None
        self._data.begin()
        self._saved = {found.name for found in catalog.scan(self._storage) if found.committed}
        self._name_the_best(state)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.ignore_data_skip or not (state.epoch or 0) % 1:
            self._restore_rng()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._restore_rng()  # after the first batches of an epoch that was saved in its middle

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self._manager is not None
        self._manager.progress.step = state.global_step
        if self._manager.told_to_stop():
            self._told_to_stop = control.should_save = control.should_training_stop = True
        elif self._manager.session.due.schedule.is_due(state.global_step):  # SIGUSR1
            control.should_save = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._manager is not None and (curves := self._manager.session.state.curves) is not None:
            curves.note(state.global_step, logs or {})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._manager is not None and self._push is not None:
            self._push.finish(self._manager, in_haste=self._told_to_stop)

    def _train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, *others: Any, **named: Any
    ) -> TrainOutput:
        if trial is not None:
            raise ConfigError(
                "CkptCallback saves a single run, but a hyperparameter search has many. Search without CkptCallback."
            )
        self._told_to_stop = self._rng_is_due = False
        with ExitStack() as stack:
            stack.push(self._close)
            output_dir = self._trainer.args.output_dir
            resume = self._source.choose(resume_from_checkpoint or None, output_dir, stack)
            output = self._own["train"](resume, trial, *others, **named)
        if self._told_to_stop:
            raise Preempted(EXIT_STATUS)
        return output

    def _close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        manager, self._manager = self._manager, None
        self._source.release()
        self._release_data()
        if manager is not None:
            manager.__exit__(kind, error, trace)

    def _open(self) -> StateManager:
        """Build a manager for the objects that the Trainer has just prepared."""
        trainer = self._trainer
        if self._manager is not None:  # the Trainer starts again, with smaller batches
            self._release_data()
            self._manager.close()
        given = self._options
        self._manager = StateManager(
            self._storage,
            **managed_objects(trainer),
            keep=total_limit(trainer.args) if given.keep is None else given.keep,
            mirror=given.mirror,
            storage_options=given.storage_options,
            saving=given.saving,
            ranks=given.ranks,
            memory=given.memory,
            signing=given.signing,
        )
        self._manager.session.saves.unmanaged.quiet = True  # what is saved, and when, is for its arguments to say
        self._manager.session.loop.quiet = True  # `TrainerData` follows its loader
        self._part = TrainerPart(trainer)
        self._manager.register(**{PART: self._part}, **beside(trainer))
        self._data = TrainerData(trainer, self._manager)
        return self._manager

    def _release_data(self) -> None:
        data, self._data = self._data, None
        if data is not None:
            data.release()

    def _save(self, model: nn.Module, trial: Any = None) -> None:
        state, manager, before = self._trainer.state, self._prepare_save(), set(self._saved)
        name = name_of_step(state.global_step)
        self._saved.add(name)
        self._name_the_best(state)
        if manager.save_state(name, metrics=logged_metrics(state)) is None:  # left out
            self._saved = before
            self._name_the_best(state)
        elif self._push is not None and not self._told_to_stop:
            self._push.after_save(manager)

    def _prepare_save(self) -> StateManager:
        """Bring everything to the step that was just made, as a checkpoint is to have it."""
        trainer, manager, part = self._trainer, self._manager, self._part
        assert manager is not None
        assert part is not None
        self._override.call(manager.session.ranks)
        part.files = self._override.files
        trainer.store_flos()
        part.gather()
        if self._data is not None and trainer.args.process_index == 0:
            self._data.warn_unfollowed()
        manager.progress.step = trainer.state.global_step
        return manager

    def _training_step(self, *given: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = self._own["training_step"](*given, **named)
        return loss if self._part is None else self._part.first_loss(loss)

    def _log_save_evaluate(self, tr_loss: torch.Tensor, *given: Any, **named: Any) -> Any:
        """After the step is logged, evaluated and maybe saved, take it into memory where that is due."""
        if self._part is not None:
            self._part.loss = tr_loss
        result = self._own[LOG_SAVE_EVALUATE.name](tr_loss, *given, **named)
        session = self._manager.session if self._manager is not None else None
        if session is not None and session.memory is not None:
            session.memory.stepped(session.loop.progress.step)
            if session.memory.is_due(session.loop.progress.step) and not session.state.is_saved:
                self._prepare_save()
                session.saves.to_memory()
        return result

    def _skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """In place of Accelerate's function, which builds another loader, in which positions and generators are
        unknown: the loader that is followed skips by itself."""
        ours = self._data is not None and self._data.skip(dataloader, num_batches)
        return dataloader if ours else skip_first_batches(dataloader, num_batches)

    def _load_engine(self, engine: Any, *given: Any, **named: Any) -> None:
        """In place of transformers' function, which loads DeepSpeed's own files. `_load` loads what the root has."""
        if self._source.name is None:
            deepspeed_load_checkpoint(engine, *given, **named)

    def _name_the_best(self, state: TrainerState) -> None:
        best = name_of_step(state.best_global_step or 0)
        if best in self._saved:
            state.best_model_checkpoint = f"{self._storage.url}/{best}"

    def _unless_ours(self, name: Private, load: Callable[[], None]) -> Callable[..., None]:
        """A method that calls `load` for a checkpoint in the root, and the trainer's own method for other folders."""

        def load_or_delegate(*given: Any, **named: Any) -> None:
            if self._source.name is None:
                name.of(Trainer)(self._trainer, *given, **named)
            else:
                load()

        return load_or_delegate

    def _load(self) -> None:
        """Load everything at once, now that model, optimizer and scheduler are as training will use them.

        The random generators are restored when the data is at its position (`TrainerData`), or by `_restore_rng`.
        """
        assert self._source.name is not None
        before = rng.capture()
        manager = self._open()
        restored = manager.resume() if self._source.in_memory else manager.load_state(self._source.name)
        rng.restore(before)
        if restored is None or restored.name != self._source.name:
            raise MissingError(
                f"another process removed {self._source.name} while ckpt was loading it. Start the training again."
            )
        assert self._part is not None
        assert self._data is not None
        self._data.resumes(same_steps=self._part.has_same_steps)
        self._part.report_data(restored, has_position=self._data.has_position)
        self._source.release()
        self._rng_is_due = True

    def _restore_rng(self) -> None:
        """Put the generators back, unless the data did when it came to its position, and draws from them since."""
        if self._rng_is_due and self._manager is not None and not (self._data is not None and self._data.is_exact):
            self._manager.rewind_rng()
        self._rng_is_due = False

    def _restore_best(self) -> None:
        assert self._manager is not None
        assert self._push is not None
        self._push.settle(self._manager)
        self._manager.wait()
        best = self._trainer.state.best_model_checkpoint.rpartition("/")[2]
        if best in self._saved:
            trust = self._manager.session.trust.of_named()
            load_checkpoint_model(self._storage, best, trained_model(self._trainer), trust=trust)
        else:
            LOAD_BEST.of(Trainer)(self._trainer)

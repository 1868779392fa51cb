"""What subclasses of Trainer, such as TRL's, add to a checkpoint: by overriding its methods, and in memory alone."""

from __future__ import annotations

import inspect
import logging
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ckpt.compat.transformers import OF_THESE_RANKS, SAVE, names_of_subclass
from ckpt.errors import ConfigError
from ckpt.ranks.consensus import Result, decide_together
from ckpt.ranks.group import Ranks
from ckpt.util.console import format_size

_log = logging.getLogger("ckpt")
STATE_FILE = "trainer_state.json"
_MOST_BYTES = 16_000_000  # of an override's files: they are part of a checkpoint's JSON
PART = "trainer_subclass"


def insert_methods(trainer: Trainer, methods: Mapping[str, Callable[..., Any]]) -> None:
    """Put methods between a trainer's class and `Trainer`: overrides run, and their `super()` reaches these.

    The trainer gets a subclass of its own class. Methods set on the trainer itself would hide overrides instead.
    """
    own = type(trainer)
    _warn_of_uncalled(own, methods)
    inserted = type("CkptTrainer", (Trainer,), {name: _without_self(method) for name, method in methods.items()})
    described = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    trainer.__class__ = type(own.__name__, (inserted,) if own is Trainer else (own, inserted), described)


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
            "%s overrides %s. The Trainer calls that for its own checkpoints, and ckpt does not. Keep what it adds in "
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
                f"{name} does not call super()._save_checkpoint(model, trial), so ckpt cannot know what it saves "
                "instead. Call it there, or train without CkptCallback."
            )
        written = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        decide_together(ranks, f"{name} (files)", Result(written), lambda each: self._read(name, folder, each))
        shutil.rmtree(folder, ignore_errors=True)  # of every host; what was in it is part of the checkpoint

    def _read(self, name: str, folder: Path, written: list[list[str]]) -> None:
        elsewhere = sorted({path for paths in written for path in paths} - set(written[0]))
        if elsewhere:
            raise ConfigError(
                f"{name} wrote {', '.join(elsewhere)} on a host whose {folder} the main process does not see, so these "
                "files would be missing after a resume. Write them on the main process, or to a shared output_dir."
            )
        sizes = {path: (folder / path).stat().st_size for path in written[0]}
        if sum(sizes.values()) > _MOST_BYTES:
            largest = max(sizes, key=lambda path: sizes[path])
            raise ConfigError(
                f"{name} wrote {format_size(sum(sizes.values()))} into {folder} (most of it: {largest}). CkptCallback "
                f"keeps up to {format_size(_MOST_BYTES)} of such files. Make large tensors parameters or buffers of "
                "the model, which ckpt saves."
            )
        self.files = {path: (folder / path).read_bytes() for path in written[0]}


def _empty(folder: Path) -> None:
    """Remove what a save that was killed has left. A checkpoint that a Trainer itself wrote is not touched."""
    if (folder / STATE_FILE).exists():
        raise ConfigError(
            f"{folder} is a checkpoint of a Trainer without ckpt, and this run would overwrite its files. Choose "
            "another output_dir, or move it away."
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
        found[PART] = state
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

"""What subclasses of Trainer, such as TRL's, keep in memory alone, and would begin anew with after a resume."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer

PART = "trainer_subclass"
_NAMES = (  # attributes of TRL's trainers
    "_step",  # by which GRPO and RLOO know when to generate
    "_buffered_inputs",  # completions that are trained on for several steps
    "_metrics",  # those since the last log
    "_total_train_tokens",
    "_logs",  # completions since the last log
    "entropy_coef",
    "_last_world_entropy",
    "_entropy_window_stats",
)
_NOT_SAVED = ("images",)  # pictures of a log, which are no state
_OF_THESE_RANKS = ("_buffered_inputs",)  # made again where the number of ranks is another


class SubclassState:
    """The attributes of a trainer that its class adds to those of Trainer; each rank has its own."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def names(self) -> list[str]:
        return [name for name in _NAMES if name in vars(self._trainer)]

    def state_dict(self) -> dict[str, Any]:
        values = {name: _plain(getattr(self._trainer, name)) for name in self.names}
        return {"world_size": self._trainer.args.world_size, "values": values}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        same_ranks = saved["world_size"] == self._trainer.args.world_size
        for name in self.names:
            if name in saved["values"] and (same_ranks or name not in _OF_THESE_RANKS):
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
        return {key: _plain(each) for key, each in value.items() if key not in _NOT_SAVED}
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

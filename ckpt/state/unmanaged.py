"""Warnings: state that checkpoints cannot restore, objects that the manager was not given, training without saves."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckpt.compat.torch import version_of
from ckpt.state.parts import Caveats
from ckpt.state.registry import StateRegistry, weakly
from ckpt.state.unwrap import is_fsdp1, parameters_in

_log = logging.getLogger("ckpt")


_AT_STEPS = (1, 5, 25, 125)  # it is looked at what is managed, and at saves
_CHECKS = 8  # of the managed objects, because each takes time proportional to the number of parameters
_LONG = 1000  # optimizer steps without a call of the manager after which it warns


class UnmanagedWatch:
    """Compares what is trained with what is saved, and warns once about each difference.

    Only actual training is considered: a manager for inference gets no warning. `quiet` if an integration decides what
    is saved, and when.
    """

    def __init__(self, managed: StateRegistry, remarks: Caveats, save_every: int | str | None) -> None:
        self.quiet = False
        self.resumed_from: str | None = None  # the checkpoint's name
        self._managed = managed
        self._remarks = remarks
        self._save_every = save_every
        self._has_saved = False
        self._steps = 0  # calls of `manager.step`
        self._updates = 0  # steps of any optimizer of the models
        self._checks = 0
        self._first_epoch: int | None = None
        self._ours: dict[int, bool] = {}  # optimizers by identity: whether they train managed models
        self._versions: dict[int, int | None] = {}  # of parameters that no managed optimizer has, by identity
        self._hook = register_optimizer_step_post_hook(weakly(self._on_step))

    def stepped(self) -> None:
        """`manager.step` was called."""
        self._steps += 1
        if self._steps in _AT_STEPS:
            self._check()

    def trained(self, epoch: int) -> None:
        """A batch was trained on. The first batch of another epoch shows that an epoch is over."""
        if self._first_epoch is None:
            self._first_epoch = epoch
        elif epoch > self._first_epoch and not self._has_saved:
            self._tell_unsaved("an epoch of training is over and nothing was saved")

    def saving(self) -> None:
        self._has_saved = True
        self._check()

    def close(self) -> None:
        self._hook.remove()
        if not self._has_saved and (self._steps or self._updates):
            self._tell_unsaved("training is over and nothing was saved", steps=True)

    def _tell_unsaved(self, what: str, *, steps: bool = False) -> None:
        if self._save_every is None:
            why = "no save_every= was given, and save_state() was not called"
        elif not self._steps:
            why = f"save_every={self._save_every!r} counts the calls of manager.step(), and there was none"
        else:
            why = f"save_every={self._save_every!r}, and there were {self._steps} steps" if steps else ""
        if why and not self.quiet:
            after = f"begin at {self.resumed_from} again" if self.resumed_from else "start from scratch"
            self._remarks.tell(f"unsaved/{what}", f"{what}: {why}. The next run would {after}.")

    def _check(self) -> None:
        if self._checks < _CHECKS and not self.quiet:
            self._checks += 1
            self._check_objects()
            self._check_changed()

    def _check_objects(self) -> None:
        managed = self._managed
        if not (managed.parts or managed.generators):
            self._tell("nothing", "no object is managed, so a resume restores none. StateManager(root, model=...).")
        parameters = self._parameters()
        for key, optimizer in managed.optimizers_by_key().items():
            own = _parameters_of(optimizer)
            if parameters and own and not own & parameters and not self._has_flat_parameters():
                self._tell(
                    key,
                    f"{key}: none of its parameters belongs to the model, so it does not train what ckpt saves. Build "
                    "the optimizer from the parameters of the model that is managed, after it was wrapped or moved.",
                )
            elif _is_scheduled(optimizer) and not self._has_scheduler_of(optimizer):
                self._tell(
                    f"{key}/scheduler",
                    f"{key}: an LR scheduler was built for it and is not managed, so its schedule starts over after a "
                    "resume. Pass it too: StateManager(root, ..., scheduler=scheduler).",
                )

    def _has_scheduler_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a managed scheduler may be this optimizer's: those of wrappers do not say whose they are."""
        others = [other for other in self._managed.optimizers if other is not optimizer]
        schedulers = (held for held in self._held() if hasattr(held, "get_last_lr"))
        owners = [getattr(scheduler, "optimizer", None) for scheduler in schedulers]
        return any(all(owner is not other for other in others) for owner in owners)

    def _held(self) -> list[Any]:
        """The managed objects that are neither models nor optimizers, and their attributes, also those in lists."""
        registered = self._managed.registered()
        attributes = [value for owner in registered for value in getattr(owner, "__dict__", {}).values()]
        contained = [item for value in attributes if isinstance(value, list | tuple) for item in value]
        return [*registered, *attributes, *contained]

    def _check_changed(self) -> None:
        """Warn about parameters that have gradients and change, but belong to no managed optimizer."""
        owned: set[int] = set().union(*map(_parameters_of, self._optimizers()))
        if self._has_optimizers_of_others():
            return
        changed = []
        for key, model in self._managed.models.items():
            if all(id(parameter) in owned for parameter in parameters_in(model)):
                continue  # as in most runs; to name parameters takes long
            for name, parameter in model.named_parameters():
                if id(parameter) in owned or not parameter.requires_grad:
                    continue
                before = self._versions.setdefault(id(parameter), version_of(parameter))
                if before != version_of(parameter) and parameter.grad is not None:
                    changed.append(f"{key}: {name}")
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            self._tell_unmanaged(f"{', '.join(changed[:3])}{more} changed, and no managed optimizer has them")

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called after a step of any optimizer of this process."""
        ours = self._ours.get(id(optimizer))
        if ours is None:
            ours = self._ours[id(optimizer)] = self._trains(optimizer)
            weakref.finalize(optimizer, self._ours.pop, id(optimizer), None)
            if ours and not self._is_managed(optimizer):
                self._tell_unmanaged(f"{_named(optimizer)} trains the model and is not managed")
            if ours and getattr(optimizer, "grad_scale", None) is not None and not self._has_scaler():
                self._tell(
                    "unmanaged scaler",
                    f"a GradScaler steps {_named(optimizer)} and is not managed, so its scale starts over after a "
                    "resume. Pass it too: StateManager(root, ..., scaler=scaler).",
                )
        if ours:
            self._updates += 1
            if self._updates == _LONG and not self._has_saved and self._first_epoch is None:
                self._tell_unsaved(f"{_LONG} steps of training were made and nothing was saved")

    def _has_scaler(self) -> bool:
        return any(hasattr(held, "get_scale") for held in self._held())

    def _trains(self, optimizer: torch.optim.Optimizer) -> bool:
        return not self._parameters().isdisjoint(_parameters_of(optimizer))

    def _parameters(self) -> set[int]:
        """The identities of the managed models' parameters."""
        return {id(parameter) for model in self._managed.models.values() for parameter in parameters_in(model)}

    def _is_managed(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(managed is optimizer for managed in self._optimizers()) or self._has_optimizers_of_others()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The managed optimizers, also those registered as objects or as attributes of one."""
        managed = [*self._managed.optimizers, *_only_optimizers(self._held())]
        inner = (getattr(optimizer, "optim", None) for optimizer in managed)  # ZeroRedundancyOptimizer steps its own
        return [*managed, *_only_optimizers(inner)]

    def _has_optimizers_of_others(self) -> bool:
        """Whether an engine or a foreign wrapper steps optimizers of its own."""
        return any(not isinstance(stepper, torch.optim.Optimizer) for stepper in self._managed.steppers())

    def _has_flat_parameters(self) -> bool:
        return self._has_optimizers_of_others() or any(map(is_fsdp1, self._managed.models.values()))

    def _tell_unmanaged(self, what: str) -> None:
        self._tell(
            "unmanaged optimizer",
            f"{what}: the state of that optimizer starts over after a resume. Give it as well: "
            "StateManager(root, model=..., optimizer=...), or optimizer={'a': ..., 'b': ...}.",
        )

    def _tell(self, key: str, text: str) -> None:
        if not self.quiet:
            self._remarks.note(key, text)
            self._remarks.tell_lasting()


def _parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """The identities of an optimizer's parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler was built for it: that notes the first learning rate, and counts its steps. A checkpoint may
    have brought the rate alone."""
    return "step" in vars(optimizer) and any("initial_lr" in group for group in optimizer.param_groups)


def _only_optimizers(objects: Iterable[object]) -> list[torch.optim.Optimizer]:
    return [value for value in objects if isinstance(value, torch.optim.Optimizer)]


def _named(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__name__} of {sum(len(group['params']) for group in optimizer.param_groups)} tensors"

"""What a run has forgotten to give to its manager, or to save."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckpt.state.caveats import Caveats
from ckpt.state.fsdp1 import is_fsdp1
from ckpt.state.registry import StateRegistry

_LOOKS = 4
_LONG = 1000  # steps of an optimizer after which a manager that nobody has called is mentioned


class UnmanagedWatch:
    """Follows what is trained and what is saved, and tells the difference, once each.

    It goes by what happens, not by what is missing: a manager for inference hears nothing. `quiet` where somebody else
    decides what is kept, and when.
    """

    def __init__(self, managed: StateRegistry, remarks: Caveats, save_every: int | None) -> None:
        self.quiet = False
        self.resumed_from: str | None = None  # the checkpoint's name
        self._managed = managed
        self._remarks = remarks
        self._save_every = save_every
        self._saves = 0
        self._steps = 0  # calls of `manager.step`
        self._updates = 0  # steps of any optimizer of the models
        self._looks = 0
        self._first_epoch: int | None = None
        self._ours: dict[int, bool] = {}  # optimizers by identity: whether they train what is managed here
        self._versions: dict[int, int] = {}  # of parameters that no optimizer has
        self._hook = register_optimizer_step_post_hook(weakly(self._updated))

    def stepped(self) -> None:
        """`manager.step` was called."""
        self._steps += 1
        self._look()

    def trained(self, epoch: int) -> None:
        """A batch was trained on. The first one of another epoch shows that an epoch is over."""
        if self._first_epoch is None:
            self._first_epoch = epoch
        elif epoch > self._first_epoch and not self._saves:
            self._tell_unsaved("an epoch of training is over and nothing was saved")

    def saving(self) -> None:
        self._saves += 1
        self._look()

    def close(self) -> None:
        self._hook.remove()
        if not self._saves and (self._steps or self._updates):
            self._tell_unsaved("training is over and nothing was saved", steps=True)

    def _tell_unsaved(self, what: str, *, steps: bool = False) -> None:
        if self._save_every is None:
            why = "no save_every= was given, and save_state() was not called"
        elif not self._steps:
            why = f"save_every={self._save_every} counts the calls of manager.step(), and there was none"
        else:
            why = f"save_every={self._save_every}, and there were {self._steps} steps" if steps else ""
        if why and not self.quiet:
            after = f"begin at {self.resumed_from} again" if self.resumed_from else "start afresh"
            self._remarks.tell(f"unsaved/{what}", f"{what}: {why}. The next run would {after}.")

    def _look(self) -> None:
        """At what is managed, a few times: looking takes as long as there are parameters."""
        if self._looks < _LOOKS and not self.quiet:
            self._looks += 1
            self._check_objects()
            self._check_changed()

    def _check_objects(self) -> None:
        managed = self._managed
        if not (managed.parts or managed.generators):
            self._tell("nothing", "no object is managed, so a resume brings none back. StateManager(root, model=...).")
        parameters = {id(one) for model in managed.models.values() for one in model.parameters()}
        for key, optimizer in managed.optimizers_by_key().items():
            own = {id(one) for group in optimizer.param_groups for one in group["params"]}
            if parameters and own and not own & parameters and not self._has_flat_parameters():
                self._tell(
                    key,
                    f"{key}: none of its parameters is one of the model's, so it does not train what is saved. Build "
                    "the optimizer from the parameters of the model that is managed, after it was wrapped or moved.",
                )

    def _check_changed(self) -> None:
        """Parameters that get gradients and change, and that no optimizer here has."""
        owned = {id(p) for one in self._optimizers() for group in one.param_groups for p in group["params"]}
        if self._has_optimizers_of_others():
            return
        changed = []
        for key, model in self._managed.models.items():
            for name, one in model.named_parameters():
                if id(one) in owned or not one.requires_grad:
                    continue
                before = self._versions.setdefault(id(one), one._version)
                if before != one._version and one.grad is not None:
                    changed.append(f"{key}: {name}")
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            self._tell_unmanaged(f"{', '.join(changed[:3])}{more} changed, and no managed optimizer has them")

    def _updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Some optimizer of this process has made a step."""
        ours = self._ours.get(id(optimizer))
        if ours is None:
            ours = self._ours[id(optimizer)] = self._trains(optimizer)
            weakref.finalize(optimizer, self._ours.pop, id(optimizer), None)
            if ours and not self._is_managed(optimizer):
                self._tell_unmanaged(f"{_named(optimizer)} trains the model and is not managed")
        if ours:
            self._updates += 1
            if self._updates == _LONG and not (self._steps or self._saves) and self._first_epoch is None:
                self._tell_unsaved(f"{_LONG} steps of training were made and nothing was saved")

    def _trains(self, optimizer: torch.optim.Optimizer) -> bool:
        parameters = {id(one) for model in self._managed.models.values() for one in model.parameters()}
        return any(id(one) in parameters for group in optimizer.param_groups for one in group["params"])

    def _is_managed(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(one is optimizer for one in self._optimizers()) or self._has_optimizers_of_others()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that are managed, also as registered objects, or by one."""
        registered = self._managed.registered()
        inside = (one for value in registered for one in getattr(value, "__dict__", {}).values())
        found = [one for one in (*registered, *inside) if isinstance(one, torch.optim.Optimizer)]
        managed = [*self._managed.optimizers, *found]
        wrapped = (getattr(one, "optim", None) for one in managed)  # ZeroRedundancyOptimizer steps one of its own
        return [*managed, *(one for one in wrapped if isinstance(one, torch.optim.Optimizer))]

    def _has_optimizers_of_others(self) -> bool:
        """Whether an engine or a wrapper of somebody else steps optimizers of its own."""
        return any(not isinstance(one, torch.optim.Optimizer) for one in self._managed.steppers())

    def _has_flat_parameters(self) -> bool:
        models: list[nn.Module] = list(self._managed.models.values())
        return self._has_optimizers_of_others() or any(is_fsdp1(one) for one in models)

    def _tell_unmanaged(self, what: str) -> None:
        self._tell(
            "unmanaged optimizer",
            f"{what}: the state of that optimizer begins anew after a resume. Give it as well: "
            "StateManager(root, model=..., optimizer=...), or optimizer={'a': ..., 'b': ...}.",
        )

    def _tell(self, key: str, text: str) -> None:
        if not self.quiet:
            self._remarks.note(key, text)
            self._remarks.tell_lasting()


def _named(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__name__} of {sum(len(group['params']) for group in optimizer.param_groups)} tensors"


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The same method, which does not keep its object: loaders and optimizers, which call it, may outlive that."""
    found = weakref.WeakMethod(method)

    def call(*given: Any) -> None:
        method = found()
        if method is not None:
            method(*given)

    return call

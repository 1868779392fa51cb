"""Accumulation windows: gradients that no step of their optimizer has used yet.

Gradients that are still there after a step have done their work: the common loop clears them before the next backward
pass. What a backward pass has added since is lost by a resume, unless it is saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ckpt.formats.layout import is_sharded, local_tensor
from ckpt.state.deepspeed.engine import is_engine
from ckpt.state.fsdp1 import is_fsdp1
from ckpt.state.unwrap import modules_in

_MARK = "_ckpt_used_as"  # on a gradient: its version when a step had used it
_SAMPLE = 64  # parameters looked at after each step, evenly spread: a fraction of a millisecond


class Windows:
    """Notices what is added to gradients after a step.

    A step marks the gradients that it has used with their versions. One that was added to since has another version,
    and one that was made anew has no mark.
    """

    def __init__(self) -> None:
        self._samples: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, list[Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self._hooks: list[Any] = []

    def watch(self, optimizers: Iterable[Any]) -> None:
        method = weakref.WeakMethod(self._used)  # an optimizer may outlive the manager

        def after_step(optimizer: Any, *_: Any) -> None:
            found = method()
            if found is not None and isinstance(optimizer, torch.optim.Optimizer):
                found(optimizer)

        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_post_hook(after_step))

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def open(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """The optimizers for which gradients other than zero wait."""
        return [one for one in optimizers if self._is_fresh(one) and _is_non_zero(one)]

    def _used(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self._sample(optimizer):
            gradient = parameter.grad
            if gradient is not None:
                setattr(gradient, _MARK, _version(gradient))

    def _is_fresh(self, optimizer: torch.optim.Optimizer) -> bool:
        gradients = (parameter.grad for parameter in self._sample(optimizer))
        return any(one is not None and getattr(one, _MARK, None) != _version(one) for one in gradients)

    def _sample(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        total = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._samples.get(optimizer)
        if known is None or known[0] != total:
            every = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
            step = max(1, -(-len(every) // _SAMPLE))
            known = self._samples[optimizer] = total, every[::step]
        return known[1]


def _version(gradient: Any) -> int:
    piece = getattr(gradient, "_local_tensor", gradient)  # of a DTensor; FSDP 2 adds to that
    version: int = piece._version
    return version


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The gradients that are there; of those that are spread, the pieces."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None:
                yield local_tensor(gradient) if is_sharded(gradient) else gradient


def _is_non_zero(optimizer: torch.optim.Optimizer) -> bool:
    return any(bool((one._values() if one.is_sparse else one).any()) for one in _gradients(optimizer))


def obstacle(models: Mapping[str, nn.Module], waiting: Iterable[torch.optim.Optimizer] = ()) -> str | None:
    """Why gradients that wait cannot be saved; none if they can be."""
    if any(is_engine(model) for model in models.values()):
        return "which DeepSpeed keeps to itself"
    if any(is_fsdp1(model) for model in models.values()):
        return "which FSDP 1 keeps to itself"
    pieces = (one for optimizer in waiting for one in _gradients(optimizer))
    return None if all(type(one) is torch.Tensor and one.layout is torch.strided for one in pieces) else "some sparse"


def holds_unsharded(models: Mapping[str, nn.Module]) -> bool:
    """Whether FSDP 2 holds gradients that it has not divided yet: `set_requires_gradient_sync(False)`."""
    return any(
        _gradient(parameter) is not None
        for model in models.values()
        for module in modules_in(model)
        for parameter in _fsdp2_parameters(module)
    )


def _fsdp2_parameters(module: nn.Module) -> Iterable[Any]:
    find = getattr(type(module), "_get_fsdp_state", None)
    group = getattr(find(module), "_fsdp_param_group", None) if find is not None else None
    return getattr(group, "fsdp_params", ())


def _gradient(parameter: Any) -> Any:
    kept = getattr(parameter, "unsharded_accumulated_grad", None)
    return kept if kept is not None else getattr(getattr(parameter, "_unsharded_param", None), "grad", None)

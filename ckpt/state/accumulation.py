"""Accumulation windows: gradients that no step of their optimizer has used yet.

Gradients that remain after a step have been used: the common loop clears them before the next backward pass. Gradients
that a backward pass has added since are lost by a resume, unless they are saved.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ckpt.compat.torch import has_unsharded_gradients, version_of
from ckpt.formats.sharded_tensors import is_sharded, local_tensor
from ckpt.state.unwrap import is_engine, is_fsdp1, kinds_in, modules_in

_MARK = "_ckpt_used_as"  # attribute of a gradient: its version when a step used it
_SAMPLE = 64  # evenly spaced parameters examined after each step: a fraction of a millisecond


class Windows:
    """Detects gradients that were added after a step.

    A step hook marks the gradients that the step has used with their versions. A gradient that was added to since has
    another version, and a new one has no mark.
    """

    def __init__(self) -> None:
        self._samples: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, list[Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self._hooks: list[Any] = []

    def watch(self, optimizers: Iterable[Any]) -> None:
        method = weakref.WeakMethod(self._mark_used)  # an optimizer may outlive the manager

        def after_step(optimizer: Any, *_: Any) -> None:
            mark_used = method()
            if mark_used is not None and isinstance(optimizer, torch.optim.Optimizer):
                mark_used(optimizer)

        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_post_hook(after_step))

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def open(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """The optimizers that have unused gradients other than zero."""
        return [optimizer for optimizer in optimizers if self._is_fresh(optimizer) and _is_non_zero(optimizer)]

    def _mark_used(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self._sample(optimizer):
            gradient = parameter.grad
            if gradient is not None:
                setattr(gradient, _MARK, _version(gradient))

    def _is_fresh(self, optimizer: torch.optim.Optimizer) -> bool:
        gradients = (parameter.grad for parameter in self._sample(optimizer))
        return any(grad is not None and getattr(grad, _MARK, None) != _version(grad) for grad in gradients)

    def _sample(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        total = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._samples.get(optimizer)
        if known is None or known[0] != total:
            every = [value for group in optimizer.param_groups for value in group["params"] if value.requires_grad]
            step = max(1, -(-len(every) // _SAMPLE))
            known = self._samples[optimizer] = total, every[::step]
        return known[1]


def _version(gradient: Any) -> int | None:
    local = local_tensor(gradient) if is_sharded(gradient) else gradient  # FSDP 2 accumulates into the shard
    return version_of(local)


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The existing gradients; of sharded ones this rank's shards."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None:
                yield local_tensor(gradient) if is_sharded(gradient) else gradient


def _is_non_zero(optimizer: torch.optim.Optimizer) -> bool:
    return any(bool((grad.coalesce().values() if grad.is_sparse else grad).any()) for grad in _gradients(optimizer))


def obstacle(models: Mapping[str, nn.Module], waiting: Iterable[torch.optim.Optimizer] = ()) -> str | None:
    """Why the unused gradients of these optimizers cannot be saved; None if they can."""
    if any(is_engine(model) for model in models.values()):
        return "which DeepSpeed keeps to itself"
    if any(is_fsdp1(model) for model in models.values()):
        return "which FSDP 1 keeps to itself"
    gradients = (gradient for optimizer in waiting for gradient in _gradients(optimizer))
    plain = all(type(gradient) is torch.Tensor and gradient.layout is torch.strided for gradient in gradients)
    return None if plain else "some sparse"


def holds_unsharded(models: Mapping[str, nn.Module]) -> bool:
    """Whether FSDP 2 holds gradients that it has not sharded yet: `set_requires_gradient_sync(False)`."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a sharded module has imported it
    if fsdp is None:
        return False
    return any(
        isinstance(module, fsdp.FSDPModule) and has_unsharded_gradients(module)
        for model in models.values()
        if any(isinstance(module, fsdp.FSDPModule) for module in kinds_in(model))
        for module in modules_in(model)
    )

"""Whether a script trains on the batches that it is given."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ckpt.formats.sharded_tensors import is_sharded
from ckpt.state.fsdp1 import is_fsdp1
from ckpt.state.joined_model import parts_of

CERTAIN = 4  # batches: fewer without training may be those that a script found unfit, or had read ahead


class BatchUsage:
    """Detects the first sign of training in one pass: a gradient, a forward of a sharded model, or `note`.

    Sharded models and engines hide the gradients of an accumulation window. The roots of sharded models are hooked;
    others are not, because torch.compile could trace the hook.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._before = self._gradients()
        self._micro_steps = self._counted()
        self._seen = False
        sharded = [model for model in self._models if is_fsdp1(model) or any(map(is_sharded, model.parameters()))]
        parts = [part for model in sharded for part in parts_of(model)]
        self._hooks = [part.register_forward_pre_hook(self._hook()) for part in parts]

    @property
    def seen(self) -> bool:
        if not self._seen and (self._gradients() != self._before or self._counted() != self._micro_steps):
            self.note()
        return self._seen

    def note(self) -> None:
        self._seen = True
        self.forget()

    def forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self) -> Any:
        method = weakref.WeakMethod(self.note)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before_forward(*_: Any) -> None:
            note = method()
            if note is not None and torch.is_grad_enabled():
                note()

        return before_forward

    def _gradients(self) -> list[tuple[int, int, int]]:
        """Which parameters have gradients, and how often each was written to."""
        parameters = (parameter for model in self._models for parameter in model.parameters())
        found = ((id(parameter), parameter.grad) for parameter in parameters if parameter.grad is not None)
        return [(key, id(grad), grad._version) for key, grad in found]

    def _counted(self) -> list[int]:
        """The backward passes that DeepSpeed's engines have counted."""
        counts = (getattr(model, "micro_steps", None) for model in self._models)
        return [count for count in counts if isinstance(count, int)]


class HandedBatches:
    """The batches of a resumed pass, up to the first one that the script trains on.

    A script that skips by hand (`if step < resume_step: continue`) drops as many batches as the loader has skipped
    already. `trusted`: the script is known not to read ahead, so that what it does not train on is dropped.
    """

    def __init__(self, left_out: int, usage: BatchUsage, *, trusted: bool = False) -> None:
        self.left_out = left_out  # by the loader, before the first of these
        self.unused = 0
        self.skipped = 0  # by hand: the loader is to be taken back
        self._usage = usage
        self._trusted = trusted
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._count = 0

    def hand_out(self, batch: Any) -> None:
        """A batch is about to be given to the script."""
        if not self._usage.seen:
            self.unused = self._count
            self._count += 1
            self._tensors += [weakref.ref(tensor) for tensor in tensors_in(batch)]

    def note_training(self) -> None:
        self._usage.note()

    def goes_back(self, *, exhausted: bool = False) -> bool:
        """Whether the script has dropped all batches that it was given, so that the loader is to be taken back: when
        these are as many as it would skip by hand, or when the loader is at its end and they are fewer."""
        due = 0 < self._count < self.left_out if exhausted else 0 < self._count == self.left_out
        certain = self._trusted or self._count >= CERTAIN
        if not due or self._usage.seen or not certain or not self._are_dropped():
            return False
        if not exhausted:
            self.skipped, self.left_out, self.unused = self.left_out, 0, 0
        return True

    def _are_dropped(self) -> bool:
        """The variable of the loop may still hold the last batch. A script that reads ahead holds more."""
        held = sum(tensor() is not None for tensor in self._tensors)
        return held * self._count <= len(self._tensors)

    def forget(self) -> None:
        self._usage.forget()


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for item in batch.values():
            yield from tensors_in(item)
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from tensors_in(item)

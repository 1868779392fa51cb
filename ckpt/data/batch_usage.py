"""Whether a script trains on the batches that it is handed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ckpt.formats.layout import is_sharded
from ckpt.state.fsdp1 import is_fsdp1

CERTAIN = 4  # batches: fewer without training may be those that a script found unfit, or had read ahead


class BatchUsage:
    """Looks out for the first sign of training in one pass: a gradient, a forward of a sharded model, or `note`.

    Sharded models and engines keep the gradients of an accumulation window to themselves. The roots of sharded models
    are hooked; others are not, because a hook could get into what torch.compile traces.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._before = self._gradients()
        self._micro_steps = self._counted()
        self._seen = False
        sharded = [one for one in self._models if is_fsdp1(one) or any(is_sharded(p) for p in one.parameters())]
        self._hooks = [one.register_forward_pre_hook(self._hook()) for one in sharded]

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
        parameters = (one for model in self._models for one in model.parameters())
        found = ((id(one), one.grad) for one in parameters if one.grad is not None)
        return [(key, id(grad), grad._version) for key, grad in found]

    def _counted(self) -> list[int]:
        """The batches that DeepSpeed's engines have gone back through."""
        counts = (getattr(one, "micro_steps", None) for one in self._models)
        return [one for one in counts if isinstance(one, int)]


class HandedBatches:
    """The batches of a resumed pass, up to the first one that the script trains on.

    A script that finds its place itself (`if step < resume_step: continue`) drops as many batches as the loader has
    left out already. `trusted`: the script is known not to read ahead, so that what it does not train on is dropped.
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
            self._tensors += [weakref.ref(one) for one in tensors_in(batch)]

    def note_training(self) -> None:
        self._usage.note()

    def goes_back(self, *, exhausted: bool = False) -> bool:
        """Whether the script has dropped all that it was given, so that the loader is to be taken back: when these are
        as many as it would skip by hand, or when the loader has no more to give and they are fewer."""
        due = 0 < self._count < self.left_out if exhausted else 0 < self._count == self.left_out
        certain = self._trusted or self._count >= CERTAIN
        if not due or self._usage.seen or not certain or not self._are_dropped():
            return False
        if not exhausted:
            self.skipped, self.left_out, self.unused = self.left_out, 0, 0
        return True

    def _are_dropped(self) -> bool:
        """The last batch may still be held by the variable of its loop. What reads ahead holds on to more."""
        held = sum(one() is not None for one in self._tensors)
        return held * self._count <= len(self._tensors)

    def forget(self) -> None:
        self._usage.forget()


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for one in batch.values():
            yield from tensors_in(one)
    elif isinstance(batch, list | tuple):
        for one in batch:
            yield from tensors_in(one)

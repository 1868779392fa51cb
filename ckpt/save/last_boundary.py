"""The state at the last step boundary, to be saved if an exception ends the run and nothing has changed since."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.compat.torch import VERSION, version_of
from ckpt.errors import CkptError
from ckpt.formats.sharded_tensors import is_sharded, local_tensor
from ckpt.ranks.consensus import MAIN, Ranks
from ckpt.ranks.store_and_heartbeats import format_ranks
from ckpt.save.capture import LivePart, LiveState
from ckpt.save.saver import Saver
from ckpt.save.transaction import SaveRequest
from ckpt.state.model import ModelPart
from ckpt.state.registry import StateRegistry, weakly
from ckpt.util.console import say

_log = logging.getLogger("ckpt")
_KEY, _SAVE = "exception", "save"
_PATIENCE = 10.0  # seconds that a rank waits for the others to fail too
_PAUSE = 0.02
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class LastBoundary:
    """Keeps what a save after the last step would have captured: values as they were, and the tensors themselves.

    Values cannot change any more, and of buffers, which a forward changes without a new version, there are copies.
    Other tensors can: it is saved only if every one has the version that it had, and no optimizer has begun a step
    since. What is written through `.data` outside of optimizers has no version, and is not noticed. On several ranks,
    it is saved if all of them leave by an exception after the same step.
    """

    def __init__(self, ranks: Ranks, registry: StateRegistry, refusal: Callable[[], str] = str) -> None:
        """`refusal`: why what is there now is not to be saved; empty if it is."""
        self._refusal = refusal
        self._ranks = ranks
        self._registry = registry
        self._step = 0
        self._request: SaveRequest | None = None  # None if there is nothing to save
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int | None] = []
        self._has_begun = False  # an optimizer its next step
        self._off = ""  # why nothing is kept
        self._hook = register_optimizer_step_pre_hook(weakly(self._on_step))

    def note(self, step: int, request: SaveRequest | None) -> None:
        """A step is done. `request`: what would save it; None if it has been saved."""
        self._step, self._request, self._tensors, self._has_begun = step, None, [], False
        if request is None or self._off:
            return
        try:
            live = self._with_copied_buffers(request.capture().prepared())
            self._tensors = list(_tensors_of(live, several=self._ranks.world_size > 1))
            self._versions = [version_of(tensor) for tensor in self._tensors]
            if None in self._versions:
                raise _UnknownError(VERSION.without)
            self._require_optimizers()
        except (CkptError, _UnknownError, RuntimeError) as error:  # inference tensors have no version
            self._turn_off(str(error))
            return
        self._request = replace(request, capture=lambda: live)

    def save_after(self, error: BaseException, saver: Saver) -> None:
        """Save it after this exception. Raises none of its own: what went wrong in the loop comes first."""
        try:
            self._save(error, saver)
        except Exception as failure:
            _log.error("%s", failure)

    def _save(self, error: BaseException, saver: Saver) -> None:
        """Save it, on all ranks or on none, or say why not. Waits for other ranks for some seconds at most."""
        if self._step == 0 or (self._request is None and not self._off):
            return
        what = type(error).__name__
        refused = self._agreed(self._obstacle(error))
        if refused:
            _log.warning(
                "%s: ckpt could not save step %d: %s. Earlier checkpoints are kept.", what, self._step, refused
            )
            return
        assert self._request is not None
        saver.save(self._request, wait=True)
        if self._ranks.rank == MAIN:
            say(f"{what}: saved step {self._step}, the last that was complete, in {saver.root.storage.url}")

    def close(self) -> None:
        self._hook.remove()
        self._request, self._tensors = None, []

    def _on_step(self, *_: Any) -> None:
        self._has_begun = True

    def _require_optimizers(self) -> None:
        if any(not isinstance(stepper, torch.optim.Optimizer) for stepper in self._registry.steppers()):
            raise _UnknownError(
                "ckpt can't see when an engine, or an optimizer that is not a torch optimizer, changes tensors"
            )

    def _with_copied_buffers(self, live: LiveState) -> LiveState:
        buffers = {buffer.data_ptr() for model in self._models() for buffer in model.buffers()} - {0}
        if not buffers:
            return live
        if live.encoded is not None:
            raise _UnknownError(
                "a model has buffers, and ckpt would have to encode the state of another part at every step"
            )
        parts, own = ([_with_copies(part, buffers) for part in found] for found in (live.parts, live.own))
        sharded = [_with_copies(part, buffers) for part in live.sharded]
        return replace(live, parts=parts, own=own, sharded=sharded, leaves=None)

    def _models(self) -> list[nn.Module]:
        return [part.model for part in self._registry.parts.values() if isinstance(part, ModelPart)]

    def _turn_off(self, why: str) -> None:
        self._off = why
        self._tensors = []
        if self._ranks.rank == MAIN:
            _log.warning("Every(exception=True) has no effect: %s", why)

    def _obstacle(self, error: BaseException) -> str:
        """Why this rank cannot save the boundary; empty if it can."""
        if self._off:
            return self._off
        if isinstance(error, CkptError):
            return "the exception is one of ckpt itself"
        if self._has_begun:
            return "an optimizer has begun the next step, so that the state is between two"
        changed = sum(
            version_of(tensor) != version for tensor, version in zip(self._tensors, self._versions, strict=True)
        )
        if changed:
            return f"{changed} of {len(self._tensors)} tensors have changed since"
        return self._refusal()

    def _agreed(self, mine: str) -> str:
        """Why it is not saved, the same on every rank; empty if it is. A rank that comes too late obeys the others."""
        if self._ranks.world_size == 1:
            return mine
        try:
            self._ranks.note(_KEY, json.dumps([self._step, mine]))
            found = _judged(self._ranks, mine)
            settled = self._ranks.first_wins(f"{_KEY}/settled", found or _SAVE)
        except CkptError as error:
            return str(error)
        return "" if settled == _SAVE else settled


class _UnknownError(Exception):
    """Whether something has changed could not be known."""


def _judged(ranks: Ranks, mine: str) -> str:
    """What this rank finds in the notes of all; it waits for them unless it knows already."""
    patience = min(_PATIENCE, ranks.timeout)
    deadline = time.monotonic() + patience
    while True:
        notes = {rank: json.loads(text) for rank, text in ranks.notes(_KEY).items()}
        unable = {rank: why for rank, (_, why) in notes.items() if why}
        if unable:
            rank, why = next(iter(unable.items()))
            return f"{format_ranks([rank])}: {why}"
        if len(notes) == ranks.world_size:
            steps = sorted({step for step, _ in notes.values()})
            return "" if len(steps) == 1 else f"ranks are at different steps ({', '.join(map(str, steps))})"
        if time.monotonic() > deadline:
            others = [rank for rank in range(ranks.world_size) if rank not in notes]
            return f"{format_ranks(others)} did not leave by an exception within {patience:g} s"
        time.sleep(_PAUSE)


def _with_copies(part: LivePart, of: set[int]) -> LivePart:
    """The same with copies of the tensors at these addresses; shards are none of them."""

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.clone() if not is_sharded(value) and value.data_ptr() in of else value
        if isinstance(value, dict):
            return type(value)((key, copied(item)) for key, item in value.items())
        return type(value)(map(copied, value)) if isinstance(value, list | tuple) else value

    return replace(part, tree=copied(part.tree)) if isinstance(part.tree, dict) else part


def _tensors_of(live: LiveState, *, several: bool) -> Iterator[torch.Tensor]:
    """All tensors of a state; of sharded ones this rank's shards. Raises if there is more that can change."""
    if live.gathered:
        raise _UnknownError("with layout='full', every save gathers sharded tensors")
    if live.encoded is not None and several:
        raise _UnknownError("ckpt would have to encode the state of at least one part at every step")
    for part in (*live.parts, *live.sharded, *live.own):
        yield from _tensors_in(part.tree, part.key)


def _tensors_in(value: Any, key: str) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield local_tensor(value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item, key)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _tensors_in(item, key)
    elif not isinstance(value, _VALUES):
        raise _UnknownError(f"ckpt can't see when the {type(value).__name__} in {key} changes")

"""The generators at the start of a Trainer's epoch: its samplers draw the order of the epoch from them."""

from __future__ import annotations

import random
import sys
from collections.abc import Container
from typing import Any

import torch

from ckpt.state import rng, samplers

_NAMES = {"python": "epoch_start_python", "torch": "epoch_start_torch", "numpy": "epoch_start_numpy"}


class EpochStart:
    """Records the generators at an epoch's start, so that a resume in mid-epoch draws the same order again.

    `group_by_length` draws from the global generators: `generators` holds copies of them, which the manager saves per
    rank. Generators of the samplers are the same on all ranks and go into `state_dict`.
    """

    def __init__(self) -> None:
        self.generators: dict[str, Any] = {_NAMES["python"]: random.Random(), _NAMES["torch"]: torch.Generator()}  # noqa: S311
        if "numpy" in sys.modules:
            self.generators[_NAMES["numpy"]] = sys.modules["numpy"].random.RandomState()
        self._loader: Any = None
        self._began: dict[str, Any] = {}
        self._own_began: list[Any] = []
        self._saved: dict[str, Any] = {}
        self._saved_globals = False

    def begin(self, loader: Any) -> None:
        """Record the generators before the samplers draw from them."""
        self._loader = loader
        self._began = rng.capture()
        self._own_began = [rng.capture_one(generator) for generator in samplers.generators(loader)]

    def begin_again(self, loader: Any, *, in_its_middle: bool) -> None:
        """Restore the generators for the first epoch of a resumed run: the interrupted epoch, or the next."""
        if in_its_middle and self._saved_globals:
            rng.restore({kind: rng.capture_one(self.generators[name]) for kind, name in self._kinds()})
        saved = self._saved.get("began" if in_its_middle else "now", [])
        for generator, state in zip(samplers.generators(loader), saved, strict=False):
            rng.restore_one(generator, state)
        self.begin(loader)

    def prepare_save(self) -> None:
        """Update `generators`. Only here: `rewind_rng` may put them back to the loaded state at any other time."""
        for kind, name in self._kinds():
            if kind in self._began:
                rng.restore_one(self.generators[name], self._began[kind])

    def state_dict(self) -> dict[str, Any]:
        generators = samplers.generators(self._loader) if self._loader is not None else []
        now = [rng.capture_one(generator) for generator in generators]
        return {"began": self._own_began, "now": now}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._saved = saved

    def loaded(self, skipped: Container[str]) -> None:
        """Called after a load: checkpoints of earlier versions lack the global generators of the epoch's start."""
        self._saved_globals = not any(name in skipped for name in self.generators)

    def _kinds(self) -> list[tuple[str, str]]:
        return [(kind, name) for kind, name in _NAMES.items() if name in self.generators]

"""What a Trainer's order of samples depends on: the generators as an epoch began, kept for a resume in its middle."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from ckpt import order, rng

_NAMES = {"python": "epoch_start_python", "torch": "epoch_start_torch", "numpy": "epoch_start_numpy"}


class EpochStart:
    """Lets a sampler that draws its order when an epoch begins draw the same one again after a resume.

    `group_by_length` for instance draws from the global generators. Those are kept for each rank, in `generators`,
    which the manager saves; the sampler's own, which are the same on all ranks, in `state_dict`.
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
        """An epoch begins: note what its order will be drawn from."""
        self._loader = loader
        self._began = rng.capture()
        self._own_began = [rng.capture_one(one) for one in order.generators(loader)]

    def begin_again(self, loader: Any, *, in_its_middle: bool) -> None:
        """The epoch that a checkpoint was saved in begins anew, to have its first batches left out; or the next one."""
        if in_its_middle and self._saved_globals:
            rng.restore({kind: rng.capture_one(self.generators[name]) for kind, name in self._kinds()})
        saved = self._saved.get("began" if in_its_middle else "now", [])
        for generator, state in zip(order.generators(loader), saved, strict=False):
            rng.restore_one(generator, state)
        self.begin(loader)

    def prepare_save(self) -> None:
        """Bring `generators` up to date. Between saves they are left alone: a load may put them back at any time."""
        for kind, name in self._kinds():
            if kind in self._began:
                rng.restore_one(self.generators[name], self._began[kind])

    def state_dict(self) -> dict[str, Any]:
        now = [rng.capture_one(one) for one in order.generators(self._loader)] if self._loader is not None else []
        return {"began": self._own_began, "now": now}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._saved = saved

    def loaded(self, skipped: Any) -> None:
        """A checkpoint was loaded, but for what it did not have."""
        self._saved_globals = not any(name in skipped for name in self.generators)

    def _kinds(self) -> list[tuple[str, str]]:
        return [(kind, name) for kind, name in _NAMES.items() if name in self.generators]

"""Folders that the Trainer of Transformers wrote: `checkpoint-500`, with files of its own beside the model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ckpt.errors import DamagedError
from ckpt.formats.damage import damage_reported
from ckpt.formats.foreign.accelerate import FolderReader, in_memory
from ckpt.formats.foreign.torch_save import read_values

STATE = "trainer_state.json"
_PARTS = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}
_RNG = re.compile(r"rng_state(?:_(\d{1,9}))?\.pth")
_LARGEST_STATE = 1 << 28  # bytes: it has a line for every step that was logged
_LEFT_OUT = {
    "training_args.bin": "the arguments of the Trainer, pickled as an object: give them again",
    STATE: "its log and the state of its callbacks, which only the Trainer reads",
}


class TrainerFolder:
    """One checkpoint of the Trainer, except its model."""

    def __init__(self, folder: FolderReader) -> None:
        self._folder = folder
        self._rng = sorted((int(match.group(1) or 0), path) for path in folder.files if (match := _RNG.fullmatch(path)))

    @property
    def world_size(self) -> int:
        """The number of ranks whose generators are there; one, if there are none."""
        return max(1, len(self._rng))

    @property
    def left_out(self) -> dict[str, str]:
        return {path: why for path, why in _LEFT_OUT.items() if path in self._folder.files}

    def parts(self) -> dict[str, Any]:
        """The state of the optimizer, the scheduler and the scaler, where there are files of them."""
        return {key: self._values(path) for key, path in _PARTS.items() if path in self._folder.files}

    def progress(self) -> tuple[int, float]:
        """The steps and the epochs that were done."""
        data = self._folder.opened(STATE).read(0, min(self._folder.files[STATE], _LARGEST_STATE))
        with damage_reported(self._where(STATE), "state of the Trainer"):
            found = json.loads(data)
            steps, epochs = int(found["global_step"]), float(found["epoch"] or 0)
            if steps < 0 or not math.isfinite(epochs) or epochs < 0:
                raise ValueError(f"{steps} steps and {epochs} epochs cannot have been done")
            return steps, epochs

    def generators(self, rank: int) -> dict[str, Any] | None:
        """A rank's random generators, as `ckpt.state.rng` captures them. None if they were not saved."""
        if not self._rng:
            return None
        ranks = [number for number, _ in self._rng]
        if ranks != list(range(len(ranks))):
            raise DamagedError(f"{self._folder.where} is damaged: of its rng_state files there are only {ranks}.")
        path = self._rng[rank][1]
        states: Mapping[str, Any] = in_memory(self._values(path))
        with damage_reported(self._where(path), "states of random generators"):
            kind, key, position, has_gauss, gauss = states["numpy"]
            numpy = {"bit_generator": kind, "state": {"key": key, "pos": position}}
            found = {"python": states["python"], "torch": states["cpu"]}
            found["numpy"] = {**numpy, "has_gauss": has_gauss, "gauss": gauss}
            devices = {device: states[device] for device in ("cuda", "xpu") if device in states}
        each = {
            device: list(state) if isinstance(state, list | tuple) else [state] for device, state in devices.items()
        }
        return found | each

    def _values(self, path: str) -> Any:
        return read_values(self._folder.opened(path), 0, self._folder.files[path], self._where(path))

    def _where(self, path: str) -> str:
        return f"{self._folder.where}/{path}"

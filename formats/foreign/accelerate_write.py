"""Files as `Accelerator.load_state` reads them. The format requires `torch.save`: nothing else in ckpt pickles.

The pickled values come out of a checkpoint of ckpt and are plain data: containers, numbers, text, tensors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ckpt.formats.foreign.accelerate import RNG_DEVICES, rng_key

_STEMS = {
    "model": ("model", ".safetensors"),
    "optimizer": ("optimizer", ".bin"),
    "scheduler": ("scheduler", ".bin"),
    "scaler": ("scaler", ".pt"),
    "dataloader": ("dl_state_dict", ".bin"),
}
_NUMPY_FIELDS = ("bit_generator", "state", "has_gauss", "gauss")


def file_of(kind: str, number: int) -> str:
    """The name of a file. The first of several has no number."""
    if kind in ("custom", "random_states"):
        return f"{'custom_checkpoint' if kind == 'custom' else kind}_{number}.pkl"
    stem, suffix = _STEMS[kind]
    return f"{stem}_{number}{suffix}" if number else f"{stem}{suffix}"


def pickled_model(number: int) -> str:
    """The name of the file of a model whose state safetensors cannot hold."""
    return file_of("model", number).replace("model", "pytorch_model").replace(".safetensors", ".bin")


def write_values(path: str, values: Any) -> None:
    """Write plain data to a new file, and sync it to disk."""
    with open(path, "xb") as file:
        torch.save(values, file)
        file.flush()
        os.fsync(file.fileno())


def random_states(rng: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The content of `random_states_N.pkl`, for a rank whose generators `ckpt.state.rng` has captured."""
    states = {"step": step, "random_state": rng["python"], "numpy_random_seed": _numpy_state(rng.get("numpy"))}
    states["torch_manual_seed"] = rng["torch"]
    return states | {rng_key(kind): list(rng[kind]) for kind in RNG_DEVICES if kind in rng}


def _numpy_state(state: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """NumPy's state as a tuple; a fresh one for a run without NumPy, because Accelerate stops if it is missing."""
    import numpy as np

    if state is None:
        return tuple(np.random.RandomState(0).get_state(legacy=True))
    kind, inner, has_gauss, gauss = (state[key] for key in _NUMPY_FIELDS)
    return kind, inner["key"], inner["pos"], has_gauss, gauss

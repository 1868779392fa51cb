"""Files as `Accelerator.load_state` reads them. Its format asks for `torch.save`: this is the one place that pickles.

What is pickled are values out of a checkpoint of ours, which are plain data: containers, numbers, text, tensors.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_STEMS = {
    "model": ("model", ".safetensors"),
    "optimizer": ("optimizer", ".bin"),
    "scheduler": ("scheduler", ".bin"),
    "scaler": ("scaler", ".pt"),
    "dataloader": ("dl_state_dict", ".bin"),
}


def file_of(kind: str, number: int) -> str:
    """The name of a file: the first of several has no number."""
    if kind in ("custom", "random_states"):
        return f"{'custom_checkpoint' if kind == 'custom' else kind}_{number}.pkl"
    stem, suffix = _STEMS[kind]
    return f"{stem}_{number}{suffix}" if number else f"{stem}{suffix}"


def pickled_model(number: int) -> str:
    """The name of a model that holds more than safetensors can."""
    return file_of("model", number).replace("model", "pytorch_model").replace(".safetensors", ".bin")


def write_values(path: str, values: Any) -> None:
    """Write plain data, durably."""
    with open(path, "xb") as file:
        torch.save(values, file)
        file.flush()
        os.fsync(file.fileno())

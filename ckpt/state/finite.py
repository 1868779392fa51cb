"""Parameters that are NaN or infinite, found on their device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ckpt.formats.sharded_tensors import is_sharded, local_tensor

_KINDS = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip
_PLAIN = (torch.Tensor, nn.Parameter)


def non_finite(models: Mapping[str, nn.Module]) -> list[str]:
    """The parameters of these models that are not finite; of sharded ones this rank's shards are looked at.

    One reduction for all of a kind, the largest absolute value of each, and one transfer for each device.
    """
    found = [(f"{key}: {name}", value) for key, model in models.items() for name, value in _values(model)]
    groups: dict[Any, list[torch.Tensor]] = {}
    for _, value in found:
        groups.setdefault((value.device, value.dtype), []).append(value)
    bad: dict[torch.device, list[torch.Tensor]] = {}
    with torch.no_grad():
        for (device, _), values in groups.items():
            largest = nn.utils.get_total_norm(values, math.inf)
            bad.setdefault(device, []).append(~largest.isfinite())
        if not any(bool(torch.stack(flags).any()) for flags in bad.values()):
            return []
        return [name for name, value in found if not bool(value.isfinite().all())]


def _values(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        value: Any = getattr(parameter, "ds_tensor", parameter)  # ZeRO 3: this rank's partition
        value = (local_tensor(value) if is_sharded(value) else value).detach()
        if type(value) in _PLAIN and value.dtype in _KINDS and value.numel() and not value.is_meta:
            yield name, value

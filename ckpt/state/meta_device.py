"""Models that are still on the meta device when a checkpoint is loaded: they get memory for what it fills."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from ckpt.errors import MismatchError
from ckpt.formats.sharded_tensors import is_sharded

_LISTED = 10


def is_on_meta(tensor: Any) -> bool:
    """Whether a tensor has no memory."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "meta"


def any_on_meta(parts: Iterable[Any]) -> bool:
    """Whether the model of a part has a parameter without memory."""
    models = (getattr(part, "model", None) for part in parts)
    return any(is_on_meta(one) for model in models if isinstance(model, nn.Module) for one in model.parameters())


def materialise(key: str, module: nn.Module, filled: Collection[str]) -> None:
    """Give every tensor of a model that has none its memory: a shard where its mesh is, others on the default device.

    They remain the same objects, which an optimizer may hold already. `filled`: the names, as `state_dict` has them, of
    those that are read from the checkpoint. Refused where others have no memory either: nobody would give them values.
    """
    named = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    empty = {name: tensor for name, tensor in named.items() if is_on_meta(tensor)}
    ours = {id(named[name]) for name in filled if name in named}
    left = [name for name, tensor in empty.items() if id(tensor) not in ours]
    if left:
        more = f" and {len(left) - _LISTED} more" if len(left) > _LISTED else ""
        raise MismatchError(
            f"{key} is on the meta device, and the checkpoint has no values for {', '.join(left[:_LISTED])}{more}. "
            "Call to_empty(device=...) on the model, give these their values, then load."
        )
    for tensor in {id(tensor): tensor for tensor in empty.values()}.values():
        torch.utils.swap_tensors(tensor, _with_memory(tensor))  # type: ignore[no-untyped-call]


def _with_memory(tensor: Any) -> Any:
    device = tensor.device_mesh.device_type if is_sharded(tensor) else torch.get_default_device()
    found = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(found, requires_grad=tensor.requires_grad)
    return found.requires_grad_(tensor.requires_grad)

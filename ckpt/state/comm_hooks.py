"""State of DDP communication hooks, which belongs to neither model nor optimizer and is not saved."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt.state.unwrap import kinds_in, modules_in


def lacking_state(models: Mapping[str, nn.Module]) -> dict[str, str]:
    """The unsaved state of these models' communication hooks, by key, each with the consequence."""
    found = {}
    for key, model in models.items():
        if not any(isinstance(module, DistributedDataParallel) for module in kinds_in(model)):
            continue
        for module in modules_in(model):
            hooks = getattr(module, "_comm_hooks", ()) if isinstance(module, DistributedDataParallel) else ()
            if any(_is_power_sgd(state) for _, state in hooks):
                found[f"{key}.powerSGD"] = (
                    "PowerSGD's error feedback and warm starts belong to gradient buckets, which a new process lays "
                    "out anew: they are not saved, and begin anew, so that compressed gradients differ at first"
                )
    return found


def _is_power_sgd(state: object) -> bool:
    hooks = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    return hooks is not None and isinstance(state, hooks.PowerSGDState)

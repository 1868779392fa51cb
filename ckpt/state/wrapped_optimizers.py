"""Optimizers around others: Accelerate's, and torch's PostLocalSGDOptimizer, which averages the weights of ranks."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ckpt.state.joined_optimizer import JoinedOptimizer


def is_local_sgd(optimizer: Any) -> bool:
    """Whether this is a PostLocalSGDOptimizer. Imports nothing: a live one has imported its module."""
    module = sys.modules.get("torch.distributed.optim.post_localSGD_optimizer")
    return module is not None and isinstance(optimizer, module.PostLocalSGDOptimizer)


def stepping(optimizer: Any) -> Any:
    """The optimizer that makes the steps, and whose step hooks are called."""
    while True:
        inner = optimizer.optim if is_local_sgd(optimizer) else getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            return optimizer
        optimizer = inner


def class_of(optimizer: Any) -> str:
    """The class that a saved state fits: `AdamW`, or `PostLocalSGDOptimizer(AdamW)`, which has a counter beside it."""
    name = optimizer.kind if isinstance(optimizer, JoinedOptimizer) else type(optimizer).__name__
    return f"{name}({class_of(optimizer.optim)})" if is_local_sgd(optimizer) else name

"""torch's ZeroRedundancyOptimizer, which gives every rank the state of some parameters alone."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from ckpt.errors import UnsupportedError
from ckpt.state.optimizer import OptimizerPart
from ckpt.state.parts import WHOLE_PART
from ckpt.state.replicated import NONE, Guarantee


def is_zero_redundancy(optimizer: Any) -> bool:
    """Whether it is one. Whoever has one has imported it."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


@dataclass
class ZeroRedundancyPart(OptimizerPart):
    """The optimizer inside, which has this rank's parameters: each rank keeps its own, for as many ranks again.

    Its `state_dict` would be that of all ranks, gathered on one of them beforehand.
    """

    around: Any = None

    @classmethod
    def of(cls, key: str, optimizer: Any, models: dict[str, nn.Module]) -> ZeroRedundancyPart:
        if optimizer._overlap_with_ddp:
            raise UnsupportedError(
                f"{key}: ZeroRedundancyOptimizer(overlap_with_ddp=True) has no optimizer before its buckets are known, "
                "so its state cannot be loaded before training. Build it without overlap_with_ddp."
            )
        return cls(key, optimizer.optim, models, around=optimizer, can_be_sharded=False)

    @property
    def kind(self) -> str:
        return type(self.around).__name__

    def guaranteed(self, state: Any) -> Guarantee:
        return NONE

    def tied_to_ranks(self, names: Collection[str]) -> dict[str, str]:
        return {WHOLE_PART: "part of it"} if names else {}

    def capture(self) -> dict[str, Any]:
        self.around._sync_param_groups(self.around.param_groups, self.optimizer.param_groups)  # as before its steps
        return super().capture()

    def _take(self, values: Any, unfit: Any) -> None:
        super()._take(values, unfit)
        self.around._sync_param_groups(self.optimizer.param_groups, self.around.param_groups)

"""torch's ZeroRedundancyOptimizer, which partitions parameters, and so optimizer state, over the ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ckpt.errors import UnsupportedError
from ckpt.formats.layout import Members
from ckpt.state.optimizer import OptimizerPart
from ckpt.state.parts import UNKNOWN, WHOLE_PART, Replication


@dataclass
class ZeroRedundancyPart(OptimizerPart):
    """The inner optimizer, which has this rank's parameters. Each rank saves the state of these, under their names.

    A checkpoint has it as the state of one optimizer, which any number of ranks loads, also into an optimizer of all
    parameters. The outer `state_dict` is not used: it holds the state of all ranks, gathered beforehand on one of them.
    """

    outer: Any = None

    @classmethod
    def of(cls, key: str, optimizer: Any, models: Mapping[str, nn.Module]) -> ZeroRedundancyPart:
        if not hasattr(optimizer, "optim"):
            raise UnsupportedError(
                f"{key}: ckpt can't load ZeroRedundancyOptimizer(overlap_with_ddp=True) before training, because it "
                "builds its optimizer only when training starts. Build your optimizer without overlap_with_ddp."
            )
        return cls(key, optimizer.optim, models, outer=optimizer)

    @property
    def managed(self) -> Any:
        return self.outer

    @property
    def other_kinds(self) -> tuple[str, ...]:
        return (type(self.outer).__name__,)  # what earlier versions of ckpt called it

    def replication(self, state: Any, members: Members) -> Replication:
        return UNKNOWN

    def tied_to_ranks(self, names: Collection[str]) -> dict[str, str]:
        return {WHOLE_PART: "part of it"} if names else {}

    def capture(self) -> dict[str, Any]:
        _sync_groups(self.outer, self.optimizer)  # as the outer optimizer does before a step
        return super().capture()

    def _load(self, values: Any, unfit: Mapping[str, str], copied: Collection[str] = ()) -> None:
        super()._load(values, unfit, copied)
        _sync_groups(self.optimizer, self.outer)


def _sync_groups(source: Any, target: Any) -> None:
    """Give the groups of one optimizer the options of another's."""
    for group, other in zip(source.param_groups, target.param_groups, strict=True):
        other.update({name: value for name, value in group.items() if name != "params"})

"""Which tensors are the same on every rank by construction, so that they need not be compared at every save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt.state.deepspeed.engine import is_engine
from ckpt.state.unwrap import modules_in

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
# every rank gets the same gradients from these; a local SGD, for one, lets the weights of ranks drift apart
_SYNCHRONOUS = {f"{_HOOKS}.{name}" for name in ("default_hooks", "powerSGD_hook", "quantization_hooks")}


@dataclass(frozen=True)
class Guarantee:
    """What holds for the plain tensors of a part, by their names. All others are compared at every save."""

    equal: frozenset[str] = frozenset()  # the same on every rank: compared once, when they are first saved
    ruled: frozenset[str] = frozenset()  # rank 0's replace the others' before they are used: never compared
    all_equal: bool = False
    of_main: bool = False  # all of it is the main rank's by its own rule: what others have is not looked at
    doubted: frozenset[str] = frozenset()  # were found to differ, whatever is said of them

    def is_equal(self, name: str) -> bool:
        return (self.all_equal or name in self.equal) and name not in self.doubted

    def is_uncertain(self, name: str) -> bool:
        return not (self.of_main or self.is_equal(name) or name in self.ruled)


NONE = Guarantee()


def equal_parameters(models: Iterable[nn.Module]) -> frozenset[int]:
    """The identities of parameters that DistributedDataParallel over all ranks, or DeepSpeed, keeps the same."""
    found: set[int] = set()
    for model in models:
        if is_engine(model):
            found.update(id(one) for one in model.parameters())
        for wrapper in _synchronised(model):
            left_out = wrapper.parameters_to_ignore
            if left_out:
                named = wrapper.module.named_parameters(remove_duplicate=False)
                found.update(id(one) for name, one in named if name not in left_out)
            else:
                found.update(id(one) for module in modules_in(wrapper.module) for one in module._parameters.values())
    return frozenset(found)


def ruled_buffers(model: nn.Module) -> frozenset[int]:
    """The identities of buffers that every forward pass overwrites with those of the first rank."""
    found: set[int] = set()
    for wrapper in _synchronised(model):
        if wrapper.broadcast_buffers:
            named = wrapper.module.named_buffers(remove_duplicate=False)
            found.update(id(one) for name, one in named if name not in wrapper.parameters_to_ignore)
    return frozenset(found)


def _synchronised(model: nn.Module) -> Iterator[DistributedDataParallel]:
    for module in modules_in(model):
        if isinstance(module, DistributedDataParallel) and _is_synchronous(module):
            yield module


def _is_synchronous(wrapper: DistributedDataParallel) -> bool:
    """Whether it is one model over all ranks, and not over those of a pipeline stage, and none trains for itself."""
    hooks = getattr(wrapper, "_comm_hooks", ())
    everywhere = dist.get_world_size(wrapper.process_group) == dist.get_world_size()
    return everywhere and all(getattr(hook, "__module__", "") in _SYNCHRONOUS for hook, _ in hooks)

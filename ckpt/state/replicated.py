"""Which tensors are equal on every rank by construction, so that one writes them and saves compare shares alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt.compat.torch import own_parameters
from ckpt.formats.layout import Members
from ckpt.state.unwrap import is_engine, modules_in

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
# these give every rank the same gradients; others, such as local SGD, let the weights of ranks diverge
_SYNCHRONOUS = {f"{_HOOKS}.{name}" for name in ("default_hooks", "powerSGD_hook", "quantization_hooks")}


@dataclass(frozen=True)
class Replication:
    """Which plain tensors of a part are known to be replicated, by name. All others are compared in full at every save,
    and each rank keeps a copy of its own until then."""

    equal: frozenset[str] = frozenset()  # equal on every rank: compared by their fingerprints
    broadcast: frozenset[str] = frozenset()  # overwritten by rank 0's before they are used: never compared
    all_equal: bool = False
    of_main: bool = False  # only rank 0's state counts, as the object itself declares: never compared

    def is_equal(self, name: str) -> bool:
        return self.all_equal or name in self.equal

    def is_uncertain(self, name: str) -> bool:
        return not (self.of_main or self.is_equal(name) or name in self.broadcast)

    def distrusted(self) -> Replication:
        """The same, where some of what should be equal was found to differ: none of it counts as equal any more."""
        return replace(self, equal=frozenset(), all_equal=False)


UNKNOWN = Replication()


def equal_parameters(models: Iterable[nn.Module], members: Members = None) -> frozenset[int]:
    """The identities of parameters that DeepSpeed, or DistributedDataParallel over all these ranks, keeps equal."""
    found: set[int] = set()
    for model in models:
        if is_engine(model):
            found.update(map(id, model.parameters()))
        for wrapper in _synchronised(model, members):
            ignored = wrapper.parameters_to_ignore
            if ignored:
                named = wrapper.module.named_parameters(remove_duplicate=False)
                found.update(id(parameter) for name, parameter in named if name not in ignored)
            else:
                for module in modules_in(wrapper.module):
                    found.update(map(id, own_parameters(module).values()))
    return frozenset(found)


def broadcast_buffers(model: nn.Module, members: Members = None) -> frozenset[int]:
    """The identities of buffers that every forward pass overwrites with those of rank 0."""
    found: set[int] = set()
    for wrapper in _synchronised(model, members):
        if wrapper.broadcast_buffers:
            named = wrapper.module.named_buffers(remove_duplicate=False)
            found.update(id(buffer) for name, buffer in named if name not in wrapper.parameters_to_ignore)
    return frozenset(found)


def _synchronised(model: nn.Module, members: Members) -> Iterator[DistributedDataParallel]:
    for module in modules_in(model):
        if isinstance(module, DistributedDataParallel) and _is_synchronous(module, members):
            yield module


def _is_synchronous(wrapper: DistributedDataParallel, members: Members) -> bool:
    """Whether the wrapper spans all ranks (not those of a pipeline stage) and keeps their gradients equal."""
    from ckpt.compat.torch_ddp import hooks_of  # only where there is a wrapper

    hooks = hooks_of(wrapper)
    if members is None:
        everywhere = dist.get_world_size(wrapper.process_group) == dist.get_world_size()
    else:
        everywhere = {*members} <= {*dist.get_process_group_ranks(wrapper.process_group)}
    return everywhere and all(getattr(hook, "__module__", "") in _SYNCHRONOUS for hook, _ in hooks)

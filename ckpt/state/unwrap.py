"""Models without their wrappers, and names without the wrappers' prefixes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ckpt.state.deepspeed.engine import is_engine

_CHECKPOINTED = "_checkpoint_wrapped_module"


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel, DeepSpeed, torch.compile and wrappers that checkpoint or
    offload activations, in any order."""
    while (name := _inner_name(model)) is not None:
        model = getattr(model, name)
    return model


def clean_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Names as `module.state_dict()` has them, each with the one that it has without any wrapper."""
    names = list(names)
    if not names or not any(_inner_name(one) for one in modules_in(module)):
        return {name: name for name in names}
    return {name: clean_name(module, name) for name in names}


def clean_name(module: nn.Module, name: str) -> str:
    """A name without what wrappers further down put into it."""
    kept = []
    node: nn.Module | None = module
    for word in name.split("."):
        while node is not None and _is_checkpointed(node) and word != _CHECKPOINTED:
            node = getattr(node, _CHECKPOINTED)  # its `state_dict` leaves the word out, `named_parameters` does not
        if node is not None and _inner_name(node) == word:
            node = getattr(node, word)
            continue
        kept.append(word)
        node = node._modules.get(word) if node is not None else None
    return ".".join(kept)


def parameter_names(module: nn.Module) -> dict[int, str]:
    """The clean name of every parameter by its identity; a tied one has the name that comes first."""
    names: dict[int, str] = {}

    def walk(one: nn.Module, prefix: str) -> None:  # `named_parameters` takes three times as long, and training waits
        for name, parameter in one._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), prefix + name)
        inner = _inner_name(one)
        for name, below in one._modules.items():
            if below is not None:
                walk(below, prefix if name == inner else f"{prefix}{name}.")

    walk(module, "")
    return names


def modules_in(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all below it. `modules()` also works out their names, and training waits for that."""
    waiting, seen = [module], {id(module)}
    while waiting:
        one = waiting.pop()
        yield one
        below = [inner for inner in one._modules.values() if inner is not None and id(inner) not in seen]
        seen.update(map(id, below))
        waiting += below


def _inner_name(module: nn.Module) -> str | None:
    """The attribute under which a wrapper holds its model; none for a model."""
    if isinstance(module, DistributedDataParallel | DataParallel) or is_engine(module):
        return "module"
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        return "_fsdp_wrapped_module"
    # importing dynamo takes a second; whoever has compiled a model has imported it
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return "_orig_mod"
    return _CHECKPOINTED if _is_checkpointed(module) else None


def _is_checkpointed(module: nn.Module) -> bool:
    """Whether a module is wrapped so that its activations are checkpointed or offloaded."""
    wrapper = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return wrapper is not None and isinstance(module, wrapper.ActivationWrapper)


def without_checkpointing(name: str) -> str:
    """A name as it is without activation checkpointing: earlier versions put the wrapper into optimizers' names."""
    return name.replace(f"{_CHECKPOINTED}.", "")


def gradients(module: nn.Module, of: frozenset[int] | None = None) -> dict[str, torch.Tensor]:
    """The gradients that are there, by parameter name; those of some parameters alone if it is said of which."""
    named = ((name, one) for name, one in module.named_parameters() if of is None or id(one) in of)
    found = {name: one.grad for name, one in named if one.grad is not None}
    return {clean: found[name] for name, clean in clean_names(module, found).items()}

"""Models without their wrappers, and parameter names without the wrappers' prefixes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ckpt.formats.foreign import WRAPPERS

Found = TypeVar("Found")

# A model in parts: its names are those of the parts.


class JoinedModel(nn.Module):
    """The parts of one model. A tensor has the name that it has in its part, after the part's prefix.

    `prefixes`: by the name of a part among the submodules.
    """

    def __init__(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.prefixes: dict[str, str] = {}
        for number, (prefix, part) in enumerate(parts):
            self.prefixes[str(number)] = prefix
            self.add_module(str(number), part)

    @property
    def parts(self) -> list[nn.Module]:
        return [self.get_submodule(number) for number in self.prefixes]


def parts_of(model: nn.Module) -> list[nn.Module]:
    """The parts of a joined model; any other is its only part."""
    return model.parts if isinstance(model, JoinedModel) else [model]


_CHECKPOINTED = WRAPPERS[-1]
_walked = threading.local()  # `known`: what was found in every model, where that is remembered


def is_instance(value: Any, path: str) -> bool:
    """Whether a value is of the class at a path. Imports nothing: a live object has imported its module."""
    home, _, name = path.rpartition(".")
    module = sys.modules.get(home)
    return module is not None and isinstance(value, getattr(module, name, ()))


def is_engine(model: Any) -> bool:
    """Whether this is an engine of `deepspeed.initialize`."""
    return is_instance(model, "deepspeed.runtime.engine.DeepSpeedEngine")


def is_fsdp1(model: nn.Module) -> bool:
    """Whether FullyShardedDataParallel wraps any module in the model."""
    if "torch.distributed.fsdp.fully_sharded_data_parallel" not in sys.modules:
        return False
    kind = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
    return any(is_instance(module, kind) for module in kinds_in(model))


def has_ddp(models: Iterable[nn.Module]) -> bool:
    """Whether DistributedDataParallel wraps any module in the models."""
    return any(isinstance(module, DistributedDataParallel) for model in models for module in kinds_in(model))


def has_replicas(models: Collection[nn.Module]) -> bool:
    """Whether something keeps parameters of the models equal on several ranks: DDP, or DeepSpeed."""
    return has_ddp(models) or any(map(is_engine, models))


def unwrap(model: nn.Module) -> nn.Module:
    """Remove wrappers from a model, in any order: DistributedDataParallel, DataParallel, DeepSpeed, torch.compile, and
    those that checkpoint or offload activations."""
    while (name := _inner_name(model)) is not None:
        model = getattr(model, name)
    return model


def clean_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Names of `module.state_dict()`, each with its name in the unwrapped model."""
    names = list(names)
    if not _remembered(_has_wrappers, module):
        return {name: name for name in names}
    return {name: clean_name(module, name) for name in names}


def _has_wrappers(module: nn.Module) -> bool:
    return any(isinstance(node, JoinedModel) or _inner_name(node) for node in kinds_in(module))


def clean_name(module: nn.Module, name: str) -> str:
    """A name without the words that wrappers of submodules add to it."""
    kept = []
    node: nn.Module | None = module
    for word in name.split("."):
        while node is not None and _is_checkpointed(node) and word != _CHECKPOINTED:
            node = getattr(node, _CHECKPOINTED)  # `state_dict` leaves the word out, `named_parameters` does not
        if node is not None and _inner_name(node) == word:
            node = getattr(node, word)
            continue
        if isinstance(node, JoinedModel) and word in node.prefixes:
            word_in_model, node = node.prefixes[word], node.get_submodule(word)
            kept += [word_in_model] if word_in_model else []
            continue
        kept.append(word)
        inside = getattr(node, word, None)  # also what is there under another name too
        node = inside if isinstance(inside, nn.Module) else None
    return ".".join(kept)


def parameter_names(module: nn.Module) -> Mapping[int, str]:
    """The clean name of every parameter by its identity. A tied parameter has its first name."""
    return _remembered(_parameter_names, module)


def _parameter_names(module: nn.Module) -> dict[int, str]:
    names: dict[int, str] = {}
    inner_names = {type(node): _inner_name(node) for node in kinds_in(module)}

    def walk(node: nn.Module, prefix: str) -> None:
        for name, parameter in node.named_parameters(recurse=False):
            names.setdefault(id(parameter), prefix + name)
        inner = inner_names[type(node)]
        for name, child in node.named_children():
            in_model = node.prefixes[name] if isinstance(node, JoinedModel) else name
            walk(child, prefix if name == inner or not in_model else f"{prefix}{in_model}.")

    walk(module, "")
    return names


def all_names(module: nn.Module) -> Iterable[tuple[str, int]]:
    """Every clean name of every parameter, with the parameter's identity. A tied parameter has several."""
    return _remembered(_all_names, module)


def _all_names(module: nn.Module) -> list[tuple[str, int]]:
    named = dict(module.named_parameters(remove_duplicate=False))
    return [(clean, id(named[raw])) for raw, clean in clean_names(module, named).items()]


def modules_in(module: nn.Module) -> Iterable[nn.Module]:
    """A module and all its submodules. Faster than `modules()`, which builds names: training waits."""
    return _remembered(_nodes, module)


def kinds_in(module: nn.Module) -> Iterable[nn.Module]:
    """One module of every class in a model, to find out which classes there are."""
    return {type(node): node for node in modules_in(module)}.values()


def parameters_in(module: nn.Module) -> Iterable[nn.Parameter]:
    """The parameters of a module and all its submodules; a tied one several times."""
    return _remembered(_parameters, module)


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for node in modules_in(module) for parameter in node.parameters(recurse=False)]


def _remembered(find: Callable[[nn.Module], Found], module: nn.Module) -> Found:
    known = getattr(_walked, "known", None)
    if known is None:
        return find(module)
    if (find, id(module)) not in known:
        known[find, id(module)] = find(module), module  # the module too: another could get its id
    found: Found = known[find, id(module)][0]
    return found


@contextmanager
def walked_once() -> Iterator[None]:
    """Walk every model once in this thread while this context lasts, in which no module may be added or removed."""
    _walked.known = {}
    try:
        yield
    finally:
        _walked.known = None


def _nodes(module: nn.Module) -> list[nn.Module]:
    remaining, seen, found = [module], {id(module)}, []
    while remaining:
        node = remaining.pop()
        found.append(node)
        inside = [child for child in node.children() if id(child) not in seen]
        seen.update(map(id, inside))
        remaining += inside
    return found


def _inner_name(module: nn.Module) -> str | None:
    """The attribute that holds the model of a wrapper; None if the module is no wrapper."""
    if isinstance(module, DistributedDataParallel | DataParallel) or is_engine(module):
        return "module"
    inside = [name for name, _ in module.named_children()]
    return next((name for name in WRAPPERS if name in inside), None)


def _is_checkpointed(module: nn.Module) -> bool:
    """Whether a module is a wrapper that checkpoints or offloads activations."""
    return any(name == _CHECKPOINTED for name, _ in module.named_children())


def without_checkpointing(name: str) -> str:
    """A name without activation checkpointing: earlier versions of ckpt kept the wrapper in optimizers' names."""
    return name.replace(f"{_CHECKPOINTED}.", "")


def gradients(module: nn.Module, of: frozenset[int] | None = None) -> dict[str, torch.Tensor]:
    """The existing gradients by parameter name. `of`: identities of the parameters to consider; all if None."""
    named = ((name, value) for name, value in module.named_parameters() if of is None or id(value) in of)
    found = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
    return {clean: found[name] for name, clean in clean_names(module, found).items()}

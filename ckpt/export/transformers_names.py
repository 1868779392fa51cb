"""Weights that Transformers renames or joins when it loads them: its models have other tensors than their files.

The files of Mixtral hold every expert by itself, and the model holds all experts of a layer in one tensor; those of ViT
have the names of older modules. Transformers' own rules are followed, one joined tensor in memory at a time.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ckpt.formats.layout import Box
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.tensor_bytes import narrowed


class ReadableTensor(Protocol):
    """A saved tensor of which boxes are read: a `PiecedTensor`, or one that is made of several."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def box(self) -> Box: ...

    def read(self, box: Box) -> torch.Tensor: ...


def as_loaded(
    model: nn.Module, live: Mapping[str, Any], tensors: Mapping[str, PiecedTensor]
) -> Mapping[str, ReadableTensor]:
    """The tensors under the names, and in the form, in which Transformers would give them to this model.

    As they are if it is no model of Transformers, or of a version that has no such rules.
    """
    rules = _rules(model) if tensors.keys() - live.keys() else None
    return tensors if rules is None else dict(_converted(rules, model, live, tensors))


@dataclass(frozen=True)
class _Rules:
    """What `transformers` has for it."""

    loading: Any  # its module transformers.core_model_loading
    renamings: list[Any]
    converters: list[Any]

    def renamed(self, name: str, model: Any, live: Mapping[str, Any]) -> tuple[str, str | None]:
        """The name of the (first) tensor that one becomes, and the pattern of its converter, if it has one."""
        about = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": dict(live)}
        new, pattern = self.loading.rename_source_key(name, self.renamings, self.converters, **about)
        if new not in live and name in live:
            new, pattern = self.loading.rename_source_key(name, [], [], **about)
        return new, pattern

    def converter(self, pattern: str) -> Any:
        return copy.deepcopy(next(found for found in self.converters if pattern in found.source_patterns))


def _rules(model: nn.Module) -> _Rules | None:
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    try:
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before 5.0
        return None
    found = get_model_conversion_mapping(model)
    renamings = [rule for rule in found if isinstance(rule, loading.WeightRenaming)]
    return _Rules(loading, renamings, [rule for rule in found if isinstance(rule, loading.WeightConverter)])


def _converted(
    rules: _Rules, model: Any, live: Mapping[str, Any], tensors: Mapping[str, PiecedTensor]
) -> Iterator[tuple[str, ReadableTensor]]:
    joined: dict[tuple[str, str], dict[str, str]] = {}  # for what a converter makes: its sources, and their patterns
    for name in sorted(tensors, key=rules.loading.dot_natural_key):
        new, pattern = rules.renamed(name, model, live)
        if pattern is None:
            yield new, tensors[name]
        else:
            converter = tuple(rules.converter(pattern).source_patterns)
            joined.setdefault((new, "\n".join(converter)), {})[name] = pattern
    shared = _OneAtATime()
    for (new, _), patterns in joined.items():
        group = _Group(rules, model, new, {name: tensors[name] for name in patterns}, patterns)
        for target, outline in group.outlines().items():
            yield target, _JoinedTensor(outline.dtype, tuple(outline.shape), target, group, shared)


@dataclass(frozen=True, eq=False)
class _Group:
    """The saved tensors that a converter makes one tensor of, or several."""

    rules: _Rules
    model: Any
    name: str
    sources: Mapping[str, PiecedTensor]
    patterns: Mapping[str, str]

    def outlines(self) -> dict[str, torch.Tensor]:
        """What is made, without data."""
        empty = {
            name: torch.empty(saved.shape, dtype=saved.dtype, device="meta") for name, saved in self.sources.items()
        }
        return self._made(empty)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._made({name: saved.read(saved.box) for name, saved in self.sources.items()})

    def _made(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = self.rules.converter(next(iter(self.patterns.values())))
        for name, tensor in tensors.items():
            converter.add_tensor(self.name, name, self.patterns[name], tensor)
        made = converter.convert(self.name, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass
class _OneAtATime:
    """The tensors of the group that was read last."""

    group: _Group | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def of(self, group: _Group) -> dict[str, torch.Tensor]:
        if self.group is not group:
            self.tensors = {}  # before others are read
            self.group, self.tensors = group, group.tensors()
        return self.tensors


@dataclass(frozen=True)
class _JoinedTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    name: str
    group: _Group
    shared: _OneAtATime

    @property
    def box(self) -> Box:
        return Box((0,) * len(self.shape), self.shape)

    def read(self, box: Box) -> torch.Tensor:
        return narrowed(self.shared.of(self.group)[self.name], box.ranges)

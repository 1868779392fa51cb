"""Weights that are one and the same: known by where they were saved, or by what they hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.tensor_bytes import movable

# What models tie: an output head to an embedding, embeddings to a shared one. Only among these do equal bytes mean
# anything: fresh biases are all zero, and a model that lacked one of them would not load.
_HEADS = ("lm_head", "embed_out", "output", "output_layer", "output_projection", "proj_out", "decoder")
_EMBEDDINGS = ("embed", "wte", "shared")
_SHARED = "shared"


def tied(tensors: Mapping[str, PiecedTensor]) -> dict[str, str]:
    """Names that need not be written, each with the name that stands for it."""
    found = same_place(tensors)
    left = {name: tensor for name, tensor in tensors.items() if name not in found}
    for kept, other in _candidates(left):
        if kept not in found and other not in found and _equal(left[kept], left[other]):
            found[other] = kept
    return found


def same_place(tensors: Mapping[str, PiecedTensor]) -> dict[str, str]:
    """Those of them that were saved as one."""
    by_place = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.size:
            by_place[tensor.dtype, tensor.shape, frozenset(tensor.pieces)].append(name)
    return one_of_each(by_place.values())


def one_of_each(groups: Iterable[list[str]]) -> dict[str, str]:
    """Of names that stand for one tensor, those that need not be written, each with the one that is: no output head."""
    ordered = (sorted(names, key=_is_head) for names in groups)
    return {other: kept for kept, *others in ordered for other in others}


def _candidates(tensors: Mapping[str, PiecedTensor]) -> Iterator[tuple[str, str]]:
    """Pairs that models tie, the one to keep first."""
    tables = [name for name, tensor in tensors.items() if len(tensor.shape) == 2 and name.endswith(".weight")]

    def pairs(keep: Callable[[str], bool], drop: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
        return ((kept, other) for kept in tables if keep(kept) for other in tables if drop(other) and other != kept)

    yield from pairs(_is_shared, _is_embedding)
    yield from pairs(_is_embedding, _is_head)


def _module(name: str) -> str:
    """`lm_head` of `model.lm_head.weight`."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _is_head(name: str) -> bool:
    return _module(name) in _HEADS


def _is_embedding(name: str) -> bool:
    return not _is_head(name) and any(word in _module(name) for word in _EMBEDDINGS)


def _is_shared(name: str) -> bool:
    return _module(name) == _SHARED


def _equal(one: PiecedTensor, other: PiecedTensor) -> bool:
    """Whether every byte is the same. Different ones are told by their first slab."""
    if (one.dtype, one.shape) != (other.dtype, other.shape) or not one.size:
        return False
    return all(_same_bytes(*slabs) for slabs in zip(one.slabs(), other.slabs(), strict=True))


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(movable(one.flatten()).view(torch.uint8), movable(other.flatten()).view(torch.uint8))

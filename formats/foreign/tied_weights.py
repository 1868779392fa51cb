"""Tied weights: found by the place where they were saved, or by equal content."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.tensor_bytes import same_bytes

# What models tie: an output head to an embedding, embeddings to a shared one. Only among these do equal bytes mean
# that weights are tied: fresh biases are all zero, and a model would not load without one of them.
_HEADS = ("lm_head", "embed_out", "output", "output_layer", "output_projection", "proj_out", "decoder")
_EMBEDDINGS = ("embed", "wte", "shared")
_SHARED = "shared"
_MOST_PAIRS = 1000  # models have a few; the names of a hostile one could be compared forever


def tied(tensors: Mapping[str, PiecedTensor]) -> dict[str, str]:
    """Names of duplicates that need not be written, each with the name that is."""
    found = same_place(tensors)
    left = {name: tensor for name, tensor in tensors.items() if name not in found}
    for kept, other in islice(_candidates(left), _MOST_PAIRS):
        if kept not in found and other not in found and equal_bytes(left[kept], left[other]):
            found[other] = kept
    return found


def same_place(tensors: Mapping[str, PiecedTensor]) -> dict[str, str]:
    """Duplicates that were saved as the same bytes of the same files."""
    by_place = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.size:
            by_place[tensor.dtype, tensor.shape, frozenset(tensor.pieces)].append(name)
    return duplicates(by_place.values())


def duplicates(groups: Iterable[list[str]]) -> dict[str, str]:
    """For groups of names of the same tensor: the names not to write, each with the name to write instead.

    An output head is never the name that is written, if the group has another.
    """
    ordered = (sorted(names, key=_is_head) for names in groups)
    return {other: kept for kept, *others in ordered for other in others}


def _candidates(tensors: Mapping[str, PiecedTensor]) -> Iterator[tuple[str, str]]:
    """Pairs of names that models tie, the name to keep first."""
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


def equal_bytes(first: PiecedTensor, second: PiecedTensor) -> bool:
    """Whether every byte is the same. The first slab usually shows a difference."""
    if (first.dtype, first.shape) != (second.dtype, second.shape) or not first.size:
        return False
    return all(same_bytes(*slabs) for slabs in zip(first.slabs(), second.slabs(), strict=True))

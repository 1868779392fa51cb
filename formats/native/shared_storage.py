"""Tensors that share memory (tied weights, overlapping views): stored once, and sharing memory again when loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import torch

from ckpt.formats.native.header import BARE

_ALIGNMENT = 16  # bytes: no dtype is longer


@dataclass(frozen=True)
class View:
    """A tensor whose bytes lie within those of a stored one."""

    of: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int  # byte offset in the stored tensor

    def on(self, base: torch.Tensor) -> torch.Tensor:
        """This view of `base`, which must be contiguous and begin its storage."""
        view = torch.empty(0, dtype=self.dtype, device=base.device)
        return view.set_(base.untyped_storage(), self.start // view.element_size(), self.shape, self.stride)


@dataclass(frozen=True)
class _Span:
    """The bytes of a storage from a tensor's first to its last element."""

    name: str
    tensor: torch.Tensor
    first: int
    last: int


def untie(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, View]]:
    """Split tensors into those to store and those that are views of a stored one.

    If none of several overlapping tensors covers all the others, the bytes beneath them are stored under a name of
    their own, and all of them are views.
    """
    stored = dict(tensors)
    views: dict[str, View] = {}
    for cluster in _clusters(_spans(tensors)):
        base = _base(cluster, tensors)
        stored[base.name] = base.tensor
        for span in cluster:
            if span.name != base.name:
                del stored[span.name]
                views[span.name] = _view(span, base)
    return stored, views


def _spans(tensors: Mapping[str, torch.Tensor]) -> Iterable[list[_Span]]:
    """The tensors of each storage that several tensors use, in the order of their first byte."""
    by_address: dict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta:
            by_address[tensor.untyped_storage().data_ptr()].append(name)
    for names in by_address.values():
        if len(names) > 1:  # rare, and training waits for this loop
            by_device: dict[torch.device, list[_Span]] = defaultdict(list)
            for name in names:
                tensor = tensors[name]
                # a lazy conjugate or negation has other values than its bytes: it cannot be a view of them
                if not tensor.is_conj() and not tensor.is_neg():
                    by_device[tensor.device].append(_span(name, tensor))
            for spans in by_device.values():
                yield sorted(spans, key=lambda span: (span.first, -span.last))


def _span(name: str, tensor: torch.Tensor) -> _Span:
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    reach = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return _Span(name, tensor, first, first + (reach + 1) * size)


def _clusters(storages: Iterable[list[_Span]]) -> Iterable[list[_Span]]:
    """Runs of two or more tensors in which each overlaps an earlier one."""
    for spans in storages:
        cluster: list[_Span] = []
        reach = 0
        for span in spans:
            if cluster and span.first >= reach:
                yield from _if_shared(cluster)
                cluster = []
            cluster.append(span)
            reach = max(reach, span.last) if len(cluster) > 1 else span.last
        yield from _if_shared(cluster)


def _if_shared(cluster: list[_Span]) -> Iterable[list[_Span]]:
    if len(cluster) > 1:
        yield cluster


def _base(cluster: list[_Span], taken: Container[str]) -> _Span:
    """The tensor to store for a cluster: one that covers the others, or the bare bytes beneath them."""
    first, last = cluster[0].first, max(span.last for span in cluster)
    if len({_geometry(span) for span in cluster}) == 1:
        return cluster[0]
    for span in cluster:
        covers = (span.first, span.last) == (first, last) and span.tensor.is_contiguous()
        if covers and all((other.first - first) % other.tensor.element_size() == 0 for other in cluster):
            return span
    first -= first % _ALIGNMENT  # so that a view of any dtype begins at an element boundary
    raw = torch.empty(0, dtype=torch.uint8, device=cluster[0].tensor.device)
    raw.set_(cluster[0].tensor.untyped_storage(), first, (last - first,), (1,))
    name = f"{cluster[0].name}{BARE}"
    while name in taken:
        name += "+"
    return _Span(name, raw, first, last)


def _view(span: _Span, base: _Span) -> View:
    tensor, stride = span.tensor, span.tensor.stride()
    if _geometry(span) == _geometry(base):
        stride = torch.empty(tensor.shape, device="meta").stride()  # the base is stored contiguously
    return View(base.name, tensor.dtype, tuple(tensor.shape), tuple(stride), span.first - base.first)


def _geometry(span: _Span) -> tuple[object, ...]:
    return span.first, span.tensor.dtype, span.tensor.shape, span.tensor.stride()

"""Write portable state as a folder: of torch.distributed.checkpoint, or of a model as Hugging Face's tools read it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt.export.options import ExportOptions
from ckpt.export.save_model import CONFIG, model_files
from ckpt.formats.foreign.dcp_write import Shard, ShardedEntry, changed, flattened, write_folder
from ckpt.formats.foreign.tied_weights import tied
from ckpt.formats.pieces import PiecedTensor
from ckpt.load.accelerate_state import kind_of
from ckpt.storage import open_storage
from ckpt.tools.export_torch import left_of_ranks, whole_tree
from ckpt.tools.model_about import NO_CONFIG
from ckpt.tools.portable_state import Outcome, PortableState

_SHARD = 16 << 20  # elements: what is held in memory at once
_MODEL_ALONE = "safetensors of a model hold nothing else"


def export_dcp(state: PortableState, folder: Path, advance: Callable[[int], None]) -> Outcome:
    """Write what `torch.distributed.checkpoint.load` reads into `{"model": ..., "optimizer": ...}`."""
    tree, skipped = whole_tree(state, numbered=False)
    leaves, paths = flattened(tree)
    tensors = {name: _entry(leaf) for name, leaf in leaves.items() if isinstance(leaf, PiecedTensor | torch.Tensor)}
    values = {name: leaf for name, leaf in leaves.items() if name not in tensors}
    write_folder(os.fspath(folder), tensors, values, advance, paths)
    for key in state.parts:
        if key in tree and kind_of(key) != "optimizer":  # of optimizers, whoever reads them knows what it means
            skipped |= changed(tree[key], key)
    return tuple(key for key in (*state.parts, "rng") if key in tree), skipped


def _entry(leaf: PiecedTensor | torch.Tensor) -> ShardedEntry:
    shape = tuple(leaf.shape)
    if isinstance(leaf, torch.Tensor):
        return ShardedEntry(leaf.dtype, shape, (Shard((0,) * len(shape), shape, leaf.detach().clone),))
    boxes = list(leaf.boxes(_SHARD)) or [leaf.box]
    shards = tuple(Shard(box.offsets, box.sizes, partial(leaf.read, box)) for box in boxes)
    return ShardedEntry(leaf.dtype, shape, shards)


def export_hugging_face(
    state: PortableState, folder: Path, advance: Callable[[int], None], *, max_shard_size: int | None
) -> Outcome:
    """Write the model as `save_pretrained` would, of a PEFT model its adapters; and the files that were beside it."""
    key = state.the_model()
    tree = state.tree(key)
    tensors = {name: tensor for name, tensor in tree.items() if isinstance(tensor, PiecedTensor)}
    storage = open_storage(folder)
    files = model_files(state.about, tensors, tied(tensors), ExportOptions(max_shard_size=max_shard_size))
    for file in files:
        if file.path not in state.beside:
            storage.write(file.path, _counted(file.pieces(), advance))
    for path, read in state.beside.items():
        storage.write(path, [memoryview(read())])
    skipped = {f"{key}.{name}": "no tensor: safetensors cannot hold it" for name in tree if name not in tensors}
    skipped |= {other: _MODEL_ALONE for other in state.parts if other != key} | left_of_ranks(state)
    skipped |= _not_of_adapters(key, state.about, tensors)
    if not state.about:
        skipped[CONFIG] = NO_CONFIG
    if state.own_state is not None:
        skipped["rng"] = _MODEL_ALONE
    if any(state.progress.to_json().values()):
        skipped["progress"] = _MODEL_ALONE
    return (key,), skipped


def _not_of_adapters(key: str, about: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, str]:
    """The tensors of a PEFT model that are not written with its adapters."""
    if "adapters" not in about:
        return {}
    kept = {name for adapter in about["adapters"].values() for name in adapter["tensors"].values()}
    others = tensors.keys() - kept
    why = f"{len(others)} tensors of the model that is adapted: the adapters are written, as PEFT does"
    return {f"{key}: base model": why} if others else {}


def _counted(pieces: Iterator[memoryview], advance: Callable[[int], None]) -> Iterator[memoryview]:
    for piece in pieces:
        yield piece
        advance(len(piece))

"""Write the model of portable state as a `torch_dist` folder that `megatron.core.dist_checkpointing.load` reads.

For a model of Megatron-Core that one process holds, or FSDP, or DDP: with the names and shapes that its `state_dict()`
has without tensor parallelism. Layers are stacked, as Megatron asks for them; it divides them anew over any ranks.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt.errors import ConfigError
from ckpt.formats.foreign import megatron
from ckpt.formats.foreign.accelerate_write import write_values
from ckpt.formats.foreign.dcp_write import Shard, ShardedEntry, write_folder
from ckpt.formats.native.documents import to_json
from ckpt.formats.pieces import PiecedTensor
from ckpt.tools.portable_state import Outcome, PortableState

_PART = "model"
_ANEW = "Megatron-Core has a form of its own for it: it begins anew"
_LAYER = re.compile(r"(?:.*\.)?(?:decoder|encoder)\.layers\.\d{1,6}\..+")


def export(state: PortableState, folder: Path, advance: Callable[[int], None]) -> Outcome:
    """Write the folder. Returns the parts in it, and what was left out, with the reasons."""
    tree = state.tree(_PART) if _PART in state.parts else {}
    tensors = {name: tensor for name, tensor in tree.items() if isinstance(tensor, PiecedTensor)}
    _require_names(tensors, state.name)
    entries = _stacked(megatron.stored_names(tensors), state.name)
    objects, skipped = _objects(tree)
    write_folder(os.fspath(folder), entries, objects, advance)
    _write_rest(folder, state.progress.step)
    others = {key: _ANEW for key in state.parts if key != _PART}
    return (_PART,), {**skipped, **others, "rng": _ANEW}


def _require_names(tensors: Mapping[str, PiecedTensor], name: str) -> None:
    if not any(map(_LAYER.fullmatch, tensors)):
        raise ConfigError(
            f"the model of {name} has no names of Megatron-Core (decoder.layers.0.mlp.linear_fc1.weight): what is "
            "written, Megatron would not find."
        )


def _objects(tree: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The modules' empty `_extra_state`, which Megatron asks for, and what else is no tensor, which is left out."""
    others = {name for name, value in tree.items() if not isinstance(value, PiecedTensor)}
    empty = {name for name in others if megatron.is_extra_state(name) and tree[name] is None}
    skipped = {f"{_PART}.{name}": "no tensor: it is not written" for name in sorted(others - empty)}
    return {megatron.object_name(name, empty): [None] for name in sorted(empty)}, skipped


def _write_rest(folder: Path, step: int) -> None:
    """What is not sharded, and the file that Megatron takes for the end of a save."""
    write_values(os.fspath(folder / megatron.COMMON), {megatron.ITERATION: step})
    (folder / megatron.CONFIG).write_bytes(to_json(megatron.CONFIGURATION))


def _stacked(tensors: Mapping[str, PiecedTensor], name: str) -> dict[str, ShardedEntry]:
    """The tensors by the names of Megatron's folders. Layers that are not alike remain by themselves."""
    stacks: dict[str, dict[int, PiecedTensor]] = defaultdict(dict)
    entries: dict[str, ShardedEntry] = {}
    for key, tensor in tensors.items():
        found = megatron.stacked_name(key)
        if found is None:
            entries[key] = ShardedEntry(tensor.dtype, tensor.shape, (_shard((), tensor),))
        else:
            stacks[found[0]][found[1]] = tensor
    for key, layers in stacks.items():
        first = layers[min(layers)]
        alike = {(tensor.dtype, tensor.shape) for tensor in layers.values()} == {(first.dtype, first.shape)}
        if not alike or sorted(layers) != list(range(len(layers))) or key in entries:
            raise ConfigError(
                f"the layers of {key} in {name} are not alike: {len(layers)} of {1 + max(layers)} have it, or in "
                "several shapes. Megatron-Core stacks layers only where all of them have the same."
            )
        shards = tuple(_shard((layer,), layers[layer]) for layer in sorted(layers))
        entries[key] = ShardedEntry(first.dtype, (len(layers), *first.shape), shards)
    return entries


def _shard(layer: tuple[int, ...], tensor: PiecedTensor) -> Shard:
    ones = (1,) * len(layer)
    return Shard((*layer, *(0 for _ in tensor.shape)), (*ones, *tensor.shape), partial(_read, ones, tensor))


def _read(ones: tuple[int, ...], tensor: PiecedTensor) -> torch.Tensor:
    return tensor.read(tensor.box).reshape(*ones, *tensor.shape)

"""Folders that Megatron-Core's `dist_checkpointing.save` wrote with `torch_dist`.

They are folders of torch.distributed.checkpoint with keys of Megatron's own, `common.pt` for what is not sharded, and
`metadata.json`, which is written last. Layers that are alike are one tensor there, stacked along a new first dimension:
here every layer is a tensor of its own, by the name that it has in the module. Optimizer state is beside the model, by
names that begin with `optimizer.`. Objects that are no tensors (`_extra_state`, generators) are pickles, of which plain
data is read: nothing is executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt.errors import CkptError, DamagedError, MissingError, UnsupportedError
from ckpt.formats.foreign import dcp
from ckpt.formats.foreign.torch_save import NamesOf, read_file
from ckpt.formats.layout import Box
from ckpt.formats.pieces import Piece, PiecedTensor, check_complete
from ckpt.formats.tensors import FolderReader
from ckpt.util.checked_json import parse_json

COMMON, CONFIG = "common.pt", "metadata.json"
BACKEND = "torch_dist"
CONFIGURATION = {
    "sharded_backend": BACKEND,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
ITERATION = "iteration"
_TRACKER = "latest_checkpointed_iteration.txt"
_LONGEST_TRACKER, _LARGEST_CONFIG = 64, 1 << 16  # bytes
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)*optimizer\..*")
_STACKED = re.compile(r"(?P<head>(?:.*\.)?layers)\.(?!\d+\.)(?P<tail>.+)")
_OBJECT = re.compile(r"(?P<key>.+)/shard_(?P<offsets>\d+(?:\.\d+)*)_(?P<sizes>\d+(?:\.\d+)*)")
_LAYER = re.compile(r"(?P<head>(?:.*?\.)?layers)\.(?P<layer>\d{1,6})\.(?P<tail>.+)")
_EXTRA = "_extra_state"
# where a layer's norms are modules, and not parts of the linear layer behind them, they are stored as if they were
_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def save_in(folder: FolderReader) -> FolderReader:
    """The folder of one save: this one, or the one below it that the tracker names."""
    if COMMON in folder.files or _TRACKER not in folder.files:
        return folder
    length = min(folder.files[_TRACKER], _LONGEST_TRACKER)
    told = folder.opened(_TRACKER).read(0, length).decode("utf-8", "replace").strip()
    name = f"iter_{int(told):07d}" if told.isascii() and told.isdecimal() else told
    found = folder.below(f"{name}/")
    if not name or COMMON not in found.files:
        raise MissingError(
            f"{folder.where}/{_TRACKER} names {told!r}, but there is no Megatron-Core save with {COMMON} there. Give "
            "the folder of one save."
        )
    return found


@dataclass(frozen=True)
class MegatronSave:
    """One save: tensors by the names of the module and of the optimizer, and the objects beside them."""

    folder: FolderReader
    contents: dcp.Contents

    @classmethod
    def opened(cls, folder: FolderReader) -> MegatronSave:
        _check_backend(folder)
        return cls(folder, dcp.contents_of(folder))

    @property
    def parts(self) -> list[str]:
        """The parts that have tensors."""
        kinds = {"optimizer" if _OPTIMIZER.fullmatch(name) else "model" for name in self.contents.tensors}
        return sorted(kinds)

    def tensors(self, part: str) -> dict[str, PiecedTensor]:
        """The tensors of the model, with every layer by itself, or those of the optimizer, as they are stored."""
        if part not in self.parts:
            known = ", ".join(self.parts) or "none"
            raise MissingError(f"{self.folder.where} has no part {part!r} with tensors. Parts with tensors: {known}.")
        of_model = part == "model"
        chosen = {
            name: tensor
            for name, tensor in self.contents.tensors.items()
            if (_OPTIMIZER.fullmatch(name) is None) == of_model
        }
        self.folder.check(dcp.needed_files(chosen.values()))
        where = self.folder.where
        stored = {name: tensor.pieced(name, self.folder.opened, where) for name, tensor in chosen.items()}
        check_complete(stored, where)
        return _by_layer(stored, where) if of_model else stored

    def extra_state(self) -> tuple[dict[str, None], list[str]]:
        """The names of the modules' `_extra_state` that is empty, and the objects of the model that are more."""
        empty: dict[str, None] = {}
        others: list[str] = []
        self.folder.check(self.contents.needed_files())
        for stored in sorted(self.contents.others):
            names = list(_modules(stored))
            if names and self._is_empty(stored):
                empty |= dict.fromkeys(names)
            else:
                others.append(stored)
        return empty, others

    def _is_empty(self, stored: str) -> bool:
        try:
            value = self.contents.others[stored].read(self.folder.opened, self.folder.where)
        except CkptError:  # more than plain data: it is not read, and listed
            return False
        return isinstance(value, list) and all(item is None for item in value)

    def iteration(self) -> int | None:
        """The number of optimizer steps, if `common.pt` is plain data that says so."""
        found = _common(self.folder).get(ITERATION)
        return found if type(found) is int and found >= 0 else None

    def common_keys(self) -> list[str]:
        return sorted(map(str, _common(self.folder)))


def _common(folder: FolderReader) -> dict[Any, Any]:
    found = read_file(folder, COMMON, NamesOf("megatron."))
    if not isinstance(found, dict):
        raise DamagedError(f"{folder.where}/{COMMON} does not hold a dict that maps names to state.")
    return found


def _check_backend(folder: FolderReader) -> None:
    if CONFIG not in folder.files:
        raise DamagedError(
            f"{folder.where}/{CONFIG} is missing. Megatron-Core writes this file last, so the save was interrupted. "
            "Use another save."
        )
    where = f"{folder.where}/{CONFIG}"
    try:
        found = parse_json(folder.opened(CONFIG).read(0, min(folder.files[CONFIG], _LARGEST_CONFIG)))
        backend = found["sharded_backend"]
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"{where} does not say how the tensors are stored: {error}.") from error
    if backend != BACKEND:
        raise UnsupportedError(
            f"Megatron-Core wrote {folder.where} as {backend!r}, but ckpt reads only {BACKEND!r}. Load the "
            f"checkpoint with Megatron-Core, and save it again with --ckpt-format {BACKEND}."
        )


def _by_layer(stored: Mapping[str, PiecedTensor], where: str) -> dict[str, PiecedTensor]:
    """The tensors with one for each layer, where layers are stacked."""
    found: dict[str, PiecedTensor] = {}
    for name, tensor in stored.items():
        match = _STACKED.fullmatch(name)
        layers = dict(_layers(match, tensor)) if match and is_stacked(tensor) else {name: tensor}
        if twice := found.keys() & layers.keys():
            raise DamagedError(f"{where} has {min(twice)} twice: once in a stack of layers, and once alone.")
        found |= layers
    return found


def is_stacked(tensor: PiecedTensor) -> bool:
    """Whether every piece is of one layer: a stack is saved by layers, whoever has them."""
    return bool(tensor.pieces) and all(piece.box.sizes[:1] == (1,) for piece in tensor.pieces)


def _layers(match: re.Match[str], tensor: PiecedTensor) -> Iterator[tuple[str, PiecedTensor]]:
    pieces: list[list[Piece]] = [[] for _ in range(tensor.shape[0])]
    for piece in tensor.pieces:
        box, region = piece.box, piece.region
        inner = replace(region, sizes=region.sizes[1:], strides=region.strides[1:])
        pieces[box.offsets[0]].append(Piece(Box(box.offsets[1:], box.sizes[1:]), inner))
    for layer, held in enumerate(pieces):
        yield f"{match['head']}.{layer}.{match['tail']}", PiecedTensor(tensor.dtype, tensor.shape[1:], tuple(held))


def _modules(stored: str) -> Iterator[str]:
    """The name of the `_extra_state` that an object is; none if it is something else."""
    match = _OBJECT.fullmatch(stored)
    if match is None or match["key"].rpartition(".")[2] != _EXTRA:
        return
    stacked = _STACKED.fullmatch(match["key"])
    layer = match["offsets"].partition(".")[0]
    yield f"{stacked['head']}.{layer}.{stacked['tail']}" if stacked else match["key"]


def stacked_name(name: str) -> tuple[str, int] | None:
    """The name of the stack that a layer's tensor belongs to, and the number of the layer."""
    match = _LAYER.fullmatch(name)
    return (f"{match['head']}.{match['tail']}", int(match["layer"])) if match else None


def is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA


def object_name(name: str, names: Iterable[str]) -> str:
    """The name of an object of the module in a folder. `names` are those of the model, which say how many layers."""
    found = stacked_name(name)
    if found is None:
        return f"{name}/shard_0_1"
    same = {layer for other in map(stacked_name, names) if other and other[0] == found[0] for layer in (other[1],)}
    return f"{found[0]}/shard_{found[1]}_{len(same)}"


def stored_names(tensors: Mapping[str, PiecedTensor]) -> dict[str, PiecedTensor]:
    """A model's tensors by the names under which Megatron stores them: norms as parts of the linear layer behind."""
    found: dict[str, PiecedTensor] = {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        for stored, module in _NORMS.items():
            linear = stored.rpartition(".")[0]
            if match and match["tail"].startswith(module) and f"{name.partition(module)[0]}{linear}.weight" in tensors:
                name = name.replace(module, stored, 1)
        found[name] = tensor
    return found


def module_names(names: Mapping[str, Any]) -> dict[str, str]:
    """Other names of stored tensors, where a norm is a module of its own."""
    found = {}
    for name in names:
        for stored, module in _NORMS.items():
            if stored in name:
                found[name] = name.replace(stored, module)
    return found

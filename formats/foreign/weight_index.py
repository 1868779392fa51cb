"""Safetensors in several files, and the index that says in which of them each tensor is."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt.errors import DamagedError
from ckpt.formats.damage import damage_reported
from ckpt.formats.native.header import parsed
from ckpt.formats.native.pieced import pieced
from ckpt.formats.native.tensor_file import TensorFile
from ckpt.formats.pieces import PiecedTensor, check_complete

_FEW = 10


def read_weight_map(data: bytes, where: str) -> dict[str, str]:
    """The file of each tensor, as `model.safetensors.index.json` has it."""
    with damage_reported(where, "index of safetensors files"):
        found = parsed(data)["weight_map"]
        if not all(isinstance(path, str) for path in found.values()):
            raise ValueError("a file in it has no name")
        return dict(found)


def tensors_of(files: Mapping[str, TensorFile], weight_map: Mapping[str, str], where: str) -> dict[str, PiecedTensor]:
    """Every tensor in the files: each from the file that the index names; what it does not name must be there once."""
    absent = [name for name, path in weight_map.items() if path not in files or name not in files[path]]
    if absent:
        listed = ", ".join(f"{name} in {weight_map[name]}" for name in absent[:_FEW])
        raise DamagedError(f"{where} is damaged: its index names tensors that are not there: {listed}.")
    named = {name: files[path] for name, path in weight_map.items()}
    tensors = pieced(files.values(), lambda file, name: named.get(name, file) is file)
    check_complete(tensors, where)
    doubled = [
        name for name, tensor in tensors.items() if len({piece.box for piece in tensor.pieces}) < len(tensor.pieces)
    ]
    if doubled:
        raise DamagedError(
            f"{where} has these tensors in several files, and no index says which of them counts: "
            f"{', '.join(sorted(doubled)[:_FEW])}. Remove the files that are not of this model."
        )
    return tensors

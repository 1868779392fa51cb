"""Find out who wrote a checkpoint, and open it as portable state."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.errors import ConfigError, MissingError
from ckpt.export.installed_formats import open_installed
from ckpt.export.source import KNOWN, OLD_WEIGHTS, is_safetensors, single_file
from ckpt.formats.foreign import accelerate, dcp, deepspeed, lightning, megatron, torch_files, trainer
from ckpt.formats.foreign.hf_safetensors import INDEX_SUFFIX
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME
from ckpt.root.folder import Folder
from ckpt.root.save_marker import MARKER
from ckpt.tools.import_folders import from_dcp, from_model, from_saved_dict, from_trainer
from ckpt.tools.import_foreign import from_accelerate, from_deepspeed, from_megatron
from ckpt.tools.import_native import open_native
from ckpt.tools.portable_state import PortableState
from ckpt.util.option_values import path_text

_TOOLS = {lightning.NAME: "Lightning", torch_files.NAME: "torch.save"}


@contextmanager
def open_state(source: str | os.PathLike[str]) -> Iterator[PortableState]:
    """The checkpoint at a path or URL, of any format that is read. Nothing is executed."""
    where = path_text(source, "the source")
    alone = single_file(where)
    if alone is not None:
        yield _from_file(*alone, where)
        return
    folder = Folder.at(where)
    if not folder.files:
        raise MissingError(f"there is nothing at {folder.where}. What can be converted is {KNOWN}.")
    if {FILE_NAME, COPY_NAME, MARKER} & folder.files.keys() or any(_is_manifest(path) for path in folder.files):
        with open_native(where) as found:
            yield found
        return
    yield _from_folder(folder, where)


def _is_manifest(path: str) -> bool:
    return path.count("/") == 1 and path.endswith(f"/{FILE_NAME}")


def _from_file(folder: Folder, path: str, where: str) -> PortableState:
    name = path.removesuffix(INDEX_SUFFIX).rpartition(".")[0] or path
    if is_safetensors(path):
        return from_model(where, name)
    saved = torch_files.read_file(folder.opened(path), folder.files[path], where)
    return from_saved_dict(saved, name, _TOOLS[saved.origin])


def _from_folder(folder: Folder, where: str) -> PortableState:
    files = folder.files
    if trainer.is_trainer(files):
        return from_trainer(folder)
    if accelerate.is_accelerate(files):
        return from_accelerate(folder)
    if (engine := deepspeed.save_in(folder)) is not None:
        return from_deepspeed(engine, folder.name)
    if (written := megatron.save_in(folder)) is not None:
        return from_megatron(written, folder.name)
    if dcp.METADATA in files:
        return from_dcp(folder)
    if any(path.endswith(SUFFIX) and "/" not in path for path in files):
        return from_model(where, folder.name)
    if OLD_WEIGHTS in files:
        return _from_file(folder, OLD_WEIGHTS, f"{folder.where}/{OLD_WEIGHTS}")
    if open_installed(folder, "model") is not None:
        return from_model(where, folder.name)
    raise ConfigError(f"{folder.where} is of no kind that can be converted. That would be {KNOWN}.")

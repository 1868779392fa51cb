"""Open the tensors of a part, from any format that merge, diff, load_model and push read.

Checkpoints of ours, folders of torch.distributed.checkpoint, Accelerate's around them, what DeepSpeed writes, and
folders of safetensors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ckpt.errors import ConfigError, DamagedError, MissingError
from ckpt.export.checkpoint_tensors import TensorSource, open_checkpoint
from ckpt.export.folders import belongs_beside
from ckpt.export.installed_formats import open_installed
from ckpt.formats.foreign import accelerate, dcp, deepspeed, megatron, torch_files
from ckpt.formats.foreign.accelerate import FolderReader
from ckpt.formats.foreign.hf_safetensors import INDEX_SUFFIX
from ckpt.formats.foreign.torch_save import ARCHIVE
from ckpt.formats.foreign.weight_index import read_weight_map, tensors_of
from ckpt.formats.foreign.wrapper_prefixes import unwrapped
from ckpt.formats.native.documents import STATE
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME
from ckpt.formats.native.tensor_file import TensorFile
from ckpt.formats.pieces import PiecedTensor, check_complete
from ckpt.root.catalog import scan
from ckpt.root.folder import Folder, open_url
from ckpt.root.manifest_files import without_manifest
from ckpt.root.save_marker import MARKER
from ckpt.root.trust import BELIEVES_ALL, Trust
from ckpt.util.option_values import path_text, said

_log = logging.getLogger("ckpt")
_FEW = 10

_ACCELERATE = {"model": "pytorch_model_fsdp", "optimizer": "optimizer"}  # its folders end with the number of the object
KNOWN = (
    "a checkpoint of ckpt (with manifest.json), a folder of torch.distributed.checkpoint (with .metadata, *.distcp), "
    "what Accelerate saves under FSDP with SHARDED_STATE_DICT (pytorch_model_fsdp_0/, or the folder around it), "
    "what DeepSpeed's save_checkpoint wrote (with latest, or mp_rank_00_model_states.pt), universal ones too, "
    "a torch_dist folder of Megatron-Core (with common.pt, metadata.json), "
    "a folder with model.safetensors, whole or in shards, "
    "or one file: of safetensors, of torch.save, of Lightning (.ckpt)"
)
_WHOLE = f"model{SUFFIX}"
_INDEX = f"{_WHOLE}{INDEX_SUFFIX}"
OLD_WEIGHTS = "pytorch_model.bin"
_SAFE = (SUFFIX, f"{SUFFIX}{INDEX_SUFFIX}")
_ALONE = (*_SAFE, *torch_files.SUFFIXES)  # how the names of single files end
_LARGEST_METADATA = 1 << 30  # bytes


@contextmanager
def open_source(
    source: str | os.PathLike[str],
    part: str,
    options: Mapping[str, Any] | None = None,
    trust: Trust = BELIEVES_ALL,
) -> Iterator[TensorSource]:
    """Open a part of the checkpoint or folder at a path or URL."""
    if not isinstance(part, str):
        raise ConfigError(f"part={said(part)} must be the name of a part.")
    alone = single_file(source, options)
    if alone is not None:
        trust.refuse_unsigned(os.fspath(source))
        yield _of_file(*alone, part)
        return
    found = Folder.at(source, options)
    if {FILE_NAME, COPY_NAME} & found.files.keys():
        with open_checkpoint(source, part, options, trust) as opened:
            yield opened
        return
    trust.refuse_unsigned(os.fspath(source))
    written = megatron.save_in(found)
    folder = None if written is not None else _dcp_folder(found, part)
    if written is not None:
        yield _megatron(written, part)
    elif folder is not None:
        yield TensorSource(_distributed(folder, part))
    elif {MARKER, STATE} & found.files.keys():
        raise without_manifest(found.where, found.files)
    elif accelerate.is_accelerate(found.files):
        yield TensorSource(_of_accelerate(found, part))
    elif any(path.endswith(SUFFIX) and "/" not in path for path in found.files):
        _require_model(found.where, part)
        yield TensorSource(_weights(found), beside=_beside(found))
    elif OLD_WEIGHTS in found.files:
        yield replace(_of_file(found, OLD_WEIGHTS, part), beside=_beside(found))
    elif (save := deepspeed.save_in(found)) is not None:
        yield TensorSource(_model_of_deepspeed(save, part))
    elif (tensors := open_installed(found, part)) is not None:
        yield TensorSource(tensors)
    else:
        raise _unreadable_error(found)


def single_file(source: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> tuple[Folder, str] | None:
    """The name of the one file at a path or URL, and the folder around it; None if it is a folder, or nothing.

    Of safetensors in shards, the name of the whole stands for its index.
    """
    where = path_text(source, "the source")
    local = "://" not in where
    if local and os.path.islink(where):
        where = _followed(where)
    top, slash, name = where.rpartition("/")
    if not name or (local and not os.path.isfile(where) and not os.path.isfile(f"{where}{INDEX_SUFFIX}")):
        return None
    if not local and (not name.endswith(_ALONE) or top.endswith(":/")):
        return None
    folder = Folder.at(top or slash or ".", options)
    found = next((path for path in (name, f"{name}{INDEX_SUFFIX}") if path in folder.files), None)
    if found is None:
        return None
    _refuse_part_of_checkpoint(folder, where, options)
    return folder, found


def _followed(link: str) -> str:
    """What a link that the user names leads to. Of one to another kind of file, its name says what the file holds."""
    target = os.path.realpath(link)
    return target if os.path.splitext(target)[1] == os.path.splitext(link)[1] else link


def _refuse_part_of_checkpoint(folder: Folder, where: str, options: Mapping[str, Any] | None) -> None:
    """A file of a checkpoint may be one rank's piece, and only the manifest says what its bytes must be."""
    around = os.path.dirname(folder.where if "://" in folder.where else os.path.abspath(folder.where))
    is_ours = FILE_NAME in folder.files or bool(
        not around.endswith((":/", ":")) and open_url(around, options).version(FILE_NAME)
    )
    if is_ours:
        whole = folder.where if FILE_NAME in folder.files else around
        raise ConfigError(f"{where} is a file of a checkpoint. Name the checkpoint: {whole}.")


def is_safetensors(path: str) -> bool:
    """Whether a file holds safetensors, or is the index of some, by its name."""
    return path.endswith(_SAFE)


def _of_file(folder: Folder, path: str, part: str) -> TensorSource:
    where = f"{folder.where}/{path}"
    if is_safetensors(path):
        _require_model(where, part)
        return TensorSource(_indexed(folder, path) if path.endswith(INDEX_SUFFIX) else _tensors(folder, [path]))
    if not path.endswith(_ALONE) and folder.opened(path).read(0, min(4, folder.files[path])) != ARCHIVE:
        raise ConfigError(f"{where} is a file. What can be read is {KNOWN}.")
    saved = torch_files.read_file(folder.opened(path), folder.files[path], where)
    found = saved.parts.get(part)
    tensors = {name: item for name, item in found.items() if isinstance(item, PiecedTensor)} if found else {}
    if found is None or not tensors:
        raise MissingError(f"{where} has no tensors of a part {part!r}. Parts: {', '.join(saved.parts)}.")
    _warn_of_others(where, sorted(str(name) for name in found if name not in tensors))
    prefix = saved.prefixes.get(part, "")
    return TensorSource(tensors, other_names={name: f"{prefix}{name}" for name in tensors if prefix})


def _require_model(where: str, part: str) -> None:
    if part != "model":
        raise MissingError(f"{where} has no part {part!r}: safetensors hold a model.")


def _of_accelerate(folder: Folder, part: str) -> dict[str, PiecedTensor]:
    """The tensors of a part of Accelerate's: `model`, or `model.1` of several."""
    kind, _, number = part.partition(".")
    saved = accelerate.AccelerateCheckpoint(folder)
    numbers = saved.numbers(kind)
    if not (number.isdecimal() and int(number) in numbers) and (number or len(numbers) != 1):
        known = [f"{kind}.{other}" for kind in accelerate.KINDS for other in saved.numbers(kind)]
        raise MissingError(f"{folder.where} has no part {part!r}. Parts: {', '.join(known)}.")
    found = saved.part(kind, int(number or numbers[0]))
    tensors = {name: item for name, item in found.items() if isinstance(item, PiecedTensor)}
    if not tensors:
        raise MissingError(f"{folder.where} has no tensors by name in its part {part!r}.")
    _warn_of_others(folder.where, sorted(str(name) for name in found if name not in tensors))
    return tensors


def _warn_of_others(where: str, others: list[str]) -> None:
    if others:
        few = f"{', '.join(others[:_FEW])}{', ...' if len(others) > _FEW else ''}"
        _log.warning("%s: left out, because they are no tensors: %d objects (%s).", where, len(others), few)


def _beside(found: Folder) -> dict[str, Callable[[], bytes]]:
    return {path: found.reader(path) for path in found.files if belongs_beside(path)}


def _unreadable_error(found: Folder) -> Exception:
    where = found.where
    if not found.files and found.prefix and found.storage.version(found.prefix.rstrip("/")):
        return ConfigError(f"{where} is a file. What can be read is {KNOWN}.")
    if not found.files:
        return MissingError(f"there is nothing at {where}. What can be read is {KNOWN}.")
    names = [] if found.prefix else [checkpoint.name for checkpoint in scan(found.storage) if checkpoint.committed]
    if names:
        return ConfigError(f"{where} holds {len(names)} checkpoints. Name one of them: {where}/{names[0]}.")
    return ConfigError(f"{where} is of no kind that can be read. That would be {KNOWN}.")


def _weights(found: Folder) -> dict[str, PiecedTensor]:
    """The tensors in the safetensors of a folder: those that its index names, or `model.safetensors`, or all."""
    paths = [path for path in found.files if path.endswith(SUFFIX) and "/" not in path]
    if _INDEX in found.files:
        return _indexed(found, _INDEX)
    return _tensors(found, [_WHOLE] if _WHOLE in paths else paths)


def _indexed(found: Folder, index: str) -> dict[str, PiecedTensor]:
    where = f"{found.where}/{index}"
    weight_map = read_weight_map(found.document(index), where)
    paths = sorted(set(weight_map.values()))
    missing = [path for path in paths if path not in found.files]
    if missing:
        raise DamagedError(f"{where} names files that are not there: {', '.join(missing)}. Copy all of them there.")
    return _tensors(found, paths, weight_map)


def _tensors(found: Folder, paths: list[str], weight_map: Mapping[str, str] | None = None) -> dict[str, PiecedTensor]:
    files = {path: TensorFile.open(found.opened(path), f"{found.where}/{path}", found.files[path]) for path in paths}
    return tensors_of(files, weight_map or {}, found.where)


def _dcp_folder(found: Folder, part: str) -> Folder | None:
    """The folder itself if DCP wrote it, or the folder in it that Accelerate wrote for the part."""
    name, _, number = part.partition(".")
    below = f"{_ACCELERATE.get(name, name)}_{number or 0}/"
    for folder in (found, found.below(below)):
        if dcp.METADATA in folder.files:
            return folder
        if any(key.endswith(dcp.SUFFIX) and "/" not in key for key in folder.files):
            raise DamagedError(
                f"{folder.where}/{dcp.METADATA} is missing, which says what is in the {dcp.SUFFIX} files. "
                "It is written last: this save was cut off. Merge an older checkpoint."
            )
    return None


def _model_of_deepspeed(save: FolderReader, part: str) -> dict[str, PiecedTensor]:
    if part != "model":
        raise MissingError(
            f"{save.where} has no tensors of a part {part!r}: of what DeepSpeed wrote, the model is read."
        )
    return deepspeed.read_model(save)


def _megatron(folder: FolderReader, part: str) -> TensorSource:
    save = megatron.MegatronSave.opened(folder)
    tensors = save.tensors(part)
    _warn_of_others(folder.where, sorted(save.contents.others))
    return TensorSource(tensors, other_names=megatron.module_names(tensors))


def _distributed(folder: Folder, part: str) -> dict[str, PiecedTensor]:
    where = folder.where
    metadata = folder.document(dcp.METADATA, _LARGEST_METADATA)
    contents = dcp.read_metadata(metadata, f"{where}/{dcp.METADATA}")
    chosen = _chosen(contents, part, where)
    names = unwrapped(chosen.tensors)
    folder.check(dcp.needed_files(chosen.tensors.values()))
    if chosen.others:
        _log.warning("%s: left out, because they are no tensors: %s.", where, ", ".join(sorted(chosen.others)))
    tensors = {names[name]: saved.pieced(name, folder.opened, where) for name, saved in chosen.tensors.items()}
    check_complete(tensors, where)
    return tensors


def _chosen(contents: dcp.Contents, part: str, where: str) -> dcp.Contents:
    """The tensors under the part's key. Where nothing is nested, the whole folder is the model."""
    chosen = contents.of_part(part.partition(".")[0])
    if chosen.tensors:
        return chosen
    if contents.tensors and not contents.parts():
        return contents
    known = ", ".join(contents.parts()) or "none"
    raise MissingError(f"{where} has no tensors of a part {part!r}. Parts with tensors: {known}.")

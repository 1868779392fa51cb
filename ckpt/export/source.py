"""Open the tensors of a part, from any format that merge, diff, load_model and push read.

Checkpoints of ours, folders of torch.distributed.checkpoint, Accelerate's around them, what DeepSpeed writes, and
folders of safetensors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ckpt.errors import ConfigError, DamagedError, MissingError
from ckpt.export.folders import belongs_beside
from ckpt.export.installed_formats import open_installed
from ckpt.export.rank_variants import is_own_file, merged, warn_of_variants
from ckpt.formats.foreign import dcp, deepspeed, megatron
from ckpt.formats.foreign.accelerate import FolderReader
from ckpt.formats.foreign.weight_index import read_weight_map, tensors_of
from ckpt.formats.foreign.wrapper_prefixes import unwrapped
from ckpt.formats.native.documents import STATE, from_json, parts_in
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import FILE_NAME, FileRecord, Manifest
from ckpt.formats.native.pieced import pieced
from ckpt.formats.native.shard_table import ShardTable
from ckpt.formats.native.tensor_file import TensorFile
from ckpt.formats.pieces import PiecedTensor, check_complete
from ckpt.ranks.group import MAIN
from ckpt.root.catalog import MARKER, UncommittedError, locate, read_manifest, scan
from ckpt.root.file_names import part_of, rank_of
from ckpt.root.folder import Folder
from ckpt.root.trust import BELIEVES_ALL, Trust
from ckpt.root.verified_file import VerifiedFile
from ckpt.root.verify import problems
from ckpt.storage import Storage
from ckpt.util.option_values import path_text, said

_log = logging.getLogger("ckpt")
_FEW = 10

_ACCELERATE = {"model": "pytorch_model_fsdp", "optimizer": "optimizer"}  # its folders end with the number of the object
_KNOWN = (
    "a checkpoint of ckpt (with manifest.json), a folder of torch.distributed.checkpoint (with .metadata, *.distcp), "
    "what Accelerate saves under FSDP with SHARDED_STATE_DICT (pytorch_model_fsdp_0/, or the folder around it), "
    "what DeepSpeed's save_checkpoint wrote (with latest, or mp_rank_00_model_states.pt), universal ones too, "
    "a torch_dist folder of Megatron-Core (with common.pt, metadata.json), "
    "or a folder with model.safetensors, whole or in shards"
)
_WHOLE = f"model{SUFFIX}"
_INDEX = f"{_WHOLE}.index.json"
_LARGEST_METADATA = 1 << 30  # bytes


@dataclass(frozen=True)
class TensorSource:
    """The tensors of a part by their unwrapped names, each complete; of a checkpoint of ours also its manifest.

    `about` describes the model, if a checkpoint of ours holds a description. `beside` are other files of a folder of
    safetensors: a configuration, a tokenizer. `other_names` are those that some tensors may have in a model instead.
    """

    tensors: dict[str, PiecedTensor]
    about: Mapping[str, Any] = field(default_factory=dict)
    manifest: Manifest | None = None
    beside: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def open_source(
    source: str | os.PathLike[str],
    part: str,
    options: Mapping[str, Any] | None = None,
    trust: Trust = BELIEVES_ALL,
) -> Iterator[TensorSource]:
    """Open a part of the checkpoint or folder at a path or URL."""
    if os.path.isfile(path_text(source, "the source")):
        raise _is_a_file_error(os.fspath(source))
    if not isinstance(part, str):
        raise ConfigError(f"part={said(part)} must be the name of a part.")
    found = Folder.at(source, options)
    if FILE_NAME in found.files:
        with _checkpoint(source, part, options, trust) as opened:
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
        raise UncommittedError(
            f"{found.where} was never committed: its save was cut off before the manifest was written. Take another."
        )
    elif any(path.endswith(SUFFIX) and "/" not in path for path in found.files):
        yield TensorSource(
            _weights(found), beside={path: found.reader(path) for path in found.files if belongs_beside(path)}
        )
    elif (save := deepspeed.save_in(found)) is not None:
        yield TensorSource(_model_of_deepspeed(save, part))
    elif (tensors := open_installed(found, part)) is not None:
        yield TensorSource(tensors)
    else:
        raise _unreadable_error(found)


def _is_a_file_error(where: str) -> Exception:
    return ConfigError(f"{where} is a file. What can be read is {_KNOWN}.")


def _unreadable_error(found: Folder) -> Exception:
    where = found.where
    if not found.files and found.prefix and found.storage.version(found.prefix.rstrip("/")):
        return _is_a_file_error(where)
    if not found.files:
        return MissingError(f"there is nothing at {where}. What can be read is {_KNOWN}.")
    names = [] if found.prefix else [checkpoint.name for checkpoint in scan(found.storage) if checkpoint.committed]
    if names:
        return ConfigError(f"{where} holds {len(names)} checkpoints. Name one of them: {where}/{names[0]}.")
    return ConfigError(f"{where} is of no kind that can be read. That would be {_KNOWN}.")


def _weights(found: Folder) -> dict[str, PiecedTensor]:
    """The tensors in the safetensors of a folder: those that its index names, or `model.safetensors`, or all."""
    weight_map: dict[str, str] = {}
    paths = [path for path in found.files if path.endswith(SUFFIX) and "/" not in path]
    if _INDEX in found.files:
        where = f"{found.where}/{_INDEX}"
        weight_map = read_weight_map(found.document(_INDEX), where)
        paths = sorted(set(weight_map.values()))
        missing = [path for path in paths if path not in found.files]
        if missing:
            raise DamagedError(f"{where} names files that are not there: {', '.join(missing)}. Copy all of them there.")
    elif _WHOLE in paths:
        paths = [_WHOLE]
    files = {path: TensorFile.open(found.opened(path), f"{found.where}/{path}", found.files[path]) for path in paths}
    return tensors_of(files, weight_map, found.where)


@contextmanager
def _checkpoint(
    source: str | os.PathLike[str], part: str, options: Mapping[str, Any] | None, trust: Trust
) -> Iterator[TensorSource]:
    storage, (name,) = locate(source, options if "://" in os.fspath(source) else None)
    with storage.lock(name, shared=True):  # retention of a running job must not remove what is being read
        manifest = trust.checked(read_manifest(storage, name))
        ours = _of_part(manifest, part)
        if wrong := problems(storage, ours, show=True, threads=1):
            raise DamagedError(f"{name} is damaged: {'; '.join(wrong)}.")
        state = _state(storage, manifest, part)
        table = ShardTable.from_json(state["spread"], manifest) if "spread" in state else ShardTable({})
        united = "united" in state
        common = [file for file in ours.files if united or part_of(file.name) == part]
        tensors = pieced(
            (_tensor_file(storage, name, file) for file in common),
            partial(_is_written_by, table) if united else lambda file, tensor: True,
        )
        if united:  # the table has the values of the first rank
            warn_of_variants(f"{name}: {part}", state.get("differs", {}).get("tensors", {}))
        elif "differs" in state:
            of_ranks = pieced(_tensor_file(storage, name, file) for file in _own_files(manifest, part))
            tensors = merged(f"{name}: {part}", tensors, of_ranks, state["differs"].get("tensors", {}))
        check_complete(tensors, name)
        if "spread" in state:
            _check_table(tensors, table, f"{name}: {part}")
            tensors |= {alias: tensors[first] for alias, first in table.aliases.items()}  # tied: they are in no file
        yield TensorSource(tensors, state.get("about", {}), manifest)


def _is_written_by(table: ShardTable, file: TensorFile, name: str) -> bool:
    """Whether a file of a united part is of a rank that was to write the tensor: others have bytes of their own."""
    spec = table.tensors.get(name)
    return spec is not None and (rank_of(file.where) or MAIN) in spec.writers()


def _check_table(tensors: Mapping[str, PiecedTensor], table: ShardTable, where: str) -> None:
    """Refuse files that hold other tensors than the checkpoint's table of shards says."""
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    wrong = [name for name, spec in table.tensors.items() if found.get(name) != (spec.dtype, spec.shape)]
    wrong += [alias for alias, first in table.aliases.items() if first not in tensors]
    if wrong:
        listed = ", ".join(sorted(wrong)[:_FEW])
        raise DamagedError(f"{where} is damaged: its files do not hold what its table of shards says: {listed}.")


def _state(storage: Storage, manifest: Manifest, part: str) -> Mapping[str, Any]:
    """The entry of a part in `state.json`: everything but its tensors."""
    record = next((file for file in manifest.files if file.name == STATE), None)
    if record is None:
        raise DamagedError(f"{manifest.name} is damaged: it lists no {STATE}.")
    file = VerifiedFile.of(storage, manifest.name, record, sha256=manifest.is_authentic)
    document = from_json(file.read_all(), file.stored.key)
    state: Mapping[str, Any] = parts_in(document, "parts", file.stored.key).get(part, {})
    return state


def _tensor_file(storage: Storage, name: str, file: FileRecord) -> TensorFile:
    stored = VerifiedFile.of(storage, name, file).stored  # every byte was verified before
    return TensorFile.open(stored, stored.key, file.size)


def _own_files(manifest: Manifest, part: str) -> list[FileRecord]:
    """The files with the tensors that differ between ranks."""
    return [file for file in manifest.files if is_own_file(file.name, part)]


def _of_part(manifest: Manifest, part: str) -> Manifest:
    """The manifest reduced to the files of a part: `model.safetensors`, or those below `model/`."""
    named = [file for file in manifest.files if file.name.endswith(SUFFIX)]
    files = [file for file in named if part_of(file.name) == part or is_own_file(file.name, part)]
    if not files:
        known = ", ".join(sorted({part_of(file.name) for file in named})) or "none"
        raise MissingError(f"{manifest.name} has no tensors of a part {part!r}. Parts with tensors: {known}.")
    return replace(manifest, files=tuple(files))


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
    if others := sorted(save.contents.others):
        few = f"{', '.join(others[:_FEW])}{', ...' if len(others) > _FEW else ''}"
        _log.warning("%s: left out, because they are no tensors: %d objects (%s).", folder.where, len(others), few)
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

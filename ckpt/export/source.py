"""Opens the tensors of a part, whatever tool wrote them: for merge, diff, load_model, push and convert."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

from ckpt.errors import ConfigError, DamagedError, MissingError
from ckpt.export.checkpoint_tensors import TensorSource, open_checkpoint
from ckpt.export.folders import belongs_beside
from ckpt.formats.foreign import accelerate, dcp, deepspeed, megatron, torch_files
from ckpt.formats.foreign.hf_safetensors import read_weight_map, tensors_of
from ckpt.formats.foreign.torch_files import unwrapped
from ckpt.formats.foreign.torch_save import ARCHIVE
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.tensor_file import TensorFile
from ckpt.formats.pieces import PiecedTensor, check_complete
from ckpt.formats.registry import (
    ACCELERATE,
    ADAPTER,
    CKPT,
    DCP,
    DEEPSPEED,
    HF,
    INDEX_SUFFIX,
    KNOWN,
    MEGATRON,
    OLD_WEIGHTS,
    PEFT,
    ROOT,
    TORCH,
    TORCH_SUFFIXES,
    TRAINER,
)
from ckpt.root.catalog import scan
from ckpt.root.folder import Folder, Place
from ckpt.root.trust import BELIEVES_ALL, Trust
from ckpt.util.option_values import said

_log = logging.getLogger("ckpt")
_FEW = 10
_INSTALLED = "ckpt.formats"  # the entry points of formats that installed packages add


@contextmanager
def open_source(
    source: str | os.PathLike[str],
    part: str,
    options: Mapping[str, Any] | None = None,
    trust: Trust = BELIEVES_ALL,
    format: str | None = None,
) -> Iterator[TensorSource]:
    """Open a part of the checkpoint, folder or file at a path or URL."""
    if not isinstance(part, str):
        raise ConfigError(f"part={said(part)} must be the name of a part.")
    place = Place.at(source, options, format)
    if place.format is ROOT:
        raise choose_a_checkpoint(place)
    if place.format is CKPT:
        with open_checkpoint(source, part, options, trust) as opened:
            yield opened
        return
    trust.refuse_unsigned(os.fspath(source))
    yield open_foreign(place, part)


def choose_a_checkpoint(root: Place) -> ConfigError:
    """The error for a root where one checkpoint is asked for."""
    names = [found.name for found in scan(root.folder.storage)]  # the newest first
    return ConfigError(
        f"{root.where} holds {len(names)} checkpoints. Name one of them: {root.where}/{names[0] if names else '...'}."
    )


def open_foreign(place: Place, part: str) -> TensorSource:
    """The tensors of a part of what another tool wrote."""
    if place.file and place.format is TORCH:
        return _torch_file(place.folder, place.file, part)
    if place.format is not None:
        return _OPENERS[place.format.name](place, part)
    tensors = open_installed(place.folder, part)
    if tensors is None:
        raise ConfigError(f"{place.where} is of no kind that can be read. That would be {KNOWN}.")
    return TensorSource(tensors)


def open_installed(folder: Folder, part: str) -> dict[str, PiecedTensor] | None:
    """The tensors of a folder that ckpt itself does not know, from the first installed format that recognises it.

    An entry point is a function of a folder and the name of a part. It returns the tensors by name, or None for a
    folder that is not of its kind.
    """
    for point in sorted(entry_points(group=_INSTALLED), key=lambda point: point.name):
        tensors: dict[str, PiecedTensor] | None = point.load()(folder, part)
        if tensors is not None:
            check_complete(tensors, folder.where)
            return tensors
    return None


def _torch_file(folder: Folder, path: str, part: str) -> TensorSource:
    where = f"{folder.where}/{path}"
    if not path.endswith(TORCH_SUFFIXES) and folder.opened(path).read(0, min(4, folder.files[path])) != ARCHIVE:
        raise ConfigError(f"{where} is a file. What can be read is {KNOWN}.")
    saved = torch_files.read_file(folder.opened(path), folder.files[path], where)
    found = saved.parts.get(part)
    tensors = {name: item for name, item in found.items() if isinstance(item, PiecedTensor)} if found else {}
    if found is None or not tensors:
        raise MissingError(f"{where} has no tensors of a part {part!r}. Parts: {', '.join(saved.parts)}.")
    _warn_of_others(where, sorted(str(name) for name in found if name not in tensors))
    prefix = saved.prefixes.get(part, "")
    return TensorSource(tensors, other_names={name: f"{prefix}{name}" for name in tensors if prefix})


def _of_accelerate(place: Place, part: str) -> TensorSource:
    """The tensors of a part of Accelerate's: `model`, or `model.1` of several."""
    folder = place.folder
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
    return TensorSource(tensors)


def _of_trainer(place: Place, part: str) -> TensorSource:
    """The model, as convert takes it: an engine's master weights, what FSDP has sharded, or the weights."""
    for inside in (DEEPSPEED, ACCELERATE, PEFT, HF):
        if inside.sign(place.folder.files):
            return open_foreign(replace(place, format=inside), part)
    raise MissingError(f"{place.where} holds no model: of the Trainer there are only files beside it.")


def _warn_of_others(where: str, others: list[str]) -> None:
    if others:
        few = f"{', '.join(others[:_FEW])}{', ...' if len(others) > _FEW else ''}"
        _log.warning("%s: left out, because they are no tensors: %d objects (%s).", where, len(others), few)


def beside(found: Folder) -> dict[str, Callable[[], bytes]]:
    """The files of a folder that accompany its weights."""
    return {path: found.reader(path) for path in found.files if belongs_beside(path)}


def _weights(place: Place, part: str) -> TensorSource:
    """The tensors of the file that was named, or of a folder: those of its index, of its only file, or of all."""
    folder, is_adapter = place.folder, place.format is PEFT
    if place.file:
        _require_model(place, part)
        is_index = place.file.endswith(INDEX_SUFFIX)
        return TensorSource(_indexed(folder, place.file) if is_index else _tensors(folder, [place.file]))
    files = [path for path in folder.files if path.endswith(SUFFIX) and "/" not in path]
    files = [path for path in files if path.startswith(ADAPTER) == is_adapter]
    whole = f"{ADAPTER if is_adapter else 'model'}{SUFFIX}"
    index = f"{whole}{INDEX_SUFFIX}"
    if not files and index not in folder.files:
        return replace(_torch_file(folder, OLD_WEIGHTS, part), beside=beside(folder))
    _require_model(place, part)
    if index in folder.files:
        tensors = _indexed(folder, index, beside=whole)
    else:
        tensors = _tensors(folder, [whole] if whole in files else files)
    return TensorSource(tensors, beside=beside(folder))


def _require_model(place: Place, part: str) -> None:
    if part != "model":
        raise MissingError(f"{place.where} has no part {part!r}: safetensors hold a model.")


def _indexed(found: Folder, index: str, beside: str = "") -> dict[str, PiecedTensor]:
    """The tensors of the files that an index names. A whole model `beside` it that it does not name is another save."""
    where = f"{found.where}/{index}"
    weight_map = read_weight_map(found.document(index), where)
    paths = sorted(set(weight_map.values()))
    missing = [path for path in paths if path not in found.files]
    if missing:
        raise DamagedError(f"{where} names files that are not there: {', '.join(missing)}. Copy all of them there.")
    if beside in found.files and beside not in paths:
        raise ConfigError(
            f"{found.where} holds a model in shards, and another one in {beside}. Name the one to read: "
            f"{where} or {found.where}/{beside}."
        )
    return _tensors(found, paths, weight_map)


def _tensors(found: Folder, paths: list[str], weight_map: Mapping[str, str] | None = None) -> dict[str, PiecedTensor]:
    files = {path: TensorFile.open(found.opened(path), f"{found.where}/{path}", found.files[path]) for path in paths}
    return tensors_of(files, weight_map or {}, found.where)


def _of_deepspeed(place: Place, part: str) -> TensorSource:
    save = deepspeed.save_in(place.folder)
    if part != "model":
        raise MissingError(
            f"{save.where} has no tensors of a part {part!r}: of what DeepSpeed wrote, the model is read."
        )
    return TensorSource(deepspeed.SavedEngine(save).model())


def _of_megatron(place: Place, part: str) -> TensorSource:
    save = megatron.MegatronSave.opened(megatron.save_in(place.folder))
    tensors = save.tensors(part)
    _warn_of_others(save.folder.where, sorted(save.contents.others))
    return TensorSource(tensors, other_names=megatron.module_names(tensors))


def _of_dcp(place: Place, part: str) -> TensorSource:
    folder, where = place.folder, place.where
    contents = dcp.contents_of(folder)
    chosen = _chosen(contents, part, where)
    names = unwrapped(chosen.tensors)
    folder.check(dcp.needed_files(chosen.tensors.values()))
    if chosen.others:
        _log.warning("%s: left out, because they are no tensors: %s.", where, ", ".join(sorted(chosen.others)))
    tensors = {names[name]: saved.pieced(name, folder.opened, where) for name, saved in chosen.tensors.items()}
    check_complete(tensors, where)
    return TensorSource(tensors)


def _chosen(contents: dcp.Contents, part: str, where: str) -> dcp.Contents:
    """The tensors under the part's key. Where nothing is nested, the whole folder is the model."""
    chosen = contents.of_part(part.partition(".")[0])
    if chosen.tensors:
        return chosen
    if contents.tensors and not contents.parts():
        return contents
    known = ", ".join(contents.parts()) or "none"
    raise MissingError(f"{where} has no tensors of a part {part!r}. Parts with tensors: {known}.")


_OPENERS: dict[str, Callable[[Place, str], TensorSource]] = {
    HF.name: _weights,
    PEFT.name: _weights,
    DCP.name: _of_dcp,
    ACCELERATE.name: _of_accelerate,
    TRAINER.name: _of_trainer,
    DEEPSPEED.name: _of_deepspeed,
    MEGATRON.name: _of_megatron,
}

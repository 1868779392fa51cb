"""Opens the tensors of a part, whatever tool wrote them: for merge, diff, load_model, push and convert.

Those of a checkpoint of ours are verified, and come from all the files that ranks have written.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from ckpt.errors import ConfigError, DamagedError, MissingError
from ckpt.export.folders import belongs_beside
from ckpt.formats.foreign import accelerate, dcp, deepspeed, megatron, torch_files
from ckpt.formats.foreign.hf_safetensors import read_weight_map, tensors_at
from ckpt.formats.foreign.torch_files import unwrapped
from ckpt.formats.foreign.torch_save import ARCHIVE
from ckpt.formats.native.documents import STATE, from_json, parts_in
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import FileRecord, Manifest
from ckpt.formats.native.shard_table import ShardTable
from ckpt.formats.native.tensor_file import TensorFile, pieced
from ckpt.formats.pieces import PiecedTensor, check_complete
from ckpt.formats.registry import (
    ACCELERATE,
    ADAPTER,
    DCP,
    DEEPSPEED,
    HF,
    INDEX_SUFFIX,
    KNOWN,
    MEGATRON,
    OLD_WEIGHTS,
    PEFT,
    TORCH,
    TORCH_SUFFIXES,
    TRAINER,
)
from ckpt.ranks.consensus import MAIN
from ckpt.root.catalog import part_of, rank_of, read_manifest
from ckpt.root.folder import Folder, OneCheckpoint, Place
from ckpt.root.signing import BELIEVES_ALL, Trust
from ckpt.root.verify import AuthenticFile, VerifiedFile, problems, size_problems
from ckpt.shown import few
from ckpt.storage import Storage
from ckpt.util.option_values import said

_log = logging.getLogger("ckpt")
_FEW_NAMES = 5


def is_own_file(name: str, part: str) -> bool:
    """True for files with tensors that one rank had different from the main rank: `model-own-00001.safetensors`."""
    return re.fullmatch(rf"{re.escape(part)}-own-\d{{5}}", part_of(name)) is not None


def merged(
    where: str,
    main: Mapping[str, PiecedTensor],
    own: Mapping[str, PiecedTensor],
    differs: Mapping[str, Collection[int]],
) -> dict[str, PiecedTensor]:
    """The main rank's tensors, and those that only other ranks have, such as the layers of other pipeline stages.

    Where several ranks have different values of a tensor, those of the first rank are used, with a warning.
    """
    found = {name: _without(tensor, differs.get(name, ())) for name, tensor in main.items()}
    several = [
        name for name, ranks in differs.items() if name in found or (len(ranks) > 1 and not _is_divided(own, name))
    ]
    warn_of_variants(where, several)
    return found | {name: _first_of_each_box(tensor) for name, tensor in own.items() if name not in found}


def warn_of_variants(where: str, names: Collection[str]) -> None:
    """Say which tensors several ranks have different values of."""
    if names:
        _log.warning(
            "%s: ranks saved different values of %s, so ckpt takes the values from rank 0, or from the first rank "
            "that has them.",
            where, few(list(names), _FEW_NAMES),
        )  # fmt: skip


def _is_divided(own: Mapping[str, PiecedTensor], name: str) -> bool:
    """True if the ranks hold disjoint pieces of the tensor instead of different values of all of it."""
    return name in own and len({piece.box for piece in own[name].pieces}) == len(own[name].pieces)


def _without(tensor: PiecedTensor, ranks: Collection[int]) -> PiecedTensor:
    """A tensor without the pieces of these ranks, unless no other rank has any."""
    kept = tuple(piece for piece in tensor.pieces if rank_of(piece.region.where) not in ranks)
    return replace(tensor, pieces=kept) if kept else tensor


def _first_of_each_box(tensor: PiecedTensor) -> PiecedTensor:
    """A tensor with one piece per box: that of the first rank."""
    pieces = {piece.box: piece for piece in reversed(tensor.pieces)}
    return replace(tensor, pieces=tuple(pieces.values()))


_FEW = 10


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
def open_checkpoint(checkpoint: OneCheckpoint, part: str, trust: Trust) -> Iterator[TensorSource]:
    """The tensors of a part of a checkpoint of ours."""
    storage, name = checkpoint.root, checkpoint.name
    with storage.lock(name, shared=True):  # retention of a running job must not remove what is being read
        manifest = trust.accepted(read_manifest(storage, name))
        ours = _of_part(manifest, part)
        # what is authentic is verified as it is read: a file that is read again may have been altered meanwhile
        wrong = size_problems(storage, ours) if manifest.is_authentic else problems(storage, ours, show=True, threads=1)
        if wrong:
            raise DamagedError(f"{name} is damaged: {'; '.join(wrong)}.")
        opened = partial(_tensor_file, storage, manifest, {})
        state = _state(storage, manifest, part)
        table = ShardTable.from_json(state["spread"], manifest) if "spread" in state else ShardTable({})
        united = "united" in state
        common = [file for file in ours.files if united or part_of(file.name) == part]
        tensors = pieced(
            map(opened, common),
            partial(_is_written_by, table) if united else lambda file, tensor: True,
        )
        if united:  # the table has the values of the first rank
            warn_of_variants(f"{name}: {part}", state.get("differs", {}).get("tensors", {}))
        elif "differs" in state:
            of_ranks = pieced(map(opened, _own_files(manifest, part)))
            tensors = merged(f"{name}: {part}", tensors, of_ranks, state["differs"].get("tensors", {}))
        check_complete(tensors, name)
        if "spread" in state:
            _check_table(tensors, table, f"{name}: {part}")
            tensors |= {alias: tensors[first] for alias, first in table.aliases.items()}  # tied: they are in no file
        yield TensorSource(tensors, state.get("about", {}), manifest)


def _is_written_by(table: ShardTable, file: TensorFile, name: str) -> bool:
    """Whether a file of a united part is of a rank that was to write the tensor: others have bytes of their own."""
    spec, rank = table.tensors.get(name), rank_of(file.where)
    ranks = (MAIN,) if rank is None else range(rank, rank + table.writing_together(name))
    return spec is not None and not spec.writers().isdisjoint(ranks)


def _check_table(tensors: Mapping[str, PiecedTensor], table: ShardTable, where: str) -> None:
    """Refuse files that hold other tensors than the checkpoint's table of shards says."""
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    wrong = [name for name, spec in table.tensors.items() if found.get(name) != (spec.dtype, spec.shape)]
    wrong += [alias for alias, first in table.aliases.items() if first not in tensors]
    if wrong:
        listed = ", ".join(sorted(wrong)[:_FEW])
        raise DamagedError(f"{where} is damaged: its files do not match its shard table: {listed}.")


def _state(storage: Storage, manifest: Manifest, part: str) -> Mapping[str, Any]:
    """The entry of a part in `state.json`: everything but its tensors."""
    record = next((file for file in manifest.files if file.name == STATE), None)
    if record is None:
        raise DamagedError(f"{manifest.name} is damaged: its manifest does not list {STATE}.")
    file = VerifiedFile.of(storage, manifest.name, record, sha256=manifest.is_authentic)
    document = from_json(file.read_all(), file.stored.key)
    state: Mapping[str, Any] = parts_in(document, "parts", file.stored.key).get(part, {})
    return state


def _tensor_file(
    storage: Storage, manifest: Manifest, last: dict[tuple[str, int], memoryview], file: FileRecord
) -> TensorFile:
    verified = VerifiedFile.of(storage, manifest.name, file, sha256=manifest.is_authentic)
    if not manifest.is_authentic:  # every byte was verified before
        return TensorFile.open(verified.stored, verified.stored.key, file.size)
    return TensorFile.open(AuthenticFile(verified, last), verified.stored.key, file.size)


def _own_files(manifest: Manifest, part: str) -> list[FileRecord]:
    """The files with the tensors that differ between ranks."""
    return [file for file in manifest.files if is_own_file(file.name, part)]


def _of_part(manifest: Manifest, part: str) -> Manifest:
    """The manifest reduced to the files of a part: `model.safetensors`, or those below `model/`."""
    named = [file for file in manifest.files if file.name.endswith(SUFFIX)]
    files = [file for file in named if part_of(file.name) == part or is_own_file(file.name, part)]
    if not files:
        known = ", ".join(sorted({part_of(file.name) for file in named})) or "none"
        raise MissingError(f"{manifest.name} has no part {part!r} with tensors. Parts with tensors: {known}.")
    return replace(manifest, files=tuple(files))


_INSTALLED = "ckpt.formats"  # the entry points of formats that installed packages add


@contextmanager
def open_source(
    source: str | os.PathLike[str],
    part: str,
    options: Mapping[str, Any] | None = None,
    trust: Trust = BELIEVES_ALL,
    format: str | None = None,
) -> Iterator[TensorSource]:
    """Open a part of the checkpoint, folder or file at a path or URL; of a root, of its newest checkpoint."""
    if not isinstance(part, str):
        raise ConfigError(f"part={said(part)} must be a string, the name of a part.")
    place = Place.at(source, options, format)
    if place.is_ours:
        with open_checkpoint(place.checkpoint(trust).tell(), part, trust) as opened:
            yield opened
        return
    trust.refuse_unsigned(os.fspath(source))
    yield open_foreign(place, part)


def open_foreign(place: Place, part: str) -> TensorSource:
    """The tensors of a part of what another tool wrote."""
    if place.file and place.format is TORCH:
        return _torch_file(place.folder, place.file, part)
    if place.format is not None:
        return _OPENERS[place.format.name](place, part)
    tensors = open_installed(place.folder, part)
    if tensors is None:
        raise ConfigError(f"ckpt can't read the format of {place.where}. It reads {KNOWN}.")
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
        raise ConfigError(f"{where} is a file. ckpt reads {KNOWN}.")
    saved = torch_files.read_file(folder.opened(path), folder.files[path], where)
    found = saved.parts.get(part)
    tensors = {name: item for name, item in found.items() if isinstance(item, PiecedTensor)} if found else {}
    if found is None or not tensors:
        raise MissingError(f"{where} has no part {part!r} with tensors. Parts: {', '.join(saved.parts)}.")
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
        raise MissingError(f"the part {part!r} of {folder.where} has no named tensors.")
    _warn_of_others(folder.where, sorted(str(name) for name in found if name not in tensors))
    return TensorSource(tensors)


def _of_trainer(place: Place, part: str) -> TensorSource:
    """The model, as convert takes it: an engine's master weights, what FSDP has sharded, or the weights."""
    for inside in (DEEPSPEED, ACCELERATE, PEFT, HF):
        if inside.sign(place.folder.files):
            return open_foreign(replace(place, format=inside), part)
    raise MissingError(f"{place.where} has no model, only other Trainer files.")


def _warn_of_others(where: str, others: list[str]) -> None:
    if others:
        few = f"{', '.join(others[:_FEW])}{', ...' if len(others) > _FEW else ''}"
        _log.warning("%s: ckpt leaves out %d objects that are not tensors (%s).", where, len(others), few)


def beside(found: Folder) -> dict[str, Callable[[], bytes]]:
    """The files of a folder that accompany its weights."""
    return {path: found.reader(path) for path in found.files if belongs_beside(path)}


def _weights(place: Place, part: str) -> TensorSource:
    """The tensors of the file that was named, or of a folder: those of its index, of its only file, or of all."""
    folder, is_adapter = place.folder, place.format is PEFT
    if place.file:
        _require_model(place, part)
        return TensorSource(tensors_at(folder, place.file))
    files = [path for path in folder.files if path.endswith(SUFFIX) and "/" not in path]
    files = [path for path in files if path.startswith(ADAPTER) == is_adapter]
    whole = f"{ADAPTER if is_adapter else 'model'}{SUFFIX}"
    index = f"{whole}{INDEX_SUFFIX}"
    if not files and index not in folder.files:
        return replace(_torch_file(folder, OLD_WEIGHTS, part), beside=beside(folder))
    _require_model(place, part)
    if index not in folder.files:
        return TensorSource(tensors_at(folder, *([whole] if whole in files else files)), beside=beside(folder))
    tensors = tensors_at(folder, index)  # first: an index that is none of a model says nothing about two of them
    if whole in files and whole not in read_weight_map(folder.document(index), f"{folder.where}/{index}").values():
        raise ConfigError(
            f"{folder.where} has both a sharded model and another model, in {whole}. Name the file to read: "
            f"{folder.where}/{index} or {folder.where}/{whole}."
        )
    return TensorSource(tensors, beside=beside(folder))


def _require_model(place: Place, part: str) -> None:
    if part != "model":
        raise MissingError(f"{place.where} has no part {part!r}: safetensors files contain only a model.")


def _of_deepspeed(place: Place, part: str) -> TensorSource:
    save = deepspeed.save_in(place.folder)
    if part != "model":
        raise MissingError(
            f"ckpt can't read the part {part!r} of {save.where}: it reads only the model from DeepSpeed's files."
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
        _log.warning(
            "%s: ckpt leaves out everything that is not a tensor: %s.", where, ", ".join(sorted(chosen.others))
        )
    tensors = {names[name]: saved.pieced(name, folder.opened, where) for name, saved in chosen.tensors.items()}
    check_complete(tensors, where)
    return TensorSource(tensors)


def _chosen(contents: dcp.Contents, part: str, where: str) -> dcp.Contents:
    """The tensors under the part's key. The model may also lie beside the other parts, as torchtitan saves it, or be
    the whole folder."""
    chosen = contents.of_part(part.partition(".")[0])
    if chosen.tensors:
        return chosen
    if contents.tensors and not contents.parts():
        return contents
    beside = {name: saved for name, saved in contents.tensors.items() if len(saved.keys) == 1}
    if part == "model" and any("." in name for name in beside):
        return dcp.Contents(beside)
    known = ", ".join(contents.parts()) or "none"
    raise MissingError(f"{where} has no part {part!r} with tensors. Parts with tensors: {known}.")


_OPENERS: dict[str, Callable[[Place, str], TensorSource]] = {
    HF.name: _weights,
    PEFT.name: _weights,
    DCP.name: _of_dcp,
    ACCELERATE.name: _of_accelerate,
    TRAINER.name: _of_trainer,
    DEEPSPEED.name: _of_deepspeed,
    MEGATRON.name: _of_megatron,
}

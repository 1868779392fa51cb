"""The tensors of a part of a checkpoint of ours, verified, from all the files that ranks have written."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ckpt.errors import DamagedError, MissingError
from ckpt.formats.native.documents import STATE, from_json, parts_in
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import FileRecord, Manifest
from ckpt.formats.native.shard_table import ShardTable
from ckpt.formats.native.tensor_file import TensorFile, pieced
from ckpt.formats.pieces import PiecedTensor, check_complete
from ckpt.ranks.group import MAIN
from ckpt.root.catalog import locate, read_manifest
from ckpt.root.file_names import part_of, rank_of
from ckpt.root.trust import Trust
from ckpt.root.verified_file import VerifiedFile
from ckpt.root.verify import problems
from ckpt.storage import Storage

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
        more = f" and {len(names) - _FEW_NAMES} more" if len(names) > _FEW_NAMES else ""
        _log.warning(
            "%s: ranks have different %s%s; those of rank 0 are used, or of the first rank that has them.",
            where, ", ".join(list(names)[:_FEW_NAMES]), more,
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
def open_checkpoint(
    source: str | os.PathLike[str], part: str, options: Mapping[str, Any] | None, trust: Trust
) -> Iterator[TensorSource]:
    """The tensors of a part of the one checkpoint at a path or URL."""
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

"""The tensors of a part of a checkpoint of ours, verified, from all the files that ranks have written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ckpt.errors import DamagedError, MissingError
from ckpt.export.rank_variants import is_own_file, merged, warn_of_variants
from ckpt.formats.native.documents import STATE, from_json, parts_in
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import FileRecord, Manifest
from ckpt.formats.native.pieced import pieced
from ckpt.formats.native.shard_table import ShardTable
from ckpt.formats.native.tensor_file import TensorFile
from ckpt.formats.pieces import PiecedTensor, check_complete
from ckpt.ranks.group import MAIN
from ckpt.root.catalog import locate, read_manifest
from ckpt.root.file_names import part_of, rank_of
from ckpt.root.trust import Trust
from ckpt.root.verified_file import VerifiedFile
from ckpt.root.verify import problems
from ckpt.storage import Storage

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

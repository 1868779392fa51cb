"""Convert checkpoints of Accelerate, DeepSpeed and Megatron-Core to ours, and ours to Accelerate's and Megatron's."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import ConfigError, StorageError
from ckpt.formats.foreign import accelerate, megatron
from ckpt.formats.foreign.tied_weights import same_place
from ckpt.formats.native import documents, tensor_file_plan
from ckpt.formats.native.json_values import refuse
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.state import FilePlan
from ckpt.load.accelerate_state import ForeignPart
from ckpt.memory.root_token import remove_token
from ckpt.ranks.group import SingleProcess
from ckpt.root import deletion
from ckpt.root.catalog import check_name, find
from ckpt.root.file_names import whole_file
from ckpt.root.folder import Folder
from ckpt.root.keys import KeySource, find_signing_key
from ckpt.root.trust import Seal
from ckpt.save.root_writer import RootWriter
from ckpt.shown import Lines
from ckpt.storage import open_storage
from ckpt.tools import export_accelerate, export_megatron
from ckpt.tools.import_foreign import Imported, import_from

OURS = "ckpt"
TARGETS = (OURS, accelerate.NAME, megatron.NAME)


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a conversion wrote, and where; what is not exact, and what the other format cannot hold."""

    url: str
    parts: tuple[str, ...]
    approximated: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.url}: {', '.join(self.parts)}"]
        for title, table in (("approximated", self.approximated), ("skipped", self.skipped)):
            lines += [f"  {title:<13} {what}: {why}" for what, why in table.items()]
        return Lines.of(lines)


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: str = OURS,
    name: str | None = None,
    sign: KeySource | bool | None = None,
) -> Converted:
    """Convert a checkpoint, and return what was written, approximated and skipped.

    To "ckpt": `source` is a folder that Accelerate's `save_state` wrote, DeepSpeed's `save_checkpoint` (its master
    weights and its optimizer; universal ones, too), or Megatron-Core as `torch_dist` (its model); `destination` is a
    root, and the checkpoint is named like the folder, or `name`. To "accelerate": `source` is a checkpoint of ours,
    `destination` a folder that `accelerator.load_state` will read, with as many processes as saved the checkpoint. To
    "megatron": its model, which has Megatron's names, in a folder that `megatron.core.dist_checkpointing.load` reads.
    No pickle is executed. The output appears when it is complete. Models are streamed tensor by tensor; other parts are
    held one at a time.
    `sign`, as for the manager, signs a checkpoint of ours; others know no signatures.
    """
    if to not in TARGETS:
        raise ConfigError(f"to={to!r} is none of {', '.join(TARGETS)}.")
    if to == OURS:
        return _import(source, destination, name, Seal(key=find_signing_key(sign)))
    if name is not None:
        raise ConfigError("name= is for a checkpoint in a root. A folder is named by its path.")
    export = export_megatron.export if to == megatron.NAME else export_accelerate.export
    url, parts, skipped = export(source, destination)
    return Converted(url=url, parts=parts, skipped=skipped)


class _ConvertedWriter(RootWriter):
    """No training waits for it: what `Converted` says is enough."""

    log_level = logging.DEBUG


def _import(source: str | os.PathLike[str], root: str | os.PathLike[str], name: str | None, seal: Seal) -> Converted:
    folder = Folder.at(source)
    found = import_from(folder)
    chosen = check_name(folder.name if name is None else name)
    files = [*_tensor_files(found.parts), *_documents(found)]
    with closing(_ConvertedWriter(open_storage(root), SingleProcess(), seal=seal)) as writer:
        _write(writer, chosen, files, found)
    return Converted(
        url=f"{writer.storage.url}/{chosen}",
        parts=found.written,
        approximated=found.approximated,
        skipped=found.skipped,
    )


def _write(writer: RootWriter, name: str, files: list[FilePlan], found: Imported) -> None:
    writer.hold()
    remove_token(writer.storage)  # what a run has left in memory does not continue from what is written now
    if find(writer.storage, name).committed:
        raise ConfigError(f"{writer.storage.url} has a checkpoint {name!r} already. Choose another name=.")
    began = time.monotonic()
    attempt = writer.begin(name, [file.path for file in files])
    try:
        records = attempt.write(writer.storage, files, {}, show=True)
        seconds = dict.fromkeys(("written", "total"), time.monotonic() - began) | {"blocked": 0.0, "copied": 0.0}
        facts = {"world_size": found.world_size, "progress": found.progress.to_json(), "origin": found.origin}
        writer.commit(attempt, records, {**facts, "seconds": seconds})
    except BaseException:
        with suppress(StorageError):  # the first error is the one to raise
            deletion.remove_uncommitted(writer.storage, name)
        raise


def _tensor_files(parts: Mapping[str, ForeignPart]) -> list[FilePlan]:
    return [_tensor_file(key, part) for key, part in parts.items() if part.tensors]


def _tensor_file(key: str, part: ForeignPart) -> FilePlan:
    """The file with a part's tensors, each read when it is written. Tied tensors are written once."""
    tied = same_place({name: tensor for name, tensor in part.tensors.items() if isinstance(tensor, PiecedTensor)})
    stored = [name for name in part.tensors if name not in tied]
    outlines = {name: _outline(*part.about(name)) for name in stored}
    read: Callable[[str], torch.Tensor] = part.read
    return tensor_file_plan.plan_gathered_file(whole_file(key), outlines, tied, read, collective=False)


def _outline(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _documents(found: Imported) -> list[FilePlan]:
    parts = {key: {"class": "", "state": part.values} for key, part in found.parts.items()}
    ranks = range(found.world_size)
    return [
        FilePlan.of(documents.STATE, documents.to_json({"parts": parts})),
        *(FilePlan.of(documents.rank_document(rank), _rank_document(found.rank_state(rank))) for rank in ranks),
    ]


def _rank_document(state: Mapping[str, Any]) -> bytes:
    problems: list[str] = []
    encoded = {key: documents.encode_inline(value, key, problems) for key, value in state.items()}
    refuse(problems)
    return documents.to_json({"state": encoded, "own": {}})

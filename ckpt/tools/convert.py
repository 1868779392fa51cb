"""Convert checkpoints from any format that is read to any that is written: through portable state, part by part."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt.errors import ConfigError, StorageError
from ckpt.export.folders import atomic_file, atomic_folder
from ckpt.export.options import ExportOptions
from ckpt.formats.foreign.hf_safetensors import same_place
from ckpt.formats.native import documents, tensor_file
from ckpt.formats.native.documents import refuse
from ckpt.formats.native.manifest import FILE_NAME
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.registry import ACCELERATE, CKPT, DCP, HF, LIGHTNING, MEGATRON, TORCH, WRITTEN
from ckpt.formats.state import FilePlan
from ckpt.load.accelerate_state import ForeignPart
from ckpt.memory.root_token import remove_token
from ckpt.ranks.group import SingleProcess
from ckpt.root import deletion
from ckpt.root.catalog import check_name, find
from ckpt.root.file_names import whole_file
from ckpt.root.keys import KeySource, find_signing_key
from ckpt.root.trust import Seal
from ckpt.save.root_writer import RootWriter
from ckpt.shown import Lines
from ckpt.storage import disk_path, open_storage
from ckpt.tools.export_state import (
    export_accelerate,
    export_dcp,
    export_hugging_face,
    export_lightning,
    export_megatron,
    export_torch,
)
from ckpt.tools.import_state import open_state
from ckpt.tools.portable_state import Outcome, PortableState, files_left, with_part_names
from ckpt.util.console import progress_bar
from ckpt.util.option_values import path_text

_FILES = (TORCH.name, LIGHTNING.name)  # of which a checkpoint is one file

Export = Callable[[PortableState, Path, Callable[[int], None]], Outcome]


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
    to: str = CKPT.name,
    format: str | None = None,
    name: str | None = None,
    max_shard_size: int | str | None = None,
    sign: KeySource | bool | None = None,
) -> Converted:
    """Convert a checkpoint from any format that is read to any that is written.

    No pickle is executed. The output appears when it is complete, and never replaces anything. Tensors are streamed.
    docs/converting.md has a table of what each format holds.

    Args:
        source: A checkpoint of ours, whole or sharded, or of torch.distributed.checkpoint, Accelerate, DeepSpeed (ZeRO
            0 to 3, universal), Lightning, Megatron-Core (`torch_dist`), the Trainer, a file of `torch.save`, or
            safetensors, at a path or URL.
        destination: For `"ckpt"` a root; for the others a new file or folder on a disk.
        to: `"ckpt"`; `"hf"`, a folder with `model.safetensors` and the configuration that was beside the source;
            `"dcp"`, a folder for `torch.distributed.checkpoint.load`; `"accelerate"`, a folder for
            `accelerator.load_state` with as many processes as saved it; `"torch"`, a file for
            `torch.load(weights_only=True)`; `"lightning"`, a file for `Trainer.fit(ckpt_path=...)`; `"megatron"`, a
            folder for `megatron.core.dist_checkpointing.load`, of a model that has Megatron's names.
        format: Which of them the source is. Only needed for a folder that holds saves in several formats.
        name: Of a checkpoint in a root; that of the source if none is given.
        max_shard_size: For `"hf"`: bytes, or `"5GB"`, beyond which it is shards and an index.
        sign: For `"ckpt"`, as for the manager; others know no signatures.

    Returns:
        What was written, and what is not exact or was left out, with the reasons.

    Raises:
        MissingError: There is nothing to convert.
        DamagedError: The source is not what was saved.
        ConfigError: The source is of no kind that is read, or there is something at the destination.
    """
    if to not in WRITTEN:
        raise ConfigError(f"to={to!r} is none of {', '.join(WRITTEN)}.")
    if name is not None and to != CKPT.name:
        raise ConfigError("name= is for a checkpoint in a root. Others are named by their path.")
    if max_shard_size is not None and to != HF.name:
        raise ConfigError(f"max_shard_size= is for to={HF.name!r}.")
    limit = ExportOptions.parse(None, max_shard_size).max_shard_size
    if to != CKPT.name:
        return _export(source, format, destination, to, limit)
    seal = Seal(key=find_signing_key(sign))
    with open_state(source, format) as state:
        return _import(with_part_names(state), destination, name, seal)


def _export(
    source: str | os.PathLike[str], format: str | None, destination: str | os.PathLike[str], to: str, limit: int | None
) -> Converted:
    path = disk_path(destination, to)
    _refuse_inside_checkpoint(path)
    writers: dict[str, Export] = {
        HF.name: partial(export_hugging_face, max_shard_size=limit),
        DCP.name: export_dcp,
        TORCH.name: export_torch,
        LIGHTNING.name: export_lightning,
        ACCELERATE.name: export_accelerate,
        MEGATRON.name: export_megatron,
    }
    whole = atomic_file if to in _FILES else atomic_folder
    with open_state(source, format) as state:
        total = sum(map(state.size, state.parts))
        with whole(path) as place, progress_bar(f"converting {state.name}", total, in_bytes=True) as advance:
            parts, skipped = writers[to](state, place, advance)
        if to != HF.name:
            skipped |= files_left(state.beside, {})
        return Converted(
            url=path, parts=parts, approximated=_told(state, skipped), skipped={**state.skipped, **skipped}
        )


def _refuse_inside_checkpoint(path: str) -> None:
    """What lies in a checkpoint is removed with it."""
    for folder in Path(os.path.abspath(path)).parents:
        if (folder / FILE_NAME).is_file() and (folder / documents.STATE).is_file():
            raise ConfigError(
                f"{path} would lie in the checkpoint {folder}, and be removed with it. Choose another destination."
            )


def _told(state: PortableState, skipped: Mapping[str, str]) -> dict[str, str]:
    """What the source had not exactly; of what is left out, nothing more."""
    return {key: why for key, why in state.approximated.items() if key not in skipped}


class _ConvertedWriter(RootWriter):
    """No training waits for it: what `Converted` says is enough."""

    log_level = logging.DEBUG


def _import(found: PortableState, root: str | os.PathLike[str], name: str | None, seal: Seal) -> Converted:
    chosen = _checkpoint_name(found) if name is None else check_name(name)
    if "://" not in path_text(root, "the root"):
        _refuse_inside_checkpoint(os.path.join(root, chosen))
    files = [*_tensor_files(found.parts), *_documents(found)]
    with closing(_ConvertedWriter(open_storage(root), SingleProcess(), seal=seal)) as writer:
        _write(writer, chosen, files, found)
    return Converted(
        url=f"{writer.storage.url}/{chosen}",
        parts=found.written,
        approximated=found.approximated,
        skipped={**found.skipped, **files_left(found.beside, found.about)},
    )


def _checkpoint_name(found: PortableState) -> str:
    try:
        return check_name(found.name)
    except ConfigError:
        raise ConfigError(
            f"{found.name!r}, the name of the source, cannot name a checkpoint. Choose one with name= (--name)."
        ) from None


def _write(writer: RootWriter, name: str, files: list[FilePlan], found: PortableState) -> None:
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
    return tensor_file.plan_gathered_file(whole_file(key), outlines, tied, read, collective=False)


def _outline(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _documents(found: PortableState) -> list[FilePlan]:
    parts: dict[str, Any] = {key: {"class": "", "state": part.values} for key, part in found.parts.items()}
    if found.about:
        parts[found.the_model()]["about"] = found.about
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

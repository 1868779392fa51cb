"""A model as other tools read it: the files of `from_pretrained`, in a folder that appears when it is complete."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt.errors import ConfigError, UnsupportedError
from ckpt.export.folders import appearing, refuse_checkpoints
from ckpt.formats.foreign.hf_safetensors import LiveTensor, StreamedTensor, parse_dtype, parse_size, plan_files
from ckpt.formats.foreign.tied_weights import duplicates
from ckpt.formats.native.dtypes import name_of
from ckpt.formats.native.shard_table import ShardedState, build_table
from ckpt.formats.native.tensor_file_plan import finish_collectives
from ckpt.formats.state import FilePlan
from ckpt.ranks.consensus import run_on_all_ranks
from ckpt.ranks.group import MAIN, Ranks
from ckpt.state.model import ModelPart, tensors_in
from ckpt.storage import LocalStorage
from ckpt.util.console import PROGRESS_MIN_BYTES, progress_bar

MODEL = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
SHARD_SIZE = "5GB"
_DEFAULT_ADAPTER = "default"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How the weights shall be written."""

    dtype: torch.dtype | None = None
    max_shard_size: int | None = None

    @classmethod
    def of(cls, dtype: str | torch.dtype | None, max_shard_size: int | str | None) -> Wanted:
        return cls(
            dtype=None if dtype is None else parse_dtype(dtype),
            max_shard_size=None if max_shard_size is None else parse_size(max_shard_size),
        )


@dataclass(frozen=True)
class Exported:
    """The files of a model. `shared` ones are put together from pieces of all ranks, who go through them alike."""

    files: list[FilePlan]
    about: Mapping[str, Any] = field(default_factory=dict)
    shared: bool = False

    def write(self, folder: Path) -> None:
        """Write all files. If one cannot be, the rest is gone through all the same: other ranks take part in it."""
        storage = LocalStorage(folder)
        left = iter(self.files)
        size = sum(file.size for file in self.files)
        with progress_bar(f"writing {folder.name}", size, in_bytes=True, show=size > PROGRESS_MIN_BYTES) as advance:
            try:
                for file in left:
                    self._write_one(storage, file)
                    advance(file.size)
            except Exception:
                finish_collectives(self._go_through, ([file] for file in left))
                raise

    def help_to_write(self) -> None:
        """What the other ranks do while the main one writes."""
        self._go_through(self.files)

    def _go_through(self, files: Iterable[FilePlan]) -> None:
        for file in files if self.shared else ():
            for _ in file.pieces():
                pass

    def _write_one(self, storage: LocalStorage, file: FilePlan) -> None:
        pieces = file.pieces()
        try:
            storage.write(file.path, pieces)
        except Exception:
            if self.shared:
                finish_collectives(lambda piece: None, pieces)
            raise


def from_live(part: ModelPart, ranks: Ranks, wanted: Wanted) -> Exported:
    """A live model, however it is wrapped or spread. Every rank makes this call."""
    state = part.capture()
    tensors = tensors_in(state)
    table = build_table(tensors, ranks.world_size)
    held = ShardedState(part.kind, None, table, tensors)
    sources: dict[str, StreamedTensor] = {
        name: LiveTensor(one.dtype, one.shape, partial(held.gather, name)) for name, one in table.tensors.items()
    }
    sources |= {alias: sources[first] for alias, first in table.aliases.items()}
    groups: dict[str, list[str]] = {}
    for alias, first in table.aliases.items():
        groups.setdefault(first, [first]).append(alias)
    about = _about(part, state)
    files = model_files(about, sources, duplicates(groups.values()), wanted)
    return Exported(files, about, shared=part.is_sharded() and ranks.world_size > 1)


def _about(part: ModelPart, state: Any) -> dict[str, Any]:
    try:
        return part.about(state)
    except Exception as error:  # code of others
        raise UnsupportedError(
            f"{part.key}: its configuration could not be taken: {type(error).__name__}: {error}"
        ) from error


def model_files(
    about: Mapping[str, Any], tensors: Mapping[str, StreamedTensor], tied: Mapping[str, str], wanted: Wanted
) -> list[FilePlan]:
    """The files of a model: its weights and configuration; of one with adapters, only theirs, as PEFT has them."""
    if "adapters" in about:
        return [file for name, one in about["adapters"].items() for file in _adapter_files(name, one, tensors, wanted)]
    weights = plan_files(MODEL, tensors, tied, dtype=wanted.dtype, max_shard_size=wanted.max_shard_size)
    config = dict(about.get("config", {}))
    if config:
        config["dtype"] = _dtype_name(tensors, wanted)
    documents = {CONFIG: config, "generation_config.json": about.get("generation_config")}
    return [*weights, *(_json(name, fields) for name, fields in documents.items() if fields)]


def _adapter_files(name: str, adapter: Any, tensors: Mapping[str, StreamedTensor], wanted: Wanted) -> list[FilePlan]:
    folder = "" if name == _DEFAULT_ADAPTER else f"{name}/"
    unknown = [key for key, inside in adapter["tensors"].items() if inside not in tensors]
    if unknown:
        raise UnsupportedError(
            f"adapter {name!r} has tensors that are none of its model's state: {', '.join(unknown)}. "
            "Save it with model.save_pretrained(...)."
        )
    chosen = {key: tensors[inside] for key, inside in adapter["tensors"].items()}
    weights = plan_files(f"{folder}{ADAPTER}", chosen, {}, dtype=wanted.dtype)
    return [*weights, _json(f"{folder}{ADAPTER_CONFIG}", adapter["config"])]


def _json(path: str, fields: Any) -> FilePlan:
    return FilePlan.of(path, (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode())


def _dtype_name(tensors: Mapping[str, StreamedTensor], wanted: Wanted) -> str:
    floating = (one.dtype for one in tensors.values() if one.dtype.is_floating_point)
    return name_of(wanted.dtype or next(floating, torch.float32))


def save_live(
    call: str, directory: str | os.PathLike[str], part: ModelPart, ranks: Ranks, wanted: Wanted, beside: tuple[Any, ...]
) -> Exported:
    """Write a live model and what belongs to it into a folder, on all ranks together or not at all."""
    main = ranks.rank == MAIN
    with ranks.working(), ExitStack() as stack:
        # before anything is gathered: from there on a rank that gave up would keep the others waiting
        folder = run_on_all_ranks(ranks, call, lambda: _opened(Path(directory), stack) if main else None)
        exported: Exported = run_on_all_ranks(ranks, call, lambda: from_live(part, ranks, wanted))
        run_on_all_ranks(ranks, call, lambda: exported.write(folder) if main else exported.help_to_write())
        run_on_all_ranks(ranks, call, lambda: write_beside(folder, beside) if main else None)
        run_on_all_ranks(ranks, call, stack.close)
    return exported


def _opened(directory: Path, stack: ExitStack) -> Path:
    refuse_checkpoints(directory)
    return stack.enter_context(appearing(directory, over=True))


def belongings(**objects: Any) -> tuple[Any, ...]:
    """What goes along with a model: tokenizers and processors, by the names that they were given under."""
    wrong = [f"{name}={one!r}" for name, one in objects.items() if one is not None and not _writes_itself(one)]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: give the object itself, which writes its files with save_pretrained, as "
            "AutoTokenizer.from_pretrained(...) returns it."
        )
    return tuple(one for one in objects.values() if one is not None)


def _writes_itself(one: Any) -> bool:
    return hasattr(one, "save_pretrained")


def write_beside(folder: Path, beside: tuple[Any, ...]) -> None:
    """Tokenizers and processors write their files themselves."""
    for one in beside:
        one.save_pretrained(folder)

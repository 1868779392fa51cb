"""Write a live model as the files that `from_pretrained` reads, into a folder that appears when it is complete."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from ckpt.errors import ConfigError, UnsupportedError
from ckpt.export.folders import as_storage_error, atomic_folder, refuse_checkpoints
from ckpt.export.options import ExportOptions
from ckpt.formats.foreign.hf_safetensors import LiveTensor, StreamedTensor, duplicates, plan_files
from ckpt.formats.native.shard_table import ShardedState, build_table
from ckpt.formats.native.tensor_file import dtype_name, finish_collectives
from ckpt.formats.tensors import FilePlan
from ckpt.ranks.consensus import MAIN, Ranks, Result, decide_together, run_on_all_ranks
from ckpt.shown import few
from ckpt.state.model import ModelPart, tensors_in
from ckpt.storage import LocalStorage
from ckpt.util.checked_json import parse_json
from ckpt.util.console import counted, progress_bar

MODEL = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
CONFIG, ADAPTER_CONFIG, GENERATION = "config.json", "adapter_config.json", "generation_config.json"
_DEFAULT_ADAPTER = "default"


class Processor(Protocol):
    """A tokenizer or processor, which writes its own files."""

    def save_pretrained(self, save_directory: Path, /) -> object: ...


@dataclass(frozen=True)
class ModelExport:
    """The files of a model. Writing `shared` ones is collective: they are gathered from the shards of all ranks."""

    files: list[FilePlan]
    about: Mapping[str, Any] = field(default_factory=dict)
    shared: bool = False
    names: tuple[str, ...] = ()  # of all tensors

    def write(self, folder: Path) -> None:
        """Write all files. After an error the remaining ones are still gathered: the other ranks take part in that."""
        storage = LocalStorage(folder)
        left = iter(self.files)
        size = sum(file.size for file in self.files)
        with progress_bar(f"writing {folder.name}", size, in_bytes=True) as advance:
            try:
                for file in left:
                    self._write_file(storage, file, advance)
            except Exception:
                finish_collectives(self._gather, ([file] for file in left))
                raise

    def help_to_write(self) -> None:
        """Take part in gathering the files while the main rank writes them."""
        self._gather(self.files)

    def _gather(self, files: Iterable[FilePlan]) -> None:
        for file in files if self.shared else ():
            for _ in file.pieces():
                pass

    def _write_file(self, storage: LocalStorage, file: FilePlan, advance: Callable[[float], None]) -> None:
        pieces = file.pieces()
        try:
            storage.write(file.path, counted(pieces, advance))
        except Exception:
            if self.shared:
                finish_collectives(lambda piece: None, pieces)
            raise


def export_live(part: ModelPart, ranks: Ranks, options: ExportOptions) -> ModelExport:
    """Plan the files of a live model, wrapped and sharded or not. Collective: every rank makes this call."""
    state = part.capture()
    tensors = tensors_in(state)
    table = build_table(tensors, ranks.world_size)
    held = ShardedState(part.kind, None, table, tensors)
    sources: dict[str, StreamedTensor] = {
        name: LiveTensor(spec.dtype, spec.shape, partial(held.gather, name)) for name, spec in table.tensors.items()
    }
    sources |= {alias: sources[first] for alias, first in table.aliases.items()}
    groups: dict[str, list[str]] = {}
    for alias, first in table.aliases.items():
        groups.setdefault(first, [first]).append(alias)
    about = _about(part, state)
    files = model_files(about, sources, duplicates(groups.values()), options)
    return ModelExport(files, about, shared=part.is_sharded() and ranks.world_size > 1, names=tuple(sorted(tensors)))


def _about(part: ModelPart, state: Any) -> dict[str, Any]:
    try:
        return part.about(state)
    except Exception as error:  # raised by the code of the model
        raise UnsupportedError(
            f"could not read the configuration of {part.key}: {type(error).__name__}: {error}"
        ) from error


def model_files(
    about: Mapping[str, Any], tensors: Mapping[str, StreamedTensor], tied: Mapping[str, str], options: ExportOptions
) -> list[FilePlan]:
    """The files of a model: its weights and configuration; of a model with PEFT adapters, those of the adapters."""
    if "adapters" in about:
        return [
            file
            for name, adapter in about["adapters"].items()
            for file in _adapter_files(name, adapter, tensors, options)
        ]
    weights = plan_files(MODEL, tensors, tied, dtype=options.dtype, max_shard_size=options.max_shard_size)
    config = dict(about.get("config", {}))
    if config:
        config["dtype"] = _dtype_name(tensors, options)
    documents = {CONFIG: config, GENERATION: about.get("generation_config")}
    return [*weights, *(_json(name, fields) for name, fields in documents.items() if fields)]


def _adapter_files(
    name: str, adapter: Mapping[str, Any], tensors: Mapping[str, StreamedTensor], options: ExportOptions
) -> list[FilePlan]:
    folder = "" if name == _DEFAULT_ADAPTER else f"{name}/"
    unknown = [key for key, inside in adapter["tensors"].items() if inside not in tensors]
    if unknown:
        raise UnsupportedError(
            f"the adapter {name!r} has tensors that are not in the model's state: {', '.join(unknown)}. "
            "Save the adapter with model.save_pretrained(...)."
        )
    chosen = {key: tensors[inside] for key, inside in adapter["tensors"].items()}
    weights = plan_files(f"{folder}{ADAPTER}", chosen, {}, dtype=options.dtype)
    return [*weights, _json(f"{folder}{ADAPTER_CONFIG}", adapter["config"])]


def _json(path: str, fields: Mapping[str, Any]) -> FilePlan:
    return FilePlan.of(path, (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode())


def _dtype_name(tensors: Mapping[str, StreamedTensor], options: ExportOptions) -> str:
    floating = (tensor.dtype for tensor in tensors.values() if tensor.dtype.is_floating_point)
    return dtype_name(options.dtype or next(floating, torch.float32))


def save_live(
    call: str,
    directory: str | os.PathLike[str],
    part: ModelPart,
    ranks: Ranks,
    options: ExportOptions,
    processors: Sequence[Processor],
) -> ModelExport:
    """Write a live model and its processors into a folder. Collective: it appears if every rank succeeded."""
    main = ranks.rank == MAIN
    with ranks.working(), ExitStack() as stack:
        # before anything is gathered: a rank that failed later would leave the others waiting in a gather
        folder: Any = run_on_all_ranks(ranks, call, lambda: _open_folder(Path(directory), stack) if main else None)
        exported: ModelExport = run_on_all_ranks(ranks, call, lambda: export_live(part, ranks, options))
        _refuse_stages(call, ranks, exported)
        run_on_all_ranks(ranks, call, lambda: exported.write(folder) if main else exported.help_to_write())
        run_on_all_ranks(ranks, call, lambda: write_processors(folder, processors) if main else None)
        run_on_all_ranks(ranks, call, stack.close)
    return exported


def _refuse_stages(call: str, ranks: Ranks, exported: ModelExport) -> None:
    """Refuse a model of which the main rank has only a part: its file would lack the others, and look complete."""
    mine = hashlib.sha256("\n".join(exported.names).encode()).hexdigest()
    if decide_together(ranks, call, Result(mine), lambda each: len(set(each)) == 1):
        return
    lacking = decide_together(
        ranks, call, Result(list(exported.names)), lambda each: sorted(set().union(*each).difference(each[MAIN]))
    )
    if lacking:
        raise UnsupportedError(
            f"{call} writes the tensors that rank 0 has, but other ranks have tensors that rank 0 lacks "
            f"({few(lacking, 3)}), as in a pipeline. Save a checkpoint, which has the tensors of all ranks, and run "
            "`ckpt merge` on it."
        )


def _open_folder(directory: Path, stack: ExitStack) -> Path:
    with as_storage_error(directory):
        refuse_checkpoints(directory)
    return stack.enter_context(atomic_folder(directory, over=True))


def check_processors(**given: Processor | None) -> tuple[Processor, ...]:
    """The tokenizers and processors among the arguments; all that cannot write their files are named in one error."""
    wrong = [f"{name}={value!r}" for name, value in given.items() if value is not None and not _is_processor(value)]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: give an object that has save_pretrained, such as the result of "
            "AutoTokenizer.from_pretrained(...)."
        )
    return tuple(processor for processor in given.values() if processor is not None)


def _is_processor(value: object) -> bool:
    return hasattr(value, "save_pretrained")


def write_processors(folder: Path, processors: Sequence[Processor]) -> None:
    """Write the files of tokenizers and processors into a folder."""
    for processor in processors:
        processor.save_pretrained(folder)


def about_model(beside: Mapping[str, Callable[[], bytes]], names: Iterable[str]) -> dict[str, Any]:
    """The description of a model, as a checkpoint of ours holds it, from the files beside its tensors."""
    if is_adapter(beside):
        adapter = {"config": _fields(ADAPTER_CONFIG, beside), "tensors": {name: name for name in names}}
        return {"adapters": {"default": adapter}}
    found = {"config": CONFIG, "generation_config": GENERATION} if CONFIG in beside else {}
    return {key: _fields(path, beside) for key, path in found.items() if path in beside}


def is_adapter(beside: Iterable[str]) -> bool:
    return ADAPTER_CONFIG in beside and CONFIG not in beside


def _fields(path: str, beside: Mapping[str, Callable[[], bytes]]) -> dict[str, Any]:
    try:
        found = parse_json(beside[path]())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a configuration: it contains a {type(found).__name__}, not a dict.")
    return found

"""Convert checkpoints from any format that is read to any that is written: through portable state, part by part."""

from __future__ import annotations

import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt.errors import ConfigError, StorageError, UntrustedError
from ckpt.export.folders import atomic_file, atomic_folder
from ckpt.export.options import ExportOptions
from ckpt.export.save_model import CONFIG, model_files
from ckpt.formats.checkpoint_name import check_name
from ckpt.formats.checks import damage_reported
from ckpt.formats.foreign import megatron, torch_files
from ckpt.formats.foreign.hf_safetensors import plan_files, same_place, tied
from ckpt.formats.foreign.torch_files import RNG
from ckpt.formats.foreign.torch_write import (
    Shard,
    ShardedEntry,
    changed,
    file_of,
    flattened,
    pickled_model,
    random_states,
    write_file,
    write_folder,
    write_values,
)
from ckpt.formats.native import documents, tensor_file
from ckpt.formats.native.documents import refuse, to_json
from ckpt.formats.native.manifest import FILE_NAME
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.registry import ACCELERATE, CKPT, DCP, HF, LIGHTNING, MEGATRON, TORCH, WRITTEN
from ckpt.formats.tensors import FilePlan
from ckpt.load.accelerate import ForeignPart, kind_of
from ckpt.memory.place import remove_token
from ckpt.ranks.consensus import SingleProcess
from ckpt.root import deletion
from ckpt.root.catalog import find, whole_file
from ckpt.root.signing import KeySource, Seal, Trust, find_signing_key, open_trust
from ckpt.save.root_writer import RootWriter
from ckpt.shown import Lines
from ckpt.storage import disk_path, open_storage
from ckpt.tools.portable_state import (
    NO_CONFIG,
    Outcome,
    PortableState,
    files_left,
    open_state,
    plain_generators,
    position_of,
    with_part_names,
)
from ckpt.util.console import counted, progress_bar
from ckpt.util.option_values import path_text

_LOADER = "the position in the data, which only ckpt and Accelerate continue from"
_LIGHTNING = "Lightning keeps no such part: load it yourself"


def export_torch(state: PortableState, path: Path, advance: Callable[[int], None]) -> Outcome:
    """Write a dict with the state of each part, `epoch`, `step` and the generators of the main rank."""
    tree, skipped = whole_tree(state)
    write_file(os.fspath(path), tree, advance)
    return tuple(key for key in (*state.parts, RNG) if key in tree), skipped


def whole_tree(state: PortableState, *, numbered: bool = True) -> tuple[dict[str, Any], dict[str, str]]:
    """All parts in one dict, and what is left out. Optimizers go by number, or by name where names are known."""
    skipped = dict.fromkeys(state.of_kind("dataloader"), _LOADER)
    tree: dict[str, Any] = {}
    for key in state.parts:
        if key not in skipped:
            is_optimizer = kind_of(key) == "optimizer" and (numbered or not state.has_names(key))
            tree[key] = state.numbered(key) if is_optimizer else state.tree(key)
    for counter, value in state.progress.to_json().items():
        if counter not in tree:
            tree[counter] = value
        elif value:
            skipped[f"progress: {counter}"] = f"{value}: a part has this name"
    rng = state.generators(0)
    if rng is not None:
        tree[RNG] = plain_generators(rng)
    if state.world_size > 1 and rng is not None:
        skipped["rng of other ranks"] = f"one file has those of the main rank; {state.world_size} ranks saved theirs"
    return tree, skipped | left_of_ranks(state)


def left_of_ranks(state: PortableState) -> dict[str, str]:
    """What ranks keep that no other format has a place for."""
    if state.own_state is None:
        return {}
    own = state.rank_state(0)
    found = dict.fromkeys(own.get("values", {}), "a plain value that was registered: only ckpt keeps it")
    found |= dict.fromkeys(own.get("generators", {}), "a generator that was registered: only ckpt keeps it")
    return found | ({"loaders": _LOADER} if own.get("loaders") else {})


def export_lightning(state: PortableState, path: Path, advance: Callable[[int], None]) -> Outcome:
    """Write what `Trainer.fit(ckpt_path=...)` continues from, at the beginning of the epoch."""
    model = state.the_model()
    optimizers, schedulers = (sorted(state.of_kind(kind), key=position_of) for kind in ("optimizer", "scheduler"))
    scalers = state.of_kind("scaler")[:1]
    document = torch_files.lightning_document(
        state.tree(model),
        [state.numbered(key) for key in optimizers],
        [state.tree(key) for key in schedulers],
        state.tree(scalers[0]) if scalers else None,
        epoch=state.progress.epoch,
        step=state.progress.step,
    )
    write_file(os.fspath(path), document, advance)
    taken = (model, *optimizers, *schedulers, *scalers)
    skipped = {key: _LIGHTNING for key in state.parts if key not in taken} | left_of_ranks(state)
    if state.own_state is not None:
        skipped["rng"] = "Lightning keeps no random generators"
    if state.progress.batch:
        skipped["progress"] = (
            f"epoch {state.progress.epoch} starts over: {state.progress.batch} batches of it were done"
        )
    return taken, skipped


_SHARD = 16 << 20  # elements: what is held in memory at once
_MODEL_ALONE = "safetensors of a model hold nothing else"


def export_dcp(state: PortableState, folder: Path, advance: Callable[[int], None]) -> Outcome:
    """Write what `torch.distributed.checkpoint.load` reads into `{"model": ..., "optimizer": ...}`."""
    tree, skipped = whole_tree(state, numbered=False)
    leaves, paths = flattened(tree)
    tensors = {name: _entry(leaf) for name, leaf in leaves.items() if isinstance(leaf, PiecedTensor | torch.Tensor)}
    values = {name: leaf for name, leaf in leaves.items() if name not in tensors}
    write_folder(os.fspath(folder), tensors, values, advance, paths)
    for key in state.parts:
        if key in tree and kind_of(key) != "optimizer":  # of optimizers, whoever reads them knows what it means
            skipped |= changed(tree[key], key)
    return tuple(key for key in (*state.parts, "rng") if key in tree), skipped


def _entry(leaf: PiecedTensor | torch.Tensor) -> ShardedEntry:
    shape = tuple(leaf.shape)
    if isinstance(leaf, torch.Tensor):
        return ShardedEntry(leaf.dtype, shape, (Shard((0,) * len(shape), shape, leaf.detach().clone),))
    boxes = list(leaf.boxes(_SHARD)) or [leaf.box]
    shards = tuple(Shard(box.offsets, box.sizes, partial(leaf.read, box)) for box in boxes)
    return ShardedEntry(leaf.dtype, shape, shards)


def export_hugging_face(
    state: PortableState, folder: Path, advance: Callable[[int], None], *, max_shard_size: int | None
) -> Outcome:
    """Write the model as `save_pretrained` would, of a PEFT model its adapters; and the files that were beside it."""
    key = state.the_model()
    tree = state.named(key)
    tensors = {name: tensor for name, tensor in tree.items() if isinstance(tensor, PiecedTensor)}
    storage = open_storage(folder)
    files = model_files(state.about, tensors, tied(tensors), ExportOptions(max_shard_size=max_shard_size))
    for file in files:
        if file.path not in state.beside:
            storage.write(file.path, counted(file.pieces(), advance))
    for path, read in state.beside.items():
        storage.write(path, [memoryview(read())])
    skipped = {f"{key}.{name}": "not a tensor: safetensors can't hold it" for name in tree if name not in tensors}
    skipped |= {other: _MODEL_ALONE for other in state.parts if other != key} | left_of_ranks(state)
    skipped |= _not_of_adapters(key, state.about, tensors)
    if not state.about:
        skipped[CONFIG] = NO_CONFIG
    if state.own_state is not None:
        skipped["rng"] = _MODEL_ALONE
    if any(state.progress.to_json().values()):
        skipped["progress"] = _MODEL_ALONE
    return (key,), skipped


def _not_of_adapters(key: str, about: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, str]:
    """The tensors of a PEFT model that are not written with its adapters."""
    if "adapters" not in about:
        return {}
    kept = {name for adapter in about["adapters"].values() for name in adapter["tensors"].values()}
    others = tensors.keys() - kept
    why = f"{len(others)} tensors of the model that is adapted: the adapters are written, as PEFT does"
    return {f"{key}: base model": why} if others else {}


_NO_GENERATORS = "the source has none: Accelerate leaves the generators as they are"


def export_accelerate(state: PortableState, folder: Path, advance: Callable[[int], None]) -> Outcome:
    """Write the folder. Returns the parts in it, and what it cannot hold, with the reasons."""
    exported = _Export(state, folder, advance)
    exported.parts()
    has_generators = exported.generators()
    return (*state.parts, *(["rng"] if has_generators else [])), exported.skipped


@dataclass
class _Export:
    state: PortableState
    folder: Path
    advance: Callable[[int], None]
    skipped: dict[str, str] = field(default_factory=dict)

    def parts(self) -> None:
        for kind, keys in self._by_kind().items():
            for index, key in enumerate(keys):
                self._write_part(kind, position_of(key) if kind == "dataloader" else index, key)

    def _by_kind(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for key in self.state.parts:
            found[kind_of(key)].append(key)
        if len(found["scaler"]) > 1:
            raise ConfigError(
                f"{self.state.name} has {len(found['scaler'])} scalers, but Accelerate can load only one."
            )
        return {kind: sorted(keys, key=position_of) for kind, keys in found.items()}

    def _write_part(self, kind: str, number: int, key: str) -> None:
        tree = self.state.numbered(key) if kind == "optimizer" else self.state.tree(key)
        if kind != "model":
            self._write(file_of(kind, number), tree)
        elif isinstance(tree, dict) and all(isinstance(value, PiecedTensor) for value in tree.values()):
            self._stream_model(number, tree)
        else:
            self._write(pickled_model(number), tree)

    def _stream_model(self, number: int, tensors: Mapping[str, PiecedTensor]) -> None:
        (file,) = plan_files(file_of("model", number), tensors, same_place(tensors))
        open_storage(self.folder).write(file.path, file.pieces())
        self.advance(file.size)

    def generators(self) -> bool:
        """Write the generators of every rank; without any, the file says only that the save is complete."""
        for rank in range(self.state.world_size):
            state = self.state.rank_state(rank)
            step = state.get("source", {}).get("step", 0)
            rng = self.state.generators(rank)
            states = {"step": step} if rng is None else random_states(rng, step)
            write_values(os.path.join(self.folder, file_of("random_states", rank)), states)
            self._note_skipped(state, has_generators=rng is not None)
        return "rng" not in self.skipped

    def _note_skipped(self, state: Mapping[str, Any], *, has_generators: bool) -> None:
        if not has_generators:
            self.skipped["rng"] = _NO_GENERATORS
        for key in state.get("values", {}):
            self.skipped[key] = "Accelerate keeps no plain values: register an object that has them"
        for key in state["generators"]:
            self.skipped[key] = "Accelerate keeps only the global generators"
        progress = self.state.progress
        if any(progress.to_json().values()):
            self.skipped["progress"] = (
                f"Accelerate does not keep it: continue with epoch {progress.epoch}, and there with "
                f"accelerator.skip_first_batches(loader, {progress.batch})"
            )

    def _write(self, name: str, tree: Any) -> None:
        write_file(os.path.join(self.folder, name), tree, self.advance)


_PART = "model"
_ANEW = "Megatron-Core stores this in a form of its own, so it starts over"
_LAYER = re.compile(r"(?:.*\.)?(?:decoder|encoder)\.layers\.\d{1,6}\..+")


def export_megatron(state: PortableState, folder: Path, advance: Callable[[int], None]) -> Outcome:
    """Write the folder. Returns the parts in it, and what was left out, with the reasons."""
    tree = state.named(_PART) if _PART in state.parts else {}
    tensors = {name: tensor for name, tensor in tree.items() if isinstance(tensor, PiecedTensor)}
    _require_names(tensors, state.name)
    entries = _stacked(megatron.stored_names(tensors), state.name)
    objects, skipped = _objects(tree)
    write_folder(os.fspath(folder), entries, objects, advance)
    _write_rest(folder, state.progress.step)
    others = {key: _ANEW for key in state.parts if key != _PART}
    return (_PART,), {**skipped, **others, "rng": _ANEW}


def _require_names(tensors: Mapping[str, PiecedTensor], name: str) -> None:
    if not any(map(_LAYER.fullmatch, tensors)):
        raise ConfigError(
            f"the model of {name} does not use Megatron-Core's parameter names "
            "(decoder.layers.0.mlp.linear_fc1.weight), so Megatron could not load it."
        )


def _objects(tree: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The modules' empty `_extra_state`, which Megatron asks for, and what else is no tensor, which is left out."""
    others = {name for name, value in tree.items() if not isinstance(value, PiecedTensor)}
    empty = {name for name in others if megatron.is_extra_state(name) and tree[name] is None}
    skipped = {f"{_PART}.{name}": "not a tensor, so it is not written" for name in sorted(others - empty)}
    return {megatron.object_name(name, empty): [None] for name in sorted(empty)}, skipped


def _write_rest(folder: Path, step: int) -> None:
    """What is not sharded, and the file that Megatron takes for the end of a save."""
    write_values(os.fspath(folder / megatron.COMMON), {megatron.ITERATION: step})
    (folder / megatron.CONFIG).write_bytes(to_json(megatron.CONFIGURATION))


def _stacked(tensors: Mapping[str, PiecedTensor], name: str) -> dict[str, ShardedEntry]:
    """The tensors by the names of Megatron's folders. Layers that are not alike remain by themselves."""
    stacks: dict[str, dict[int, PiecedTensor]] = defaultdict(dict)
    entries: dict[str, ShardedEntry] = {}
    for key, tensor in tensors.items():
        found = megatron.stacked_name(key)
        if found is None:
            entries[key] = ShardedEntry(tensor.dtype, tensor.shape, (_shard((), tensor),))
        else:
            stacks[found[0]][found[1]] = tensor
    for key, layers in stacks.items():
        first = layers[min(layers)]
        alike = {(tensor.dtype, tensor.shape) for tensor in layers.values()} == {(first.dtype, first.shape)}
        if not alike or sorted(layers) != list(range(len(layers))) or key in entries:
            raise ConfigError(
                f"{key} in {name} is not the same in every layer: {len(layers)} of {1 + max(layers)} layers have it, "
                "or its shapes or dtypes differ. Megatron-Core can only stack identical layers."
            )
        shards = tuple(_shard((layer,), layers[layer]) for layer in sorted(layers))
        entries[key] = ShardedEntry(first.dtype, (len(layers), *first.shape), shards)
    return entries


def _shard(layer: tuple[int, ...], tensor: PiecedTensor) -> Shard:
    ones = (1,) * len(layer)
    return Shard((*layer, *(0 for _ in tensor.shape)), (*ones, *tensor.shape), partial(_read, ones, tensor))


def _read(ones: tuple[int, ...], tensor: PiecedTensor) -> torch.Tensor:
    return tensor.read(tensor.box).reshape(*ones, *tensor.shape)


_FILES = (TORCH.name, LIGHTNING.name)  # of which a checkpoint is one file

Export = Callable[[PortableState, Path, Callable[[int], None]], Outcome]


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Lists what a conversion wrote and where, what is not exact, and what the other format can't hold."""

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
    verify_key: KeySource | None = None,
    require_signed: bool | str = False,
) -> Converted:
    """Convert a checkpoint between formats.

    `convert` never executes pickles, and it streams tensors. The output appears only when it is complete, and never
    overwrites anything. The table in docs/converting.md shows what each format can hold.

    Args:
        source: The path or URL of a checkpoint from ckpt (full or sharded), torch.distributed.checkpoint, Accelerate,
            DeepSpeed (ZeRO 0 to 3, universal), Lightning, Megatron-Core (`torch_dist`) or the Trainer, or of a
            torch.save or safetensors file. For a ckpt root, `convert` takes the newest checkpoint.
        destination: For `"ckpt"` a root; for the others a new file or folder on a disk.
        to: `"ckpt"`; `"hf"`, a folder with `model.safetensors` and the configuration that was beside the source;
            `"dcp"`, a folder for `torch.distributed.checkpoint.load`; `"accelerate"`, a folder for
            `accelerator.load_state` with the same number of processes as the saved run; `"torch"`, a file for
            `torch.load(weights_only=True)`; `"lightning"`, a file for `Trainer.fit(ckpt_path=...)`; `"megatron"`, a
            folder for `megatron.core.dist_checkpointing.load`, of a model that has Megatron's names.
        format: The format of the source. You only need it if a folder has saves in several formats.
        name: The name of the new checkpoint in a root; by default the source's.
        max_shard_size: For `"hf"`: the largest size of a file, in bytes or as `"5GB"`; a larger model becomes shards
            and an index.
        sign: For `"ckpt"`, as `key` of `Signing`; other formats have no signatures. If the source is a ckpt checkpoint,
            this key or one of `verify_key` must have signed it.
        verify_key: As in `Signing`: ckpt warns if none of these keys has signed the source.
        require_signed: As `required` of `Signing`.

    Returns:
        What ckpt wrote, and what is not exact or is missing, with the reasons.

    Raises:
        MissingError: There is nothing to convert.
        DamagedError: The source's bytes have changed since they were saved.
        UntrustedError: No key that you trust has signed the source, but you require a signature or want to sign it.
        ConfigError: ckpt can't read this kind of source, or the destination exists already.
    """
    if to not in WRITTEN:
        raise ConfigError(f"to={to!r} is not a format that ckpt writes. Choose one of {', '.join(WRITTEN)}.")
    if name is not None and to != CKPT.name:
        raise ConfigError(
            "name= works only with to='ckpt'. For other formats, the destination path itself names the output."
        )
    if max_shard_size is not None and to != HF.name:
        raise ConfigError(f"max_shard_size= works only with to={HF.name!r}.")
    limit = ExportOptions.parse(None, max_shard_size).max_shard_size
    if to != CKPT.name:
        return _export(source, format, destination, to, limit, open_trust(verify_key, required=require_signed))
    seal = Seal(key=find_signing_key(sign))
    trust = open_trust(verify_key, required=require_signed, own=seal.key)
    with open_state(source, format, trust) as state:
        if seal.key is not None and state.origin == CKPT.name and not state.is_authentic:
            raise UntrustedError(
                f"no key that you trust has signed {state.name}, so ckpt does not sign its copy. Give the signer's "
                "public key as verify_key=, or use sign=False."
            )
        return _import(with_part_names(state), destination, name, seal)


def _export(
    source: str | os.PathLike[str],
    format: str | None,
    destination: str | os.PathLike[str],
    to: str,
    limit: int | None,
    trust: Trust,
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
    with open_state(source, format, trust) as state:
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
                f"{path} is inside the checkpoint {folder}, and would be removed with it. Choose another destination."
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
            f"the source's name, {found.name!r}, is not a valid checkpoint name. Give a valid one with name= (--name)."
        ) from None


def _write(writer: RootWriter, name: str, files: list[FilePlan], found: PortableState) -> None:
    writer.hold()
    remove_token(writer.storage)  # what a run has left in memory does not continue from what is written now
    if find(writer.storage, name).committed:
        raise ConfigError(f"{writer.storage.url} already has a checkpoint {name!r}. Choose another name=.")
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
    with damage_reported("the source", "checkpoint"):  # a number may be too large for JSON
        state = documents.to_json({"parts": parts})
    return [
        FilePlan.of(documents.STATE, state),
        *(FilePlan.of(documents.rank_document(rank), _rank_document(found.rank_state(rank))) for rank in ranks),
    ]


def _rank_document(state: Mapping[str, Any]) -> bytes:
    problems: list[str] = []
    encoded = {key: documents.encode_inline(value, key, problems) for key, value in state.items()}
    refuse(problems)
    return documents.to_json({"state": encoded, "own": {}})

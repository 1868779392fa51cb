"""A model alone is loaded, from whatever holds one, straight into its live tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ckpt.errors import MismatchError, MissingError
from ckpt.export.save_model import ADAPTER_CONFIG, CONFIG
from ckpt.export.source import TensorSource, open_source
from ckpt.formats.layout import Box, is_sharded, layout_of, local_tensor
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.formats.pieces import PiecedTensor
from ckpt.load.restore import Restoration
from ckpt.load.select import choose
from ckpt.ranks.consensus import run_on_all_ranks
from ckpt.ranks.find import find_ranks
from ckpt.ranks.group import MAIN, Ranks
from ckpt.root.catalog import locate
from ckpt.state.model import ModelPart, tensors_in
from ckpt.state.objects import ManagedObjects
from ckpt.state.registry import StateRegistry
from ckpt.storage import HubStorage, Storage, open_storage
from ckpt.storage.hub.download import fetched, unreachable
from ckpt.util.console import say

Problems = dict[str, str]
_READ = ("*.safetensors", "*.json", "*.metadata", "*.distcp")  # of a repository, what a model is loaded from


def load_model(
    source: str | os.PathLike[str],
    model: nn.Module,
    *,
    part: str = "model",
    strict: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float = 300.0,
) -> dict[str, str]:
    """Load a model's tensors, and return what was left out or is not exactly as it was saved, with the reasons.

    `source` is a checkpoint, a root (its newest intact checkpoint is taken), a folder of safetensors, or whatever else
    `merge` reads, at a path or URL: `hub://user/repo`. The model may be wrapped, compiled or sharded; every rank makes
    this call, and reads what it holds. Of a published PEFT adapter, its tensors are loaded into a model that has one.

    Checkpoints are verified by their manifests, files of the Hub by their hashes there; without the network they come
    from Hugging Face's cache, where a published model, or what was pulled, is. With `strict` everything must fit, or
    nothing is changed. What is far away is read once, and verified on the way: if it is damaged, a part of it is in the
    model already. `storage_options` are for a URL, as for `StateManager`: `{"token": ...}` for the Hub.
    """
    shown = os.fspath(source)
    ranks = find_ranks(f"load {shown}", timeout)
    call = f"load_model({shown!r})"
    with ranks.working():
        where = run_on_all_ranks(ranks, call, lambda: _reached(shown, storage_options))
        options = storage_options if where == shown else None
        storage, names = run_on_all_ranks(ranks, call, lambda: locate(where, options))
        if names:
            return _load_checkpoint(storage, names, ranks, model, part, strict=strict)
        notes = run_on_all_ranks(
            ranks, call, lambda: _load_tensors(where, shown, options, ranks, model, part, strict=strict)
        )
    if ranks.rank == MAIN:
        say(f"loaded {part} of {shown}")
    return dict(notes)


def _reached(where: str, options: Mapping[str, Any] | None) -> str:
    """Where to read: a copy in the cache, where the Hub cannot be reached or has plain files without a manifest."""
    storage = open_storage(where, **(options or {}))
    if not isinstance(storage, HubStorage):
        return where
    offline = unreachable(storage.repo)
    if offline is None and _has_checkpoints(storage):
        return where
    top = f"{storage.folder}/" if storage.folder else ""
    found = fetched(storage.repo, [f"{top}{pattern}" for pattern in _READ], offline) / top
    if not found.is_dir():
        raise MissingError(f"there is nothing at {where} that a model can be loaded from.")
    return str(found)


def _has_checkpoints(storage: Storage) -> bool:
    return any(entry.key.rpartition("/")[2] == FILE_NAME and entry.key.count("/") < 2 for entry in storage.list())


def _load_checkpoint(
    storage: Storage, names: list[str], ranks: Ranks, model: nn.Module, part: str, *, strict: bool
) -> Problems:
    """From a checkpoint of ours: the one that was named, or the newest intact one of a root."""
    managed = StateRegistry(ManagedObjects, gradients=False)
    managed.parts[part] = ModelPart(part, model)

    def prepare(storage: Storage, manifest: Manifest, held: ExitStack) -> Restoration:
        return Restoration.prepare(
            storage,
            manifest,
            ranks,
            managed,
            held,
            strict=strict,
            share=not storage.is_local,
            precious=storage.is_local,
            touch=lambda: None,
        )

    with ExitStack() as held:
        choice = choose((storage,), ranks, names[0] if len(names) == 1 else None, prepare, held)
        if choice is None:
            raise MissingError(f"there is no checkpoint in {storage.url}.")
        restoration: Restoration = choice.ready
        restoration.finish()
    if ranks.rank == MAIN:
        say(f"loaded {part} of {storage.url}/{choice.manifest.name}")
    noted = {**restoration.notes.skipped, **restoration.notes.approximated}
    return {key: why for key, why in noted.items() if key.startswith(f"{part}.")}


def _load_tensors(
    where: str,
    shown: str,
    options: Mapping[str, Any] | None,
    ranks: Ranks,
    model: nn.Module,
    part: str,
    *,
    strict: bool,
) -> Problems:
    """From a folder of safetensors, or of another tool."""
    with open_source(where, part, options) as source:
        target = ModelPart(part, model)
        live = target.places()
        wanted, saved = _matched(target, live, source, shown)
        notes = _unfit(wanted, saved)
        if strict and notes:
            lines = [f"{name}: {why}" for name, why in sorted(notes.items())]
            listed = "\n  ".join(lines)
            raise MismatchError(f"{shown} does not fit the model; nothing was changed:\n  {listed}", tuple(lines))
        fitting = {name for name in wanted if name in saved and name not in notes}
        for name in fitting:
            _fill(wanted[name], saved[name], ranks.rank)
        target.load(live, left=live.keys() - fitting)
    return notes


def _matched(
    part: ModelPart, live: Mapping[str, Any], source: TensorSource, shown: str
) -> tuple[Mapping[str, Any], Mapping[str, PiecedTensor]]:
    """What is to be loaded and what it is loaded from, under the same names: an adapter's file has names of its own."""
    if ADAPTER_CONFIG not in source.beside or CONFIG in source.beside:
        return live, source.tensors
    adapters = part.about(live).get("adapters", {}).values()
    if not adapters:
        raise MismatchError(
            f"{shown} holds an adapter, and the model has none: give the one that peft.get_peft_model returned."
        )
    names = max((one["tensors"] for one in adapters), key=lambda one: len(one.keys() & source.tensors.keys()))
    saved = {names.get(name) or name: tensor for name, tensor in source.tensors.items()}
    return {name: live[name] for name in names.values() if name is not None}, saved


def _unfit(live: Mapping[str, Any], saved: Mapping[str, PiecedTensor]) -> Problems:
    """What does not go together. A tied tensor may be there under another of its names; another dtype is cast."""
    found = {id(value) for name, value in live.items() if name in saved}
    tensors = tensors_in(live)
    notes = {name: "missing there" for name, value in tensors.items() if name not in saved and id(value) not in found}
    notes |= {name: "unexpected: the model has no such tensor" for name in saved if name not in tensors}
    for name in tensors.keys() & saved.keys():
        if tuple(tensors[name].size()) != saved[name].shape:
            notes[name] = f"shape {list(saved[name].shape)} there, {list(tensors[name].size())} here"
    return notes


@torch.no_grad()
def _fill(target: Any, saved: PiecedTensor, rank: int) -> None:
    """Read as much of a tensor as this rank holds."""
    if not is_sharded(target):
        target.copy_(saved.read(saved.box))
        return
    layout = layout_of(target)
    box = layout.box(saved.shape, rank) if layout.holds(rank) else Box((0,), (0,))
    if not box.is_empty:
        local_tensor(target).copy_(saved.read(box))

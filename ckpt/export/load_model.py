"""Loads a model alone, from a checkpoint, a folder of safetensors or another tool's, straight into its tensors.

Some models of Transformers have other tensors than their files: those of Mixtral hold every expert by itself, and the
model all experts of a layer in one; those of ViT have the names of older modules. Transformers' own rules are followed,
one joined tensor in memory at a time.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ckpt.errors import ConfigError, MismatchError, MissingError
from ckpt.export.save_model import ADAPTER_CONFIG, CONFIG
from ckpt.export.source import TensorSource, open_foreign
from ckpt.formats.foreign.hf_safetensors import equal_bytes
from ckpt.formats.layout import Box
from ckpt.formats.native.tensor_file import dtype_name
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.registry import CKPT, ROOT, claims
from ckpt.formats.sharded_tensors import is_sharded, layout_of, local_tensor
from ckpt.formats.tensors import narrowed
from ckpt.load.load_state import Restored, restored_from
from ckpt.load.restore import Restoration, RestoreRequest, Restoring
from ckpt.load.select import Choice, Selection, choose
from ckpt.ranks.consensus import MAIN, Ranks, run_on_all_ranks
from ckpt.ranks.find import find_ranks
from ckpt.ranks.hosts import ONE_SHARED_ROOT, Hosts, find_hosts, may_have_separate_roots
from ckpt.root.folder import Place, single_file
from ckpt.root.signing import BELIEVES_ALL, KeySource, Trust, open_trust
from ckpt.shown import Lines
from ckpt.state.model import ModelPart, tensors_in
from ckpt.state.objects import ManagedObjects
from ckpt.state.parts import TIED_HERE
from ckpt.state.registry import StateRegistry, model_part
from ckpt.state.unwrap import unwrap
from ckpt.storage import HubStorage, Storage, open_storage, place_of
from ckpt.storage.hub.download import fetched, unreachable
from ckpt.util.console import one_line, say
from ckpt.util.option_values import is_path, said, settings
from ckpt.util.threads import gc_paused


class ReadableTensor(Protocol):
    """A saved tensor of which boxes are read: a `PiecedTensor`, or one that is made of several."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def box(self) -> Box: ...

    def read(self, box: Box) -> torch.Tensor: ...


def as_loaded(
    model: nn.Module, live: Mapping[str, Any], tensors: Mapping[str, PiecedTensor]
) -> Mapping[str, ReadableTensor]:
    """The tensors under the names, and in the form, in which Transformers would give them to this model.

    As they are if it is no model of Transformers, or of a version that has no such rules.
    """
    rules = _rules(model) if tensors.keys() - live.keys() else None
    return tensors if rules is None else dict(_converted(rules, model, live, tensors))


@dataclass(frozen=True)
class _Rules:
    """What `transformers` has for it."""

    loading: Any  # its module transformers.core_model_loading
    renamings: list[Any]
    converters: list[Any]

    def renamed(self, name: str, model: Any, live: Mapping[str, Any]) -> tuple[str, str | None]:
        """The name of the (first) tensor that one becomes, and the pattern of its converter, if it has one."""
        about = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": dict(live)}
        new, pattern = self.loading.rename_source_key(name, self.renamings, self.converters, **about)
        if new not in live and name in live:
            new, pattern = self.loading.rename_source_key(name, [], [], **about)
        return new, pattern

    def converter(self, pattern: str) -> Any:
        return copy.deepcopy(next(found for found in self.converters if pattern in found.source_patterns))


def _rules(model: nn.Module) -> _Rules | None:
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    try:
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before 5.0
        return None
    found = get_model_conversion_mapping(model)
    renamings = [rule for rule in found if isinstance(rule, loading.WeightRenaming)]
    return _Rules(loading, renamings, [rule for rule in found if isinstance(rule, loading.WeightConverter)])


def _converted(
    rules: _Rules, model: Any, live: Mapping[str, Any], tensors: Mapping[str, PiecedTensor]
) -> Iterator[tuple[str, ReadableTensor]]:
    joined: dict[tuple[str, str], dict[str, str]] = {}  # for what a converter makes: its sources, and their patterns
    for name in sorted(tensors, key=rules.loading.dot_natural_key):
        new, pattern = rules.renamed(name, model, live)
        if pattern is None:
            yield new, tensors[name]
        else:
            converter = tuple(rules.converter(pattern).source_patterns)
            joined.setdefault((new, "\n".join(converter)), {})[name] = pattern
    shared = _OneAtATime()
    for (new, _), patterns in joined.items():
        group = _Group(rules, model, new, {name: tensors[name] for name in patterns}, patterns)
        for target, outline in group.outlines().items():
            yield target, _JoinedTensor(outline.dtype, tuple(outline.shape), target, group, shared)


@dataclass(frozen=True, eq=False)
class _Group:
    """The saved tensors that a converter makes one tensor of, or several."""

    rules: _Rules
    model: Any
    name: str
    sources: Mapping[str, PiecedTensor]
    patterns: Mapping[str, str]

    def outlines(self) -> dict[str, torch.Tensor]:
        """What is made, without data."""
        empty = {
            name: torch.empty(saved.shape, dtype=saved.dtype, device="meta") for name, saved in self.sources.items()
        }
        return self._made(empty)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._made({name: saved.read(saved.box) for name, saved in self.sources.items()})

    def _made(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = self.rules.converter(next(iter(self.patterns.values())))
        for name, tensor in tensors.items():
            converter.add_tensor(self.name, name, self.patterns[name], tensor)
        made = converter.convert(self.name, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass
class _OneAtATime:
    """The tensors of the group that was read last."""

    group: _Group | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def of(self, group: _Group) -> dict[str, torch.Tensor]:
        if self.group is not group:
            self.tensors = {}  # before others are read
            self.group, self.tensors = group, group.tensors()
        return self.tensors


@dataclass(frozen=True)
class _JoinedTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    name: str
    group: _Group
    shared: _OneAtATime

    @property
    def box(self) -> Box:
        return Box((0,) * len(self.shape), self.shape)

    def read(self, box: Box) -> torch.Tensor:
        return narrowed(self.shared.of(self.group)[self.name], box.ranges)


def misfits(live: Mapping[str, Any], saved: Mapping[str, ReadableTensor]) -> dict[str, str]:
    """What does not fit, by name. A tied tensor may be there under another of its names; floating point is cast."""
    found = {id(value) for name, value in live.items() if name in saved}
    tensors = tensors_in(live)
    wrong = {name: "missing there" for name, value in tensors.items() if name not in saved and id(value) not in found}
    wrong |= {name: "unexpected: the model has no such tensor" for name in saved if name not in tensors}
    for name in tensors.keys() & saved.keys():
        if tuple(tensors[name].size()) != saved[name].shape:
            wrong[name] = f"shape {list(saved[name].shape)} there, {list(tensors[name].size())} here"
        elif not _is_castable(saved[name].dtype, tensors[name].dtype):
            wrong[name] = f"dtype {dtype_name(saved[name].dtype)} there, {dtype_name(tensors[name].dtype)} here"
    return wrong | _contradictions({name: tensors[name] for name in tensors if name not in wrong}, saved)


def _is_castable(saved: torch.dtype, live: torch.dtype) -> bool:
    """Whether values remain what they are, except for rounding: not 300 as a byte, or 0.5 as a whole number."""
    return saved == live or (saved.is_floating_point and live.is_floating_point) or _holds(live, saved)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    try:
        return torch.promote_types(wide, narrow) == wide
    except RuntimeError:  # dtypes of 8 bits and less are promoted to nothing
        return False


def rounded(live: Any, saved: ReadableTensor) -> str | None:
    if saved.dtype == live.dtype or _holds(live.dtype, saved.dtype):
        return None
    return f"rounded from {dtype_name(saved.dtype)} to {dtype_name(live.dtype)}"


def _contradictions(live: Mapping[str, Any], saved: Mapping[str, ReadableTensor]) -> dict[str, str]:
    """Names of tied tensors whose values differ there: the last one read would win."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, value in live.items():
        if name in saved and (kept := first.setdefault(id(value), name)) != name and _differ(saved[kept], saved[name]):
            found[name] = f"its values there differ from those of {kept}, {TIED_HERE}"
    return found


def _differ(first: ReadableTensor, second: ReadableTensor) -> bool:
    if not isinstance(first, PiecedTensor) or not isinstance(second, PiecedTensor):
        return False  # what Transformers makes of several tensors
    return set(first.pieces) != set(second.pieces) and not equal_bytes(first, second)


def other_state(live: Mapping[str, Any]) -> list[str]:
    """What modules keep that is no tensor, in `_extra_state`."""
    return [name for name, value in live.items() if not isinstance(value, torch.Tensor) and value is not None]


def with_aliases(names: set[str], live: Mapping[str, Any]) -> set[str]:
    """The names, and the other names of the same tensors."""
    filled = {id(live[name]) for name in names}
    return {name for name, value in live.items() if id(value) in filled}


_log = logging.getLogger("ckpt")
_NOT_READ = "not a tensor: ckpt does not read it, and leaves it unchanged"
_READ = ("*.safetensors", "*.json", "*.metadata", "*.distcp")  # of a repository, what a model is loaded from


def load_model(
    source: str | os.PathLike[str],
    model: nn.Module,
    *,
    part: str = "model",
    format: str | None = None,
    strict: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float = 300.0,
    verify_key: KeySource | None = None,
    require_signed: bool | str = False,
) -> dict[str, str]:
    """Load a model's tensors from a checkpoint, or from files that another tool wrote.

    The model may be wrapped, compiled or sharded. Every rank must make this call, and each rank reads only its own
    shards. To load a published PEFT adapter, pass a model that has an adapter. If Transformers renames or joins weights
    when it loads them, ckpt does the same.

    ckpt verifies checkpoints against the hashes in their manifests, and files from the Hub against the hashes that the
    Hub lists. Without a network, ckpt reads a Hub model from Hugging Face's cache, if you have loaded or pulled it
    before. ckpt reads remote files only once, and verifies the bytes as they arrive: if ckpt finds damage, some of
    these bytes are already in the model.

    Args:
        source: A checkpoint, a root (ckpt loads its newest intact checkpoint, and warns about newer ones), a
            safetensors file, a folder of such files, or anything else that `merge` reads, at a path or URL:
            `hub://user/repo`.
        model: The model to load into.
        part: The part of the checkpoint to load, if not the model.
        format: The format to load, if a folder has saves in several formats: `"deepspeed"`, `"hf"`.
        strict: If anything does not fit, raise an error and change nothing. ckpt casts floating point tensors of
            another dtype if another tool wrote the file.
        storage_options: For a URL, as for `StateManager`: `{"token": ...}` for the Hub.
        timeout: Seconds that ranks wait for each other.
        verify_key: As in `Signing`: ckpt warns if none of these keys has signed the source.
        require_signed: Like `required` of `Signing`; ckpt then also refuses files without a manifest.

    Returns:
        A report of what ckpt skipped and what differs from the saved state, with the reasons.

    Raises:
        MissingError: The source does not exist, or has no such part.
        MismatchError: The source does not fit the model; nothing was changed.
        DamagedError: The source's bytes have changed since they were saved.
    """
    trust = open_trust(verify_key, required=require_signed)
    if not is_path(source):
        raise ConfigError(f"load_model(source, model) needs a path or a URL as its source, not {said(source)}.")
    shown = os.fspath(source)
    ranks = find_ranks(f"load {shown}", timeout, reads_only=True)
    call = f"load_model({shown!r})"
    with ranks.working():
        where = run_on_all_ranks(ranks, call, lambda: _reached(shown, storage_options))
        options = storage_options if where == shown else None
        place = run_on_all_ranks(ranks, call, lambda: Place.at(where, options, format))
        if place.is_ours:
            storage, names = run_on_all_ranks(ranks, call, place.checkpoints)
            return _load_checkpoint(storage, names, ranks, model_part(part, model), trust, strict=strict)
        if trust.required or ranks.rank == MAIN:  # one warning
            trust.refuse_unsigned(shown)
        skipped: dict[str, str] = run_on_all_ranks(
            ranks, call, lambda: _load_foreign(place, shown, model_part(part, model), ranks.rank, strict=strict)
        )
    if ranks.rank == MAIN:
        say(f"loaded {part} of {shown}")
    return dict(skipped)


def load_checkpoint_model(
    storage: Storage, name: str | None, model: nn.Module, *, timeout: float = 300.0, trust: Trust = BELIEVES_ALL
) -> Restored:
    """Load the model of a checkpoint, by its name or the newest intact one. Prints and returns what was restored.

    For integrations that have a root already: everything must fit, nothing is changed before all of it is verified,
    and no generator is touched. Hosts may have roots of their own.
    """
    ranks = find_ranks(place_of(storage), timeout, own_root=may_have_separate_roots(storage, shared=None))
    hosts = find_hosts(ranks, storage, shared=None)
    request = _model_request(ranks, model_part("model", model), strict=True, verify_before_overwrite=True)
    with ranks.working(), gc_paused():
        choice = _choose_and_restore(request, storage, name, hosts, foreign=True, trust=trust)
    restored = restored_from(choice, ("model",))
    if ranks.rank == MAIN:
        restored.report()
        trust.warn(choice.manifest)
    ranks.linger()
    return restored


def _reached(where: str, options: Mapping[str, Any] | None) -> str:
    """Where to read: in the cache, if the Hub cannot be reached or has plain files without a manifest."""
    if single_file(where, options) is not None:
        return where
    storage = open_storage(where, **settings(options))
    if not isinstance(storage, HubStorage):
        return where
    offline = unreachable(storage.repo)
    if offline is None and {CKPT.name, ROOT.name} & claims([entry.key for entry in storage.list()]).keys():
        return where
    top = f"{storage.folder}/" if storage.folder else ""
    found = fetched(storage.repo, [f"{top}{pattern}" for pattern in _READ], offline) / top
    if not found.is_dir():
        raise MissingError(f"there is nothing at {where} that ckpt can load a model from.")
    return str(found)


def _load_checkpoint(
    storage: Storage, names: list[str], ranks: Ranks, part: ModelPart, trust: Trust, *, strict: bool
) -> dict[str, str]:
    """From a checkpoint of ours: the named one, or the newest intact one of a root."""
    request = _model_request(ranks, part, strict=strict, verify_before_overwrite=storage.is_local)
    choice = _choose_and_restore(request, storage, names[0] if len(names) == 1 else None, trust=trust)
    if ranks.rank == MAIN:
        for newer, why in choice.passed_over.items():
            _log.warning("ckpt skips the newer checkpoint %s: %s", newer, one_line(why))
        trust.warn(choice.manifest)
        say(f"loaded {part.key} of {storage.url}/{choice.manifest.name}")
    noted = {**choice.ready.notes.skipped, **choice.ready.notes.approximated}
    return {key: why for key, why in noted.items() if key.startswith(f"{part.key}.")}


def _model_request(ranks: Ranks, part: ModelPart, *, strict: bool, verify_before_overwrite: bool) -> RestoreRequest:
    registry = StateRegistry(ManagedObjects, gradients=False)
    registry.parts[part.key] = part
    return RestoreRequest(
        ranks=ranks, registry=registry, strict=strict, verify_before_overwrite=verify_before_overwrite
    )


def _choose_and_restore(
    request: RestoreRequest,
    storage: Storage,
    name: str | None,
    hosts: Hosts = ONE_SHARED_ROOT,
    *,
    foreign: bool = False,
    trust: Trust = BELIEVES_ALL,
) -> Choice[Restoration]:
    restoring = Restoring(request)
    selection = Selection(
        tiers=(storage,),
        ranks=request.ranks,
        prepare=restoring.prepare,
        opening=restoring.opening,
        check=restoring.check,
        name=name,
        hosts=hosts,
        foreign=foreign,
        trust=trust,
    )
    with ExitStack() as held:
        choice = choose(selection, held)
        if choice is None:
            raise MissingError(f"there is no checkpoint in {storage.url}.")
        choice.ready.finish()
    return choice


def _load_foreign(place: Place, shown: str, target: ModelPart, rank: int, *, strict: bool) -> dict[str, str]:
    """From safetensors, or what another tool wrote. Returns what was skipped, with the reasons."""
    source = open_foreign(place, target.key)
    live = target.places()
    wanted, saved = _matched(target, live, source, shown)
    wrong = misfits(wanted, saved)
    if strict and wrong:
        lines = [f"{name}: {why}" for name, why in sorted(wrong.items())]
        head = f"{shown} does not fit the model; nothing was changed:"
        advice = "Build the model as it was when it was saved, or use strict=False to load what fits."
        raise MismatchError(Lines.listing(head, lines, advice), tuple(lines))
    fitting = {name for name in wanted if name in saved and name not in wrong}
    target.materialise(with_aliases(fitting, live))
    inexact = {name: why for name in saved if name in fitting and (why := rounded(wanted[name], saved[name]))}
    for name in saved:
        if name in fitting:
            _fill(wanted[name], saved[name], rank)
    target.load(live, left=live.keys() - fitting)
    return wrong | inexact | dict.fromkeys(other_state(live), _NOT_READ)


def _matched(
    part: ModelPart, live: Mapping[str, Any], source: TensorSource, shown: str
) -> tuple[Mapping[str, Any], Mapping[str, ReadableTensor]]:
    """Live and saved tensors under the same names: an adapter's file has names of its own."""
    if ADAPTER_CONFIG not in source.beside or CONFIG in source.beside:
        return live, as_loaded(unwrap(part.model), live, _named_as_here(live, source))
    adapters = part.about(live).get("adapters", {}).values()
    if not adapters:
        raise MismatchError(
            f"{shown} has an adapter, but the model has none. Pass the model that peft.get_peft_model returned."
        )
    tables = (adapter["tensors"] for adapter in adapters)
    names = max(tables, key=lambda table: len(table.keys() & source.tensors.keys()))
    saved = {names.get(name) or name: tensor for name, tensor in source.tensors.items()}
    return {name: live[name] for name in names.values() if name is not None}, saved


def _named_as_here(live: Mapping[str, Any], source: TensorSource) -> Mapping[str, PiecedTensor]:
    """The saved tensors, those under their other name that the model has only under that one."""
    other = {name: new for name, new in source.other_names.items() if name not in live and new in live}
    return {other.get(name, name): tensor for name, tensor in source.tensors.items()}


@torch.no_grad()
def _fill(target: Any, saved: ReadableTensor, rank: int) -> None:
    """Read the piece of a tensor that this rank holds."""
    if not is_sharded(target):
        target.copy_(saved.read(saved.box))
        return
    layout = layout_of(target)
    box = layout.box(saved.shape, rank) if layout.holds(rank) else Box((0,), (0,))
    if not box.is_empty:
        local_tensor(target).copy_(saved.read(box))

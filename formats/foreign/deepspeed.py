"""Folders that DeepSpeed's `save_checkpoint` wrote, with ZeRO 0 to 3, and universal ones: model, optimizer, counters.

Trained parameters are the master weights of ZeRO, as `zero_to_fp32.py` of DeepSpeed gives them. Others, and buffers,
come from the states of the model. The files are pickles, which are read as data: nothing is executed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ckpt.errors import DamagedError, MissingError, UnsupportedError
from ckpt.formats.damage import damage_reported
from ckpt.formats.foreign import deepspeed_optimizer, zero_partitions
from ckpt.formats.foreign.accelerate import FolderReader
from ckpt.formats.foreign.deepspeed_states import (
    EngineFacts,
    ModelStates,
    ZeroStates,
    master_weight,
    read_states,
    widened,
)
from ckpt.formats.foreign.wrapper_prefixes import unwrapped
from ckpt.formats.foreign.zero_partitions import Flat
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.registry import is_engine_save
from ckpt.formats.strides import Sizes

_LATEST = ("latest", "latest_universal")  # name the folder of the newest save
_LONGEST_TAG = 4096  # bytes
_FEW = 10
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d{1,9})_)?mp_rank_(?P<part>\d\d(?:_\d{3})?)_model_states\.pt")
_ZERO = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<part>\d\d(?:_\d{3})?)_optim_states\.pt")
_MASTER = re.compile(r"zero/(?P<name>[^/]+)/fp32\.pt")
_LAYERS = re.compile(r"layer_\d.*-?model_states\.pt|expp_rank_.*\.pt")
_WHAT = "checkpoint of DeepSpeed"


def save_in(folder: FolderReader) -> FolderReader:
    """The folder of one save: this one, or the one below it that `latest` names."""
    if is_engine_save(folder.files):
        return folder
    pointer = next(name for name in _LATEST if name in folder.files)
    tag = folder.opened(pointer).read(0, min(folder.files[pointer], _LONGEST_TAG)).decode("utf-8", "replace").strip()
    found = folder.below(f"{tag}/")
    if not tag or not is_engine_save(found.files):
        raise MissingError(
            f"{folder.where}/{pointer} names {tag!r}, and no such save of DeepSpeed is there. Name the folder of one."
        )
    return found


@dataclass(frozen=True)
class SavedEngine:
    """One save of an engine: the files with the states of its model, and with the partitions of each rank."""

    folder: FolderReader

    def model(self) -> dict[str, PiecedTensor]:
        """The tensors of the model by their names without wrappers."""
        with damage_reported(self.folder.where, _WHAT):
            found = self._tensors()
            names = unwrapped(found)
            return {names[name]: tensor for name, tensor in found.items()}

    def master_model(self) -> dict[str, PiecedTensor]:
        """The same to go on training with: beside master weights, other parameters are in fp32, too."""
        found = self.model()
        return {name: widened(tensor) for name, tensor in found.items()} if self._models[0].groups else found

    def optimizer(self) -> dict[str, Any] | None:
        """The optimizer's state by parameter name, as torch's `state_dict` has it by number. None if it has none."""
        with damage_reported(self.folder.where, _WHAT):
            self._refuse_unfit()
            found = self._optimizer()
            if found is None or not self._models[0].groups:
                return found
            names = unwrapped(self._tensors())
            return deepspeed_optimizer.renamed(found, names)

    def _optimizer(self) -> dict[str, Any] | None:
        states, where = self._models[0], self.folder.where
        if any(map(_MASTER.fullmatch, self.folder.files)):
            return deepspeed_optimizer.universal(self.folder, states.groups)
        if not states.groups:
            return deepspeed_optimizer.undivided(states.optimizer, where)
        return deepspeed_optimizer.divided(states.groups, self._zero(), where)

    def facts(self) -> EngineFacts:
        """What the engine counted, and the names of other state that it saved."""
        with damage_reported(self.folder.where, _WHAT):
            self._refuse_unfit()
            facts = self._models[0].facts
            is_scaled = any(states.is_scaled for states in self._read_zero)
            return replace(facts, others=(*facts.others, "loss_scaler")) if is_scaled else facts

    def _tensors(self) -> dict[str, PiecedTensor]:
        self._refuse_unfit()
        states = self._models[0]
        found = {name: states.buffer(name) for name in states.buffers}
        found = {**self._whole(), **found, **dict(self._frozen())}
        found |= dict(self._trained())
        found |= {name: found[first] for name, first in states.shared.items() if first in found}
        missing = [name for name in states.module if name not in found]
        if missing:
            raise DamagedError(f"{self.folder.where} is incomplete: it lacks {', '.join(missing[:_FEW])}.")
        return found

    def _whole(self) -> Mapping[str, PiecedTensor]:
        """The tensors that are in the states of the model as a whole: under ZeRO 3 its parameters are empty there."""
        divided = any(match["rank"] for path in self.folder.files if (match := _MODEL.fullmatch(path)))
        return {} if divided else self._models[0].module

    def _refuse_unfit(self) -> None:
        parts = {match["part"] for path in self.folder.files if (match := _MODEL.fullmatch(path))}
        layers = next((path for path in self.folder.files if _LAYERS.fullmatch(path)), None)
        if layers or parts != {"00"}:
            why = layers or f"mp_rank_{max(parts)}"
            raise UnsupportedError(
                f"{self.folder.where} was written by DeepSpeed with pipeline, tensor or expert parallelism ({why}), "
                "which ckpt does not read. Load it with DeepSpeed, and save the model with its save_16bit_model()."
            )

    @cached_property
    def _models(self) -> list[ModelStates]:
        """The states of the model by rank: stage 3 has a file of each rank, and the others one of all ranks."""
        return [ModelStates.described(read_states(self.folder, path)) for path in self._ranked(_MODEL)]

    def _ranked(self, pattern: re.Pattern[str]) -> list[str]:
        """The files of a kind in the order of their ranks, each of which must be there."""
        matches = [match for path in self.folder.files if (match := pattern.fullmatch(path))]
        found = {int(match["rank"] or 0): match.string for match in matches}
        missing = [rank for rank in range(len(found)) if rank not in found]
        if missing or len(found) != len(matches):
            raise DamagedError(
                f"{self.folder.where} is damaged: of {len(found)} ranks that have files such as {matches[0].string}, "
                f"rank {', '.join(map(str, missing[:_FEW])) or 0} has none, or two. Copy all files of one save there."
            )
        return [found[rank] for rank in range(len(found))]

    def _trained(self) -> Iterator[tuple[str, PiecedTensor]]:
        if any(map(_MASTER.fullmatch, self.folder.files)):
            self._ranked(_ZERO)
            return self._universal()
        return self._partitioned(self._zero())

    @cached_property
    def _read_zero(self) -> list[ZeroStates]:
        return [ZeroStates.described(read_states(self.folder, path)) for path in self._ranked(_ZERO)]

    def _universal(self) -> Iterator[tuple[str, PiecedTensor]]:
        shapes = self._models[0].shapes
        for match in filter(None, map(_MASTER.fullmatch, self.folder.files)):
            name, path = match["name"], match.string
            yield name, master_weight(read_states(self.folder, path), shapes.get(name), f"{self.folder.where}/{path}")

    def _zero(self) -> list[ZeroStates]:
        """What ZeRO divided, by rank; nothing if it was trained without."""
        ranks = self._read_zero
        if not ranks and not self._models[0].groups:
            return []
        if {states.world_size for states in ranks} != {len(ranks)} or len({states.stage for states in ranks}) > 1:
            wrote = ranks[0].world_size if ranks else "several"
            raise DamagedError(
                f"{self.folder.where} has the *_optim_states.pt of {len(ranks)} ranks, and {wrote} wrote it. They hold "
                "the master weights: copy all files of one save there."
            )
        return ranks

    def _partitioned(self, ranks: list[ZeroStates]) -> Iterator[tuple[str, PiecedTensor]]:
        if not ranks:
            return iter(())
        where, groups = self.folder.where, self._models[0].groups
        partitions = [states.partitions for states in ranks]
        if ranks[0].stage == 3:
            return zero_partitions.by_parameter(groups, partitions, where)
        if {len(found) for found in partitions} != {len(groups)}:
            raise ValueError(f"{len(groups)} groups of parameters are not the {len(partitions[0])} that were divided")
        return zero_partitions.by_group(groups, partitions, ranks[0].paddings, where)

    def _frozen(self) -> Iterator[tuple[str, PiecedTensor]]:
        """Parameters that are not trained, of which each rank has a share under ZeRO 3."""
        for name, shape in self._models[0].frozen.items():
            held = [states.fragments[name] for states in self._models]
            yield name, _joined(held, shape, f"{self.folder.where}: {name}")


def _joined(held: list[PiecedTensor], shape: Sizes, where: str) -> PiecedTensor:
    if len(held) == 1 and held[0].shape == shape:
        return held[0]
    flats = [Flat.joined([share]) for share in held]
    share = zero_partitions.share_of(math.prod(shape), len(held))
    if {flat.count for flat in flats} != {share} or len({flat.dtype for flat in flats}) > 1:
        raise ValueError(f"{[flat.count for flat in flats]} elements are no shares of {list(shape)}")
    return zero_partitions.from_shares(flats, 0, shape, where)

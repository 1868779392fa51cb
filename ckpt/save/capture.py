"""From live objects to the files of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from ckpt.errors import CkptError, UnsupportedError
from ckpt.formats.layout import is_sharded
from ckpt.formats.native import documents, tensor_file_plan
from ckpt.formats.native.block_hash import digest
from ckpt.formats.native.json_values import refuse
from ckpt.formats.native.shard_table import ShardedState, written_by
from ckpt.formats.state import FilePlan, PartState, Shard
from ckpt.ranks.group import Ranks
from ckpt.ranks.hosts import Hosts
from ckpt.root.file_names import spread_file, whole_file
from ckpt.save.checksums import checksum
from ckpt.save.spare_tensors import SpareTensors, spare_of_spread, spare_of_whole
from ckpt.state.parts import Part
from ckpt.state.replicated import Replication

_log = logging.getLogger("ckpt")

LAYOUTS = ("auto", "full", "sharded")
_WORTH_A_FILE = 1 << 20  # bytes of frozen tensors


@dataclass(frozen=True)
class CapturedState:
    """What this process has to save: the state of parts, its pieces of those that are spread, and what is its own.

    Tensors are still the live ones. `images` lays them out as files, and reads them when the files are written.
    """

    rank: int
    parts: Mapping[str, PartState]
    spread: Mapping[str, ShardedState]
    gathered: Mapping[str, ShardedState]  # spread ones that the main rank writes whole, with the help of the others
    own: Mapping[str, PartState]
    document: bytes
    keeps: bool = True  # whether this rank writes what all have in common
    guarantees: Mapping[str, Replication] = field(default_factory=dict)
    sums: Mapping[str, Mapping[str, Callable[[], str]]] = field(default_factory=dict)  # of what is guaranteed, once
    spares: Mapping[str, SpareTensors] = field(default_factory=dict)
    kept: Sequence[FilePlan] = ()  # out of the spares, what differs between ranks
    differs: Mapping[str, Any] = field(default_factory=dict)  # on the main rank: what does, on which ranks

    @cached_property
    def images(self) -> list[FilePlan]:
        """The files for tensors that all ranks have in common: the main rank writes them, or one on each host."""
        return [*self._gathered_files(), *_whole_files(self.parts)]

    @cached_property
    def values(self) -> FilePlan:
        """The file for everything that is no tensor. Nothing in it is live: it may be made later."""
        return FilePlan.of(documents.STATE, documents.to_json({"parts": self._values()}))

    @cached_property
    def own_images(self) -> list[FilePlan]:
        """The files that only this rank can write."""
        files = []
        for key, part in self.spread.items():
            files += _tensor_files(partial(spread_file, key, self.rank), self.pieces[key], part.frozen)
        return [*files, *_whole_files(self.own)]

    @cached_property
    def pieces(self) -> dict[str, dict[str, Shard]]:
        """The pieces of spread parts that this rank writes."""
        return {key: written_by(part.table, part.tensors, self.rank) for key, part in self.spread.items()}

    @property
    def all_images(self) -> list[FilePlan]:
        """The files of tensors that this rank writes."""
        return [*(self.images if self.keeps else ()), *self.own_images]

    @property
    def copied_images(self) -> list[FilePlan]:
        """The same, and those of which it will be known later whether they are written."""
        return [*self.all_images, *(one.image for one in self.spares.values())]

    @property
    def on_device(self) -> bool:
        """Whether some of it lies on an accelerator."""
        images = self.copied_images
        named = (content for image in images for content in image.contents or () if isinstance(content, tuple))
        return any(tensor.device.type != "cpu" for _, tensor in named)

    def help_to_gather(self) -> None:
        """What the other ranks do while the main one writes files whole: hand over each tensor when its turn comes."""
        for part in self.gathered.values():
            for name in tensor_file_plan.in_file_order(part.outlines):
                part.gather(name)

    @cached_property
    def tables(self) -> dict[str, Any]:
        """How tensors are spread, and how they are written, as JSON: the same on every rank."""
        pieces = {key: {"written": "in pieces", **part.table.to_json()} for key, part in self.spread.items()}
        whole = {key: {"written": "whole", **part.table.to_json()} for key, part in self.gathered.items()}
        return {**pieces, **whole}

    @property
    def tables_digest(self) -> str:
        return digest(documents.to_json(self.tables))

    def _gathered_files(self) -> list[FilePlan]:
        return [
            tensor_file_plan.plan_gathered_file(whole_file(key), part.outlines, part.table.aliases, part.gather)
            for key, part in self.gathered.items()
            if part.table.tensors
        ]

    def _values(self) -> dict[str, Any]:
        values = {**_values(self.parts), **_values(self.gathered)}
        for key, part in self.spread.items():
            table = {name: one for name, one in self.tables[key].items() if name != "written"}
            values[key] = {**_value(part), "spread": table}
        for key, differs in self.differs.items():
            if key in values:
                values[key]["differs"] = differs
        return values


@dataclass
class Compared:
    """What the ranks of a job have found out about each other in earlier saves, the same on every rank."""

    equal: dict[str, set[str]] = field(default_factory=dict)  # by part: what was guaranteed to be the same, and was
    doubted: dict[str, set[str]] = field(default_factory=dict)  # what was not, and is compared from then on
    told: set[str] = field(default_factory=set)  # the parts of which was said that ranks differ

    def doubting(self, key: str, guarantee: Replication) -> Replication:
        return replace(guarantee, doubted=frozenset(self.doubted[key])) if key in self.doubted else guarantee

    def pending(self, taken: CapturedState) -> dict[str, dict[str, Callable[[], str]]]:
        """Checksums of what is guaranteed to be the same and has not been compared yet: at the first save."""
        tensors: dict[str, Mapping[str, Any]] = {
            **{key: {name: one.tensor for name, one in part.tensors.items()} for key, part in taken.parts.items()},
            **{key: part.tensors for key, part in {**taken.spread, **taken.gathered}.items()},
        }
        found: dict[str, dict[str, Callable[[], str]]] = {}
        for key, named in tensors.items():
            known, guarantee = self.equal.get(key, set()), taken.guarantees[key]
            new = [name for name in named if name not in known and guarantee.is_equal(name)]
            found[key] = {name: checksum(named[name]) for name in new if not is_sharded(named[name])}
        return found

    def doubt(self, names: Iterable[Sequence[str]]) -> bool:
        """Compare these at every save from now on; whether any of them was not doubted before."""
        new = [(key, name) for key, name in names if name not in self.doubted.get(key, ())]
        for key, name in new:
            self.doubted.setdefault(key, set()).add(name)
        return bool(new)

    def agreed(self, taken: CapturedState) -> None:
        """All ranks have the same of what they compared: it is not looked at again."""
        for key, names in taken.sums.items():
            self.equal.setdefault(key, set()).update(names)


@dataclass
class Capture:
    """Asks parts for their state. Refuses all values that cannot be held at once, each by its path."""

    ranks: Ranks
    layout: str = "auto"
    hosts: Hosts = field(default_factory=Hosts)
    compared: Compared = field(default_factory=Compared)
    problems: list[str] = field(default_factory=list)
    _guarantees: dict[str, Replication] = field(default_factory=dict)

    def take(self, parts: Iterable[Part], own: Mapping[str, Part], rank_state: Mapping[str, Any]) -> CapturedState:
        whole, spread = self._divided(parts)
        gathered = spread if self.layout == "full" else {}
        mine = {key: self._encoded(part) for key, part in own.items()}
        state = {key: documents.encode_inline(value, key, self.problems) for key, value in rank_state.items()}
        refuse(self.problems)
        document = {"state": state, "own": _values(mine)}
        pieces = {} if gathered else spread
        taken = CapturedState(
            self.ranks.rank, whole, pieces, gathered, mine, documents.to_json(document), self._keeps, self._guarantees
        )
        if self.ranks.world_size == 1:
            return taken
        return replace(taken, spares=self._spares(taken), sums=self.compared.pending(taken))

    def _spares(self, taken: CapturedState) -> dict[str, SpareTensors]:
        """What ranks may hold otherwise than the one that writes it. Nothing is copied here."""
        rank, found = self.ranks.rank, {}
        for key, part in taken.parts.items() if not self._keeps else ():
            found[key] = spare_of_whole(part, self._guarantees[key])
        for key, one in {**taken.spread, **taken.gathered}.items():
            written, gathered = taken.pieces.get(key, {}), key in taken.gathered
            found[key] = spare_of_spread(one, written, self._guarantees[key], rank, gathered=gathered)
        return {key: SpareTensors.of(key, rank, shards) for key, shards in found.items() if shards}

    @property
    def _keeps(self) -> bool:
        return self.hosts.owns_root(self.ranks.rank)

    def _divided(self, parts: Iterable[Part]) -> tuple[dict[str, PartState], dict[str, ShardedState]]:
        """Parts of which the main rank writes the state, and those that are spread over all ranks."""
        whole, spread = {}, {}
        for part in parts:
            if part.is_sharded() or (self.layout == "sharded" and part.can_be_sharded and self.ranks.world_size > 1):
                spread[part.key] = self._encoded_spread(part)
            elif self._keeps or self.ranks.world_size > 1:  # whether all have the same is seen later
                whole[part.key] = self._encoded(part)
        return whole, spread

    def _encoded(self, part: Part) -> PartState:
        live = self._state_of(part)
        state = documents.encode_part(part.kind, live, part.key, self.problems)
        return replace(state, frozen=part.frozen(), about=_about(part, live)) if self._keeps else state

    def _state_of(self, part: Part) -> Any:
        live = _state_of(part)
        if self.ranks.world_size > 1:
            self._guarantees[part.key] = self.compared.doubting(part.key, part.replication(live))
        return live

    def _encoded_spread(self, part: Part) -> ShardedState:
        live, world_size = self._state_of(part), self.ranks.world_size
        state = documents.encode_sharded(part.kind, live, part.key, self.problems, world_size)
        table = state.table.with_every_copy() if self.hosts.separate_roots else state.table
        return replace(state, table=table, frozen=part.frozen(), about=_about(part, live))


def _state_of(part: Part) -> Any:
    try:
        return part.capture()
    except CkptError:
        raise
    except Exception as error:
        raise UnsupportedError(f"{part.key}: its state could not be taken: {type(error).__name__}: {error}") from error


def _about(part: Part, live: Any) -> dict[str, Any]:
    try:
        return part.about(live)
    except Exception as error:  # code of others, and the checkpoint is whole without it
        _log.warning(
            "%s: its configuration could not be taken (%s: %s). It is saved, but its checkpoint cannot be published.",
            part.key, type(error).__name__, error,
        )  # fmt: skip
        return {}


def _values(parts: Mapping[str, PartState | ShardedState]) -> dict[str, Any]:
    return {key: _value(part) for key, part in parts.items()}


def _value(part: PartState | ShardedState) -> dict[str, Any]:
    about = {"about": part.about} if part.about else {}
    return {"class": part.kind, "state": part.values, **about}


def _whole_files(parts: Mapping[str, PartState]) -> list[FilePlan]:
    of_each = [_tensor_files(partial(whole_file, key), part.tensors, part.frozen) for key, part in parts.items()]
    return [image for images in of_each for image in images]


def _tensor_files(name: Callable[..., str], tensors: Mapping[str, Shard], frozen: frozenset[str]) -> list[FilePlan]:
    """One file; two where some tensors change and others, worth a file, do not."""
    still = {key: shard for key, shard in tensors.items() if key in frozen}
    moving = {key: shard for key, shard in tensors.items() if key not in frozen}
    if sum(shard.tensor.nbytes for shard in still.values()) < _WORTH_A_FILE:
        return [tensor_file_plan.plan_file(name(), tensors)] if tensors else []
    images = [tensor_file_plan.plan_file(name(frozen=bool(moving)), still, likely_unchanged=True)]
    return [tensor_file_plan.plan_file(name(), moving), *images] if moving else images

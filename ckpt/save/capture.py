"""Captures the state of live objects: asks every part for it, and divides it into what is sharded and what is not."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.errors import CkptError, ConfigError, RanksError, UnsupportedError
from ckpt.formats.native import documents
from ckpt.formats.native.shard_table import ShardedState
from ckpt.ranks.group import Ranks
from ckpt.ranks.hosts import Hosts
from ckpt.save.captured_state import CapturedState
from ckpt.save.comparison_history import ComparisonHistory
from ckpt.save.live_state import LivePart, LiveState
from ckpt.save.replica_tensors import ReplicaTensors, sharded_replicas, unsharded_replicas
from ckpt.state.model import ModelPart
from ckpt.state.parts import Part
from ckpt.state.replicated import Replication
from ckpt.state.unwrap import JoinedModel

_log = logging.getLogger("ckpt")

LAYOUTS = ("auto", "full", "sharded")


@dataclass
class StateCapture:
    """One capture on one rank."""

    ranks: Ranks
    layout: str = "auto"
    hosts: Hosts = field(default_factory=Hosts)
    compared: ComparisonHistory = field(default_factory=ComparisonHistory)
    _guarantees: dict[str, Replication] = field(default_factory=dict)
    _turn: int = 0
    _trusted: bool = True

    def capture(
        self, parts: Iterable[Part], rank_parts: Mapping[str, Part], rank_state: Mapping[str, Any]
    ) -> LiveState:
        """The state of parts that all ranks have, of parts that are this rank's alone, and values of this rank."""
        self._turn, self._trusted = self.compared.turn, self.compared.trusted  # later saves may change them meanwhile
        parts = list(parts)
        known = ("loaders", "generators", "values", "source")
        has_none = not (parts or rank_parts or any(rank_state.get(key) for key in known))
        if has_none and self.ranks.world_size == 1:  # of several ranks, one may have nothing of its own
            raise ConfigError(
                "there is nothing to save: StateManager(root, model=model, optimizer=optimizer) says what."
            )
        unsharded, sharded = self._divided(parts)
        gathered = sharded if self.layout == "full" else []
        own = [self._live(part) for part in rank_parts.values()]
        problems: list[str] = []
        values = {key: documents.encode_inline(value, key, problems) for key, value in rank_state.items()}
        state = CapturedState(
            rank=self.ranks.rank,
            rank_values={"state": values},
            writes_common=self._writes_common,
            guarantees=self._guarantees,
            trusted=self._trusted,
            divisible=frozenset(part.key for part in parts if part.can_be_sharded),
            announced=frozenset(part.key for part in parts if _is_joined(part)),
        )
        return LiveState(
            state,
            parts=unsharded,
            sharded=[] if gathered else sharded,
            gathered=gathered,
            own=own,
            problems=problems,
            encode_sharded=self._encoded_sharded,
            finish=self._compared,
        ).prepared()

    def _compared(self, captured: CapturedState) -> CapturedState:
        """With what the ranks need to compare what they hold."""
        if self.ranks.world_size == 1:
            return captured
        replicas = self._replicas(captured)
        return replace(captured, replicas=replicas, fingerprints=self.compared.fingerprints(captured, self._turn))

    def _replicas(self, captured: CapturedState) -> dict[str, ReplicaTensors]:
        """What this rank may hold with other bytes than the rank that writes it. Nothing is copied here."""
        rank, found = self.ranks.rank, {}
        for key, part in captured.parts.items() if not self._writes_common else ():
            found[key] = unsharded_replicas(part, captured.is_uncertain(key))
        for key, state in {**captured.sharded, **captured.gathered}.items():
            written, gathered = captured.shards.get(key, {}), key in captured.gathered
            found[key] = sharded_replicas(state, written, captured.is_uncertain(key), rank, gathered=gathered)
        return {key: ReplicaTensors.of(key, rank, shards) for key, shards in found.items() if shards}

    @property
    def _writes_common(self) -> bool:
        return self.hosts.owns_root(self.ranks.rank)

    def _divided(self, parts: Iterable[Part]) -> tuple[list[LivePart], list[LivePart]]:
        """The state of parts that one rank writes for all, and of parts that are sharded over all ranks."""
        unsharded, sharded = [], []
        for part in parts:
            is_sharded = part.is_sharded()
            if is_sharded and self.ranks.world_size == 1:
                _refuse_shards_of_others(part)
            if is_sharded or (self.layout == "sharded" and part.can_be_sharded and self.ranks.world_size > 1):
                sharded.append(self._live(part, described=True))
            elif self._writes_common or self.ranks.world_size > 1:  # other ranks compare theirs with it later
                unsharded.append(self._live(part))
        return unsharded, sharded

    def _live(self, part: Part, *, described: bool = False) -> LivePart:
        tree = _state_of(part)
        if self.ranks.world_size > 1:
            guarantee = part.replication(tree, self.ranks.members)
            self._guarantees[part.key] = guarantee if self._trusted else guarantee.distrusted()
        if not described and not self._writes_common:
            return LivePart(part.key, part.kind, tree)
        return LivePart(part.key, part.kind, tree, part.frozen(), _about(part, tree))

    def _encoded_sharded(
        self, part: LivePart, substitute: documents.Substitute | None, problems: list[str]
    ) -> ShardedState:
        size, members = self.ranks.world_size, self.ranks.members
        state = documents.encode_sharded(part.kind, part.tree, part.key, problems, size, substitute, members)
        table = state.table.with_every_copy() if self.hosts.separate_roots else state.table
        return replace(state, table=table, frozen=part.frozen, about=part.about)


def _refuse_shards_of_others(part: Part) -> None:
    """For a manager of one process: what it holds must be all there is."""
    others = {rank for layout in part.layouts(None) for rank in layout.ranks}
    if len(others) > 1:
        raise RanksError(
            f"{part.key} is sharded over {len(others)} ranks, and this manager saves for its process alone: its shard "
            "is not the whole. Leave out ranks=ckpt.RankOptions(alone=True), and build the manager on every rank."
        )


def _is_joined(part: Part) -> bool:
    return isinstance(part, ModelPart) and isinstance(part.model, JoinedModel)


def _state_of(part: Part) -> Any:
    try:
        return part.capture()
    except CkptError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UnsupportedError(f"{part.key}: its state could not be captured: {why}") from error


def _about(part: Part, live: Any) -> dict[str, Any]:
    try:
        return part.about(live)
    except Exception as error:  # code of others, and the checkpoint is complete without it
        _log.warning(
            "%s: its configuration could not be read (%s: %s). It is saved, but its checkpoint cannot be published.",
            part.key, type(error).__name__, error,
        )  # fmt: skip
        return {}

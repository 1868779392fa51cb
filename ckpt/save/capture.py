"""Captures the state of live objects: asks every part for it, and divides it into what is sharded and what is not.

A part gives out a tree of values and live tensors. Trees of plain values get containers of their own at once, and are
encoded later, in the background, with copies in place of the tensors; all others are encoded before training continues.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from ckpt.errors import CkptError, ConfigError, RanksError, UnsupportedError
from ckpt.formats.native import documents
from ckpt.formats.native.documents import Substitute, refuse
from ckpt.formats.native.shard_table import ShardedState
from ckpt.formats.sharded_tensors import ShardOutline, is_sharded, local_tensor
from ckpt.formats.tensors import PartState, Unsharded
from ckpt.ranks.group import Ranks
from ckpt.ranks.hosts import Hosts
from ckpt.save.captured_state import CapturedState, ReplicaTensors, part_values, sharded_replicas, unsharded_replicas
from ckpt.save.checksums import fingerprints
from ckpt.save.snapshot.tensor_copies import Leaves, TensorCopies
from ckpt.state.model import ModelPart
from ckpt.state.parts import Part, Replication
from ckpt.state.unwrap import JoinedModel

_log = logging.getLogger("ckpt")

LAYOUTS = ("auto", "full", "sharded")

# Trees of plain values and dense tensors: once containers and tensors have been copied, they can be encoded later.
_SCALARS = frozenset({bool, int, float, str, type(None)})
_KEYS = frozenset({str, int})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_TOO_DEEP = 50
_NEVER = tuple(map(attrgetter, ("is_nested", "is_quantized", "is_meta", "is_xla")))
_NO_LAZY_BITS = (torch.Tensor.is_conj, torch.Tensor.is_neg)


class NotPlainError(Exception):
    """A tree has something in it that only its encoding can judge."""


class PlainTrees:
    """Copies the containers of trees, and collects their tensors. Nothing in them can be refused when it is encoded."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []  # plain or sharded, as they are in the trees
        self.local: list[torch.Tensor] = []  # of each, this rank's shard or itself
        self.sharded: dict[int, ShardOutline] = {}  # by identity

    def copy(self, value: Any, depth: int = 0) -> Any:
        """The tree with containers of its own and the same tensors. Raises `NotPlainError` for anything else."""
        kind = type(value)
        if kind is dict or kind is OrderedDict:
            if depth > _TOO_DEEP or not _KEYS.issuperset(map(type, value)):
                raise NotPlainError
            return kind(zip(value, self._items(value.values(), depth), strict=True))
        if kind is list or kind is tuple:
            if depth > _TOO_DEEP:
                raise NotPlainError
            return kind(self._items(value, depth))
        return self._items((value,), depth)[0]

    def _items(self, values: Any, depth: int) -> list[Any]:
        items = list(values)
        for index, item in enumerate(items):  # most are tensors, and training waits
            kind = type(item)
            if kind in _TENSORS:
                self.tensors.append(item)
                self.local.append(item)
            elif kind not in _SCALARS:
                items[index] = self._container(item, depth + 1)
        return items

    def _container(self, value: Any, depth: int) -> Any:
        if type(value) in (dict, OrderedDict, list, tuple):
            return self.copy(value, depth)
        if type(value) is Unsharded:
            return Unsharded(*self._items(value, depth))
        if not is_sharded(value) or not hasattr(value, "device_mesh"):  # FSDP 1 has objects of its own
            raise NotPlainError
        local = local_tensor(value)
        if local.device.type != value.device_mesh.device_type:  # offloaded: PyTorch would build it on the device
            raise NotPlainError
        self.tensors.append(value)
        self.local.append(local)
        self.sharded[id(value)] = ShardOutline.of(value)
        return value

    def require_dense(self) -> None:
        """Raise `NotPlainError` if the memory of some tensor is not exactly its values, in order."""
        if not are_dense(self.local):
            raise NotPlainError


def are_dense(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are strided and contiguous, and their values are those in memory. In loops of C: training waits."""
    return (
        {torch.strided}.issuperset(map(attrgetter("layout"), tensors))
        and not any(any(map(has, tensors)) for has in _NEVER)
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not any(any(map(has, tensors)) for has in _NO_LAZY_BITS)
    )


@dataclass(frozen=True)
class LivePart:
    """The state of a part, with live tensors in it."""

    key: str
    kind: str
    tree: Any
    frozen: frozenset[str] = frozenset()
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LiveState:
    """What this rank has to save, not encoded yet.

    `finish`: adds what is found out about the encoded state. `leaves`: the tensors in the trees, if these are plain and
    have containers of their own; None if the state must be encoded before training continues.
    """

    state: CapturedState  # without the state of parts
    parts: Sequence[LivePart]
    sharded: Sequence[LivePart]
    gathered: Sequence[LivePart]
    own: Sequence[LivePart]
    problems: list[str]
    encode_sharded: Callable[[LivePart, Substitute | None, list[str]], ShardedState]
    finish: Callable[[CapturedState], CapturedState]
    leaves: Leaves | None = None
    encoded: CapturedState | None = None

    def prepared(self) -> LiveState:
        """The same with trees that training cannot change, but for their tensors; encoded if that cannot be had."""
        trees = PlainTrees()

        def copied(parts: Sequence[LivePart]) -> list[LivePart]:
            return [replace(part, tree=trees.copy(part.tree)) for part in parts]

        try:
            if self.gathered or self.problems:
                raise NotPlainError
            parts, sharded, own = copied(self.parts), copied(self.sharded), copied(self.own)
            trees.require_dense()
        except NotPlainError:
            return replace(self, encoded=self.encode())
        return replace(
            self, parts=parts, sharded=sharded, own=own, leaves=Leaves.of(trees.tensors, trees.local, trees.sharded)
        )

    def encode(self, copies: TensorCopies | None = None) -> CapturedState:
        """The state as files hold it, copies in place of live tensors. Refuses all values that no file can hold."""
        if self.encoded is not None:
            return self.encoded
        substitute = None if copies is None else copies.of
        problems: list[str] = []
        parts = {part.key: _encoded(part, substitute, problems) for part in self.parts}
        own = {part.key: _encoded(part, substitute, problems) for part in self.own}
        sharded, gathered = (
            {part.key: self.encode_sharded(part, substitute, problems) for part in found}
            for found in (self.sharded, self.gathered)
        )
        refuse([*problems, *self.problems])
        values = {**self.state.rank_values, "own": part_values(own)}
        state = replace(self.state, parts=parts, sharded=sharded, gathered=gathered, rank_parts=own, rank_values=values)
        finished = self.finish(state)
        return finished if copies is None else _with_known_fingerprints(finished)


def _encoded(part: LivePart, substitute: Substitute | None, problems: list[str]) -> PartState:
    state = documents.encode_part(part.kind, part.tree, part.key, problems, substitute)
    return replace(state, frozen=part.frozen, about=part.about)


def _with_known_fingerprints(state: CapturedState) -> CapturedState:
    """Wait for them: the copies that they are of may be released before somebody asks for them."""
    for read in state.fingerprints.values():
        read()
    return state


@dataclass
class ComparisonHistory:
    """The same on every rank. What should be equal is compared in full at its first save, and by turns from then on.

    Once some of it has differed, no rank trusts in it any more: all of it is compared in full at every save, and each
    rank keeps its own.
    """

    turn: int = 0  # counts the captures, which all ranks make together
    trusted: bool = True
    equal: dict[str, set[str]] = field(default_factory=dict)  # by part: tensors that were compared in full
    reported: set[str] = field(default_factory=set)  # parts whose differences have been logged

    def fingerprints(self, captured: CapturedState, turn: int) -> dict[str, Callable[[], dict[str, str]]]:
        """Those of what should be equal: in full where it is new, else those of this turn."""
        readers: dict[str, Callable[[], dict[str, str]]] = {}
        for key, tensors in captured.should_be_equal():
            known = self.equal.get(key, set())
            first = fingerprints({name: tensor for name, tensor in tensors.items() if name not in known})
            again = fingerprints({name: tensor for name, tensor in tensors.items() if name in known}, turn)
            readers[key] = _both(first, again)
        return readers

    def distrust(self) -> None:
        """Some of what should be equal differs."""
        self.trusted = False
        self.reported.clear()  # what differs now is more than was logged

    def record_equal(self, captured: CapturedState) -> None:
        """The ranks have compared what should be equal."""
        for key, read in captured.fingerprints.items():
            self.equal.setdefault(key, set()).update(read())


def _both(one: Callable[[], dict[str, str]], other: Callable[[], dict[str, str]]) -> Callable[[], dict[str, str]]:
    return cache(lambda: one() | other())


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
        )

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

"""The state of live objects at a moment: trees of values and tensors, as their parts have given them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.formats.native import documents
from ckpt.formats.native.documents import Substitute
from ckpt.formats.native.json_values import refuse
from ckpt.formats.native.shard_table import ShardedState
from ckpt.formats.state import PartState
from ckpt.save.captured_state import CapturedState, part_values
from ckpt.save.plain_tree import NotPlainError, PlainTrees
from ckpt.save.tensor_copies import Leaves, TensorCopies


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

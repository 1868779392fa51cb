"""ZeRO's partitions of one number of ranks, cut anew for another: each rank's are a part, and the last loads all."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ckpt.formats.native.documents import to_json
from ckpt.formats.native.manifest import digest
from ckpt.state.parts import LEFT, WHOLE_PART, Notes, Read, SavedTensor, UnshardedPart

_FLAT = ("single_partition_of_fp32_groups", "fp32_flat_groups")  # of ZeRO 1 and 2, and of ZeRO 3
_INNER = ("base_optimizer_state", "optimizer_state_dict")
_LIVE = ("partition_count", "group_paddings")  # what depends on the number of ranks
_LAYOUT = "param_alignment_paddings"
_GROUPS = ("round_robin_bit16_groups", "bf16_groups", "bit16_groups", "fp16_groups")  # the first that there is


def parameter_shapes(engine: Any) -> list[dict[str, Any]]:
    """The names and shapes of the parameters in each group, in the order in which ZeRO's partitions have them."""
    optimizer = engine.optimizer
    groups = next(getattr(optimizer, name) for name in _GROUPS if hasattr(optimizer, name))
    return [{engine.param_names[one]: getattr(one, "ds_shape", one.shape) for one in group} for group in groups]


@dataclass
class Regrouping:
    """What all ranks saved of an optimizer, by rank, and how that is loaded on this one."""

    engine: Any
    saved_by: int
    load: Callable[[Any], None]
    trees: dict[int, Any] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    asks: list[Callable[[], None]] = field(default_factory=list)  # made when the trees of all ranks are known
    _moves: list[Move] | None = None

    def __post_init__(self) -> None:
        self.live = self.engine.optimizer.state_dict()
        self.stage3 = _FLAT[1] in self.live
        self.flat, self.inner = _FLAT[self.stage3], _INNER[self.stage3]
        optimizer = self.engine.optimizer
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        masters = next(getattr(optimizer, name) for name in names if hasattr(optimizer, name))
        self.lengths = [master.numel() for master in masters]
        self.rank, self.world_size = (
            dist.get_rank(optimizer.dp_process_group),
            dist.get_world_size(optimizer.dp_process_group),
        )

    def problem(self, saved: Any) -> str | None:
        """Why partitions of a rank cannot be cut anew."""
        state = saved["state"]
        if _LAYOUT in state and state[_LAYOUT] != self.live.get(_LAYOUT):
            return "another parameter_alignment than here"
        shapes = parameter_shapes(self.engine)
        groups = [{name: tuple(shape) for name, shape in group.items()} for group in shapes]
        if self.stage3:
            groups = cut(groups, _lengths(state[self.flat]), self.saved_by)
        listed = [[(name, list(shape)) for name, shape in group.items()] for group in groups]
        if saved["parameters"] != digest(to_json(listed)):
            return "the optimizer's parameters, their groups or their order are not those of the checkpoint"
        odd = [key for one in state[self.inner]["state"].values() for key, value in one.items() if _is_odd(value)]
        return f"its {odd[0]} is not stored per element, so it fits only the same number of ranks" if odd else None

    @property
    def moves(self) -> list[Move]:
        if self._moves is None:
            saved = [_lengths(self.trees[rank]["state"][self.flat]) for rank in range(self.saved_by)]
            if self.stage3:
                shapes = parameter_shapes(self.engine)
                counts = [torch.Size(shape).numel() for group in shapes for shape in group.values()]
                found = moves_by_parameter(counts, saved, self.lengths, self.rank, self.world_size)
            else:
                found = moves_by_group(saved, self.lengths, self.rank)
            self._moves = list(found)
        return self._moves

    def needs(self, rank: int) -> bool:
        """Whether this rank gets elements that a rank saved."""
        return any(move.rank == rank for move in self.moves)

    def take(self, rank: int, values: Any) -> None:
        """What a rank saved has been read. With that of the last rank, all of it is loaded."""
        self.values[rank] = values
        if len(self.values) == self.saved_by:
            first = self.values[0]
            self.load({**first, "state": {**first["state"], **self._state()}})

    def _state(self) -> dict[str, Any]:
        masters = moved(self.moves, self.lengths, lambda rank, group: self._of(rank)[self.flat][group])
        kept = {name: self.live[name] for name in _LIVE if name in self.live}
        return {**kept, self.flat: masters, self.inner: self._inner_state()}

    def _of(self, rank: int) -> Any:
        return self.values[rank]["state"]

    def _inner_state(self) -> dict[str, Any]:
        saved = self._of(0)[self.inner]
        pairs = zip(saved["param_groups"], self.live[self.inner]["param_groups"], strict=True)
        groups = [{**group, "params": live["params"]} for group, live in pairs]
        return {"state": self._moments() if saved["state"] else {}, "param_groups": groups}

    def _moment(self, key: str, rank: int, group: int) -> torch.Tensor:
        found: torch.Tensor = self._of(rank)[self.inner]["state"][group][key]
        return found

    def _moments(self) -> dict[int, dict[str, Any]]:
        origins = {move.group: (move.rank, move.saved_group) for move in reversed(self.moves)}
        found: dict[int, dict[str, Any]] = {}
        for group in range(len(self.lengths)):
            rank, saved_group = origins.get(group, (0, 0))
            found[group] = dict(self._of(rank)[self.inner]["state"][saved_group])
        flat = {key for entry in found.values() for key, value in entry.items() if is_flat(value)}
        for key in flat:
            tensors = moved(self.moves, self.lengths, partial(self._moment, key))
            for group, tensor in enumerate(tensors):
                found[group][key] = tensor
        return found


def _lengths(partitions: Any) -> list[int]:
    return [partition.shape[0] for partition in partitions]


def _is_odd(value: Any) -> bool:
    return hasattr(value, "shape") and len(value.shape) > 1


@dataclass
class SavedPartitionsPart(UnshardedPart):
    """The partitions that one of the ranks saved."""

    key: str
    rank: int
    kind: str
    regrouping: Regrouping
    same_class: bool = True
    can_be_sharded: bool = False

    def capture(self) -> Any:
        raise NotImplementedError("ckpt only loads these partitions, and never saves them")

    def check(self, saved: Any) -> dict[str, str]:
        problem = self.regrouping.problem(saved)
        return {WHOLE_PART: problem} if problem else {}

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> Callable[[], None]:
        regrouping = self.regrouping
        if not regrouping.trees:
            notes.resharded[self.key] = f"{regrouping.saved_by} partitions -> {regrouping.world_size}"
        regrouping.trees[self.rank] = saved
        values: list[Callable[[], Any]] = []
        regrouping.asks.append(lambda: values.append(read(self._place)))
        if len(regrouping.trees) == regrouping.saved_by:
            for ask in regrouping.asks:
                ask()
        return lambda: regrouping.take(self.rank, values[0]())

    def _place(self, saved: SavedTensor) -> Any:
        needed = len(saved.shape) == 0 or self.regrouping.needs(self.rank)
        return None if needed else LEFT

    def missed(self, why: str, notes: Notes, *, strict: bool) -> None:
        notes.skipped[self.key] = why


# -- which elements go where ------------------------------------------------------------------------------------------

Lengths = Sequence[int]  # of a rank's flat partitions, by group
Sizes = tuple[int, ...]


class Move(NamedTuple):
    """Elements of a saved partition, and their place in a live one."""

    rank: int  # that saved them
    saved_group: int
    start: int
    group: int
    to: int
    length: int


def moves_by_group(saved: Sequence[Lengths], live: Lengths, rank: int) -> Iterator[Move]:
    """Under ZeRO 1 and 2, where the ranks have consecutive parts of each group, all of the same length but the last."""
    for group, length in enumerate(live):
        start = 0
        for other, lengths in enumerate(saved):
            first, stop = max(start, rank * length), min(start + lengths[group], (rank + 1) * length)
            if first < stop:
                yield Move(other, group, first - start, group, first - rank * length, stop - first)
            start += lengths[group]


def moves_by_parameter(
    counts: Sequence[int], saved: Sequence[Lengths], live: Lengths, rank: int, world_size: int
) -> Iterator[Move]:
    """Under ZeRO 3, where the ranks have equal shares of each parameter, the last one with padding."""
    from_, to = _Row(saved[0]), _Row(live)
    for count in counts:
        before, now = -(-count // len(saved)), -(-count // world_size)
        saved_group, begin = from_.take(before)
        group, target = to.take(now)
        for other in range(len(saved)):
            first = max(other * before, rank * now)
            stop = min((other + 1) * before, (rank + 1) * now, count)
            if first < stop:
                start = begin + first - other * before
                yield Move(other, saved_group, start, group, target + first - rank * now, stop - first)


class _Row:
    """A rank's partitions one behind the other, from which parameters are taken in their order."""

    def __init__(self, lengths: Lengths) -> None:
        self._ends = list(accumulate(lengths))
        self._at = 0

    def take(self, count: int) -> tuple[int, int]:
        """The group of the next elements, and where in it they begin."""
        group = min(bisect_right(self._ends, self._at), len(self._ends) - 1)
        begin = self._at - (self._ends[group - 1] if group else 0)
        self._at += count
        return group, begin


def cut(groups: Sequence[Mapping[str, Sizes]], lengths: Lengths, world_size: int) -> list[dict[str, Sizes]]:
    """The parameters in the groups that partitions of these lengths are: ZeRO 3 makes smaller ones of few ranks."""
    row, found = _Row(lengths), [dict[str, Sizes]() for _ in lengths]
    for name, shape in ((name, shape) for group in groups for name, shape in group.items()):
        number, _ = row.take(-(-math.prod(shape) // world_size))
        found[number][name] = shape
    return found


def moved(moves: Sequence[Move], live: Lengths, tensor: Callable[[int, int], torch.Tensor]) -> list[torch.Tensor]:
    """The live partitions, filled from the saved ones, which `tensor` gives by rank and group. Padding is zero."""
    dtype = tensor(moves[0].rank, moves[0].saved_group).dtype if moves else torch.float32
    targets = [torch.zeros(length, dtype=dtype) for length in live]
    for move in moves:
        piece = tensor(move.rank, move.saved_group).narrow(0, move.start, move.length)
        targets[move.group].narrow(0, move.to, move.length).copy_(piece)
    return targets


def is_flat(value: Any) -> bool:
    """Whether a value has an element for each one of a partition."""
    return hasattr(value, "shape") and len(value.shape) == 1

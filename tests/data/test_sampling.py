"""The order of an epoch: how it is recorded, skipped, and divided in another way, each function by its cases."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from ckpt.data import sampling
from ckpt.data.batch_digest import index_bytes
from ckpt.data.progress import Position
from ckpt.data.repartition import (
    ConsumedSamples,
    Layout,
    RemainingIndices,
    Repartition,
    batcher_of,
    distributed_sampler_of,
    global_order,
    is_round_robin,
    layout_of,
    saved_layout,
)
from ckpt.data.sampling import EpochPlan, ResumableSampler, SeededBatch
from ckpt.state import samplers

DATA: Any = list(range(12))
BATCHES = [[0, 1], [2, 3], [4, 5], [6]]


def _digest(*indices: int) -> str:
    return xxhash.xxh3_64_hexdigest(index_bytes(list(indices)))


class Told:
    """A plan's callbacks, in their order."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed, self.calls = seed, list[str]()

    def plan(self, **options: Any) -> EpochPlan:
        return EpochPlan(self.begin, lambda: self.calls.append("arrive"), **options)

    def begin(self) -> int | None:
        self.calls.append("begin")
        return self.seed


# -- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_skips_batches_records_the_others_and_counts_what_the_loop_gets() -> None:
    told = Told()
    plan = told.plan(skip=1, expected=_digest(0, 1))
    following = plan.follow(BATCHES)
    assert told.calls == []
    assert next(following) == [2, 3]
    assert told.calls == ["begin", "arrive"]
    assert (plan.same_order, plan.left_out, len(plan.ahead)) == (True, 2, 1)
    assert plan.problem("L") == ""
    assert next(following) == [4, 5]
    assert plan.taken() == 2
    assert plan.digest.hexdigest() == _digest(0, 1, 2, 3)
    assert next(following) == [6]
    assert plan.taken(0) == 0
    assert plan.taken(5) == 3  # fewer at the end
    assert plan.taken() == 0
    assert plan.digest.hexdigest() == _digest(0, 1, 2, 3, 4, 5, 6)
    plan.forget()
    assert plan.begin() is None
    plan.arrive()
    assert told.calls == ["begin", "arrive"]


@pytest.mark.parametrize(
    ("samples", "left", "left_out", "skipped"),
    [
        (0, BATCHES, 0, []),
        (1, [[1], [2, 3], [4, 5], [6]], 1, [0]),
        (2, [[2, 3], [4, 5], [6]], 2, [0, 1]),
        (3, [[3], [4, 5], [6]], 3, [0, 1, 2]),
        (7, [], 7, [0, 1, 2, 3, 4, 5, 6]),
        (9, [], 7, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_a_plan_skips_samples_and_cuts_the_batch_that_it_ends_in(
    samples: int, left: list[list[int]], left_out: int, skipped: list[int]
) -> None:
    plan = Told().plan(samples=samples, skip=3, expected=_digest(*skipped))
    assert list(plan.follow(BATCHES)) == left
    assert plan.left_out == left_out
    assert plan.same_order


def test_a_plan_that_skips_more_batches_than_there_are_ends() -> None:
    plan = Told().plan(skip=9)
    assert list(plan.follow(BATCHES)) == []
    assert plan.left_out == 7


def test_another_order_than_before_is_a_problem_that_names_the_loader() -> None:
    by_batch = xxhash.xxh3_64_hexdigest(b"[0, 1]")
    cases = [
        ({"expected": _digest(0, 1)}, True),
        ({"expected": _digest(1, 0)}, False),
        ({"expected_batches": by_batch}, True),
        ({"expected_batches": "0"}, False),
        ({"expected": _digest(0, 1), "expected_batches": "0"}, False),
        ({}, True),
    ]
    for options, same in cases:
        plan = Told().plan(skip=1, **options)
        list(plan.follow(BATCHES))
        assert plan.same_order is same
        assert ("the sampler of Mine gave a different order" in plan.problem("Mine")) is not same


def test_indices_are_those_of_a_batch_or_a_single_one() -> None:
    cases: list[tuple[bool, Any, list[Any]]] = [
        (True, [1, 2], [1, 2]),
        (True, (1, 2), [1, 2]),
        (True, torch.tensor([1, 2]), [1, 2]),
        (True, "ab", ["ab"]),
        (True, 3, [3]),
        (False, [1, 2], [[1, 2]]),
        (False, 3, [3]),
    ]
    for batched, batch, indices in cases:
        plan = Told().plan(batched=batched)
        list(plan.follow([batch]))
        assert plan.taken() == len(indices)
        assert plan.digest.hexdigest() == xxhash.xxh3_64_hexdigest(index_bytes(indices))


def test_where_the_loader_skips_itself_its_order_is_drawn_before_the_generators_are_restored() -> None:
    told = Told()

    def batches() -> Iterator[list[int]]:
        told.calls.append("drawn")
        yield from BATCHES

    assert list(told.plan(skips_inside=True).follow(batches())) == BATCHES
    assert told.calls == ["begin", "drawn", "arrive"]
    told.calls.clear()
    assert list(told.plan().follow(batches())) == BATCHES
    assert told.calls == ["begin", "arrive", "drawn"]


def test_batches_for_workers_are_seeded_by_their_number_in_the_epoch() -> None:
    whole = list(Told(seed=5).plan().follow(BATCHES))
    rest = list(Told(seed=5).plan(skip=2).follow(BATCHES))
    assert whole == BATCHES
    seeds = [batch.seed for batch in whole]
    assert len(set(seeds)) == 4
    assert seeds[0] == xxhash.xxh3_64_intdigest(b"5/1") >> 1  # of every run, or augmentations would differ
    assert [batch.seed for batch in rest] == seeds[2:]
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    sent = pickle.loads(pickle.dumps(whole[0]))
    assert (type(sent), sent, sent.seed) == (SeededBatch, [0, 1], seeds[0])
    assert list(Told(seed=5).plan(batched=False).follow([3, 4])) == [3, 4]  # indices carry no seed
    before = torch.get_rng_state()
    list(whole[0])
    assert torch.equal(torch.get_rng_state(), before)  # only in a worker


def test_in_a_worker_every_generator_is_seeded_when_a_batch_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: SimpleNamespace(id=0))
    batch, found = SeededBatch([1, 2], (1 << 40) + 3), []
    for _ in range(2):
        assert list(batch) == [1, 2]
        found.append(drawn())
    assert found[0] == found[1]
    np.random.seed(3)  # the seed without what NumPy does not take
    assert found[0][1] == float(np.random.rand())
    list(SeededBatch([1, 2], 4))
    assert all(one != other for one, other in zip(drawn(), found[0], strict=True))


# -- the sampler that follows a plan ----------------------------------------------------------------------------------


def test_a_sampler_follows_its_plan_once_and_is_the_loaders_own_otherwise() -> None:
    inner = BatchSampler(SequentialSampler(DATA), 5, False)
    sampler = ResumableSampler(inner)
    assert list(sampler) == list(inner)
    assert (len(sampler), sampler.batch_size) == (3, 5)
    sampler.plan = Told().plan(skip=2)
    iter(sampler)  # dropped unused: the plan stays
    assert list(sampler) == [[10, 11]]
    assert vars(sampler)["plan"] is None
    assert list(sampler) == list(inner)
    assert list(copy.deepcopy(sampler)) == list(inner)
    assert not hasattr(ResumableSampler.__new__(ResumableSampler), "inner")  # while it is being copied


def test_a_sampler_is_installed_once_and_taken_out_again() -> None:
    for loader, name in ((DataLoader(DATA, 5), "batch_sampler"), (DataLoader(DATA, batch_size=None), "sampler")):
        own = getattr(loader, name)
        installed = sampling.install(loader)
        assert getattr(loader, name) is installed
        assert sampling.install(loader) is installed
        assert (installed.inner, installed.plan) == (own, None)
        sampling.uninstall(loader)
        assert getattr(loader, name) is own
        assert sampling.install(loader) is installed  # which persistent workers know
        sampling.uninstall(loader)
        object.__setattr__(loader, name, other := BatchSampler(SequentialSampler(DATA), 2, False))
        assert sampling.install(loader) is not installed
        sampling.uninstall(SimpleNamespace(base_dataloader=loader))
        assert getattr(loader, name) is other
    sampling.uninstall([1])


# -- layouts ----------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def _distributed(replicas: int = 3, rank: int = 1, **options: Any) -> DistributedSampler[Any]:
    return DistributedSampler(DATA, replicas, rank, shuffle=False, **options)


def test_the_layout_of_a_loader_is_that_of_its_sampler_and_batch_size() -> None:
    ours = _distributed()
    cases: list[tuple[Any, Layout]] = [
        ([1], Layout()),
        (DataLoader(DATA, 4), Layout(batch=4, window=4)),
        (DataLoader(DATA, batch_size=None), Layout(batch=1, window=1)),
        (DataLoader(Stream(), 4), Layout(batch=4, window=4)),
        (DataLoader(Stream(), batch_size=None), Layout(batch=1, window=1)),
        (DataLoader(DATA, batch_sampler=[[1], [2, 3]]), Layout()),
        (DataLoader(DATA, 4, sampler=ours), Layout(replicas=3, replica=1, batch=4, window=12)),
        (DataLoader(DATA, None, sampler=ours), Layout(replicas=3, replica=1, batch=1, window=3)),
    ]
    assert [layout_of(loader) for loader, _ in cases] == [layout for _, layout in cases]
    assert [str(layout_of(loader)) for loader, _ in cases[1::5]] == ["4", "3 x 4"]
    defaults = Layout()
    assert (defaults.replicas, defaults.replica, defaults.piece) == (1, 0, 1)


def _accelerated(whole: int | None = 8, *, split: bool = False, index: int = 1, dispatched: bool = False) -> Any:
    """Loaders with the attributes of Accelerate's own, of two processes."""
    parts: dict[str, Any] = {"num_processes": 2, "process_index": index, "batch_size": whole, "split_batches": split}
    shard = SimpleNamespace(**parts)
    reader = SimpleNamespace(batch_sampler=shard, dataset=DATA)
    if dispatched:
        reader = SimpleNamespace(batch_sampler=BatchSampler(SequentialSampler(DATA), 8, False), dataset=DATA)
    loader = SimpleNamespace(base_dataloader=reader, state=SimpleNamespace(num_processes=2))
    if dispatched:
        loader.split_batches = split
    return loader


def test_accelerate_deals_whole_batches_or_an_equal_part_of_each() -> None:
    cases = [
        (_accelerated(), Layout(replicas=2, replica=1, piece=8, batch=8, window=16)),
        (_accelerated(split=True), Layout(replicas=2, replica=1, piece=4, batch=4, window=8)),
        (_accelerated(None), Layout(replicas=2, replica=1)),
        (_accelerated(dispatched=True), Layout(batch=8, window=16, piece=8)),
        (_accelerated(dispatched=True, split=True), Layout(batch=8, window=8, piece=8)),
    ]
    assert [layout_of(loader) for loader, _ in cases] == [layout for _, layout in cases]
    alone = SimpleNamespace(base_dataloader=DataLoader(DATA, batch_sampler=[[1], [2]]), state=None)
    assert layout_of(alone) == Layout()
    on_data = _accelerated()
    on_data.base_dataloader = SimpleNamespace(
        batch_sampler=None, batch_size=4, dataset=on_data.base_dataloader.batch_sampler
    )
    assert layout_of(on_data) == Layout(replicas=2, replica=1, piece=8, batch=8, window=16)


def test_the_layout_of_a_position_of_an_earlier_version_follows_from_its_counts() -> None:
    now = Layout(replicas=2, replica=1, batch=8, window=16)
    saved = Layout(replicas=4, batch=2, window=8)
    assert saved_layout(Position(layout=asdict(saved), batches=3, samples=9), now, 2, shared=True) == saved
    same = Position(world_size=2, batches=3, samples=12)
    assert saved_layout(same, now, 2, shared=True) == Layout(replicas=2, replica=1, batch=4, window=8)
    uneven = Position(world_size=2, batches=3, samples=11)
    assert saved_layout(uneven, now, 2, shared=True) == Layout(replicas=2, replica=1)
    pieces = Layout(replicas=2, piece=8, batch=8, window=16)
    assert saved_layout(same, pieces, 2, shared=True) == pieces
    other = Position(world_size=4, batches=3, samples=12)
    assert saved_layout(other, now, 2, shared=True) == Layout(replicas=4, batch=4, window=16)
    assert saved_layout(other, now, 2, shared=False) == Layout(batch=4, window=4)
    assert saved_layout(Position(world_size=4), now, 2, shared=True) == Layout(replicas=4)
    split = Position(world_size=4, batches=3, samples=12, split=True)
    assert saved_layout(split, now, 2, shared=True) == Layout(replicas=4, batch=4, window=16)
    assert saved_layout(split, Layout(window=20), 2, shared=True).window == 20


def test_a_distributed_sampler_is_found_where_the_loader_batches_it_directly() -> None:
    ours = _distributed()
    assert distributed_sampler_of(DataLoader(DATA, 4, sampler=ours)) is ours
    assert distributed_sampler_of(DataLoader(DATA, None, sampler=ours)) is ours
    assert distributed_sampler_of(DataLoader(DATA, 4)) is None
    assert distributed_sampler_of([1]) is None
    wrapped = DataLoader(DATA, 4, sampler=ours)
    sampling.install(wrapped)
    assert distributed_sampler_of(wrapped) is ours


def test_batching_can_start_at_any_sample_where_torch_makes_the_batches() -> None:
    class Own(BatchSampler): ...

    plain: Any = DataLoader(DATA, 4)
    single = DataLoader(DATA, None)
    assert batcher_of(plain) is plain.batch_sampler
    assert batcher_of(single) is single
    assert batcher_of(DataLoader(DATA, batch_sampler=Own(SequentialSampler(DATA), 4, False))) is None
    assert batcher_of(DataLoader(DATA, batch_sampler=[[1]])) is None
    shard = SimpleNamespace(batch_sampler=plain.batch_sampler)
    assert batcher_of(SimpleNamespace(batch_sampler=shard)) is plain.batch_sampler


# -- what is left of an order -----------------------------------------------------------------------------------------


def test_what_was_consumed_is_compared_with_the_order() -> None:
    layout = Layout(replicas=2, replica=1, piece=2)  # gets 2 3, 6 7, 10 11 of the order
    right = ConsumedSamples(layout, 0, 4, _digest(2, 3, 6, 7))
    assert right.agrees(DATA)
    assert right.agrees(DATA[:8])
    assert not right.agrees(DATA[::-1])
    assert not ConsumedSamples(layout, 0, 3, _digest(2, 3, 6, 7)).agrees(DATA)
    assert ConsumedSamples(layout, 4, 2, _digest(6, 7)).agrees(DATA)
    assert not ConsumedSamples(layout, 3, 2, _digest(6, 7)).agrees(DATA)
    assert right.agrees(DATA[::-1][:7])  # too short to tell
    assert ConsumedSamples(layout, 5, 4, "x").agrees(DATA)
    assert not ConsumedSamples(layout, 4, 4, "x").agrees(DATA)
    assert ConsumedSamples(layout, 0, 4, "").agrees(DATA[::-1])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("start", [0, 1, 5, 10, 11, 12, 20])
def test_ranks_share_what_is_left_of_an_order(start: int, drop_last: bool) -> None:
    shares = []
    for rank in range(3):
        sampler = _distributed(3, rank, drop_last=drop_last)
        rest = RemainingIndices(SimpleNamespace(sampler=sampler), sampler, start, distributed=True)
        rest.advance()
        assert rest.problem == ""
        shares.append(list(rest))
        assert len(shares[-1]) == len(rest)
    left = DATA[start:]
    dealt = [index for turn in zip(*shares, strict=True) for index in turn]
    if drop_last:
        assert dealt == left[: len(left) // 3 * 3]
    else:
        assert dealt[: len(left)] == left
        assert (
            dealt[len(left) :] == list(itertools.islice(itertools.cycle(left), (-len(left)) % 3)) if left else not dealt
        )


def test_one_rank_goes_on_with_the_rest_of_its_samplers_order() -> None:
    sampler = SequentialSampler(DATA)
    consumed = ConsumedSamples(Layout(), 0, 4, _digest(0, 1, 2, 3))
    rest = RemainingIndices(SimpleNamespace(sampler=sampler), sampler, 4, False, consumed)
    rest.advance()
    assert (len(rest), list(rest), rest.problem) == (8, DATA[4:], "")
    beyond = RemainingIndices(SimpleNamespace(sampler=sampler), sampler, 20, distributed=False)
    beyond.advance()
    assert (len(beyond), list(beyond)) == (0, [])
    other = ConsumedSamples(Layout(), 0, 4, _digest(3, 2, 1, 0))
    wrong = RemainingIndices(SimpleNamespace(sampler=sampler), sampler, 4, False, other)
    wrong.advance()
    assert "SequentialSampler gave a different order than before the resume" in wrong.problem


class Blocks(DistributedSampler[Any]):
    """Gives every rank a block."""

    def __iter__(self) -> Iterator[int]:
        return iter(DATA[self.rank * self.num_samples : (self.rank + 1) * self.num_samples])


class RoundRobin(DistributedSampler[Any]):
    """As torch's class does, by code of its own that draws from the global generator."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(DATA)).tolist()
        return iter(order[self.rank :: self.num_replicas])


class Shorter(DistributedSampler[Any]):
    """Leaves out the last `less` samples of its share."""

    less = 1

    def __iter__(self) -> Iterator[int]:
        share = DATA[self.rank :: self.num_replicas]
        return iter(share[: len(share) - self.less] if self.num_replicas > 1 else share)


def test_a_sampler_is_round_robin_if_its_share_is_that_of_the_whole_order() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert is_round_robin(_distributed())
    assert is_round_robin(RoundRobin(DATA, 3, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert not is_round_robin(Blocks(DATA, 3, 1))
    shorter = Shorter(DATA, 3, 1)
    assert is_round_robin(shorter)
    shorter.less = 2
    assert not is_round_robin(shorter)


def test_the_whole_order_of_a_sampler_is_without_padding_and_leaves_it_as_it_was() -> None:
    sampler: Any = DistributedSampler(DATA, 5, 2, shuffle=True, seed=3)
    kept = dict(vars(sampler))
    shares: list[list[int]] = [list(DistributedSampler(DATA, 5, rank, seed=3)) for rank in range(5)]
    order = [index for turn in zip(*shares, strict=True) for index in turn]
    assert global_order(sampler) == order[:12]
    assert vars(sampler) == kept


def test_a_sampler_that_is_not_round_robin_skips_its_own_part_and_says_so() -> None:
    sampler = Blocks(DATA, 3, 1)
    rest = RemainingIndices(SimpleNamespace(sampler=sampler), sampler, 6, distributed=True)
    rest.advance()
    assert list(rest) == [6, 7]
    assert "Blocks does not give rank r of R the samples" in rest.problem


def test_a_custom_batch_sampler_that_has_copied_its_order_is_a_problem() -> None:
    sampler = SequentialSampler(DATA)
    rest = RemainingIndices(SimpleNamespace(sampler=sampler), sampler, 4, False, may_bypass_sampler=True)
    assert list(rest.checked(iter([]))) == []
    assert rest.problem == ""
    assert list(rest.checked(iter(BATCHES))) == BATCHES
    assert "SimpleNamespace does not iterate over its sampler" in rest.problem
    used = RemainingIndices(SimpleNamespace(sampler=sampler), sampler, 4, False, may_bypass_sampler=True)
    used.advance()
    assert list(used.checked([index] for index in used)) == [[index] for index in DATA[4:]]
    assert used.problem == ""
    plan = Told().plan(rest=used)
    assert plan.problem("L") == ""
    used.problem = "why"
    assert plan.problem("L") == "why"
    plan.same_order = False
    assert plan.problem("L") == "why"
    used.problem = ""
    assert plan.problem("L").startswith("the sampler of L")


def test_the_rest_of_an_order_replaces_the_sampler_for_one_epoch() -> None:
    loader = DataLoader(DATA, 5)
    batcher: Any = loader.batch_sampler
    own = batcher.sampler
    rest = RemainingIndices(batcher, own, 4, distributed=False)
    resumable = sampling.install(loader)
    resumable.plan = Told().plan(rest=rest)
    batches = iter(resumable)
    assert next(batches) == [4, 5, 6, 7, 8]
    assert batcher.sampler is rest
    assert list(batches) == [[9, 10, 11]]
    assert batcher.sampler is own
    single = DataLoader(DATA, None)
    resumable = sampling.install(single)
    resumable.plan = Told().plan(
        rest=RemainingIndices(single, samplers.unwrapped(single.sampler), 9, distributed=False)
    )
    assert list(resumable) == [9, 10, 11]


# -- positions of another layout --------------------------------------------------------------------------------------


def _position(layout: Layout, ranks: int, **more: Any) -> Position:
    given: dict[str, Any] = {"batches": 3, "samples": 6, "indices": "x", "digest": "y", **more}
    return Position(world_size=ranks, layout=asdict(layout), **given)


def _ours(batch: int = 2, ranks: int = 2) -> Any:
    return DataLoader(DATA, batch, sampler=_distributed(ranks, 0))


TWO = Layout(replicas=2, batch=2, window=4)


def test_a_position_of_the_same_layout_stays_as_it_is() -> None:
    repartition = Repartition(_ours(), 1, 0, 2)
    position = _position(TWO, 2)
    before = copy.deepcopy(position)
    assert repartition.carry_over(position) == {}
    assert position == before
    assert repartition.consumed is None
    assert repartition.rest(position) is None


@pytest.mark.parametrize("more", [{"done": True}, {"exhausted": True}, {"batches": 0, "samples": 0}])
def test_a_position_at_the_start_or_the_end_of_an_epoch_needs_no_conversion(more: dict[str, Any]) -> None:
    repartition = Repartition(_ours(3), 1, 0, 2)
    position = _position(TWO, 4, **more)
    assert repartition.carry_over(position) == {}
    assert (position.world_size, position.start, position.layout) == (2, 0, asdict(layout_of(_ours(3))))


@pytest.mark.parametrize(
    ("then", "ranks", "batch", "start"),
    [(TWO, 2, 3, 12), (Layout(replicas=4, batch=1, window=4), 4, 2, 24), (Layout(batch=6, window=6), 1, 2, 6)],
)
def test_a_position_of_another_layout_is_converted_by_samples(then: Layout, ranks: int, batch: int, start: int) -> None:
    loader = _ours(batch)
    repartition = Repartition(loader, 1, 0, 2)
    position = _position(then, ranks, before=5, ahead=2)
    changes = repartition.carry_over(position)
    assert list(changes) == ["data"]
    same = then.window == batch * 2
    assert ("the same 4 samples in each step" in changes["data"]) is same
    assert f"{start} " in changes["data"]
    assert changes["data"].startswith(f"{then} samples in a batch before, 2 x {batch} now")
    assert (position.start, position.before, position.batches, position.samples) == (start, 8, 0, 0)
    assert (position.ahead, position.digest, position.indices) == (0, "", "")
    assert repartition.consumed == ConsumedSamples(then, 0, 6, "x")
    rest = repartition.rest(position)
    assert rest is not None
    assert (rest.owner, rest.start, rest.distributed) == (loader.batch_sampler, start, True)
    assert (rest.consumed, rest.may_bypass_sampler) == (repartition.consumed, False)


def test_a_second_conversion_in_an_epoch_adds_to_the_first() -> None:
    position = _position(TWO, 2)
    Repartition(_ours(3), 1, 0, 2).carry_over(position)
    position.batches, position.samples = 1, 3
    again = Repartition(_ours(1), 1, 0, 2)
    again.carry_over(position)
    assert (position.start, position.before) == (18, 4)
    untouched = _position(TWO, 2, batches=0, samples=0, start=12)
    assert list(Repartition(_ours(3), 1, 0, 2).carry_over(untouched)) == ["data"]


def test_samples_of_one_loader_for_each_rank_are_not_shared() -> None:
    """A sampler that is not distributed: every rank has all samples, or a share by a rule of its own."""
    loader = DataLoader(DATA, 2)
    for total, size, words in (
        (12, 12, "is not distributed"),
        (12, 6, "by a rule of its own"),
        (13, 6, "by a rule of its own"),
        (14, 6, "is not distributed"),
        (None, 6, "is not distributed"),
        (12, None, "is not distributed"),
    ):
        position = _position(Layout(batch=2, window=2), 2, dataset_size=total, sampler_size=size)
        changes = Repartition(loader, 1, 0, 3).carry_over(position)
        assert words in changes["data"], (total, size)
        assert (position.start, position.batches) == (0, 3)  # nothing else has changed
    alone = _position(Layout(batch=2, window=2), 1, dataset_size=24, sampler_size=24)
    assert "by a rule of its own" in Repartition(loader, 1, 0, 2).carry_over(alone)["data"]
    resized = _position(Layout(batch=3, window=3), 2, dataset_size=12, sampler_size=12)
    changes = Repartition(loader, 1, 0, 3).carry_over(resized)
    assert "is not distributed" in changes["data"]
    assert (resized.start, resized.batches) == (6, 0)


class Grouped(BatchSampler):
    """A batch sampler of the user's own."""


def test_of_a_custom_batch_sampler_whole_batches_are_all_that_is_known() -> None:
    loader = DataLoader(DATA, batch_sampler=Grouped(SequentialSampler(DATA), 2, False))
    repartition = Repartition(loader, 1, 0, 2)
    assert repartition.skips_samples
    position = _position(Layout(batch=2, window=2), 3)
    assert (
        "Grouped is a custom batch sampler: which samples 3 ranks consumed" in repartition.carry_over(position)["data"]
    )
    assert (position.digest, position.indices, position.batches, position.samples) == ("", "", 3, 6)
    longer = _position(Layout(batch=3, window=3), 2)
    assert repartition.carry_over(longer) == {}
    assert (longer.indices, longer.batches, longer.samples) == ("x", 3, 6)
    assert repartition.rest(Position(start=4)) is None  # it has no sampler that could be replaced
    assert not Repartition(DataLoader(DATA, 2), 1, 0, 2).skips_samples
    assert not Repartition(DataLoader(DATA, None), 1, 0, 2).skips_samples


def test_a_custom_batch_sampler_around_a_distributed_one_is_given_the_rest() -> None:
    ours = _distributed(2, 0)
    loader: Any = DataLoader(DATA, batch_sampler=Grouped(ours, 2, False))
    repartition = Repartition(loader, 1, 0, 2)
    position = _position(Layout(replicas=3, batch=2, window=6), 3)
    assert list(repartition.carry_over(position)) == ["data"]
    assert position.start == 18
    rest = repartition.rest(position)
    assert rest is not None
    assert (rest.owner, rest.sampler, rest.distributed, rest.may_bypass_sampler) == (
        loader.batch_sampler,
        ours,
        True,
        True,
    )

"""Small facts about loaders, batches, metrics and positions, each function by a table of cases."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt.data import batch_digest, loader_info
from ckpt.data.batch_digest import Contents, extract, index_bytes
from ckpt.data.progress import Position, Progress, as_numbers, checked_metrics
from ckpt.errors import MetricError

DATA = TensorDataset(torch.arange(12))


class WithState:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


class StatefulStream(Stream, WithState): ...


class StatefulData(TensorDataset, WithState): ...


class StatefulSampler(SequentialSampler, WithState): ...


def test_the_size_of_a_batch_is_that_of_the_first_thing_in_it_that_has_one() -> None:
    row = torch.zeros(3, 2)
    cases: list[tuple[Any, int]] = [
        (row, 3),
        (torch.tensor(1), 1),
        ({"a": row, "b": torch.zeros(5)}, 3),
        ({}, 0),
        ([], 0),
        ((), 0),
        ([row, torch.zeros(5)], 3),
        ((row,), 3),
        ([[1, 2], [3, 4], [5, 6]], 2),
        ([{"a": row}, {"a": row}], 3),
        ([1, 2, 3, 4], 4),
        (["a", "b"], 2),
        ("text", 1),
        (None, 1),
        (7, 1),
    ]
    assert [loader_info.batch_size(batch) for batch, _ in cases] == [size for _, size in cases]


def test_a_dataset_that_does_not_say_its_size_has_none() -> None:
    class Refuses:
        def __len__(self) -> int:
            raise NotImplementedError

    assert [loader_info.size_of(one) for one in ([], [1, 2], Stream(), None, Refuses())] == [0, 2, None, None, None]


def test_a_position_goes_by_index_where_data_is_map_style_and_no_part_has_a_state_that_the_loader_saves() -> None:
    by_index = {
        "a list": ([1], False),
        "map-style": (DataLoader(DATA), True),
        "a stream": (DataLoader(Stream()), False),
        "a stateful loader": (StatefulDataLoader(DATA), True),
        "stateful data": (DataLoader(StatefulData(torch.arange(4))), True),
        "both": (StatefulDataLoader(StatefulData(torch.arange(4))), False),
        "a stateful loader and sampler": (StatefulDataLoader(DATA, sampler=StatefulSampler(DATA)), False),
    }
    assert {name: loader_info.goes_by_index(loader) for name, (loader, _) in by_index.items()} == {
        name: expected for name, (_, expected) in by_index.items()
    }


def test_the_keeper_of_a_position_is_the_loader_or_its_dataset_in_this_process() -> None:
    stream, data = StatefulStream(), StatefulData(torch.arange(4))
    own, both = StatefulDataLoader(Stream()), StatefulDataLoader(stream)
    unlisted = SimpleNamespace(dataset=stream)  # no DataLoader, and says nothing of workers
    cases: list[tuple[Any, Any]] = [
        ([1], None),
        (DataLoader(DATA), None),
        (StatefulDataLoader(DATA), None),
        (DataLoader(Stream()), None),
        (DataLoader(stream), stream),
        (DataLoader(stream, num_workers=1), None),
        (unlisted, stream),
        (own, own),
        (both, both),
        (DataLoader(data), data),
    ]
    assert [loader_info.keeper_of(loader) for loader, _ in cases] == [keeper for _, keeper in cases]


def test_a_state_of_torchdata_that_is_a_count_alone_is_known() -> None:
    counts = {"fetcher_state": {"dataset_iter_state": None}, "dataset_state": None}
    whole = {"fetcher_state": {"dataset_iter_state": 1}, "dataset_state": None}
    data = {"fetcher_state": {"dataset_iter_state": None}, "dataset_state": {}}
    cases: list[tuple[Any, bool]] = [
        (None, False),
        ("text", False),
        ({}, False),
        ({"fetcher_state": None, "dataset_state": None}, False),
        (counts, True),
        (whole, False),
        (data, False),
        ({**counts, "_snapshot": 3}, True),
        ({**counts, "_snapshot": {"_worker_snapshots": {}}}, True),
        ({"_snapshot": {"_worker_snapshots": {"0": counts, "1": counts}}}, True),
        ({"_snapshot": {"_worker_snapshots": {"0": counts, "1": whole}}}, False),
        ({"_snapshot": {"_worker_snapshots": {"0": whole}}, **counts}, False),
    ]
    assert [loader_info.only_counts(state) for state, _ in cases] == [expected for _, expected in cases]


def test_what_accelerate_says_of_a_loader_is_read_from_it_or_its_samplers() -> None:
    def loader(**of_batches: Any) -> Any:
        return SimpleNamespace(batch_sampler=SimpleNamespace(**of_batches))

    assert [loader_info.splits(one) for one in (loader(), loader(split_batches=True), loader(split_batches=1))] == [
        False,
        True,
        False,
    ]
    assert loader_info.splits(SimpleNamespace(split_batches=True))
    assert not loader_info.splits([1])
    skipping = [loader(), loader(skip_batches=3), loader(skip_batches=1), loader(skip_batches=0), [1]]
    assert [loader_info.batches_skipped(one) for one in skipping] == [0, 3, 1, 0, 0]
    assert loader_info.batches_skipped(loader(skip_batches="many")) == 0
    assert loader_info.batches_skipped(SimpleNamespace(skip_batches=2, batch_sampler=None)) == 2


def test_an_order_that_needs_no_generator_is_one_in_sequence() -> None:
    class Own(SequentialSampler): ...

    loaders = [
        DataLoader(DATA),
        DataLoader(DATA, shuffle=True),
        DataLoader(DATA, sampler=Own(DATA)),
        DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 2, False)),
        DataLoader(DATA, batch_size=None),
        [1],
    ]
    assert [loader_info.keeps_order(loader) for loader in loaders] == [True, False, False, False, True, True]


def test_stateful_samplers_are_those_with_a_state_dict() -> None:
    sampler = StatefulSampler(DATA)
    assert loader_info.stateful_samplers(DataLoader(DATA, sampler=sampler)) == [sampler]
    assert loader_info.stateful_samplers(DataLoader(DATA)) == []


class Following:
    """Hands out the batches of a loader it takes with its own mark."""

    def __init__(self, mark: str, taking: bool = True) -> None:
        self.mark, self.taking = mark, taking

    def takes(self, loader: Any) -> bool:
        return self.taking

    def follow(self, loader: Any, own: Any) -> Iterator[Any]:
        return iter([(self.mark, batch) for batch in own()])


def test_the_last_follower_has_a_loader_until_it_goes_and_the_loader_gets_its_class_back() -> None:
    class Numbers:
        def __iter__(self) -> Iterator[Any]:
            return iter([1])

    loader, one, two = Numbers(), Following("one"), Following("two")
    assert not loader_info.follow([1], one)
    assert not loader_info.follow(object(), one)
    loader_info.unfollow(loader, one)  # nobody follows it
    assert loader_info.follow(loader, one)
    kind = type(loader)
    assert loader_info.follow(loader, one)
    assert type(loader) is kind  # not made a second time
    assert (kind.__name__, kind.__qualname__, kind.__module__) == ("Numbers", Numbers.__qualname__, __name__)
    assert list(loader) == [("one", 1)]
    assert list(loader_info.own_iterator(loader)) == [1]
    assert type(copy.copy(loader)) is Numbers
    one.taking = False
    assert list(loader) == [1]
    assert loader_info.follow(loader, two)
    assert type(loader).__mro__[1] is Numbers  # not a subclass of a subclass
    loader_info.unfollow(loader, one)
    assert list(loader) == [("two", 1)]
    del one
    gc.collect()
    assert list(loader) == [("two", 1)]
    loader_info.unfollow(loader, two)
    assert type(loader) is Numbers
    loader_info.follow(loader, two)
    del two
    gc.collect()
    assert type(loader) is Numbers
    assert list(loader_info.own_iterator(loader)) == [1]


# -- metrics, counters and positions ----------------------------------------------------------------------------------


def test_metrics_are_names_with_one_number_each() -> None:
    given = {"a": 1, "b": 2.5, "c": torch.tensor([3.0], requires_grad=True), "d": np.float32(4), "e": True}
    kept = checked_metrics(given)
    assert not kept["c"].requires_grad
    assert as_numbers(kept) == {"a": 1.0, "b": 2.5, "c": 3.0, "d": 4.0, "e": 1.0}
    assert as_numbers(given)["c"] == 3.0
    assert checked_metrics(None) == checked_metrics({}) == {}
    unfit: list[Any] = ["1.0", None, [1], torch.zeros(2), torch.zeros(0), 10**400, {}]
    for value in unfit:
        with pytest.raises(MetricError, match="'bad' is not"):
            checked_metrics({"good": 1, "bad": value})
    with pytest.raises(MetricError, match="1 is not"):
        checked_metrics({1: 1})
    for wrong in ([("a", 1)], 3, "a"):
        with pytest.raises(MetricError, match="must be a dict"):
            checked_metrics(wrong)
    with pytest.raises(MetricError, match="one number for each name"):
        as_numbers({"a": torch.zeros(2)})


def test_counters_begin_at_zero_and_those_of_a_later_version_are_left_out() -> None:
    assert Progress() == Progress.from_json({}) == Progress(epoch=0, batch=0, step=0, samples=0)
    saved = {"epoch": 1, "batch": 2, "step": 3, "samples": 4}
    assert Progress.from_json({**saved, "later": 5}) == Progress(1, 2, 3, 4)
    assert Progress(1, 2, 3, 4).to_json() == saved


def test_a_position_that_says_nothing_is_the_start_of_an_epoch() -> None:
    nothing = Position.from_saved({"later": 1})
    numbers = {name: value for name, value in vars(nothing).items() if isinstance(value, int) and value}
    assert numbers == {"world_size": 1}
    assert nothing == Position()
    assert Position.from_saved({"batches": 3, "done": True}) == Position(batches=3, done=True)


# -- digests ----------------------------------------------------------------------------------------------------------


def test_indices_have_the_same_bytes_however_they_are_cut_into_batches() -> None:
    assert index_bytes([]) == b""
    assert index_bytes([1, 2, 3]) == index_bytes([1]) + index_bytes([2, 3]) == b"1, 2, 3, "


def test_the_leaves_of_a_batch_are_named_by_their_paths() -> None:
    batch = {
        "a": torch.tensor([1.0]),
        "b": [torch.tensor([2]), {"c": "text"}],
        "d": [1, 2],
        "e": object(),
        "f": np.ones(1),
    }
    assert extract(batch) == [
        ("['a']", torch.tensor([1.0]).numpy().tobytes()),
        ("['b'][0]", torch.tensor([2]).numpy().tobytes()),
        ("['b'][1]['c']", b"'text'"),
        ("['d']", b"12"),
        ("['f']", np.ones(1).tobytes()),
    ]
    assert extract([]) == extract(object()) == extract(torch.zeros(2, device="meta")) == []
    assert extract(torch.eye(2).to_sparse()) == []
    assert extract(["ab", "c"]) == [("", b"'ab''c'")]
    assert extract("x" * 100) == [("", b"'" + b"x" * 63)]
    assert extract(["x" * 100, "y"]) == [("", b"'" + b"x" * 63 + b"'y'")]
    assert extract(np.array(["text", None], dtype=object)) == []
    assert [path for path, _ in extract([torch.ones(1)] * 20)] == [f"[{number}]" for number in range(8)]
    assert len(extract([object()] * 31 + [torch.ones(1)])) == 1
    assert len(extract([object()] * 32 + [torch.ones(1)])) == 0
    assert len(extract({**{str(n): None for n in range(31)}, "last": 1.0})) == 1
    assert len(extract({**{str(n): None for n in range(32)}, "last": 1.0})) == 0


def test_of_a_tensor_a_few_elements_of_every_sample_are_taken() -> None:
    def taken(*shape: int) -> list[int]:
        tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
        ((_, data),) = extract(tensor)
        return list(np.frombuffer(data, dtype=np.int64))

    assert taken() == [0]
    assert taken(20) == list(range(20))
    assert taken(2, 8) == list(range(16))
    assert taken(2, 9) == [0, 2, 4, 6, 8, 9, 11, 13, 15, 17]
    assert taken(1, 4, 2) == list(range(8))
    assert taken(1, 8, 2) == [0, 1, 4, 5, 8, 9, 12, 13]
    assert taken(2, 3, 1, 1) == [0, 3]  # of other dimensions, the first
    half = torch.arange(4).reshape(2, 2).T  # not contiguous
    assert extract(half) == extract(half.contiguous())


def test_only_leaves_that_vary_between_batches_are_compared() -> None:
    contents = Contents()
    contents.add([("a", b"1"), ("mask", b"0")])
    one = contents.digests()
    assert sorted(one) == ["a", "mask"]  # after one batch nothing is known to be the same in all
    contents.add([("a", b"2"), ("mask", b"0")])
    saved = contents.digests()
    assert list(saved) == ["a"]
    assert saved["a"] != one["a"]
    assert contents.differing(saved) == []
    other = Contents()
    other.add([("a", b"12")])
    assert other.digests()["a"] == saved["a"]  # for any size of batches
    assert other.differing({**saved, "b": "x"}) == ["b"]
    assert batch_digest.Contents().digests() == {}

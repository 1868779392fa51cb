"""The states of a tracked loader, and by which strategy the position of each kind of loader is restored."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt.data.batch_digest import Contents
from ckpt.data.progress import Position
from ckpt.data.repartition import layout_of
from ckpt.data.tracked_loader import (
    ByIndex,
    ByReplay,
    ByState,
    EpochLoaders,
    Lookahead,
    Replay,
    RestoreStrategy,
    TrackedLoader,
    UnclaimedPositions,
    mismatch,
    reads_per_batch,
)
from ckpt.errors import StateError
from ckpt.ranks.consensus import SingleProcess
from ckpt.state import rng
from tests.helpers import accelerated
from tests.helpers.second_process import slow_where


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


class StatefulStream(IterableDataset[int]):
    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> Iterator[int]:
        while self._next < 12:
            self._next += 1
            yield self._next - 1
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


def _hugging_face(*, shuffled: bool) -> Any:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"index": list(range(12))}).to_iterable_dataset().with_format("torch")
    return stream.shuffle(seed=1, buffer_size=4) if shuffled else stream


def _shuffled() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(12)), 2, shuffle=True)


LOADERS: dict[str, tuple[type[RestoreStrategy], Callable[[], Any]]] = {
    "map-style data": (ByIndex, _shuffled),
    "a stateful loader of map-style data": (ByIndex, lambda: StatefulDataLoader(TensorDataset(torch.arange(12)), 2)),
    "a stateful loader of a stream": (ByState, lambda: StatefulDataLoader(StatefulStream(), 2)),
    "a stateful loader that only counts what a stream yields": (ByReplay, lambda: StatefulDataLoader(Stream(), 2)),
    "a stream with a state_dict": (ByState, lambda: DataLoader(StatefulStream(), 2)),
    "a stream of Hugging Face": (ByState, lambda: DataLoader(_hugging_face(shuffled=False), 2)),
    "a stream whose state_dict drops the shuffle buffer": (
        ByReplay,
        lambda: DataLoader(_hugging_face(shuffled=True), 2),
    ),
    "a stream with a state_dict in workers": (ByReplay, lambda: DataLoader(StatefulStream(), 2, num_workers=1)),
    "a stream without a state_dict": (ByReplay, lambda: DataLoader(Stream(), 2)),
    "a list of batches": (ByReplay, lambda: [torch.arange(2) + start for start in range(0, 12, 2)]),
}


def _take(tracked: TrackedLoader, batches: int | None = None) -> list[Any]:
    """The next batches, or all that are left."""
    taken: list[Any] = []
    for batch, _ in tracked.take(0):
        taken.append(batch)
        if len(taken) == batches:
            break
    return taken


def _states(tracked: TrackedLoader) -> list[str]:
    return [name for name in ("has_saved_position", "done") if getattr(tracked, name)]


def _resumed(make: Callable[[], Any], state: dict[str, Any]) -> TrackedLoader:
    tracked = TrackedLoader(make(), 0, 1)
    tracked.go_back(state, lambda done, before: None, lambda text: None)
    return tracked


@pytest.mark.parametrize("kind", slow_where("workers", LOADERS))
def test_the_position_of_each_kind_of_loader_is_restored_by_its_strategy(kind: str) -> None:
    strategy, make = LOADERS[kind]
    running = TrackedLoader(make(), 0, 1)
    passing = running.take(0)
    for _ in range(2):
        next(passing)
    resumed = _resumed(make, running.state())
    rest = resumed.take(0)
    batch, samples = next(rest)
    assert type(resumed._strategy) is strategy
    assert samples == 2
    assert repr(batch) == repr(next(passing)[0])


def test_the_samples_of_a_batch_are_its_indices_whatever_it_is_collated_to() -> None:
    tracked = TrackedLoader(DataLoader(TensorDataset(torch.arange(5)), 2, collate_fn=lambda samples: "text"), 0, 1)
    assert list(tracked.take(0)) == [("text", 2), ("text", 2), ("text", 1)]
    assert tracked.state()["samples"] == 5


def test_a_loader_is_fresh_then_in_the_middle_then_done() -> None:
    tracked = TrackedLoader(_shuffled(), 0, 1)
    assert _states(tracked) == []
    passing = tracked.take(0)
    next(passing)
    assert _states(tracked) == []
    assert tracked.batches_handed_out == 1
    assert len(list(passing)) == 5
    assert _states(tracked) == ["done"]


def test_a_loader_that_is_left_is_in_the_middle() -> None:
    tracked = TrackedLoader(_shuffled(), 0, 1)
    assert len(_take(tracked, 2)) == 2
    assert _states(tracked) == []
    assert tracked.state()["batches"] == 2


def test_a_saved_position_is_kept_until_the_pass_reaches_it() -> None:
    first = TrackedLoader(_shuffled(), 0, 1)
    _take(first, 2)
    resumed = _resumed(_shuffled, first.state())
    assert _states(resumed) == ["has_saved_position"]
    assert resumed.state()["batches"] == 2  # saved again before the loader is read: the same position
    passing = resumed.take(0)
    assert _states(resumed) == ["has_saved_position"]
    next(passing)
    assert _states(resumed) == []
    assert resumed.batches_handed_out == 3


def test_a_loader_at_the_end_of_its_epoch_hands_out_nothing_more() -> None:
    first = TrackedLoader(_shuffled(), 0, 1)
    _take(first)
    resumed = _resumed(_shuffled, first.state())
    assert _states(resumed) == ["has_saved_position"]  # done when the pass has reached the end
    assert _take(resumed) == []
    assert _states(resumed) == ["done"]


def test_skipped_batches_are_a_position_to_begin_at() -> None:
    tracked = TrackedLoader(_shuffled(), 0, 1)
    tracked.skip(4)
    assert _states(tracked) == ["has_saved_position"]
    assert len(_take(tracked)) == 2


def test_a_position_that_is_put_back_is_that_of_the_next_pass_through_a_loader_without_a_name() -> None:
    loaders, loader = EpochLoaders(SingleProcess(), dict), DataLoader(range(8))  # type: ignore[arg-type, var-annotated]
    key, tracked, _ = loaders.next(loader)
    saved = {**tracked.state(), "batches": 3}
    loaders.put_back(key, tracked, saved)
    assert loaders.next(loader)[::2] == (key, saved)


# -- keepers and cursors ----------------------------------------------------------------------------------------------


class Counted(StatefulStream):
    """Counts its epochs, which its state tells."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next, self.epochs = state["next"], state["epochs"]


def test_at_the_end_of_an_epoch_the_state_of_a_stream_is_restored_and_nothing_is_handed_out() -> None:
    first = TrackedLoader(DataLoader(Counted(), 5), 0, 1)
    assert len(_take(first)) == 3
    stream = Counted()
    resumed = _resumed(lambda: DataLoader(stream, 5), first.state())
    assert _take(resumed) == []
    assert stream.epochs == 1
    assert resumed.is_over
    assert len(_take(TrackedLoader(DataLoader(stream, 5), 0, 1))) == 3
    assert stream.epochs == 2


@pytest.mark.parametrize("end", ["done", "exhausted"])
def test_done_and_exhausted_are_both_the_end_of_an_epoch(end: str) -> None:
    tracked = _resumed(lambda: DataLoader(StatefulStream(), 2), {"batches": 3, end: True, "state": {"next": 6}})
    assert tracked.is_over
    assert _take(tracked) == []


def test_the_last_batch_of_a_stream_is_noted_before_the_loop_asks_for_more() -> None:
    for loader, noted in (
        (DataLoader(Stream(), 5), True),
        (DataLoader(StatefulStream(), 5), True),
        (StatefulDataLoader(StatefulStream(), 5), False),  # its own state says it
    ):
        tracked = TrackedLoader(loader, 0, 1)
        assert [tracked.state()["exhausted"] for _ in tracked.take(0)] == [False, False, noted]


@pytest.mark.parametrize("make", [_shuffled, lambda: DataLoader(StatefulStream(), 2), lambda: DataLoader(Stream(), 2)])
@pytest.mark.parametrize("batches", [2, None])
def test_arrival_is_told_with_the_generators_from_before_and_those_of_the_start_are_captured(
    make: Callable[[], Any], batches: int | None
) -> None:
    torch.manual_seed(3)
    start = rng.capture()
    first = TrackedLoader(make(), 0, 1)
    _take(first, batches)
    saved = first.state()
    assert rng.differ(saved["rng"], start) is (make is _shuffled)  # torch's iterator draws a seed for workers first
    torch.manual_seed(8)
    now = rng.capture()
    told: list[tuple[bool, dict[str, Any]]] = []
    resumed = TrackedLoader(make(), 0, 1)
    resumed.go_back(saved, lambda done, before: told.append((done, before)), lambda text: None)
    assert told == []
    assert len(_take(resumed)) == (4 if batches else 0)
    ((done, before),) = told
    assert done is (batches is None)
    assert not rng.differ(before, now)
    fresh = TrackedLoader(make(), 0, 1)
    fresh._cursor.on_arrival = lambda done, before: told.append((done, before))
    _take(fresh)
    assert len(told) == 1  # there was no saved position to arrive at


def test_generators_of_a_loader_are_as_they_were_at_the_save_and_at_the_end() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(12)), 2, shuffle=True, generator=torch.Generator().manual_seed(3))

    for batches in (2, None):
        own = make()
        first = TrackedLoader(own, 0, 1)
        _take(first, batches)
        other = make()
        torch.rand(5, generator=other.generator)
        resumed = _resumed(lambda loader=other: loader, first.state())  # type: ignore[misc]
        left = _take(resumed)
        assert len(left) == (6 - batches if batches else 0)
        if batches is None:
            assert torch.equal(own.generator.get_state(), other.generator.get_state())


class OfRank(StatefulStream):
    """As torchtitan's loader: its state is under the name of its data-parallel rank."""

    def __init__(self, name: str, size: int = 2) -> None:
        super().__init__()
        self.name, self.size = name, size

    def state_dict(self) -> dict[str, Any]:
        return {self.name: super().state_dict(), "world_size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.name in state:
            super().load_state_dict(state[self.name])


def test_the_state_of_another_rank_of_torchtitan_is_refused_and_one_of_its_own_is_not() -> None:
    state = {"dp_rank_0": {"next": 4}, "world_size": 2}
    with pytest.raises(
        StateError, match="OfRank reads the data of dp_rank_1, but this rank saved the position of dp_rank_0"
    ):
        _take(_resumed(lambda: DataLoader(OfRank("dp_rank_1"), 2), {"batches": 2, "state": state}))
    assert len(_take(_resumed(lambda: DataLoader(OfRank("dp_rank_0"), 2), {"batches": 2, "state": state}))) == 4
    both = {"dp_rank_1": {"next": 10}, **state}
    assert len(_take(_resumed(lambda: DataLoader(OfRank("dp_rank_1"), 2), {"batches": 2, "state": both}))) == 1
    for known in ({"dp_rank_0": {"next": 4}}, [1]):  # says nothing of ranks
        assert len(_take(_resumed(lambda: DataLoader(OfRank("dp_rank_1"), 2), {"batches": 2, "state": known}))) == 6


def test_a_stream_or_a_sampler_that_does_not_take_its_state_back_is_named() -> None:
    class Sampler(SequentialSampler):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("odd")

    with pytest.raises(StateError, match="StatefulStream could not load its state: KeyError"):
        _take(_resumed(lambda: DataLoader(StatefulStream(), 2), {"batches": 2, "state": {}}))
    data: Any = list(range(4))
    saved = {"batches": 1, "rng": rng.capture(), "samplers": [{}]}
    with pytest.raises(StateError, match="Sampler could not load its state: ValueError: odd"):
        _take(_resumed(lambda: DataLoader(data, 2, sampler=Sampler(data)), saved))


def test_a_pass_set_to_an_epoch_tells_the_loader_its_samplers_and_its_data() -> None:
    told: list[tuple[str, int]] = []

    class Data(TensorDataset):
        def set_epoch(self, epoch: int) -> None:
            told.append(("data", epoch))

    class Order(SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            told.append(("sampler", epoch))

    data = Data(torch.arange(4))
    tracked = TrackedLoader(DataLoader(data, 2, sampler=Order(data)), 0, 1)
    assert len(list(tracked.take(3, announced=False))) == 2
    assert told == []
    list(TrackedLoader(DataLoader(data, 2, sampler=Order(data)), 0, 1).take(7))
    assert told == [("sampler", 7), ("data", 7)]


def test_the_same_epoch_once_more_is_in_the_same_order() -> None:
    torch.manual_seed(4)
    loader = _shuffled()
    first = TrackedLoader(loader, 0, 1)
    whole = _take(first)
    torch.manual_seed(9)
    resumed = _resumed(lambda: loader, first.state())
    again = resumed.from_start(first.state())
    assert repr(_take(again)) == repr(whole)


def test_batches_that_the_loader_skips_itself_are_not_skipped_twice() -> None:
    loader = DataLoader(TensorDataset(torch.arange(12)), 1)
    saved = {"batches": 5, "skipped": 3, "samples": 5, "layout": asdict(layout_of(loader)), "indices": "x"}
    for now, batches in ((0, 8), (1, 7), (2, 6), (6, 2), (9, 0)):
        vars(loader)["skip_batches"] = now  # as Accelerate writes it; this loader skips nothing
        position = _resumed(lambda: loader, saved).state()
        assert (position["batches"], position["skipped"]) == (batches, now)
        assert (position["samples"], position["indices"]) == (0, "")
    vars(loader)["skip_batches"] = 3
    position = _resumed(lambda: loader, saved).state()
    assert (position["batches"], position["samples"], position["indices"]) == (5, 5, "x")


def test_what_has_changed_since_the_save_is_named() -> None:
    def changes(loader: Any, **saved: Any) -> dict[str, str]:
        return TrackedLoader(loader, 0, 1).go_back(saved, lambda done, before: None, lambda text: None)

    assert changes(_shuffled(), dataset_size=12) == changes(_shuffled()) == {}
    assert changes(_shuffled(), dataset_size=9) == {"dataset": "has 12 samples now and had 9 when it was saved"}
    assert changes(DataLoader(Stream(), 2), dataset_size=9) == {}
    assert list(changes(DataLoader(Stream(), 2), worn=True)) == ["workers"]
    assert changes(_shuffled(), worn=True) == {}
    assert list(changes(DataLoader(TensorDataset(torch.arange(4)), None, num_workers=1))) == ["workers"]
    assert changes(DataLoader(TensorDataset(torch.arange(4)), None)) == {}
    assert changes(DataLoader(TensorDataset(torch.arange(4)), 2, num_workers=1)) == {}


class Random(IterableDataset[int]):
    """Another order in every pass."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        type(self).passes += 1
        return iter(range(self.passes * 100, self.passes * 100 + 12))


def test_a_replay_says_why_it_did_not_yield_the_same() -> None:
    def position(**more: Any) -> Position:
        return Position(batches=3, **more)

    now = Contents()
    now.add([("a", b"1"), ("b", b"1")])
    right = now.digests()
    assert mismatch(now, position(contents=right), found=3, drawn=False) == ""
    assert "ended after 2 of the 3 batches" in mismatch(now, position(contents=right), found=2, drawn=False)
    assert "without a check" in mismatch(now, position(), found=3, drawn=False)
    one = {**right, "a": "x"}
    assert "(in a)" in mismatch(now, position(contents=one), found=3, drawn=False)
    assert mismatch(now, position(contents=one), found=3, drawn=True) == ""
    assert "(in a, b)" in mismatch(now, position(contents={"a": "x", "b": "x"}), found=3, drawn=True)
    assert "(in the batch)" in mismatch(now, position(contents={"": "x"}), found=3, drawn=False)
    many = dict.fromkeys("acdef", "x")
    assert "(in a, c, d)" in mismatch(now, position(contents=many), found=3, drawn=False)


def test_a_stream_in_another_order_warns_and_one_in_the_same_does_not() -> None:
    for stream, words in ((Random(), "yielded different data in its replay"), (Stream(), "")):
        first = TrackedLoader(DataLoader(stream, 2), 0, 1)
        _take(first, 3)
        warnings: list[str] = []
        resumed = TrackedLoader(DataLoader(stream, 2), 0, 1)
        resumed.go_back(first.state(), lambda done, before: None, warnings.append)
        assert len(_take(resumed)) == 3
        assert [words in warning for warning in warnings] == ([True] if words else [])
        assert all(warning.startswith("DataLoader ") for warning in warnings)


def test_a_replay_counts_what_it_read_and_whether_that_drew() -> None:
    noted: list[int] = []
    replay = Replay(iter([1, 2, 3]), 2, noted.append)
    replay.run("x")
    assert (noted, replay.found, replay.drawn) == ([1, 2], 2, False)
    drawing = Replay(iter(lambda: torch.rand(1), None), 2, lambda batch: None)
    drawing.run("x")
    assert (drawing.found, drawing.drawn) == (2, True)
    short = Replay(iter([1]), 5, lambda batch: None)
    short.run("x")
    assert short.found == 1


# -- the loaders of an epoch ------------------------------------------------------------------------------------------


class Loaders:
    """Two loaders, the first with a name, and what an epoch knows of them."""

    def __init__(self, **positions: dict[str, Any]) -> None:
        self.named, self.other = _shuffled(), _shuffled()
        self.rewound = 0
        self.found = EpochLoaders(SingleProcess(), lambda: {"dataloader": self.named})
        self.unclaimed = UnclaimedPositions(dict(positions), self._rewind)
        self.found.go_back(self.unclaimed)

    def _rewind(self) -> None:
        self.rewound += 1


def test_named_loaders_claim_their_positions_at_once_and_others_when_they_are_read() -> None:
    loaders = Loaders(**{"dataloader": {"batches": 2}, "loader.0": {"batches": 3, "before": 1}})
    found = loaders.found
    assert list(found.by_key) == ["dataloader"]
    assert list(found.unclaimed.positions) == ["loader.0"]
    assert [found.saved_batches(one) for one in (loaders.named, loaders.other)] == [2, None]
    assert [found.length(one) for one in (loaders.named, loaders.other)] == [6, 6]
    assert found.begins_at() == "batch 3 of loader.0, batch 2 of dataloader"
    assert sorted(found.state()) == ["dataloader", "loader.0"]
    key, tracked, saved = found.next(loaders.other)
    assert (key, saved) == ("loader.0", {"batches": 3, "before": 1})
    assert tracked.batches_handed_out == 4
    assert found.next(loaders.named)[2] == {"batches": 2}
    assert found.next(loaders.named)[2] is None  # a position is that of one pass
    assert [found.is_named(one) for one in (loaders.named, loaders.other)] == [True, False]


def test_going_back_forgets_the_epoch_before() -> None:
    loaders = Loaders(dataloader={"batches": 2})
    loaders.found.next(loaders.other)
    assert sorted(loaders.found.by_key) == ["dataloader", "loader.0"]
    loaders.found.go_back(UnclaimedPositions({}))
    assert loaders.found.by_key == {}
    assert loaders.found.saved_batches(loaders.named) is None
    assert loaders.found.next(loaders.named)[2] is None


def test_a_loader_is_used_up_where_its_saved_position_is_the_end() -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"batches": 2}, False),
        ({"batches": 5}, False),
        ({"batches": 6}, True),
        ({"batches": 7}, True),
        ({"batches": 1, "done": True}, True),
        ({"batches": 1, "exhausted": True}, True),
        ({}, False),
    ]
    for saved, used_up in cases:
        loaders = Loaders(dataloader=saved)
        assert loaders.found.is_used_up(loaders.named) is used_up, saved
        assert not loaders.found.is_used_up(loaders.other)
    stream: Any = DataLoader(Stream(), 2)
    found = EpochLoaders(SingleProcess(), lambda: {"dataloader": stream})
    found.go_back(UnclaimedPositions({"dataloader": {"batches": 99}}))
    assert not found.is_used_up(stream)
    empty: Any = []
    found = EpochLoaders(SingleProcess(), lambda: {"dataloader": empty})
    found.go_back(UnclaimedPositions({"dataloader": {"batches": 0}}))
    assert not found.is_used_up(empty)


def test_passes_through_a_loader_in_one_epoch_are_numbered() -> None:
    loaders = Loaders()
    names = []
    for loader in (loaders.named, loaders.named, loaders.other, loaders.named, loaders.other):
        key, tracked, saved = loaders.found.next(loader)
        names.append(key)
        assert saved is None
        assert not loaders.found.done
        list(tracked.take(0))
    assert names == ["dataloader", "dataloader.2", "loader.0", "dataloader.3", "loader.1"]
    assert loaders.found.done
    loaders.found.clear()
    assert loaders.found.next(loaders.named)[0] == "dataloader"


def test_a_loader_was_trained_on_if_a_step_was_made_in_a_pass_of_this_epoch() -> None:
    loaders = Loaders(dataloader={"batches": 2, "trained": True})
    assert not loaders.found.was_trained_on(loaders.named)  # before this resume
    _, tracked, _ = loaders.found.next(loaders.other)
    assert not loaders.found.was_trained_on(loaders.other)
    tracked.trained = True
    assert loaders.found.was_trained_on(loaders.other)
    assert not loaders.found.was_trained_on(loaders.named)


def test_positions_that_no_pass_went_to_are_dropped_and_named() -> None:
    loaders = Loaders(**{"dataloader": {"batches": 2}, "loader.0": {"batches": 3}})
    assert loaders.found.drop_unread() == {"loader.0": None, "dataloader": loaders.named}
    assert (loaders.found.by_key, loaders.found.unclaimed.positions) == ({}, {})
    assert loaders.found.next(loaders.named)[2] is None
    _, tracked, _ = loaders.found.next(loaders.other)
    assert loaders.found.drop_unread() == {}
    assert list(loaders.found.by_key.values())[-1] is tracked


def test_a_named_loader_claims_again_what_is_put_back() -> None:
    loaders = Loaders(dataloader={"batches": 2})
    key, tracked, saved = loaders.found.next(loaders.named)
    assert saved is not None
    loaders.found.put_back(key, tracked, saved)
    assert loaders.found.by_key[key] is not tracked
    assert loaders.found.saved_batches(loaders.named) == 2
    assert loaders.found.unclaimed.positions == {}


def test_released_loaders_get_their_samplers_back() -> None:
    loaders = Loaders()
    own = loaders.named.batch_sampler
    list(loaders.found.next(loaders.named)[1].take(0))
    assert loaders.named.batch_sampler is not own
    loaders.found.release()
    assert loaders.named.batch_sampler is own


def test_a_position_of_a_plain_loader_of_an_earlier_version_is_claimed_if_it_is_the_only_one() -> None:
    one = UnclaimedPositions({"plain.loader": {}})
    assert one.key_of("loader.0") == "plain.loader"
    assert UnclaimedPositions({"plain.a": {}, "plain.b": {}}).key_of("loader.0") is None
    assert UnclaimedPositions({"plain.a": {}, "loader.0": {}}).key_of("loader.0") == "loader.0"
    assert UnclaimedPositions({"other": {}}).key_of("loader.0") is None


def test_the_first_of_loaders_side_by_side_sees_the_saved_generators_and_others_what_it_drew() -> None:
    loaders = Loaders()
    arrive, before = loaders.unclaimed._arrive, rng.capture()
    arrive(False, before)
    assert loaders.rewound == 1
    torch.rand(1)
    arrive(False, before)
    assert loaders.rewound == 1
    assert torch.equal(torch.get_rng_state(), before["torch"])
    arrive(True, before)  # at the end of its epoch: the next one begins as at the save
    assert loaders.rewound == 2
    arrive(False, before)
    assert loaders.rewound == 3
    arrive(False, before)
    loaders.unclaimed.put_back("loader.0", {})
    arrive(False, before)
    assert loaders.rewound == 4


def test_what_changes_after_the_report_of_a_resume_is_warned_of_at_once(caplog: pytest.LogCaptureFixture) -> None:
    for reported, rank in ((False, 0), (True, 1), (True, 0)):
        unclaimed = UnclaimedPositions({"loader.0": {"dataset_size": 9}}, reported=reported)
        saved = unclaimed.claim("loader.0", TrackedLoader(_shuffled(), rank, 2))
        assert saved == {"dataset_size": 9}
        assert "had 9 when it was saved" in unclaimed.approximated["loader.0.dataset"]
        assert ("not exact: loader.0.dataset" in caplog.text) is (reported and rank == 0)
    unclaimed = UnclaimedPositions()
    assert not unclaimed.reported
    assert unclaimed.claim("loader.0", TrackedLoader(_shuffled(), 0, 1)) is None
    caplog.clear()
    unclaimed._warn("the order is another one")
    assert unclaimed.approximated == {"data order": "the order is another one"}
    assert "the order is another one" in caplog.text


# -- loaders that read ahead ------------------------------------------------------------------------------------------


class Reader:
    """Reads three batches, each of which draws a number."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(3):
            self.read += 1
            yield torch.rand(1) + number

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_what_was_read_ahead_is_remembered_until_the_loop_gets_it() -> None:
    reader, befores, contents = Reader(), list[int](), Contents()
    look: Any = Lookahead(reader, reader, befores.append, contents)
    assert look.first == (0, {}, {"read": 0})
    reading = vars(reader)["__iter__"]()  # as the loader around it calls it: by name
    assert "__iter__" not in vars(reader)
    moments = []
    for _ in range(2):
        moments.append(rng.capture())
        next(reading)
    assert befores == [0, 1]
    reads, generators, kept = look.first
    assert (reads, kept) == (2, {"read": 0})
    assert not rng.differ(generators, moments[0])
    assert contents.digests() == {}
    look.taken(1)
    reads, generators, kept = look.first
    assert (reads, kept) == (1, {"read": 1})
    assert not rng.differ(generators, moments[1])
    assert len(contents.digests()) == 1
    assert len(list(reading)) == 1
    assert befores == [0, 1, 2, 3]  # also before it finds that there are no more
    assert look.first[0] == 2
    look.taken(9)  # fewer at the end
    assert look.first == (0, {}, {"read": 3})
    again = Lookahead(reader, None, befores.append)
    again.forget()
    assert "__iter__" not in vars(reader)
    assert again.first == (0, {}, None)
    again._before(7)
    assert befores == [0, 1, 2, 3]


def test_a_dispatcher_reads_on_rank_0_for_all() -> None:
    accelerate = pytest.importorskip("accelerate.data_loader")
    dispatcher = accelerate.DataLoaderDispatcher.__new__(accelerate.DataLoaderDispatcher)
    vars(dispatcher).update(split_batches=False, submesh_tp=None, state=SimpleNamespace(num_processes=3))
    assert [reads_per_batch(dispatcher, rank) for rank in range(3)] == [3, 0, 0]
    vars(dispatcher).update(split_batches=True)
    assert [reads_per_batch(dispatcher, rank) for rank in range(2)] == [1, 0]
    vars(dispatcher).update(split_batches=False, submesh_tp=1)
    assert reads_per_batch(dispatcher, 0) == 1
    assert [reads_per_batch(DataLoader(Stream()), rank) for rank in (0, 1)] == [1, 1]


# of seedable ones the accelerator's own state has the seed
@pytest.mark.parametrize("kind", [kind for kind in accelerated.KINDS if not kind.startswith(("workers", "seedable"))])
def test_a_loader_of_accelerate_goes_on_after_each_batch_as_if_it_had_not_stopped(kind: str) -> None:
    options, make = accelerated.KINDS[kind]

    def begin(run: int, saved: tuple[dict[str, Any], dict[str, Any]] | None = None) -> tuple[TrackedLoader, Any]:
        accelerated.reseed(0, run)
        tracked = TrackedLoader(accelerated.new_accelerator(loaders=options).prepare(make()), 0, 1)
        if saved is not None:
            position, generators = copy.deepcopy(saved)
            told = tracked.go_back(position, lambda done, before: rng.restore(generators), _no_warning)
            assert told == {}
        return tracked, tracked.take(0)

    tracked, passing = begin(0)
    straight, saved = [], []
    for batch, samples in passing:
        straight.append((repr(batch), samples, float(torch.rand(1))))  # as dropout does
        saved.append(copy.deepcopy((tracked.state(), rng.capture())))
    end = copy.deepcopy((tracked.state(), rng.capture()))
    for number, position in enumerate([*saved, end]):
        resumed, rest = begin(1 + number, position)
        assert [(repr(batch), samples, float(torch.rand(1))) for batch, samples in rest] == straight[number + 1 :]
        assert resumed.done
        assert resumed.batches_handed_out == len(straight)


def _no_warning(text: str) -> None:
    raise AssertionError(text)

"""The states of a tracked loader, and by which strategy the position of each kind of loader is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt.data.tracked_loader import ByIndex, ByReplay, ByState, EpochLoaders, RestoreStrategy, TrackedLoader
from ckpt.ranks.consensus import SingleProcess
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

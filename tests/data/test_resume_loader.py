"""The data goes on where it stopped, whatever the loader."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt
from tests.helpers.second_process import slow_where

SIZE = 23
_roots = iter(range(10_000))


class Numbers(Dataset[Any]):
    """Samples that say who they are, with a random augmentation; and which samples were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.read.append(index)
        return index, torch.rand(()).item() + random.random() + float(np.random.rand())


class Stream(IterableDataset[Any]):
    """The same samples, one after the other, without a word about the position."""

    def __init__(self) -> None:
        self.numbers = Numbers()

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        for index in range(worker.id if worker else 0, SIZE, worker.num_workers if worker else 1):
            yield self.numbers[index]


class StatefulStream(Stream):
    """A stream that knows its position, as the datasets of Hugging Face do."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < SIZE:
            self.position += 1
            yield self.numbers[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class StatefulNumbers(Numbers):
    """Map-style data with state of its own."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.read.append(index)
        return index, float(len(self.read))

    def state_dict(self) -> dict[str, Any]:
        return {"read": list(self.read)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = list(state["read"])


class OwnSampler(Sampler[int]):
    """Shuffles with Python's generator, all at once."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return SIZE


class OwnBatchSampler(Sampler[list[int]]):
    """Batches of growing length."""

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(SIZE).tolist()
        length = 1
        while order:
            batch, order = order[:length], order[length:]
            length += 1
            yield batch

    def __len__(self) -> int:
        return 7


class LazySampler(OwnSampler):
    """Draws each index only when it is asked for, from a generator that training draws from as well."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield random.randrange(SIZE)


class StatefulSampler(OwnSampler):
    """Walks on from epoch to epoch by a rule of its own."""

    turn = 0

    def __iter__(self) -> Iterator[int]:
        self.turn += 1
        return iter([(index * 5 + self.turn) % SIZE for index in range(SIZE)])

    def state_dict(self) -> dict[str, int]:
        return {"turn": self.turn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.turn = state["turn"]


class Around(DataLoader[Any]):
    """Another loader's batches, as Ray Train's `prepare_data_loader` yields them: it has the other's attributes, and is
    its own iterator. With `ahead`, it has read the next batch before it yields one, as Ray's does."""

    def __init__(self, inner: DataLoader[Any], *, ahead: bool = False) -> None:
        self.__dict__.update(vars(inner))
        self._inner, self._ahead = inner, ahead
        self._read: list[Any] = []

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._batches = iter(self._inner)
        self._read = [next(self._batches)] if self._ahead else []
        return self

    def __next__(self) -> Any:
        self._read.extend(itertools.islice(self._batches, 1))
        if not self._read:
            raise StopIteration
        return self._read.pop(0)


class BeginsAgain:
    """No DataLoader, and its own iterator: `iter` begins at the first batch."""

    def __iter__(self) -> Iterator[Any]:
        self._at = 0
        return self

    def __next__(self) -> Any:
        if self._at == 6:
            raise StopIteration
        self._at += 1
        return torch.full((4,), self._at)


def _workers(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), 4, num_workers=2, multiprocessing_context="fork", **options)


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "in order": lambda: DataLoader(Numbers(), 4),
    "shuffle": lambda: DataLoader(Numbers(), 4, shuffle=True),
    "drop_last": lambda: DataLoader(Numbers(), 4, shuffle=True, drop_last=True),
    "a generator": lambda: DataLoader(Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "with replacement": lambda: DataLoader(Numbers(), 4, sampler=RandomSampler(Numbers(), replacement=True)),
    "a sampler's generator": lambda: DataLoader(
        Numbers(), 4, sampler=RandomSampler(Numbers(), replacement=True, generator=torch.Generator().manual_seed(6))
    ),
    "a subset": lambda: DataLoader(Numbers(), 4, sampler=SubsetRandomSampler(range(3, 20))),
    "weights": lambda: DataLoader(Numbers(), 4, sampler=WeightedRandomSampler([1.0] * SIZE, 21)),
    "own sampler": lambda: DataLoader(Numbers(), 4, sampler=OwnSampler()),
    "own sampler with state": lambda: DataLoader(Numbers(), 4, sampler=StatefulSampler()),
    "own batch sampler": lambda: DataLoader(Numbers(), batch_sampler=OwnBatchSampler()),
    "a batch sampler": lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(OwnSampler(), 5, drop_last=False)),
    "no batches": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "distributed": lambda: DataLoader(Numbers(), 4, sampler=DistributedSampler(Numbers(), 2, 1)),
    "around another": lambda: Around(DataLoader(Numbers(), 4, shuffle=True)),
    "data with state": lambda: DataLoader(StatefulNumbers(), 4, shuffle=True),
    "workers": lambda: _workers(shuffle=True),
    "workers and a generator": lambda: _workers(shuffle=True, generator=torch.Generator().manual_seed(5)),
    "persistent workers": lambda: _workers(shuffle=True, persistent_workers=True),
    "stateful loader": lambda: StatefulDataLoader(Numbers(), 4, shuffle=True),
    "stateful loader with workers": lambda: StatefulDataLoader(
        Numbers(), 4, shuffle=True, num_workers=2, multiprocessing_context="fork"
    ),
    "stateful loader of data with state": lambda: StatefulDataLoader(StatefulNumbers(), 4, shuffle=True),
    "stateful loader of a stream": lambda: StatefulDataLoader(StatefulStream(), 4),
    "a stream": lambda: DataLoader(Stream(), 4),
    "a stream with workers": lambda: DataLoader(Stream(), 4, num_workers=2, multiprocessing_context="fork"),
    "a stream with state": lambda: DataLoader(StatefulStream(), 4),
    "own class": BeginsAgain,
    "a list": lambda: [torch.arange(4) + 4 * batch for batch in range(6)],
}


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _train(manager: ckpt.StateManager, loader: Iterable[Any], epochs: int, stop: int | None) -> list[str]:
    """Go through the loader; drawing from every generator in between, as a training step with dropout does."""
    return _train_in_turn(manager, lambda: [loader], epochs, stop)


def _train_in_turn(
    manager: ckpt.StateManager, loaders: Callable[[], list[Iterable[Any]]], epochs: int, stop: int | None
) -> list[str]:
    """The same, through several loaders in every epoch, one after the other."""
    seen = []
    for epoch in manager.epochs(epochs):
        for batch in itertools.chain.from_iterable(map(manager.batches, loaders())):
            seen.append(f"{epoch} {batch} {torch.rand(()).item()} {random.random()} {np.random.rand()}")
            manager.step()
            if manager.progress.step == stop:
                manager.save_state()
                return seen
    return seen


def _assert_exact(anywhere: str, run: Callable[[str, int | None], list[str]], *stops: int) -> list[str]:
    """A loop, given a root and a step to save and stop at, sees the same interrupted as uninterrupted."""
    _seed(1)
    straight = run(f"{anywhere}/{next(_roots)}", None)
    for stop in stops:
        root = f"{anywhere}/{next(_roots)}"
        _seed(1)
        before = run(root, stop)
        _seed(2)
        assert before + run(root, None) == straight
    return straight


def _interrupted(
    anywhere: str, make: Callable[[], Iterable[Any]], stop: int, epochs: int
) -> tuple[list[str], ckpt.Restored, Any]:
    root = f"{anywhere}/{next(_roots)}"
    _seed(1)
    with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
        seen = _train(manager, make(), epochs, stop)
    _seed(999)
    loader = make()
    with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
        seen += _train(manager, loader, epochs, None)
        assert manager.restored is not None
        return seen, manager.restored, loader


@pytest.mark.parametrize("stop", ["in the first epoch", "at its end", "in the second epoch"])
@pytest.mark.parametrize("name", slow_where("workers", LOADERS))
def test_a_resumed_loader_goes_on_exactly_where_it_stopped(anywhere: str, name: str, stop: str) -> None:
    make = LOADERS[name]
    per_epoch = len(list(make()))
    at = {"in the first epoch": 2, "at its end": per_epoch, "in the second epoch": per_epoch + 3}[stop]
    _seed(1)
    with ckpt.StateManager(f"{anywhere}/{next(_roots)}", model=nn.Linear(1, 1)) as manager:
        straight = _train(manager, make(), 3, None)
    seen, restored, _ = _interrupted(anywhere, make, at, 3)
    assert seen == straight
    assert restored.approximated == {}


@pytest.mark.parametrize("name", slow_where("workers", ["shuffle", "persistent workers"]))
@pytest.mark.parametrize("stops", [(2, 3), (2, 8)])
def test_a_loader_that_nobody_uses_any_more_is_gone_at_once_also_after_break(
    anywhere: str, name: str, stops: tuple[int, int]
) -> None:
    """Its persistent workers end with it. The garbage collector would wait for each of them for 5 s."""
    root = f"{anywhere}/{next(_roots)}"
    gc.disable()
    try:
        for stop in stops:  # the second one begins at the saved position
            loader = weakref.ref(made := LOADERS[name]())
            with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
                _train(manager, made, 3, stop)
            del made, manager
            assert loader() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_stream_of_persistent_workers_resumes_its_samples_and_says_what_it_cannot(anywhere: str) -> None:
    def make() -> Iterable[Any]:
        return DataLoader(Stream(), 4, num_workers=2, persistent_workers=True, multiprocessing_context="fork")

    _, restored, _ = _interrupted(anywhere, make, len(list(make())) + 2, 2)
    assert "draw at random" in restored.approximated["loader.0.workers"]


def test_samples_of_a_loader_that_reads_ahead_of_another_neither_repeat_nor_are_missed(anywhere: str) -> None:
    def make() -> Iterable[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(Numbers(), 2, 1)
        return Around(DataLoader(Numbers(), 4, sampler=sampler), ahead=True)

    _seed(1)
    with ckpt.StateManager(f"{anywhere}/{next(_roots)}", model=nn.Linear(1, 1)) as manager:
        straight = _train(manager, make(), 2, None)
    seen, _, _ = _interrupted(anywhere, make, 4, 2)
    assert [line.split("]")[0] for line in seen] == [line.split("]")[0] for line in straight]


@pytest.mark.parametrize("name", ["shuffle", "own sampler", "own batch sampler", "distributed", "stateful loader"])
def test_samples_that_are_skipped_are_not_read(anywhere: str, name: str) -> None:
    _, _, loader = _interrupted(anywhere, LOADERS[name], 2, 1)
    skipped = 3 if name == "own batch sampler" else 8
    whole = 12 if name == "distributed" else SIZE
    assert len(loader.dataset.read) == whole - skipped


def test_the_users_loader_is_as_it_was_when_the_manager_is_closed(anywhere: str) -> None:
    loader = DataLoader(Numbers(), 4, shuffle=True)
    sampler = loader.batch_sampler
    with ckpt.StateManager(f"{anywhere}/as-it-was", model=nn.Linear(1, 1)) as manager:
        assert len(list(manager.batches(loader))) == len(loader) == 6
        assert len(list(loader)) == 6  # between, without the manager
    assert loader.batch_sampler is sampler


def test_a_sampler_that_cannot_be_followed_is_named(anywhere: str) -> None:
    _, restored, _ = _interrupted(anywhere, lambda: DataLoader(Numbers(), 4, sampler=LazySampler()), 3, 1)
    assert "a different order" in restored.approximated["data order"]


def test_another_dataset_size_is_named(anywhere: str) -> None:
    root = f"{anywhere}/other-size"
    with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
        _train(manager, DataLoader(Numbers(), 4), 1, 2)
    with ckpt.StateManager(root, model=nn.Linear(1, 1), dataloader=DataLoader(torch.arange(9), 4)) as manager:  # type: ignore[arg-type]
        restored = manager.resume()
    assert restored is not None
    assert restored.approximated == {}  # by another name: its position is kept for a loader with the old name
    with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
        list(manager.batches(DataLoader(torch.arange(9), 4)))  # type: ignore[arg-type]
        assert manager.restored is not None
        assert "has 9 samples now and had 23" in manager.restored.approximated["loader.0.dataset"]


def test_the_distributed_sampler_gets_its_epoch(anywhere: str) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(Numbers(), 2, 0, seed=4)
    loader = DataLoader(Numbers(), 4, sampler=sampler)
    orders = []
    with ckpt.StateManager(f"{anywhere}/set-epoch", model=nn.Linear(1, 1)) as manager:
        for epoch in manager.epochs(2):
            orders.append([index.tolist() for index, _ in manager.batches(loader)])
            assert sampler.epoch == epoch
    assert orders[0] != orders[1]


def test_two_loaders_in_an_epoch_are_told_apart_when_the_second_is_interrupted(anywhere: str) -> None:
    def train(root: str, stop: int | None) -> list[str]:
        first, second = DataLoader(Numbers(), 8, shuffle=True), DataLoader(Numbers(), 6, shuffle=True)
        with ckpt.StateManager(root, model=nn.Linear(1, 1), dataloader={"a": first, "b": second}) as manager:
            return _train_in_turn(manager, lambda: [first, second], 2, stop)

    _assert_exact(anywhere, train, 5)


def test_a_save_after_the_inner_loop_belongs_to_the_end_of_the_epoch(anywhere: str) -> None:
    root = f"{anywhere}/end-of-epoch"
    loader = DataLoader(Numbers(), 4, shuffle=True)
    with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
        for _ in manager.epochs(1):
            for _ in manager.batches(loader):
                manager.step()
            manager.save_state()
    with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
        assert list(manager.epochs(3)) == [1, 2]


def test_batches_alone_count_epochs(anywhere: str) -> None:
    loader = DataLoader(Numbers(), 4, shuffle=True)
    with ckpt.StateManager(f"{anywhere}/batches-alone", model=nn.Linear(1, 1)) as manager:
        for epoch in range(3):
            assert manager.progress.epoch == epoch
            assert len(list(manager.batches(loader))) == 6
        assert manager.progress.samples == 3 * SIZE


def test_a_loader_made_anew_for_every_epoch_is_followed(anywhere: str) -> None:
    def train(root: str, stop: int | None) -> list[str]:
        with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
            return _train_in_turn(manager, lambda: [DataLoader(Numbers(), 4, shuffle=True)], 3, stop)

    _assert_exact(anywhere, train, 14)


def test_a_loader_gone_through_twice_in_an_epoch_is_followed(anywhere: str) -> None:
    def train(root: str, stop: int | None) -> list[str]:
        loader = DataLoader(Numbers(), 4, shuffle=True)
        with ckpt.StateManager(root, model=nn.Linear(1, 1), dataloader=loader) as manager:
            return _train_in_turn(manager, lambda: [loader, loader], 2, stop)

    _assert_exact(anywhere, train, 9)


@pytest.mark.slow
def test_a_save_right_after_a_resume_keeps_the_position(anywhere: str) -> None:
    root = f"{anywhere}/save-after-resume"
    make = LOADERS["shuffle"]
    _seed(1)
    with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
        before = _train(manager, make(), 1, 2)
    for _ in range(2):
        with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
            manager.resume()
            manager.save_state("again")
    with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
        after = _train(manager, make(), 1, None)
    _seed(1)
    with ckpt.StateManager(f"{root}-straight", model=nn.Linear(1, 1)) as manager:
        assert before + after == _train(manager, make(), 1, None)


def test_going_back_inside_the_loop_goes_back_in_the_data_too(anywhere: str) -> None:
    seen: list[str] = []
    loader = DataLoader(Numbers(), 4, shuffle=True)
    _seed(1)
    with ckpt.StateManager(f"{anywhere}/go-back", model=nn.Linear(1, 1)) as manager:
        for _ in manager.epochs(2):
            for batch in manager.batches(loader):
                seen.append(f"{manager.progress.epoch} {batch} {torch.rand(())}")
                manager.step()
                if manager.progress.step == 4 and len(seen) == 4:
                    manager.save_state()
                if len(seen) == 8:  # in the second epoch: something went wrong, back to step 4
                    manager.load_state()
    assert seen[8:12] == seen[4:8]
    assert len(seen) == 12 + 4
    assert [line[0] for line in seen] == [*"000000", *"11", *"00", *"111111"]


@pytest.mark.slow
def test_persistent_workers_serve_a_second_manager(anywhere: str) -> None:
    loader = _workers(shuffle=True, persistent_workers=True)
    for turn in range(2):
        with ckpt.StateManager(f"{anywhere}/second-manager-{turn}", model=nn.Linear(1, 1)) as manager:
            for _ in manager.epochs(2):
                assert len(list(manager.batches(loader))) == 6
            assert manager.progress.samples == 2 * SIZE


def test_an_empty_loader_and_a_generator_are_fine(anywhere: str) -> None:
    with ckpt.StateManager(f"{anywhere}/empty", model=nn.Linear(1, 1)) as manager:
        for _ in manager.epochs(2):
            assert list(manager.batches([])) == []
            assert list(manager.batches(iter([1, 2]))) == [1, 2]
        manager.save_state()
        assert manager.progress.epoch == 2


@pytest.mark.parametrize("in_epochs", [True, False])
def test_a_validation_loop_inside_the_training_loop_is_left_alone(anywhere: str, in_epochs: bool) -> None:
    def run(root: str, stop: int | None) -> list[str]:
        seen: list[str] = []
        train, validation = DataLoader(Numbers(), 2, shuffle=True), DataLoader(Numbers(), 8)
        with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
            for epoch in manager.epochs(2) if in_epochs else range(2):
                for batch in manager.batches(train):
                    seen.append(f"{epoch if in_epochs else ''} {batch}")
                    manager.step()
                    if manager.progress.step % 5 == 0:
                        seen.append(f"validation {len(list(manager.batches(validation)))}")
                    if manager.progress.step == stop:
                        manager.save_state()
                        return seen
                if not in_epochs and manager.progress.epoch == 2:
                    break
        return seen

    straight = _assert_exact(anywhere, run, 5, 7)
    assert straight.count("validation 3") == 4


def test_two_loaders_side_by_side_both_go_on(anywhere: str) -> None:
    def run(root: str, stop: int | None) -> list[str]:
        seen: list[str] = []
        real, fake = DataLoader(Numbers(), 3, shuffle=True), DataLoader(Numbers(), 2, shuffle=True)
        with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
            for epoch in manager.epochs(2):
                for pair in zip(manager.batches(real), manager.batches(fake), strict=False):
                    seen.append(f"{epoch} {pair}")
                    manager.step()
                    if manager.progress.step == stop:
                        manager.save_state()
                        return seen
        return seen

    _assert_exact(anywhere, run, 1, 4)


def test_generators_that_are_registered_or_shared_with_the_loader_go_on(anywhere: str) -> None:
    def run(root: str, seed: int, stop: int | None) -> list[str]:
        seen: list[str] = []
        dice, shared = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
        loader = DataLoader(Numbers(), 4, shuffle=True, generator=shared)
        with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
            manager.register(dice=dice)
            for epoch in manager.epochs(2):
                torch.rand((), generator=dice)  # done again by a resumed run, and undone
                for batch in manager.batches(loader):
                    draws = [torch.rand((), generator=generator).item() for generator in (dice, shared)]
                    seen.append(f"{epoch} {batch} {draws}")
                    manager.step()
                    if manager.progress.step == stop:
                        manager.save_state()
                        return seen
        return seen

    _seed(1)
    straight = run(f"{anywhere}/dice-straight", 1, None)
    _seed(1)
    before = run(f"{anywhere}/dice", 1, 8)
    _seed(2)
    assert before + run(f"{anywhere}/dice", 2, None) == straight


@pytest.mark.slow
def test_a_loader_whose_order_depends_on_timing_is_refused(anywhere: str) -> None:
    loader = _workers(in_order=False)
    with (
        ckpt.StateManager(f"{anywhere}/in-order", model=nn.Linear(1, 1)) as manager,
        pytest.raises(ckpt.ConfigError, match="in_order=True"),
    ):
        list(manager.batches(loader))


@pytest.mark.slow
def test_workers_without_batches_are_named(anywhere: str) -> None:
    def make() -> Iterable[Any]:
        return DataLoader(Numbers(), None, shuffle=True, num_workers=2, multiprocessing_context="fork")

    _, restored, _ = _interrupted(anywhere, make, 3, 1)
    assert "draw at random" in restored.approximated["loader.0.workers"]

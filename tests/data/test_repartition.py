"""A run resumes in mid-epoch with another batch size or other ranks: no sample of the epoch is lost or repeated."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt
from ckpt.data.batch_digest import index_bytes
from ckpt.data.progress import Position
from ckpt.data.repartition import ConsumedSamples, Layout, Repartition
from tests.data.test_resume_loader import LazySampler, StatefulStream
from tests.helpers.processes import run_ranks
from tests.helpers.second_process import slow_where

SIZE = 80


def flat(batches: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(batches))


class Numbers(Dataset[Any]):
    """Samples that say who they are, each with a number drawn where it is read."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand((), dtype=torch.float64).item()


class Shuffled(Sampler[int]):
    """Shuffles with Python's generator, all at once."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(SIZE), SIZE))

    def __len__(self) -> int:
        return SIZE


class Runs(Sampler[list[int]]):
    """Batches of its own making."""

    def __init__(self, batch: int) -> None:
        self.length = batch

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(range(SIZE), SIZE)
        return iter([order[at : at + self.length] for at in range(0, SIZE, self.length)])


class Once(BatchSampler):
    """Copies the order of its sampler when it is built."""

    def __init__(self, sampler: Any, batch: int) -> None:
        super().__init__(sampler, batch, False)
        self.copied = list(sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([self.copied[at : at + self.batch_size] for at in range(0, len(self.copied), self.batch_size)])


def _workers(batch: int) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch, shuffle=True, num_workers=2, multiprocessing_context="fork")


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[int], Iterable[Any]]] = {
    "in order": lambda batch: DataLoader(Numbers(), batch),
    "shuffle": lambda batch: DataLoader(Numbers(), batch, shuffle=True),
    "a generator": lambda batch: DataLoader(Numbers(), batch, shuffle=True, generator=_generator()),
    "with replacement": lambda batch: DataLoader(Numbers(), batch, sampler=RandomSampler(range(SIZE), True, SIZE)),
    "own sampler": lambda batch: DataLoader(Numbers(), batch, sampler=Shuffled()),
    "a batch sampler": lambda batch: DataLoader(Numbers(), batch_sampler=BatchSampler(Shuffled(), batch, False)),
    "own batch sampler": lambda batch: DataLoader(Numbers(), batch_sampler=Runs(batch)),
    "workers": _workers,
    "stateful loader": lambda batch: StatefulDataLoader(Numbers(), batch, shuffle=True),
    "distributed": lambda batch: DataLoader(Numbers(), batch, sampler=DistributedSampler(range(SIZE), 1, 0)),  # type: ignore[arg-type]
}


def _go(root: str, loader: Iterable[Any], stop: int | None = None) -> tuple[list[list[int]], dict[str, str]]:
    """Train for an epoch, or until a save after so many batches; the samples of each batch, and `approximated`."""
    seen = []
    with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
        for _ in manager.epochs(1):
            for indices, *_ in manager.batches(loader):
                seen.append(indices.tolist())
                torch.rand(3)  # as dropout does
                random.random()
                manager.step()
                if len(seen) == stop:
                    manager.save_state()
                    return seen, dict(manager.restored.approximated) if manager.restored else {}
        return seen, dict(manager.restored.approximated) if manager.restored else {}


@pytest.mark.parametrize("name", slow_where("workers", LOADERS))
def test_after_batches_of_another_size_no_sample_is_skipped_or_seen_again(anywhere: str, name: str) -> None:
    """From 8 to 4, 40 of 80 samples were skipped or 24 repeated; then to 16, in the same epoch."""
    torch.manual_seed(1)
    random.seed(1)
    straight, _ = _go(f"{anywhere}/straight", LOADERS[name](8))
    order = flat(straight)
    torch.manual_seed(1)
    random.seed(1)
    root = f"{anywhere}/run"
    seen, _ = _go(root, LOADERS[name](8), stop=3)
    torch.manual_seed(2)
    random.seed(2)
    second, told = _go(root, LOADERS[name](4), stop=3)
    third, _ = _go(root, LOADERS[name](16))
    assert flat(seen + second + third) == order
    assert [len(batch) for batch in second] == [4, 4, 4]
    if name == "own batch sampler":
        assert [len(batch) for batch in third] == [12, 16, 16]  # cut where the earlier ones had come to
    else:
        assert [len(batch) for batch in third] == [16, 16, 12]
        assert "8 samples in a batch before, 4 now: continues after the 24 samples" in told["loader.0.data"]
    assert "data order" not in told


@pytest.mark.slow
def test_a_resume_without_a_change_goes_on_in_the_middle_of_what_was_changed(anywhere: str) -> None:
    torch.manual_seed(1)
    root = f"{anywhere}/run"
    seen = _go(root, LOADERS["shuffle"](8), stop=3)[0]
    seen += _go(root, LOADERS["shuffle"](4), stop=2)[0]
    third, told = _go(root, LOADERS["shuffle"](4), stop=1)
    assert told == {}
    seen += third + _go(root, LOADERS["shuffle"](4))[0]
    assert Counter(flat(seen)) == Counter(range(SIZE))


def test_the_last_samples_are_dropped_after_a_change_if_they_fill_no_batch(anywhere: str) -> None:
    def make(batch: int) -> Iterable[Any]:
        return DataLoader(Numbers(), batch, shuffle=True, drop_last=True)

    seen = _go(f"{anywhere}/run", make(8), stop=3)[0] + _go(f"{anywhere}/run", make(15))[0]
    assert [len(batch) for batch in seen] == [8, 8, 8, 15, 15, 15]
    assert max(Counter(flat(seen)).values()) == 1


def test_an_order_that_is_not_repeated_is_named_also_when_the_batches_are_others(anywhere: str) -> None:
    def make(batch: int) -> Iterable[Any]:
        return DataLoader(Numbers(), batch, sampler=LazySampler())

    random.seed(1)  # of 200 seeds, one draws the same order by chance
    _go(f"{anywhere}/run", make(4), stop=3)
    _, told = _go(f"{anywhere}/run", make(2))
    assert "a different order" in told["data order"]


@pytest.mark.slow
def test_the_counter_of_batches_goes_on_when_they_are_of_another_size(anywhere: str) -> None:
    _go(f"{anywhere}/run", LOADERS["in order"](8), stop=3)
    with ckpt.StateManager(f"{anywhere}/run", model=nn.Linear(1, 1)) as manager:
        for _ in manager.batches(LOADERS["in order"](16)):
            assert manager.progress.batch == 4
            assert manager.progress.samples == 24 + 16
            break


class LongStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter((index, 0.0) for index in range(SIZE))


class LongStatefulStream(StatefulStream):
    def __iter__(self) -> Iterator[Any]:
        while self.position < SIZE:
            self.position += 1
            yield self.position - 1, 0.0
        self.position = 0


STREAMS: dict[str, Callable[[int], Iterable[Any]]] = {
    "a stream": lambda batch: DataLoader(LongStream(), batch),
    "a stream with state": lambda batch: DataLoader(LongStatefulStream(), batch),
    "stateful loader of a stream": lambda batch: StatefulDataLoader(LongStream(), batch),
    "stateful loader of a stream with state": lambda batch: StatefulDataLoader(LongStatefulStream(), batch),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_goes_on_by_samples_when_the_batches_are_of_another_size(anywhere: str, name: str) -> None:
    root = f"{anywhere}/run"
    seen = _go(root, STREAMS[name](8), stop=3)[0]
    second, told = _go(root, STREAMS[name](4), stop=2)
    assert "8 samples in a batch before, 4 now" in told["loader.0.data"]
    assert flat(seen + second + _go(root, STREAMS[name](16))[0]) == list(range(SIZE))


def test_samples_of_a_stream_that_are_seen_again_are_named(anywhere: str) -> None:
    _go(f"{anywhere}/run", STREAMS["a stream"](8), stop=3)
    seen, told = _go(f"{anywhere}/run", STREAMS["a stream"](10))
    assert flat(seen) == list(range(20, SIZE))
    assert "The last 4 of them are seen again" in told["loader.0.data"]


# Several ranks


@dataclass(frozen=True)
class Job:
    """A run of an epoch by so many ranks, of which every `apart` read the same data; it is saved and left at `stop`."""

    folder: str
    name: str
    batch: int
    stop: int | None = None
    kind: str = "distributed"
    workers: int = 0
    drop_last: bool = False
    size: int = 200
    apart: int = 1
    alike: bool = False


class Backwards(DistributedSampler[Any]):
    """Each rank gets a run of samples, and not every so-manieth."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank * self.num_samples, (self.rank + 1) * self.num_samples))


class Dealt(Sampler[int]):
    """Shares samples out by itself, and is no DistributedSampler."""

    def __init__(self, size: int) -> None:
        self.indices = list(range(dist.get_rank(), size, dist.get_world_size()))

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def _loader(job: Job, rank: int, ranks: int) -> DataLoader[Any]:
    workers: dict[str, Any] = {"num_workers": job.workers}
    if job.workers:
        workers["multiprocessing_context"] = "fork"
    data = Numbers(job.size)
    place = {"num_replicas": ranks // job.apart, "rank": rank // job.apart}
    if job.kind == "dealt":
        return DataLoader(data, job.batch, sampler=Dealt(job.size))
    kind = Backwards if job.kind == "backwards" else DistributedSampler
    shuffle = job.kind != "in order"
    sampler: DistributedSampler[Any] = kind(data, **place, shuffle=shuffle, seed=3, drop_last=job.drop_last)
    if job.kind == "copied":
        return DataLoader(data, batch_sampler=Once(sampler, job.batch))
    return DataLoader(data, job.batch, sampler=sampler, drop_last=job.drop_last, **workers)


def _run(rank: int, job: Job) -> None:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if job.alike:
        torch.manual_seed(1)  # as many scripts do, on all ranks
        random.seed(1)
    loader = _loader(job, rank, ranks)
    steps: list[Any] = []
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)  # on every rank the same, as DDP has it
    nn.init.zeros_(model.bias)
    with ckpt.StateManager(f"{job.folder}/root", model=model, ranks=ckpt.RankOptions(timeout=60)) as manager:
        for _ in manager.epochs(1):
            for indices, drawn in manager.batches(loader):
                steps.append([indices.tolist(), drawn.tolist(), torch.rand((), dtype=torch.float64).item()])
                manager.step()
                if len(steps) == job.stop:
                    manager.save_state()
                    break
            if len(steps) == job.stop:
                break
        told = dict(manager.restored.approximated) if manager.restored else {}
    Path(job.folder, f"{job.name}-{rank}").write_text(json.dumps([steps, told]))


def _steps(job: Job, ranks: int) -> list[list[Any]]:
    """Of each rank, what each step was given."""
    run_ranks(ranks, _run, job)
    return [json.loads(Path(job.folder, f"{job.name}-{rank}").read_text())[0] for rank in range(ranks)]


def _told(job: Job) -> dict[str, str]:
    told: dict[str, str] = json.loads(Path(job.folder, f"{job.name}-0").read_text())[1]
    return told


def _together(steps: list[list[Any]]) -> list[list[int]]:
    """The global batch of each step."""
    return [sorted(flat(step[0] for step in ranks)) for ranks in zip(*steps, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers"), [("distributed", 0), ("distributed", 2), ("in order", 0)])
def test_four_ranks_of_8_go_on_as_two_of_16_and_one_of_32_with_the_same_global_batches(
    tmp_path: Path, kind: str, workers: int
) -> None:
    def job(name: str, batch: int, stop: int | None = None) -> Job:
        folder = tmp_path / ("straight" if name == "straight" else "run")
        folder.mkdir(exist_ok=True)
        return Job(str(folder), name, batch, stop, kind, workers)

    straight = _together(_steps(job("straight", 8), 4))
    seen = _together(_steps(job("four", 8, 2), 4))
    seen += _together(_steps(job("two", 16, 2), 2))
    seen += _together(_steps(job("one", 32), 1))
    assert seen == straight
    told = _told(job("two", 16, 2))
    assert "4 x 8 samples in a batch before, 2 x 16 now: the same 32 samples in each step" in told["loader.0.data"]


@pytest.mark.slow
def test_two_ranks_then_three_then_one_see_every_sample_of_the_epoch_once(tmp_path: Path) -> None:
    """The second change in an epoch must not forget the first."""
    seen: list[list[int]] = []
    for name, ranks, batch, stop in (("two", 2, 4, 3), ("three", 3, 5, 2), ("one", 1, 7, None)):
        seen += _together(_steps(Job(str(tmp_path), name, batch, stop, size=90), ranks))
    assert [len(batch) for batch in seen] == [8] * 3 + [15] * 2 + [7] * 5 + [1]
    assert Counter(flat(seen)) == Counter(range(90))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_change_of_ranks_what_fills_no_batch_is_dropped_if_it_shall_be(tmp_path: Path, workers: int) -> None:
    first = Job(str(tmp_path), "two", 4, 3, size=50, drop_last=True, workers=workers)
    second = Job(str(tmp_path), "three", 3, size=50, drop_last=True, workers=workers)
    seen = _together(_steps(first, 2)) + _together(_steps(second, 3))
    assert [len(batch) for batch in seen] == [8] * 3 + [9] * 2  # of 26 that were left, 8 fill no step
    assert max(Counter(flat(seen)).values()) == 1


@pytest.mark.slow
def test_a_change_of_ranks_without_drop_last_fills_up_with_samples_that_are_left(tmp_path: Path) -> None:
    seen = _together(_steps(Job(str(tmp_path), "two", 4, 3, size=50), 2))
    seen += _together(_steps(Job(str(tmp_path), "three", 3, size=50), 3))
    assert set(flat(seen)) == set(range(50))
    assert len(flat(seen)) == 51


@pytest.mark.slow
def test_ranks_that_read_the_same_data_count_once(tmp_path: Path) -> None:
    """Tensor parallelism: of four ranks two and two read the same, and two replicas share the epoch."""
    seen = _together(_steps(Job(str(tmp_path), "four", 4, 3, size=64, apart=2), 4))
    seen += _together(_steps(Job(str(tmp_path), "two", 8, size=64, apart=2), 2))
    assert Counter(flat(seen)) == Counter(dict.fromkeys(range(64), 2))


def _draws(steps: list[list[Any]]) -> list[float]:
    """What was drawn first for each batch where it was read."""
    return [step[1][0] for step in steps]


@pytest.mark.slow
def test_workers_draw_other_numbers_for_every_batch_and_on_every_rank(tmp_path: Path) -> None:
    """Also where all ranks are seeded alike, also after a change, and not what the epoch's first batches had drawn."""
    two = _steps(Job(str(tmp_path), "two", 4, 3, workers=2, size=96, alike=True), 2)
    four = _steps(Job(str(tmp_path), "four", 2, workers=2, size=96, alike=True), 4)
    draws = flat(_draws(rank) for rank in (*two, *four))
    assert len(draws) == 2 * 3 + 4 * 9
    assert len(set(draws)) == len(draws)


@pytest.mark.slow
def test_every_new_rank_has_generators_of_its_own(tmp_path: Path) -> None:
    _steps(Job(str(tmp_path), "two", 4, 3, size=96, alike=True), 2)
    four = _steps(Job(str(tmp_path), "four", 2, size=96, alike=True), 4)
    assert len({rank[0][2] for rank in four[1:]}) == 3  # ranks 0 and 1 were seeded alike, and have stayed so
    assert len({rank[0][1][0] for rank in four[1:]}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("backwards", "does not give rank r of R the samples r, r+R, ..."),
        ("dealt", "divides the samples among ranks by a rule of its own"),
        ("copied", "does not iterate over its sampler"),
    ],
)
def test_what_cannot_be_followed_to_another_number_of_ranks_is_named(tmp_path: Path, kind: str, why: str) -> None:
    _steps(Job(str(tmp_path), "two", 4, 3, kind, size=48), 2)
    job = Job(str(tmp_path), "three", 4, None, kind, size=48)
    run_ranks(3, _run, job)
    assert why in " ".join(_told(job).values())


def test_a_sampler_of_which_one_rank_had_all_and_each_of_two_has_a_half_is_named() -> None:
    half = DataLoader(Numbers(48), 4, sampler=range(0, 48, 2))
    position = Position(batches=2, samples=8, dataset_size=48, sampler_size=48)
    told = Repartition(half, reads=0, rank=0, world_size=2).carry_over(position)
    assert "divides the samples among ranks by a rule of its own" in told["data"]


class Recorded(Sampler[list[int]]):
    """Batches as a list has them."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


@pytest.mark.parametrize("same", [True, False])
def test_the_digest_that_an_earlier_version_saved_is_compared_too(same: bool) -> None:
    from xxhash import xxh3_64

    from ckpt.data.sampling import EpochPlan

    batches = [[3, 1], [2, 0], [5, 4]]
    digest = xxh3_64()
    for batch in batches[:2]:
        digest.update(repr(batch if same else batch[::-1]).encode())
    plan = EpochPlan(lambda: None, lambda: None, skip=2, expected_batches=digest.hexdigest())
    assert list(plan.follow(Recorded(batches))) == [[5, 4]]
    assert ("a different order" in plan.problem("DataLoader")) is not same


@pytest.mark.slow
def test_a_position_of_an_earlier_version_is_gone_on_from(anywhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a digest of whole batches, and does not say how large they were."""
    from ckpt.data import tracked_loader

    own = tracked_loader.TrackedLoader.state
    new = ("indices", "before", "layout", "sampler_size", "contents")

    def state(self: tracked_loader.TrackedLoader) -> dict[str, Any]:
        return {key: value for key, value in own(self).items() if key not in new}

    root = f"{anywhere}/run"
    torch.manual_seed(1)
    with monkeypatch.context() as patch:
        patch.setattr(tracked_loader.TrackedLoader, "state", state)
        seen = _go(root, LOADERS["shuffle"](8), stop=3)[0]
        seen += _go(root, LOADERS["shuffle"](8), stop=1)[0]
    second, told = _go(root, LOADERS["shuffle"](16), stop=1)
    assert "8 samples in a batch before, 16 now" in told["loader.0.data"]
    assert Counter(flat(seen + second + _go(root, LOADERS["shuffle"](16))[0])) == Counter(range(SIZE))


def test_an_order_is_compared_with_what_was_consumed_where_that_is_known_and_not_padded() -> None:
    order, layout = [3, 1, 2, 0], Layout(replicas=2, replica=1)
    digest = xxhash.xxh3_64_hexdigest(index_bytes([1, 0]))
    assert ConsumedSamples(layout, 0, 2, digest).agrees(order)
    assert not ConsumedSamples(layout, 0, 2, digest).agrees([3, 2, 1, 0])
    assert ConsumedSamples(layout, 0, 2, "").agrees(order)
    assert ConsumedSamples(layout, 0, 3, digest).agrees(order)  # the third was a sample once more

"""Streams that are replayed after a resume: no sample is lost, or the restored record says that some are."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt
from ckpt.compat.datasets import loses_samples
from ckpt.data.batch_digest import Contents, extract

SIZE = 80


def _lines(folder: Path, shards: int = 4) -> Any:
    """A streaming dataset of Hugging Face over files."""
    datasets = pytest.importorskip("datasets")
    files = []
    for shard in range(shards):
        path = folder / f"{shard}.jsonl"
        path.write_text("".join(json.dumps({"index": index}) + "\n" for index in range(shard, SIZE, shards)))
        files.append(str(path))
    made = datasets.load_dataset(
        "json", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache")
    )
    return made.with_format("torch")


def _go(root: str, loader: Iterable[Any], stop: int | None = None, epochs: int = 1) -> tuple[list[int], dict[str, str]]:
    """Train, or until a save after so many batches; the samples that were seen, and what was approximated."""
    seen: list[int] = []
    with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
        for _ in manager.epochs(epochs):
            for batch in manager.batches(loader):
                seen += (batch["index"] if isinstance(batch, dict) else batch).tolist()
                torch.rand(3), random.random(), np.random.rand()  # as training does
                manager.step()
                if manager.progress.step == stop:
                    manager.save_state()
                    return seen, {}
        return seen, dict(manager.restored.approximated) if manager.restored else {}


def _stateful(stream: Any) -> Iterable[Any]:
    loader: Iterable[Any] = StatefulDataLoader(stream, batch_size=5)
    return loader


@pytest.mark.parametrize("stop", [4, 20])
@pytest.mark.parametrize("make", [lambda stream: DataLoader(stream, 5), _stateful])
def test_a_shuffled_stream_of_hugging_face_loses_no_samples(
    tmp_path: Path, anywhere: str, make: Callable[[Any], Iterable[Any]], stop: int
) -> None:
    """Its state_dict leaves out what is in the shuffle buffer, so that those samples of the epoch were never seen."""

    def stream() -> Any:
        return _lines(tmp_path).shuffle(seed=7, buffer_size=24)

    straight, _ = _go(f"{anywhere}/straight", make(stream()), epochs=2)
    assert sorted(straight[:SIZE]) == list(range(SIZE))
    before, _ = _go(f"{anywhere}/run", make(stream()), stop, epochs=2)
    after, told = _go(f"{anywhere}/run", make(stream()), epochs=2)
    assert before + after == straight
    assert told == {}


def test_a_stream_of_hugging_face_that_is_not_shuffled_goes_on_by_its_own_state(
    tmp_path: Path, anywhere: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before, _ = _go(f"{anywhere}/run", DataLoader(_lines(tmp_path), 5), 4)
    after, told = _go(f"{anywhere}/run", DataLoader(_lines(tmp_path), 5))
    assert sorted(before + after) == list(range(SIZE))
    assert told == {}
    assert "replaying" not in capfd.readouterr().err


def test_where_samples_would_be_lost_is_found_wherever_it_is_in_the_stream(tmp_path: Path) -> None:
    plain = _lines(tmp_path)
    shuffled = plain.shuffle(seed=1, buffer_size=10)
    assert not loses_samples(plain)
    assert loses_samples(shuffled.map(lambda sample: sample).filter(lambda sample: True).take(30))
    assert loses_samples(pytest.importorskip("datasets").interleave_datasets([plain, shuffled]))
    assert not loses_samples(plain.map(lambda sample: sample, batched=True))
    assert loses_samples(plain.map(lambda sample: sample, batched=True).with_format("arrow"))
    assert not loses_samples(plain.map(lambda sample: sample).with_format("arrow"))


class Counting(IterableDataset[Any]):
    """Neither it nor its iterator has a `state_dict`: torchdata's loader saves a number alone."""

    def __iter__(self) -> Iterator[Any]:
        yield from range(SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_loader_of_a_stream_without_state_is_resumed_twice_and_loses_nothing(
    anywhere: str, workers: int
) -> None:
    """torchdata counts what it reads again twice, so that the second resume skipped samples."""
    seen: list[int] = []
    for stop in (3, 6, None):
        loader = StatefulDataLoader(
            Counting(), batch_size=5, num_workers=workers, multiprocessing_context="fork" if workers else None
        )
        more, told = _go(f"{anywhere}/run", loader, stop)
        seen += more
        assert told == {}
    assert seen == list(range(SIZE))


class Entropic(IterableDataset[Any]):
    """Shuffled by the entropy of the operating system, as webdataset does it."""

    def __iter__(self) -> Iterator[Any]:
        order = list(range(SIZE))
        random.Random(os.urandom(8)).shuffle(order)
        return iter(order)


class Fewer(IterableDataset[Any]):
    size = SIZE

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.size))


class Lazy(IterableDataset[Any]):
    """Draws its order sample by sample from a generator that training draws from, too."""

    def __iter__(self) -> Iterator[Any]:
        left = list(range(SIZE))
        while left:
            yield left.pop(random.randrange(len(left)))


class Noisy(IterableDataset[Any]):
    """In the same order every time, with an augmentation from the generator that training draws from."""

    def __iter__(self) -> Iterator[Any]:
        return iter({"index": index, "noise": torch.rand(4), "mask": torch.ones(4)} for index in range(SIZE))


class Counted(IterableDataset[Any]):
    """Shuffled by the operating system, and with a number that says nothing about the sample."""

    def __iter__(self) -> Iterator[Any]:
        return ({"index": index, "number": number} for number, index in enumerate(Entropic()))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Entropic, Counted])
def test_a_stream_shuffled_by_the_operating_system_is_named(
    anywhere: str, kind: type[IterableDataset[Any]], workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """It sees 60 of 80 samples in the epoch, and nothing said so."""
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    _go(f"{anywhere}/run", DataLoader(kind(), 5, **options), 8)
    _, told = _go(f"{anywhere}/run", DataLoader(kind(), 5, **options))
    assert "different data in its replay than before the save" in told["data order"]
    assert "state_dict" in told["data order"]
    assert "different data in its replay than before the save" in capfd.readouterr().err


def test_a_stream_of_hugging_face_without_a_seed_is_named(tmp_path: Path, anywhere: str) -> None:
    _go(f"{anywhere}/run", DataLoader(_lines(tmp_path).shuffle(buffer_size=24), 5), 4)
    _, told = _go(f"{anywhere}/run", DataLoader(_lines(tmp_path).shuffle(buffer_size=24), 5))
    assert "yielded different data" in told["data order"]


def test_a_stream_that_draws_its_order_while_training_draws_is_named(anywhere: str) -> None:
    _go(f"{anywhere}/run", DataLoader(Lazy(), 5), 8)
    _, told = _go(f"{anywhere}/run", DataLoader(Lazy(), 5))
    assert "a global generator" in told["data order"]


def test_a_stream_that_only_draws_augmentations_is_not_suspected(anywhere: str) -> None:
    before, _ = _go(f"{anywhere}/run", DataLoader(Noisy(), 5), 8)
    after, told = _go(f"{anywhere}/run", DataLoader(Noisy(), 5))
    assert before + after == list(range(SIZE))
    assert told == {}


def test_a_stream_that_has_become_shorter_is_named(anywhere: str) -> None:
    _go(f"{anywhere}/run", DataLoader(Fewer(), 5), 8)
    shorter = Fewer()
    shorter.size = 30
    _, told = _go(f"{anywhere}/run", DataLoader(shorter, 5))
    assert "ended after 6 of the 8 batches" in told["data order"]


def test_a_shuffled_list_of_batches_is_named(anywhere: str) -> None:
    batches = [torch.arange(5) + 5 * number for number in range(16)]
    _go(f"{anywhere}/run", batches, 8)
    _, told = _go(f"{anywhere}/run", batches[::-1])
    assert "yielded different data" in told["data order"]


def test_a_stream_shuffled_by_the_operating_system_is_named_with_batches_of_another_size_too(anywhere: str) -> None:
    _go(f"{anywhere}/run", DataLoader(Entropic(), 5), 8)
    _, told = _go(f"{anywhere}/run", DataLoader(Entropic(), 10))
    assert "yielded different data" in told["data order"]
    _go(f"{anywhere}/other", DataLoader(Fewer(), 5), 8)
    seen, told = _go(f"{anywhere}/other", DataLoader(Fewer(), 10))
    assert seen == list(range(40, SIZE))
    assert set(told) == {"loader.0.data"}


def test_what_lies_on_a_device_cannot_be_compared_and_that_is_said(anywhere: str) -> None:
    def batches() -> Any:
        return [{"x": torch.empty(4, 3, device="meta")} for _ in range(6)]

    with ckpt.StateManager(f"{anywhere}/run", model=nn.Linear(1, 1)) as manager:
        for _ in manager.batches(batches()):
            manager.step()
            if manager.progress.step == 3:
                manager.save_state()
                break
    with ckpt.StateManager(f"{anywhere}/run", model=nn.Linear(1, 1)) as manager:
        assert len(list(manager.batches(batches()))) == 3
        assert manager.restored is not None
        assert "replayed without a check" in manager.restored.approximated["data order"]


def test_of_a_batch_a_few_bytes_are_taken_of_every_sample() -> None:
    images = torch.rand(6, 3, 64, 64)
    for batch in (images, images.to(memory_format=torch.channels_last), images.numpy()):
        ((_, data),) = extract(batch)
        assert len(data) == 6 * 8 * 4 * 4
    for number in range(6):
        other = images.clone()
        other[number] += 1
        assert extract(other) != extract(images)
    halves = [extract(images[:2])[0][1], extract(images[2:])[0][1]]
    assert b"".join(halves) == extract(images)[0][1]
    nested = {"text": ["a", "b"], "deep": [torch.arange(2), (torch.ones(2), torch.zeros(())), None], "id": [1, 2]}
    assert [path for path, _ in extract(nested)] == [
        "['text']",
        "['deep'][0]",
        "['deep'][1][0]",
        "['deep'][1][1]",
        "['id']",
    ]


class Resumable(IterableDataset[Any]):
    """Numbers, with a state that says where it is."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < SIZE:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class OfRank(StatefulDataLoader):  # type: ignore[misc]
    """Its state is that of one data-parallel rank, as torchtitan's is: it ignores that of another."""

    def __init__(self, rank: int) -> None:
        self._rank_id = f"dp_rank_{rank}"
        super().__init__(Resumable(), 4)

    def state_dict(self) -> dict[str, Any]:
        return {self._rank_id: super().state_dict(), "world_size": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._rank_id in state:
            super().load_state_dict(state[self._rank_id])


def test_the_position_of_another_data_parallel_rank_is_refused(anywhere: str) -> None:
    def first_batches(rank: int, count: int) -> list[Any]:
        model, loader = nn.Linear(1, 1), OfRank(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        with ckpt.StateManager(anywhere, model=model, optimizer=optimizer, dataloader=loader) as manager:
            manager.resume()
            for batch in loader:
                seen.append(batch.tolist())
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                manager.step()
                if len(seen) == count:
                    manager.save_state(wait=True)
                    break
        return seen

    first = first_batches(0, 2)
    with pytest.raises(
        ckpt.StateError, match="reads the data of dp_rank_1, but this rank saved the position of dp_rank_0"
    ):
        first_batches(1, 2)
    assert first + first_batches(0, 1) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]


def test_what_is_the_same_in_every_batch_proves_nothing() -> None:
    contents = Contents()
    for number in range(2):
        contents.add([("mask", b"ones"), ("sample", b"%d" % number)])
    assert set(contents.digests()) == {"sample"}

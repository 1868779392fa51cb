"""Loaders that Accelerate has prepared resume with other ranks and batch sizes: with the same global batches."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from ckpt.integrations.accelerate import attach
from tests.data.test_repartition import flat
from tests.helpers.accelerated import build, new_accelerator, reseed, train_on
from tests.helpers.processes import run_ranks

pytestmark = pytest.mark.slow

SAMPLES = 64
SEEDABLE = {"use_seedable_sampler": True}


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter((index, 0.0) for index in range(SAMPLES))


def _shuffled(batch: int) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch, shuffle=True)


def _workers(batch: int) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch, shuffle=True, num_workers=2, multiprocessing_context="fork")


def _stream(batch: int) -> DataLoader[Any]:
    return DataLoader(Stream(), batch)


class Backwards(BatchSampler):
    """A batch sampler of the user's own: no order of samples says what its batches are."""

    def __iter__(self) -> Iterator[list[int]]:
        return reversed(list(super().__iter__()))


def _own_batches(batch: int) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_sampler=Backwards(SequentialSampler(range(SAMPLES)), batch, drop_last=False))


KINDS: dict[str, tuple[dict[str, Any], Callable[[int], DataLoader[Any]]]] = {
    "sharded": (SEEDABLE, _shuffled),
    "workers": (SEEDABLE, _workers),
    "split": ({**SEEDABLE, "split_batches": True}, _shuffled),
    "dispatched": ({**SEEDABLE, "dispatch_batches": True}, _shuffled),
    "dispatched and split": ({**SEEDABLE, "dispatch_batches": True, "split_batches": True}, _shuffled),
    "a stream": ({"dispatch_batches": False}, _stream),
    "a stream, dispatched": ({"dispatch_batches": True}, _stream),
}
OF_ANY_SIZE = tuple(KINDS)
KINDS["own batches, split"] = ({"split_batches": True}, _own_batches)


def _run(
    rank: int, folder: str, kinds: tuple[str, ...], name: str, run: int, world_size: int, window: int, stop: int | None
) -> None:
    """An epoch with these kinds of loader, `window` samples in a step, or until a save after so many steps."""
    for kind in kinds:
        options, make = KINDS[kind]
        reseed(0, run)  # all ranks alike, as Accelerate wants it, and every run otherwise
        accelerator = new_accelerator(rank=rank, world_size=world_size, loaders=options)
        batch = window if "split" in kind else window // world_size
        loader, *parts = accelerator.prepare(make(batch), *build())
        steps: list[list[int]] = []
        with attach(accelerator, f"{folder}/{kind}") as manager:
            restored = manager.resume()
            for given in loader:
                train_on(given, accelerator, *parts)
                steps.append(given[0].tolist())
                if len(steps) == stop:
                    accelerator.save_state()
                    break
            told = dict(restored.approximated) if restored else {}
        Path(folder, f"{name}-{kind}-{rank}").write_text(json.dumps([steps, told]))


def _together(folder: Path, name: str, kind: str, ranks: int) -> tuple[list[list[int]], dict[str, str]]:
    found = [json.loads((folder / f"{name}-{kind}-{rank}").read_text()) for rank in range(ranks)]
    steps = [sorted(flat(ranks)) for ranks in zip(*(steps for steps, _ in found), strict=True)]
    return steps, found[0][1]


def _epoch(
    folder: Path, *runs: tuple[str, int, int, int | None], kinds: tuple[str, ...] = OF_ANY_SIZE
) -> dict[str, list[list[int]]]:
    folder.mkdir()
    for number, (name, ranks, window, stop) in enumerate(runs):
        assert run_ranks(ranks, _run, str(folder), kinds, name, number, ranks, window, stop) == [0] * ranks
    return {
        kind: [batch for name, ranks, _, _ in runs for batch in _together(folder, name, kind, ranks)[0]]
        for kind in kinds
    }


def test_prepared_loaders_go_on_with_the_same_global_batches_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    straight = _epoch(tmp_path / "straight", ("straight", 2, 8, None), kinds=tuple(KINDS))
    seen = _epoch(tmp_path / "run", ("two", 2, 8, 2), ("one", 1, 8, 3), ("again", 2, 8, None), kinds=tuple(KINDS))
    assert seen == straight
    for kind in ("sharded", "split", "workers"):
        told = _together(tmp_path / "run", "one", kind, 1)[1]
        assert "the same 8 samples in each step, from sample 16 of the epoch on" in told["dataloader.0.data"], kind


def test_prepared_loaders_go_on_with_batches_of_another_size(tmp_path: Path) -> None:
    seen = _epoch(tmp_path / "run", ("first", 2, 8, 2), ("second", 2, 16, 1), ("third", 1, 4, None))
    for kind, batches in seen.items():
        assert [len(batch) for batch in batches] == [8, 8, 16, *[4] * 8], kind
        assert Counter(flat(batches)) == Counter(range(SAMPLES)), kind


@pytest.mark.parametrize("kind", ["a stream"])
def test_what_a_stream_sees_again_is_named(tmp_path: Path, kind: str) -> None:
    seen = _epoch(tmp_path / "run", ("first", 1, 8, 3), ("second", 1, 16, None), kinds=(kind,))
    assert flat(seen[kind]) == [*range(24), *range(16, SAMPLES)]
    told = _together(tmp_path / "run", "second", kind, 1)[1]
    assert "The last 8 of them are seen again" in told["dataloader.0.data"]

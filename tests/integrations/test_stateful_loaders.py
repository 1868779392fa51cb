"""Accelerate with `use_stateful_dataloader=True`: the `dl_state_dict.bin` of its folders, taken over in mid-epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import ckpt
from ckpt.integrations.accelerate import attach
from tests.helpers.accelerated import build, new_accelerator, reseed, train_on
from tests.helpers.processes import run_ranks
from tests.helpers.training import exact

pytestmark = pytest.mark.slow

EPOCHS, SAMPLES = 2, 22


class Numbers(Dataset[Any]):
    """Without draws of their own: what Accelerate saves says nothing of those that were read ahead."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, index / SAMPLES


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (Numbers()[index] for index in range(SAMPLES))


class StatefulStream(Stream):
    """Says where it is, with a tensor."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < SAMPLES:
            self.position += 1
            yield Numbers()[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": torch.tensor(self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int(state["position"])


Kind = tuple[dict[str, Any], Callable[[], DataLoader[Any]]]
KINDS: dict[str, Kind] = {
    "in order": ({}, lambda: DataLoader(Numbers(), 4)),
    "seedable": ({"use_seedable_sampler": True}, lambda: DataLoader(Numbers(), 4, shuffle=True)),
    "workers": ({}, lambda: DataLoader(Numbers(), 4, num_workers=1, multiprocessing_context="fork")),
    "a stream": ({"dispatch_batches": False}, lambda: DataLoader(Stream(), 4)),
    "a stateful stream": ({"dispatch_batches": False}, lambda: DataLoader(StatefulStream(), 4)),
    "dispatched": ({"dispatch_batches": True}, lambda: DataLoader(Numbers(), 4)),
    "drawn": ({}, lambda: DataLoader(Numbers(), 4, shuffle=True)),
}


def _prepared(kind: str, run: int, rank: int = 0, world_size: int = 1) -> tuple[Any, Any, list[Any]]:
    reseed(rank, run)
    options, make = KINDS[kind]
    loaders = {"use_stateful_dataloader": True, "data_seed": 3, **options}
    accelerator = new_accelerator(rank=rank, world_size=world_size, loaders=loaders)
    loader, *parts = accelerator.prepare(make(), *build())
    return accelerator, loader, parts


def _trained(accelerator: Any, loader: Any, parts: list[Any], epochs: range, stop: int | None = None) -> list[Any]:
    """What was seen, until so many batches are done."""
    seen: list[Any] = []
    for _ in epochs:
        for batch in loader:
            seen.append([batch[0].tolist(), train_on(batch, accelerator, *parts).hex()])
            if len(seen) == stop:
                return seen
    return [*seen, exact([part.state_dict() for part in parts])]


def _taken_over(rank: int, folder: str, kind: str, world_size: int, stop: int) -> None:
    straight = _trained(*_prepared(kind, 0, rank, world_size), range(EPOCHS))
    accelerator, loader, parts = _prepared(kind, 0, rank, world_size)
    seen = _trained(accelerator, loader, parts, range(EPOCHS), stop)
    accelerator.save_state(f"{folder}/step_{stop}")  # Accelerate's own
    accelerator.wait_for_everyone()
    for turn in range(2):  # from Accelerate's folder, then, two batches later, from ckpt's
        accelerator, loader, parts = _prepared(kind, 1 + turn, rank, world_size)
        with attach(accelerator, f"{folder}/ours") as manager:
            accelerator.load_state(None if turn else f"{folder}/step_{stop}")
            assert manager.restored is not None
            left = {"dataloader.0"} if kind in ("seedable", "a stream") and not turn else set()
            assert manager.restored.approximated.keys() - {"progress"} == left
            assert manager.restored.skipped == {}
            assert f"batch {stop + 2 * turn} of dataloader.0" in str(manager.restored)
            more = _trained(accelerator, loader, parts, range(EPOCHS), None if turn else 2)
            if not turn:
                assert more == straight[stop : stop + 2]
                accelerator.save_state("later")
            else:
                assert seen + straight[stop : stop + 2] + more == straight


@pytest.mark.parametrize("kind", ["in order", "seedable", "workers", "a stream", "a stateful stream"])
def test_a_loader_continues_exactly_where_accelerate_saved_it(tmp_path: Path, kind: str) -> None:
    assert run_ranks(1, _taken_over, str(tmp_path), kind, 1, 2) == [0]


def test_two_ranks_continue_exactly_where_accelerate_saved_them(tmp_path: Path) -> None:
    assert run_ranks(2, _taken_over, str(tmp_path), "in order", 2, 1) == [0, 0]


def test_at_the_end_of_an_epoch_the_next_one_begins_as_with_accelerate_itself(tmp_path: Path) -> None:
    accelerator, loader, parts = _prepared("in order", 0)
    _trained(accelerator, loader, parts, range(1), 6)
    accelerator.save_state(str(tmp_path / "step_6"))
    accelerator, loader, _ = _prepared("in order", 1)
    with attach(accelerator, tmp_path) as manager:
        assert manager.resume() is not None
        assert len(list(loader)) == 6


def test_an_order_that_was_drawn_from_a_generator_is_named_and_as_many_batches_are_skipped(tmp_path: Path) -> None:
    accelerator, loader, parts = _prepared("drawn", 0)
    _trained(accelerator, loader, parts, range(1), 2)
    accelerator.save_state(str(tmp_path / "step_2"))
    accelerator, loader, _ = _prepared("drawn", 1)
    with attach(accelerator, tmp_path) as manager:
        restored = manager.resume()
        assert restored is not None
        assert (
            "2 batches are skipped, in an order that RandomSampler draws again" in restored.approximated["dataloader.0"]
        )
        assert accelerator.skip_first_batches(loader, 2) is loader
        assert len(list(loader)) == 4


def _other_ranks(rank: int, folder: str) -> None:
    accelerator, loader, _ = _prepared("in order", 1, rank, 2)
    with attach(accelerator, f"{folder}/ours") as manager:
        accelerator.load_state(f"{folder}/step_2")
        assert manager.restored is not None
        why = manager.restored.approximated["dataloader.0"]
        assert "1 ranks saved it, and 2 load it" in why
        assert "skip_first_batches(loader, 2)" in why
        assert len(list(loader)) == 3


def _dispatched(rank: int, folder: str) -> None:
    accelerator, loader, parts = _prepared("dispatched", 0, rank, 2)
    _trained(accelerator, loader, parts, range(1), 2)
    accelerator.save_state(f"{folder}/step_2")
    accelerator.wait_for_everyone()
    accelerator, loader, _ = _prepared("dispatched", 1, rank, 2)
    with attach(accelerator, f"{folder}/ours") as manager:
        accelerator.load_state(f"{folder}/step_2")
        assert manager.restored is not None
        assert "rank 0 reads for all ranks" in manager.restored.approximated["dataloader.0"]


def test_what_other_ranks_saved_or_one_reads_for_all_begins_anew_and_is_named(tmp_path: Path) -> None:
    accelerator, loader, parts = _prepared("in order", 0)
    _trained(accelerator, loader, parts, range(1), 2)
    accelerator.save_state(str(tmp_path / "one" / "step_2"))
    assert run_ranks(2, _other_ranks, str(tmp_path / "one")) == [0, 0]
    assert run_ranks(2, _dispatched, str(tmp_path / "two")) == [0, 0]


def test_more_batches_than_the_loader_has_are_named_and_nothing_is_skipped(tmp_path: Path) -> None:
    accelerator, loader, parts = _prepared("in order", 0)
    _trained(accelerator, loader, parts, range(1), 2)
    accelerator.save_state(str(tmp_path / "step_2"))
    path = tmp_path / "step_2" / "dl_state_dict.bin"
    torch.save(torch.load(path, weights_only=True) | {"_num_yielded": 7}, path)
    accelerator, loader, _ = _prepared("in order", 1)
    with attach(accelerator, tmp_path) as manager:
        restored = manager.resume()
        assert restored is not None
        assert "7 batches were done, and the loader has 6" in restored.approximated["dataloader.0"]
        assert len(list(loader)) == 6


def test_a_state_that_is_none_of_a_loader_is_refused(tmp_path: Path) -> None:
    accelerator, *_ = _prepared("in order", 0)
    accelerator.save_state(str(tmp_path / "step_2"))
    torch.save([1], tmp_path / "step_2" / "dl_state_dict.bin")
    with attach(accelerator, tmp_path) as manager, pytest.raises(ckpt.DamagedError, match=r"step_2: dataloader\.0"):
        manager.resume()

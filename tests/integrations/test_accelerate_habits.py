"""Accelerate: what scripts, notebooks and Accelerate's own tests do with an accelerator, attached."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from torch.utils.data import DataLoader

import ckpt
from ckpt.integrations.accelerate import attach
from tests.helpers.accelerated import Numbers, build, new_accelerator, reseed


def _prepared(accelerator: Any, **options: Any) -> tuple[Any, list[Any]]:
    """A prepared loader, and a prepared model, optimizer and scheduler."""
    loader, *parts = accelerator.prepare(DataLoader(Numbers(), batch_size=4, shuffle=True, **options), *build())
    return loader, parts


@pytest.mark.parametrize("background", [True, False])
def test_a_cell_that_is_run_twice_takes_the_root_from_the_manager_that_nobody_uses_any_more(
    tmp_path: Path, background: bool
) -> None:
    def cell(namespace: dict[str, Any]) -> None:
        namespace["accelerator"] = new_accelerator()
        namespace["loader"], namespace["parts"] = _prepared(namespace["accelerator"])
        options = ckpt.SaveOptions(background=background)
        namespace["manager"] = attach(namespace["accelerator"], tmp_path, saving=options)
        namespace["manager"].resume()
        namespace["accelerator"].save_state(f"step_{len(ckpt.list_checkpoints(tmp_path))}")

    namespace: dict[str, Any] = {}
    for _ in range(3):
        cell(namespace)
    namespace["manager"].close()
    assert {found.name for found in ckpt.list_checkpoints(tmp_path)} == {"step_0", "step_1", "step_2"}


def test_a_manager_that_is_still_in_use_keeps_its_root_and_the_other_is_told_how_to_take_it(tmp_path: Path) -> None:
    first, second = new_accelerator(), new_accelerator()
    _prepared(first)
    _prepared(second)
    with attach(first, tmp_path) as manager:
        first.save_state("once")
        manager.wait()
        later = attach(second, tmp_path)
        second.load_state("once")
        with pytest.raises(ckpt.LockedError, match=r"a StateManager of this process: close\(\) it first"):
            second.save_state("twice") and later.wait()
    with later:
        second.save_state("twice")
    assert {found.name for found in ckpt.list_checkpoints(tmp_path)} == {"once", "twice"}


def test_an_attached_accelerator_is_pickled_and_its_copy_is_one_of_accelerates_own(tmp_path: Path) -> None:
    accelerator = new_accelerator()
    loader = accelerator.prepare(DataLoader(range(8), batch_size=2))  # type: ignore[arg-type]
    with attach(accelerator, tmp_path):
        other = pickle.loads(pickle.dumps(accelerator))
        assert type(other) is type(accelerator)
        assert other.save_state.__func__ is Accelerator.save_state
        assert other.end_training.__self__ is other
        assert [batch.tolist() for batch in other._dataloaders[0]] == [batch.tolist() for batch in loader]
        accelerator.save_state("ours")
        with attach(other, tmp_path / "other"):
            other.save_state("its")
    assert [found.name for found in ckpt.list_checkpoints(tmp_path)] == ["ours"]
    assert [found.name for found in ckpt.list_checkpoints(tmp_path / "other")] == ["its"]


def test_a_loader_alone_is_saved_and_continues_where_it_stopped(tmp_path: Path) -> None:
    def run(stop: int) -> list[list[int]]:
        reseed(0, 0)
        accelerator = new_accelerator()
        loader = accelerator.prepare(DataLoader(Numbers(), batch_size=4, shuffle=True))
        seen = []
        with attach(accelerator, tmp_path / f"root-{stop < 9}") as manager:
            manager.resume()
            for batch in loader:
                seen.append([tensor.tolist() for tensor in batch])
                if len(seen) == stop:
                    accelerator.save_state()
                    break
        return seen

    straight = run(9)
    assert run(2) + run(8) == straight
    assert len(straight) == 6

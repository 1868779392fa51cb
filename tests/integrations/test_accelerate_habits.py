"""Accelerate: what scripts, notebooks and Accelerate's own tests do with an accelerator, attached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import ckpt
from ckpt.integrations.accelerate import attach
from tests.helpers.accelerated import Numbers, build, new_accelerator


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

"""Hosts with roots of their own, under paths of their own; and managers that not every rank has built."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt
from ckpt.ranks import hosts
from tests.helpers.processes import run_ranks

pytestmark = pytest.mark.slow


def _train_apart(rank: int, folder: str, names: list[str], shared: bool | None) -> None:
    hosts.host_name = lambda: f"host-{rank}"
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    root = Path(folder, names[rank])
    for run in range(2):
        model = nn.Linear(2, 2)
        with ckpt.StateManager(root, model=model, ranks=ckpt.RankOptions(shared=shared, timeout=20)) as manager:
            restored = manager.resume()
            assert (restored is not None) == (run > 0)
            assert run == 0 or torch.equal(model.weight, torch.full((2, 2), 5.0))
            nn.init.constant_(model.weight, 5.0)
            nn.init.constant_(model.bias, 5.0)
            manager.save_state(f"run-{run}", wait=True)


@pytest.mark.parametrize(
    ("names", "shared"),
    [
        (["nvme/node0/x", "nvme/node1/x"], False),
        (["nvme/node0", "nvme/node1"], False),
        (["nvme/node0/x", "nvme/node1/x"], None),
    ],
)
def test_roots_of_hosts_with_different_paths_meet_save_and_resume(
    tmp_path: Path, names: list[str], shared: bool | None
) -> None:
    assert run_ranks(2, _train_apart, str(tmp_path), names, shared) == [0, 0]
    for name in names:
        assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(tmp_path / name)] == ["run-1", "run-0"]


def _open_unlike_names(rank: int, folder: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    with pytest.raises(
        ckpt.RanksError, match=r"rank 0 opened .*node0; rank 1 opened .*node1.*RankOptions\(shared=False\)"
    ):
        ckpt.StateManager(Path(folder, f"node{rank}"), model=nn.Linear(2, 2), ranks=ckpt.RankOptions(timeout=60))


def test_roots_of_other_names_are_refused_at_once_unless_the_user_says_that_they_belong_together(
    tmp_path: Path,
) -> None:
    assert run_ranks(2, _open_unlike_names, str(tmp_path)) == [0, 0]


def _manager(folder: str, name: str, shared: bool | None = None) -> ckpt.StateManager:
    return ckpt.StateManager(
        Path(folder, name), model=nn.Linear(2, 2), ranks=ckpt.RankOptions(shared=shared, timeout=2)
    )


def _build_in_another_order(rank: int, folder: str) -> None:
    first, second = ("x", "y") if rank == 0 else ("y", "x")
    _manager(folder, first, shared=False)
    with pytest.raises(ckpt.RanksError, match=r"rank 0 opened .*x, .*y; rank 1 opened .*y, .*x.*same order"):
        _manager(folder, second, shared=False)


def test_managers_with_roots_of_their_own_that_are_built_in_another_order_are_refused(tmp_path: Path) -> None:
    assert run_ranks(2, _build_in_another_order, str(tmp_path)) == [0, 0]


def _check_that_the_extra_one_is_named(refusal: pytest.ExceptionInfo[ckpt.RanksError], extra: str) -> None:
    text = str(refusal.value)
    assert "rank 0 opened" in text
    assert f"{extra}', '" in text.partition("rank 1 opened")[2]
    assert "Build the same managers on every rank" in text


def _build_one_more(rank: int, folder: str) -> None:
    if rank == 1:
        _manager(folder, "run").close()
    manager = _manager(folder, "run")
    with pytest.raises(ckpt.RanksError) as refusal:
        manager.resume()
    _check_that_the_extra_one_is_named(refusal, "run")


def test_an_extra_manager_on_one_rank_is_named_when_later_ones_do_not_meet(tmp_path: Path) -> None:
    assert run_ranks(2, _build_one_more, str(tmp_path)) == [0, 0]


def _build_one_more_with_roots_apart(rank: int, folder: str) -> None:
    if rank == 1:
        _manager(folder, "other", shared=False)
        with pytest.raises(ckpt.RanksError) as refusal:
            _manager(folder, "run", shared=False)
    else:
        manager = _manager(folder, "run", shared=False)
        with pytest.raises(ckpt.RanksError) as refusal:
            manager.resume()
    _check_that_the_extra_one_is_named(refusal, "other")


def test_an_extra_manager_with_a_root_of_its_own_is_named_too(tmp_path: Path) -> None:
    assert run_ranks(2, _build_one_more_with_roots_apart, str(tmp_path)) == [0, 0]


def _meet_beside_an_extra_one(rank: int, folder: str) -> None:
    if rank == 1:
        _manager(folder, "other")
    with _manager(folder, "run") as manager:
        manager.resume()
        manager.save_state("x", wait=True)


def test_an_extra_manager_of_another_root_on_one_rank_does_no_harm(tmp_path: Path) -> None:
    assert run_ranks(2, _meet_beside_an_extra_one, str(tmp_path)) == [0, 0]

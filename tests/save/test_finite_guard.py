"""Weights that are NaN or infinite are noticed before they are saved."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.ranks.consensus import SingleProcess
from ckpt.save.finite_guard import FiniteGuard, _listed, _shortened, non_finite
from tests.helpers.processes import run_ranks


def _model(value: float | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).to(dtype)
    if value is not None:
        with torch.no_grad():
            model[1].weight[1, 2] = value  # type: ignore[operator]
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found_by_name(dtype: torch.dtype, value: float) -> None:
    assert non_finite({"model": _model(value, dtype)}) == ["model: 1.weight"]
    assert non_finite({"model": _model(None, dtype)}) == []


def test_large_weights_and_odd_ones_are_no_offence() -> None:
    model = nn.Linear(300, 300).half()
    with torch.no_grad():
        model.weight.fill_(60_000.0)  # their sum of squares is infinite
    model.register_parameter("none", None)
    model.register_parameter("empty", nn.Parameter(torch.ones(0)))
    model.register_parameter("count", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False))
    assert non_finite({"model": model}) == []


def test_a_few_are_named_with_the_ranks_that_have_them() -> None:
    fine = _shortened([])
    for answers, listed in (
        ([fine, fine], ""),
        ([_shortened(["a"])], "a"),
        ([_shortened(["a", "b", "c"])], "a, b, c"),
        ([_shortened(["a", "b", "c", "d", "e"])], "a, b, c and 2 more"),
        ([fine, _shortened(["a"]), _shortened(["b"])], "a (on ranks 1, 2)"),
        ([_shortened(["a"]), _shortened(["b"])], "a"),
    ):
        assert _listed(answers) == listed


@pytest.mark.parametrize("dead", [True, False])
def test_why_a_rank_does_not_save_its_state(dead: bool) -> None:
    for on_nan, refuses in (("raise", True), ("skip", True), ("warn", False)):
        registry: Any = SimpleNamespace(models={"model": _model(math.nan if dead else None)})
        problem = FiniteGuard(SingleProcess(), registry, on_nan).problem_here()
        assert problem == ("these parameters are NaN or infinite: model: 1.weight" if refuses and dead else "")


def _manager(root: Path, model: nn.Module, on_nan: str | None, **options: Any) -> ckpt.StateManager:
    return ckpt.StateManager(root, model=model, saving=ckpt.SaveOptions(on_nan=on_nan), **options)


def test_raise_saves_nothing_and_keeps_what_is_there(tmp_path: Path) -> None:
    with _manager(tmp_path, model := _model(), "raise") as manager:
        assert manager.save_state("good") == "good"
        nn.init.constant_(model[1].bias, math.nan)  # type: ignore[index]
        with pytest.raises(ckpt.StateError, match=r"bad was not saved, .* NaN or infinite: model: 1\.bias\."):
            manager.save_state("bad")
    assert [found.name for found in ckpt.list_checkpoints(tmp_path)] == ["good"]


def test_skip_leaves_the_save_out_and_a_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with _manager(tmp_path, model := _model(), "skip", save_every=1, keep=ckpt.Keep(last=1)) as manager:
        manager.resume()
        manager.step()
        nn.init.constant_(model[1].bias, math.nan)  # type: ignore[index]
        manager.step()
    assert [found.name for found in ckpt.list_checkpoints(tmp_path)] == ["step-00000001"]
    assert "ckpt skips the save of step-00000002, because these parameters are NaN or infinite" in caplog.text


def test_warn_saves_and_none_does_not_look(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with _manager(tmp_path / "warn", _model(math.nan), "warn") as manager:
        assert manager.save_state("a") == "a"
    assert "ckpt saves a, although these parameters are NaN or infinite: model: 1.weight" in caplog.text
    caplog.clear()
    with _manager(tmp_path / "none", _model(math.nan), None) as manager:
        assert manager.save_state("a") == "a"
    assert not caplog.text


def _terminated(rank: int, root: str) -> None:
    with _manager(Path(root), _model(math.nan), "skip") as manager:
        manager.resume()
        manager.step()
        os.kill(os.getpid(), signal.SIGTERM)
        manager.step()


@pytest.mark.slow
def test_told_to_terminate_with_dead_weights_a_run_stops_without_a_save(tmp_path: Path) -> None:
    assert run_ranks(1, _terminated, str(tmp_path), dies=True) == [143]
    assert ckpt.list_checkpoints(tmp_path) == []


def test_after_an_exception_dead_weights_are_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = _manager(tmp_path, _model(math.nan), "skip", save_every=ckpt.Every(exception=True))
    manager.resume()
    manager.step()
    manager.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert "could not save step 1: these parameters are NaN or infinite: model: 1.weight" in caplog.text


def _one_rank(rank: int, root: str) -> None:
    model = nn.Linear(2, 2)
    with _manager(Path(root), model, "raise") as manager:
        manager.save_state("good", wait=True)
        if rank == 1:
            nn.init.constant_(model.bias, math.nan)
        with pytest.raises(ckpt.StateError, match=r"model: bias \(on rank 1\)\. Earlier checkpoints are kept"):
            manager.save_state("bad", wait=True)


@pytest.mark.slow
def test_dead_weights_of_one_rank_stop_the_save_of_all(tmp_path: Path) -> None:
    assert run_ranks(2, _one_rank, str(tmp_path)) == [0, 0]
    assert [found.name for found in ckpt.list_checkpoints(tmp_path)] == ["good"]

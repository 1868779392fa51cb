"""A save in the middle of an accumulation window keeps its gradients, or says that it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.state.registry import Windows
from tests.helpers.places import Place
from tests.helpers.processes import run_ranks
from tests.helpers.training import exact

WINDOW = 4


def _built(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """By hand, as in many a script: `if (step + 1) % n == 0`."""
    for step in steps:
        (model(torch.linspace(-1, 1, 6).reshape(2, 3) * (1 + step)).pow(2).mean() / WINDOW).backward()
        if (step + 1) % WINDOW == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("stop", range(3, 9))
def test_accumulation_by_hand_resumes_exactly_from_the_middle_of_a_window(root: Place, stop: int) -> None:
    model, optimizer = _built(1)
    with ckpt.StateManager(str(root), model=model, optimizer=optimizer) as manager:
        _accumulate(model, optimizer, range(stop))
        manager.save_state("middle")
        _accumulate(model, optimizer, range(stop, 12))
    assert ("gradients-00000.safetensors" in (root / "middle").files()) is (stop % WINDOW != 0)
    again, its = _built(2)
    with ckpt.StateManager(str(root), model=again, optimizer=its) as manager:
        restored = manager.load_state("middle")
        assert not restored.approximated
        assert not restored.skipped
        _accumulate(again, its, range(stop, 12))
    assert exact([again.state_dict(), its.state_dict()]) == exact([model.state_dict(), optimizer.state_dict()])


def test_a_second_save_before_the_first_step_after_a_resume_has_them_too(root: Place) -> None:
    model, optimizer = _built(1)
    with ckpt.StateManager(str(root), model=model, optimizer=optimizer) as manager:
        _accumulate(model, optimizer, range(6))
        manager.save_state("a")
    with ckpt.StateManager(str(root), model=model, optimizer=optimizer) as manager:
        manager.load_state("a")
        manager.save_state("b")
    assert "gradients-00000.safetensors" in (root / "b").files()


def _zeroed_first(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Any]) -> None:
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def _zeroed_last(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Any]) -> None:
    loss().backward()
    optimizer.step()
    optimizer.zero_grad()


def _zeroed_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Any]) -> None:
    loss().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def _with_closure(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Any]) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        found = loss()
        found.backward()
        return float(found)

    optimizer.step(closure)


def _compiled(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Any]) -> None:
    """torch.compile traces the hooks of a step too."""
    optimizer.zero_grad()
    loss().backward()
    torch.compile(optimizer.step, backend="eager")()


@pytest.mark.parametrize(
    "step",
    [_zeroed_first, _zeroed_last, _zeroed_in_place, _with_closure, pytest.param(_compiled, marks=pytest.mark.slow)],
)
def test_gradients_that_a_step_has_used_are_not_saved(root: Place, step: Callable[..., None]) -> None:
    model, optimizer = _built(1)
    with ckpt.StateManager(str(root), model=model, optimizer=optimizer, save_every=2) as manager:
        for _ in range(2):
            for batch in manager.batches([torch.ones(2, 3), torch.ones(2, 3)]):
                step(model, optimizer, lambda batch=batch: model(batch).pow(2).mean())
                with torch.no_grad():
                    model(torch.ones(1, 3))  # an evaluation
                manager.step()
    assert not [name for name in root.files() if "gradients" in name]


def test_told_not_to_keep_gradients_it_says_so_at_the_save_and_at_the_load(
    root: Place, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = _built(1)
    with (
        caplog.at_level(logging.WARNING, "ckpt"),
        ckpt.StateManager(
            str(root), model=model, optimizer=optimizer, saving=ckpt.SaveOptions(gradients=False)
        ) as manager,
    ):
        _accumulate(model, optimizer, range(6))
        manager.save_state("a")
        restored = manager.load_state("a")
    assert "in the middle of an accumulation window" in caplog.text
    assert "saving=ckpt.SaveOptions(gradients=False)" in restored.approximated["gradients"]
    assert "approximated  gradients" in str(restored)


def test_sparse_gradients_are_named_and_do_not_stop_the_save(root: Place) -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ckpt.StateManager(str(root), model=model, optimizer=optimizer) as manager:
        model(torch.tensor([1, 3])).sum().backward()
        manager.save_state("a")
        assert "some sparse" in manager.load_state("a").approximated["gradients"]


def test_a_load_leaves_no_gradients_of_the_window_that_was_left(root: Place) -> None:
    model, optimizer = _built(1)
    with ckpt.StateManager(str(root), model=model, optimizer=optimizer) as manager:
        _accumulate(model, optimizer, range(4))
        manager.save_state("a")
        _accumulate(model, optimizer, range(4, 6))
        manager.load_state("a")
        assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_added_to_a_few_of_very_many_gradients_is_noticed() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(1000)]
    optimizer = torch.optim.SGD(parameters)
    windows = Windows()
    windows.watch([optimizer])
    sum(parameter.sum() for parameter in parameters).backward()  # type: ignore[union-attr]
    assert windows.open([optimizer])
    optimizer.step()
    assert not windows.open([optimizer])
    sum(parameter.sum() for parameter in parameters[500:520]).backward()  # type: ignore[union-attr]
    assert windows.open([optimizer])


def _spread(rank: int, folder: str, kind: str) -> None:
    torch.manual_seed(1)
    model: Any = nn.Linear(4, 2)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    elif kind == "fsdp2 without sync":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
        model.set_requires_gradient_sync(False)
    elif kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with ckpt.StateManager(
        f"{folder}/runs", model=model, optimizer=optimizer, ranks=ckpt.RankOptions(timeout=60)
    ) as manager:
        model(torch.ones(2, 4) * (1 + rank)).sum().backward()
        manager.save_state("middle")
        optimizer.step()
        then = exact([value.to_local() if hasattr(value, "to_local") else value for value in model.parameters()])
        restored = manager.load_state("middle")
        if kind in ("fsdp1", "fsdp2 without sync"):
            assert "in the middle of an accumulation window" in restored.approximated["gradients"]
            return
        assert "gradients" not in restored.approximated
        optimizer.step()
    now = exact([value.to_local() if hasattr(value, "to_local") else value for value in model.parameters()])
    assert now == then
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2 without sync", "fsdp1"])
def test_ranks_keep_their_gradients_or_say_that_they_cannot(tmp_path: Path, kind: str) -> None:
    assert run_ranks(2, _spread, str(tmp_path), kind) == [0, 0]

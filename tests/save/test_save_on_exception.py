"""An exception ends a run: the last complete step is saved, or a line says why it is not."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ckpt
from tests.helpers.processes import run_ranks, seed_everything
from tests.helpers.training import digest


class FailureError(Exception):
    """Of the training."""


class Training:
    """A model with dropout over shuffled data, which fails in some step at some place."""

    def __init__(self, root: Path, norm: bool = False, **options: Any) -> None:
        seed_everything(0)
        layers = [nn.Linear(4, 8), nn.Dropout(0.3), *([nn.BatchNorm1d(8)] if norm else []), nn.Linear(8, 1)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        data: Any = torch.arange(48.0).reshape(12, 4) / 48
        self.loader: DataLoader[Any] = DataLoader(data, batch_size=2, shuffle=True)
        self.manager = ckpt.StateManager(
            root, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler,
            **{"save_every": ckpt.Every(exception=True), **options},
        )  # fmt: skip

    def _fails(self, fails: tuple[int, str] | None, place: str) -> bool:
        return fails == (self.manager.progress.step + 1, place)

    def run(self, fails: tuple[int, str] | None = None, error: BaseException | None = None) -> dict[str, str]:
        with self.manager as manager:
            for _ in manager.epochs(2):
                for batch in manager.batches(self.loader):
                    if self._fails(fails, "before"):
                        raise error or FailureError
                    loss = self.model(batch).pow(2).mean()
                    loss.backward()
                    if self._fails(fails, "backward"):
                        raise error or FailureError
                    if self._fails(fails, "changed"):
                        with torch.no_grad():
                            self.model[0].bias.add_(1.0)  # type: ignore[operator]
                        raise error or FailureError
                    self.optimizer.step()
                    if self._fails(fails, "update"):
                        raise error or FailureError
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                    manager.step(metrics={"loss": loss})
        return digest(self.model, self.optimizer, self.scheduler, None)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("fails", [(5, "before"), (5, "backward"), (7, "backward")])
def test_the_last_complete_step_is_saved_and_the_next_run_ends_as_if_nothing_had_been(
    tmp_path: Path, fails: tuple[int, str], norm: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = Training(tmp_path / "straight", norm).run()
    with pytest.raises(FailureError):
        Training(tmp_path / "run", norm).run(fails)
    (saved,) = ckpt.list_checkpoints(tmp_path / "run")
    assert saved.step == fails[0] - 1
    assert ckpt.verify(tmp_path / "run") == {saved.name: []}
    assert f"FailureError: saved step {saved.step}, the last that was complete" in capsys.readouterr().err
    assert Training(tmp_path / "run", norm).run() == straight


@pytest.mark.parametrize(
    ("place", "why"),
    [("update", "an optimizer has begun the next step"), ("changed", "1 of 16 tensors have changed since")],
)
def test_what_is_no_boundary_any_more_is_not_saved_and_a_line_says_why(
    tmp_path: Path, place: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(FailureError):
        Training(tmp_path).run((5, place))
    assert ckpt.list_checkpoints(tmp_path) == []
    assert f"FailureError: ckpt could not save step 4: {why}" in caplog.text


def test_what_is_saved_already_is_not_saved_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with pytest.raises(FailureError):
        Training(tmp_path, save_every=4).run((5, "before"))
    assert [found.name for found in ckpt.list_checkpoints(tmp_path)] == ["step-00000004"]
    assert "could not save" not in caplog.text


def test_an_end_on_request_is_no_failure(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        Training(tmp_path).run((5, "before"), SystemExit(3))
    assert ckpt.list_checkpoints(tmp_path) == []


def test_an_interrupt_is_one(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Training(tmp_path).run((5, "before"), KeyboardInterrupt())
    assert [found.step for found in ckpt.list_checkpoints(tmp_path)] == [4]


def test_without_the_option_nothing_is_saved(tmp_path: Path) -> None:
    with pytest.raises(FailureError):
        Training(tmp_path, save_every=None).run((5, "before"))
    assert ckpt.list_checkpoints(tmp_path) == []


class Odd:
    """State in which changes cannot be noticed."""

    def state_dict(self) -> dict[str, Any]:
        import numpy as np

        return {"array": np.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_where_changes_cannot_be_noticed_it_is_off_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path)
    training.manager.register(odd=Odd())
    with pytest.raises(FailureError):
        training.run((5, "before"))
    assert "Every(exception=True) has no effect: ckpt can't see when the ndarray in odd changes" in caplog.text
    assert ckpt.list_checkpoints(tmp_path) == []


def _fail(rank: int, root: str, failing: dict[int, int]) -> None:
    """Ranks that fail after these steps of their own; a rank without one trains to its end."""
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with ckpt.StateManager(
            root, model=model, optimizer=optimizer, save_every=ckpt.Every(exception=True),
            ranks=ckpt.RankOptions(timeout=3),
        ) as manager:  # fmt: skip
            manager.resume()
            for step in range(1, 7):
                if step > failing.get(rank, step):
                    raise FailureError
                with model.no_sync():
                    model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                manager.step()
    except FailureError:
        pass
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize(("failing", "saved"), [({0: 4, 1: 4}, [4]), ({0: 4, 1: 3}, []), ({1: 4}, []), ({0: 2}, [])])
def test_ranks_save_the_same_step_or_none_and_no_rank_waits_for_ever(
    tmp_path: Path, failing: dict[int, int], saved: list[int]
) -> None:
    began = time.monotonic()
    assert run_ranks(2, _fail, str(tmp_path), failing) == [0, 0]
    assert [found.step for found in ckpt.list_checkpoints(tmp_path)] == saved
    assert time.monotonic() - began < 240

"""When a run saves by itself: by steps, by the clock, and what asks for it besides."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ckpt
from ckpt.util.option_values import parse_duration
from tests.helpers.places import intact
from tests.helpers.processes import run_ranks


def test_times_are_said_as_people_say_them() -> None:
    said = ("10min", "90s", "2h", "1h30min", " 1.5 H ", "2 days", "45 sec", "0.5s")
    assert [parse_duration(text) for text in said] == [600, 90, 7200, 5400, 5400, 172800, 45, 0.5]


@pytest.mark.parametrize(
    "text", ["600", "10 minuets", "min", "0s", "-5s", "1e3s", "10min!", "9" * 30 + "s", "99999d", ""]
)
def test_a_time_that_is_none_is_refused_with_the_forms_that_are(tmp_path: Path, text: str) -> None:
    with pytest.raises(ckpt.ConfigError) as raised:
        ckpt.StateManager(tmp_path / "run", model=nn.Linear(1, 1), save_every=text)
    assert str(raised.value) == (
        f"StateManager: save_every={text!r} must be a number of steps, 1 or more, a time such as '10min', '90s' or "
        "'2h', 'auto', or a ckpt.Every."
    )


def steps_in(root: Path) -> list[int]:
    return sorted(found.step or 0 for found in ckpt.list_checkpoints(root))


def train(manager: ckpt.StateManager, steps: int, pause: float = 0.0) -> None:
    manager.resume()
    for _ in range(steps):
        time.sleep(pause)
        manager.step()


def test_by_the_clock_a_run_saves_when_so_much_time_has_passed(tmp_path: Path) -> None:
    with ckpt.StateManager(tmp_path, model=nn.Linear(1, 1), save_every="0.5s") as manager:
        train(manager, 3)  # at once: nothing is due
        assert steps_in(tmp_path) == []
        time.sleep(0.6)
        manager.step()
        manager.step()  # the time is counted from the save on
        manager.wait()
        assert steps_in(tmp_path) == [4]
        time.sleep(0.6)
        manager.save_state("mine", wait=True)  # a save by hand counts too
        manager.step()
    assert [found.name for found in ckpt.list_checkpoints(tmp_path)] == ["mine", "step-00000004"]


def test_a_time_in_yaml_is_a_time(tmp_path: Path) -> None:
    (tmp_path / "ckpt.yaml").write_text(f"root: {tmp_path}/run\nsave_every: 10min\n")
    with ckpt.StateManager.from_config(tmp_path / "ckpt.yaml", model=nn.Linear(1, 1)) as manager:
        assert manager.session.options.save_every == ckpt.Every(time="10min")


def _by_the_clock(rank: int, root: str) -> None:
    """Rank 1's clock is never asked: it would save at every step."""
    ckpt.ranks.schedule_and_signals._POLL = 0.0
    if rank == 1:
        real = time.monotonic
        ckpt.ranks.schedule_and_signals.time = type("Fast", (), {"monotonic": staticmethod(lambda: 1000 * real())})  # type: ignore[attr-defined, assignment]
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ckpt.StateManager(root, model=model, optimizer=optimizer, save_every="0.2s") as manager:
        manager.resume()
        for _ in range(60):
            time.sleep(0.02)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            manager.step()


@pytest.mark.slow
def test_all_ranks_save_after_the_same_step_by_the_clock_of_the_main_one(tmp_path: Path) -> None:
    began = time.monotonic()
    assert run_ranks(2, _by_the_clock, str(tmp_path)) == [0, 0]
    assert 3 <= len(steps_in(tmp_path)) <= 5 * (time.monotonic() - began), "again and again, not once"
    assert intact(tmp_path)


def _asked_by_each_in_turn(rank: int, folder: str) -> None:
    """Four rounds on two ranks; one of them asks each time. A barrier stands for what training exchanges."""
    ckpt.ranks.schedule_and_signals._POLL = 0.0
    model, seen = nn.Linear(2, 2), list[int]()
    options = ckpt.RankOptions(save_on_sigusr1=True, timeout=60)
    with ckpt.StateManager(f"{folder}/run", model=model, ranks=options, save_every=None) as manager:
        manager.resume()
        for step in range(1, 49):
            dist.barrier()
            if step % 12 == 1 and step // 12 % 2 == rank:
                signal.raise_signal(signal.SIGUSR1)
            manager.step()
            seen += [step] if manager.session.state.is_saved else []
        manager.load_state(f"step-{seen[0]:08d}")  # back: steps to come are no later than those that were agreed on
        for step in range(seen[0] + 1, seen[0] + 13):
            dist.barrier()
            if step == seen[0] + 1 and rank == 1:
                signal.raise_signal(signal.SIGUSR1)
            manager.step()
            seen += [step] if manager.session.state.is_saved else []
    Path(folder, f"saved-{rank}").write_text(str(seen))


@pytest.mark.slow
def test_every_rank_can_ask_for_a_save_again_and_again_and_all_save_after_the_same_steps(tmp_path: Path) -> None:
    assert run_ranks(2, _asked_by_each_in_turn, str(tmp_path)) == [0, 0]
    first, second = (json.loads(Path(tmp_path, f"saved-{rank}").read_text()) for rank in (0, 1))
    assert first == second
    assert sorted(first) == sorted(steps_in(tmp_path / "run"))
    *steps, after_going_back = first
    assert [(step - 1) // 12 for step in steps] == [0, 1, 2, 3]
    assert steps[0] < after_going_back <= steps[0] + 12


def _epochs(root: Path, total: int, steps: int | None = None) -> list[tuple[int, float]]:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    data: Any = torch.arange(6.0).reshape(6, 1)
    loader: DataLoader[Any] = DataLoader(data, batch_size=2, shuffle=True)
    seen = []
    with ckpt.StateManager(root, model=model, save_every=ckpt.Every(steps=steps, epoch_end=True)) as manager:
        for epoch in manager.epochs(total):
            for batch in manager.batches(loader):
                seen.append((epoch, float(batch.sum())))
                manager.step()
    return seen


def test_the_end_of_every_epoch_is_saved_beside_the_steps(tmp_path: Path) -> None:
    _epochs(tmp_path, 3, steps=2)
    names = [found.name for found in ckpt.list_checkpoints(tmp_path)]
    assert sorted(names) == [
        "step-00000002", "step-00000003", "step-00000004", "step-00000006", "step-00000008", "step-00000009",
    ]  # fmt: skip


def test_a_run_that_resumes_at_the_end_of_an_epoch_begins_with_the_next(tmp_path: Path) -> None:
    straight = _epochs(tmp_path / "straight", 3)
    assert [found.step for found in ckpt.list_checkpoints(tmp_path / "straight")] == [9, 6, 3]
    _epochs(tmp_path / "run", 3)
    for name in ("step-00000006", "step-00000009"):
        shutil.rmtree(tmp_path / "run" / name)
    assert _epochs(tmp_path / "run", 3) == straight[3:]


def _sharded(rank: int, root: str, layout: str, changes: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    saving = ckpt.SaveOptions(layout=layout)
    with ckpt.StateManager(root, model=model, optimizer=optimizer, save_every=3, saving=saving) as manager:
        for _ in manager.epochs(2):
            for batch in manager.batches([torch.ones(1, 4)] * 3):
                model(batch).sum().backward()
                optimizer.step()
                manager.step()
            for parameter in model.parameters() if changes else ():
                parameter.data.add_(1)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("layout", ["full", "auto"])
def test_ranks_bring_the_last_step_up_to_date_together(tmp_path: Path, layout: str, changes: bool) -> None:
    run_ranks(2, _sharded, str(tmp_path / "run"), layout, changes)
    names = [found.name for found in ckpt.list_checkpoints(tmp_path / "run")]
    assert names == ["step-00000006", "step-00000003"]
    weights = [path.name for path in (tmp_path / "run" / "step-00000006").rglob("*.safetensors")]
    written = [name for name in weights if name.count(".") > 1]  # beside those of the step, which are removed then
    assert len(written) == changes * {"full": 1, "auto": 2}[layout]
    assert ckpt.verify(tmp_path / "run") == {name: [] for name in names}

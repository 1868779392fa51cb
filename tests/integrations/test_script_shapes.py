"""Loops of the shapes that well-known scripts have, with the lines that we ask for: killed twice, resumed, bit for bit.

What each is like: a language model on random batches that are fetched ahead and counted by `iter_num`; a GAN with two
optimizers; accumulation by `step % n`; an iterator without an end, by `next`; epochs without a loader, whose learning
rate is a variable; with Accelerate, the newest folder by its name, skipped batches and accumulation by `step % n`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import ckpt
from tests.helpers.processes import run_alone
from tests.helpers.training import exact

pytestmark = pytest.mark.slow

STEPS, KILLS = 20, (7, 14)
DURABLE = ckpt.SaveOptions(background=False)  # so that no kill comes before the first save


class Record:
    """Writes a line for every step, and ends the process after one of them, as nothing can prevent."""

    def __init__(self, path: str, killed_at: int) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115
        self._killed_at = killed_at

    def step(self, number: int, *of: Any) -> None:
        self._file.write(f"{number} {exact(list(of))!r}\n")
        if number == self._killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def _model(features: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))


def _data(size: int = 24) -> TensorDataset:
    values = torch.arange(size * 4, dtype=torch.float32).reshape(size, 4) / size
    return TensorDataset(values, values.sum(1, keepdim=True).sin())


def random_batches(root: str, record: Record) -> None:
    data, model = _data().tensors, _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def get_batch() -> tuple[torch.Tensor, ...]:
        chosen = torch.randint(len(data[0]), (4,))
        return tuple(part[chosen] for part in data)

    x, y = get_batch()
    ahead = nn.Module()
    ahead.register_buffer("x", x)
    ahead.register_buffer("y", y)
    manager = ckpt.StateManager(root, model=model, optimizer=optimizer, save_every=3, saving=DURABLE)
    manager.register(ahead=ahead, best=1e9)
    iter_num, best = 0, 1e9
    if manager.resume():
        iter_num, best = manager.progress.step, manager.values["best"]
        x, y = ahead.state_dict().values()
    while iter_num < STEPS:
        if iter_num % 4 == 0:
            model.eval()
            with torch.no_grad():
                best = min(best, float(nn.functional.mse_loss(model(get_batch()[0]), y)))
            model.train()
        loss = nn.functional.mse_loss(model(x), y)
        x, y = get_batch()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        iter_num += 1
        ahead.x, ahead.y, manager.values["best"] = x, y, best
        manager.step()
        record.step(iter_num, loss, best, model.state_dict())


def gan(root: str, record: Record) -> None:
    generator, critic = nn.Linear(2, 4), _model()
    first, second = (torch.optim.Adam(net.parameters(), lr=0.01) for net in (generator, critic))
    loader = DataLoader(_data(), 4, shuffle=True)
    done = 0
    models, optimizers = {"G": generator, "D": critic}, {"G": first, "D": second}
    with ckpt.StateManager(root, model=models, optimizer=optimizers, save_every=3, saving=DURABLE) as manager:
        for _ in manager.epochs(4):
            for number, (real, _) in manager.enumerate(loader):
                critic.zero_grad()
                fake = generator(torch.randn(len(real), 2))
                errors = critic(real).mean(), -critic(fake.detach()).mean()
                (errors[0] + errors[1]).backward()
                second.step()
                generator.zero_grad()
                critic(fake).mean().backward()
                first.step()
                manager.step()
                done = manager.progress.step
                record.step(done, number, *errors, generator.state_dict(), critic.state_dict())
    assert done == 24


def accumulated_by_hand(root: str, record: Record) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    loader = DataLoader(_data(), 3, shuffle=True)
    saving = ckpt.SaveOptions(gradients=True, background=False)
    with ckpt.StateManager(
        root, model=model, optimizer=optimizer, scheduler=scheduler, save_every=4, saving=saving
    ) as manager:
        for _ in manager.epochs(3):
            for step, (x, y) in manager.enumerate(loader):
                loss = nn.functional.mse_loss(model(x), y) / 3
                loss.backward()  # type: ignore[no-untyped-call]
                if step % 3 == 0 or step == len(loader) - 1:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                manager.step()
                record.step(manager.progress.step, step, loss, model.state_dict())


def without_an_end(root: str, record: Record) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = _data()
    loader = DataLoader(data, 4, sampler=RandomSampler(data, replacement=True, num_samples=10**10))
    manager = ckpt.StateManager(root, model=model, optimizer=optimizer, save_every=5, saving=DURABLE)
    manager.resume()
    iter_num = manager.progress.step
    batches = iter(manager.batches(loader))
    while iter_num < STEPS:
        x, y = next(batches)
        model.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        iter_num += 1
        manager.step()
        record.step(iter_num, loss, model.state_dict())


def epochs_by_hand(root: str, record: Record) -> None:
    model, (x, y) = _model(), _data().tensors
    manager = ckpt.StateManager(root, model=model, save_every=1, saving=DURABLE)
    manager.register(lr=0.5, best=0.0)
    for epoch in manager.epochs(STEPS):
        lr, best = manager.values["lr"], manager.values["best"]
        for begin in range(0, len(x), 8):
            model.zero_grad()
            loss = nn.functional.mse_loss(model(x[begin : begin + 8]), y[begin : begin + 8])
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=lr)  # type: ignore[arg-type]
        if not best or loss < best:
            best = float(loss)
        else:
            lr /= 2
        manager.values["lr"], manager.values["best"] = lr, best
        manager.step()
        record.step(epoch + 1, loss, lr, best, model.state_dict())


def attached(root: str, record: Record) -> None:
    """Saved after every batch while the number of updates is even: also in the middle of a window."""
    from ckpt.integrations.accelerate import attach
    from tests.helpers.accelerated import new_accelerator

    window, accelerator = 4, new_accelerator()
    manager = attach(accelerator, root, saving=DURABLE)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(_data(), 3, shuffle=True))
    folders = sorted(Path(root).glob("step_*"), key=lambda path: int(path.name[5:]))
    done = first = skipped = batches = 0
    if folders:
        accelerator.load_state(str(folders[-1]))
        done = int(folders[-1].name[5:])
        first, skipped = divmod(manager.progress.epoch * len(loader) + manager.progress.batch, len(loader))
        batches = first * len(loader) + skipped
    for epoch in range(first, 3):
        active = accelerator.skip_first_batches(loader, skipped) if epoch == first and skipped else loader
        for step, (x, y) in manager.enumerate(active):
            loss = nn.functional.mse_loss(model(x), y) / window
            accelerator.backward(loss)
            if step % window == 0 or step == len(loader) - 1:
                optimizer.step()
                optimizer.zero_grad()
                done += 1
            if done % 2 == 0:
                accelerator.save_state(f"{root}/step_{done}")
            batches += 1
            record.step(batches, step, done, loss, model.state_dict())
    accelerator.end_training()


SHAPES: dict[str, Callable[[str, Record], None]] = {
    shape.__name__: shape
    for shape in (random_batches, gan, accumulated_by_hand, without_an_end, epochs_by_hand, attached)
}


def _run(rank: int, root: str, shape: str, run: int, killed_at: int) -> None:
    torch.manual_seed(3 + run)  # another process: what it shares with the earlier ones, it has taken over
    SHAPES[shape](f"{root}/runs", Record(f"{root}/steps.txt", killed_at))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_script_of_that_shape_killed_twice_ends_as_one_that_was_not(tmp_path: Path, shape: str) -> None:
    kills: dict[str, tuple[int, ...]] = {"straight": (), "run": KILLS}
    for name in kills:
        (tmp_path / name).mkdir()
        for number, killed_at in enumerate((*kills[name], 0)):
            code = run_alone(_run, str(tmp_path / name), shape, number, killed_at, dies=True)
            assert code == (-signal.SIGKILL if killed_at else 0)
    straight, run = ((tmp_path / name / "steps.txt").read_text().splitlines() for name in kills)
    assert len(run) < 2 * len(straight)  # none began anew
    assert set(run) == set(straight)
    assert run[-1] == straight[-1]

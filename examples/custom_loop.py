"""A loop of one's own, without `epochs` and `batches`: data made on the fly, and an object with its own state.

    python examples/custom_loop.py

`resume` continues where the last run stopped. `register` adds what the manager does not know by itself: here the
generator that makes the data, and a curriculum that makes it harder. `save_state(name)` keeps the moments that matter,
and `load_state(name)` goes back to one of them.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import ckpt

HARDEST = 3


class Curriculum:
    """Rises to the next level when the loss has been low for a while. All that it takes is these two methods."""

    def __init__(self) -> None:
        self.level = 0
        self.average = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level, self.average = state["level"], state["average"]

    @property
    def mastered(self) -> bool:
        return self.average < 0.05 and self.level < HARDEST

    def observe(self, loss: float) -> None:
        self.average += 0.05 * (loss - self.average)

    def rise(self) -> None:
        self.level += 1
        self.average = 1.0


def sines(level: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of a sine: the higher the level, the faster it swings."""
    inputs = torch.rand(64, 1, generator=generator) * 2 - 1
    return inputs, torch.sin((1 + level) * 2 * inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="runs/custom_loop", help="where the checkpoints are kept")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    curriculum, generator = Curriculum(), torch.Generator().manual_seed(1)

    with ckpt.StateManager(options.root, model=model, optimizer=optimizer, save_every=200) as manager:
        manager.register(curriculum=curriculum, data=generator)
        manager.resume()
        while manager.progress.step < options.steps:
            # Decided from what is saved, and before the step: a run that was stopped right here decides it again.
            if curriculum.mastered:
                curriculum.rise()
                print(f"step {manager.progress.step}: {manager.save_state(f'level-{curriculum.level}')}")
            inputs, targets = sines(curriculum.level, generator)
            loss = mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curriculum.observe(loss.item())
            manager.step()
        manager.save_state("final")

        for name in ("final", *(f"level-{level}" for level in range(1, curriculum.level + 1))):
            manager.load_state(name)
            inputs, targets = sines(HARDEST, torch.Generator().manual_seed(2))
            print(f"{name}: loss {mse_loss(model(inputs), targets):.4f} on the hardest level")


if __name__ == "__main__":
    main()

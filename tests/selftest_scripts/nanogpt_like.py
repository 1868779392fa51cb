"""A loop in the manner of nanoGPT: batches cut at random out of one text, micro-steps, a learning rate by formula.

`--trap` plants one of the mistakes that make such a loop resume inexactly.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn
from torch.nn import functional

import ckpt

VOCABULARY, BLOCK, MICRO_STEPS, ITERATIONS = 11, 8, 2, 12
TRAPS = ("rate", "generator", "optimizer", "accumulation", "text", "average")


class Average:
    """A running mean of the loss, which the loop scales its loss by."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def get_batch(text: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - BLOCK - 1, (4,), generator=generator).tolist()
    inputs = torch.stack([text[start : start + BLOCK] for start in starts])
    targets = torch.stack([text[start + 1 : start + BLOCK + 1] for start in starts])
    return inputs, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trap", choices=TRAPS)
    trap = parser.parse_args().trap
    if trap != "text":  # the text is made anew by every process
        torch.manual_seed(1337)
    text = torch.randint(VOCABULARY, (400,))
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Dropout(0.1), nn.Linear(16, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, average = torch.Generator().manual_seed(7), Average()
    manager = ckpt.StateManager(
        "out",
        model=model,
        optimizer=None if trap == "optimizer" else optimizer,
        saving=ckpt.SaveOptions(gradients=trap != "accumulation"),
    )
    if trap != "generator":
        manager.register(batches=generator)
    if trap != "average":
        manager.register(average=average)
    with manager:
        manager.resume()
        first = 0 if trap == "rate" else manager.progress.step // MICRO_STEPS
        for iteration in range(first, first + ITERATIONS - manager.progress.step // MICRO_STEPS):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * iteration / ITERATIONS)))
            done = manager.progress.step % MICRO_STEPS  # of a window that was saved in its middle
            for _ in range(done, MICRO_STEPS):
                inputs, targets = get_batch(text, generator)
                loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                average.value = 0.9 * average.value + 0.1 * float(loss)
                (loss * (1 + average.value) / MICRO_STEPS).backward()  # type: ignore[no-untyped-call]
                manager.progress.step += 1
                if manager.progress.step % 5 == 0 and manager.progress.step % MICRO_STEPS:
                    manager.save_state(f"step-{manager.progress.step:08d}")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()

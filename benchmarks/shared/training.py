"""A training run to be saved: steps of a known length, and a reference copy of what was saved."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional

from benchmarks.shared import measure
from benchmarks.shared.state import State

LENGTH = 256  # tokens of one sample


class Training:
    """A run that can be saved at any step, and keeps a copy of the state at that moment."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device: str = options.device
        self.state = State.trained(options.gigabytes * 1e9, self.device)
        self.remembered = {name: torch.empty_like(tensor) for name, tensor in self.state.tensors().items()}
        self.samples = 1 if self.device == "cpu" else self.samples_for(options.step_seconds)
        self.run(3)
        self.remembering = min(self.time_remembering() for _ in range(3))
        self.baselines: list[float] = []  # seconds of a step without saves
        self.rest(options.steps)
        print(f"a step: {self.baselines[0]:.4f} s, {self.samples} samples of {LENGTH} tokens", flush=True)

    def samples_for(self, wanted: float) -> int:
        """How many samples make a step as long as wanted."""
        few, many = 8, 32
        of_a_sample = (self.step_with(many) - self.step_with(few)) / (many - few)
        return max(1, round(few + (wanted - self.step_with(few)) / of_a_sample))

    def step_with(self, samples: int) -> float:
        self.samples = samples
        self.run(3)
        return self.run(5) / 5

    def rest(self, steps: int) -> float:
        """Train without saves. Clocks drift by more than a save may cost, so baselines are taken often."""
        self.baselines.append(self.run(steps) / steps)
        return self.baselines[-1]

    def run(self, steps: int, save: Callable[[], None] | None = None, guard: Callable[[], Any] = nullcontext) -> float:
        """Seconds of some steps, with a save among the first, if any, and a copy of what is saved."""
        self.synchronize()
        started = time.perf_counter()
        for number in range(steps):
            if save is not None and number == steps // 12:
                self.remember()
                save()
            self.step(guard)
        self.synchronize()
        return time.perf_counter() - started

    def step(self, guard: Callable[[], Any]) -> None:
        vocabulary = self.state.model.embedding.num_embeddings
        tokens = torch.randint(vocabulary, (self.samples, LENGTH), device=self.device)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device != "cpu"):
            loss = functional.cross_entropy(self.state.model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        with guard():
            self.state.optimizer.step()
        self.state.optimizer.zero_grad()

    def time_remembering(self) -> float:
        self.synchronize()
        return measure.seconds(lambda: (self.remember(), self.synchronize()))

    def remember(self) -> None:
        tensors = self.state.tensors()
        torch._foreach_copy_(list(self.remembered.values()), [tensors[name] for name in self.remembered])

    def synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def give_back_memory(self) -> None:
        """Free the memory of a load before steps are timed, then let the allocator get what a step needs."""
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()
        self.run(2)

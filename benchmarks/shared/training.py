"""A training run to be saved: steps of a known length, each of them timed, and a record of what was saved."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch.nn import functional

from benchmarks.shared.measure import seconds
from benchmarks.shared.reference import REFERENCES, Reference
from benchmarks.shared.state import State

LENGTH = 256  # tokens of one sample
LEAD = 5  # steps before a save
WARM_UP = 3  # steps before a baseline: a device that was idle has other clocks
HICCUP = 1.5  # medians: a step that took longer is no part of a baseline


class Clock(Protocol):
    def now(self) -> Any: ...

    def between(self, start: Any, end: Any) -> float:
        """Seconds."""


class HostClock:
    def now(self) -> float:
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        return end - start


class DeviceClock:
    """For a loop that does not wait for the device: the host is then several steps ahead."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1000


class Training:
    """A run that can be saved at any step, and records the state at that moment."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device: str = options.device
        self.reads_loss: bool = options.read_loss == "every"
        self.clock: Clock = HostClock() if self.reads_loss or self.device == "cpu" else DeviceClock()
        self.state = State.trained(options.gigabytes * 1e9, self.device)
        self.reference: Reference = REFERENCES[options.compare](self.state.tensors())
        self.baselines: list[float] = []  # seconds of a step without saves
        self.remembering: list[float] = []  # seconds that the clock stood still for
        self.samples = 1 if self.device == "cpu" else self.samples_for(options.step_seconds)
        self.give_back_memory()  # of the longest step that was tried
        self.rest(options.steps)
        print(f"a step: {self.baselines[0]:.4f} s, {self.samples} samples of {LENGTH} tokens", flush=True)

    def samples_for(self, wanted: float) -> int:
        """How many samples make a step as long as wanted."""
        few, many = 8, 32
        of_a_sample = (self.step_with(many) - self.step_with(few)) / (many - few)
        return max(1, round(few + (wanted - self.step_with(few)) / of_a_sample))

    def step_with(self, samples: int) -> float:
        self.samples = samples
        self.run(WARM_UP)
        return statistics.fmean(self.run(5))

    def rest(self, steps: int) -> float:
        """Train without saves: seconds of a step. Clocks drift by more than a save may cost, so it is done often."""
        self.run(WARM_UP)
        self.baselines.append(typical(self.run(steps)))
        return self.baselines[-1]

    def run(
        self,
        steps: int,
        save: Callable[[], None] | None = None,
        guard: Callable[[], Any] = nullcontext,
        more: Callable[[], bool] = bool,
    ) -> list[float]:
        """Seconds of each step. A save, if any, is at the beginning of the step with the number that `lead_of` says.

        As long as there is `more` to be seen, up to twice as many steps are made. The clock stands still while the
        state is recorded to compare with, between two moments when the device has nothing to do. A run without a save
        waits for the device there too.
        """
        spans: list[list[tuple[Any, Any]]] = []
        self.synchronize()
        begun = self.clock.now()
        while len(spans) < steps or (len(spans) < 2 * steps and more()):
            parts = []
            if len(spans) == lead_of(steps):
                self.synchronize()
                parts.append((begun, self.clock.now()))
                if save is not None:
                    self.remembering.append(seconds(self.remember))
                begun = self.clock.now()
                if save is not None:
                    save()
            self.step(guard)
            ended = self.clock.now()
            spans.append([*parts, (begun, ended)])
            begun = ended
        self.synchronize()
        return [sum(self.clock.between(*part) for part in parts) for parts in spans]

    def step(self, guard: Callable[[], Any]) -> None:
        vocabulary = self.state.model.embedding.num_embeddings
        tokens = torch.randint(vocabulary, (self.samples, LENGTH), device=self.device)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device != "cpu"):
            loss = functional.cross_entropy(self.state.model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        with guard():
            self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        if self.reads_loss:
            loss.item()

    def remember(self) -> None:
        self.reference.take(self.state.tensors())
        self.synchronize()

    def synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def give_back_memory(self) -> None:
        """Free the memory of a load before steps are timed, then let the allocator get what a step needs."""
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()
        self.run(2)


def lead_of(steps: int) -> int:
    """The number of the step that begins with a save."""
    return min(LEAD, steps // 4)


def typical(steps: list[float]) -> float:
    """The mean without hiccups: with them a baseline would hide what a save costs."""
    limit = HICCUP * statistics.median(steps)
    return statistics.fmean(step for step in steps if step <= limit)

"""What a checkpoint keeps of the loop: the counters of its progress, its metrics, and the positions of loaders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from ckpt.errors import MetricError
from ckpt.util.checked_json import is_text

# Metrics as a training loop gives them, and as a checkpoint keeps them.


def checked_metrics(metrics: Any) -> dict[str, Any]:
    """Metrics to be kept until a save, if there is one. Nothing waits for the device."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise MetricError(f"metrics must be a dict that maps names to numbers, not {metrics!r}.")
    unfit = [key for key, value in (metrics or {}).items() if not isinstance(key, str) or not _is_one_number(value)]
    if unfit:
        raise MetricError(f"metrics must have one number for each name: {', '.join(map(repr, unfit))} is not a number.")
    return {key: _detached(value) for key, value in (metrics or {}).items()}


def _is_one_number(value: Any) -> bool:
    """Nothing waits for the device: of a tensor, its shape is enough."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return not isinstance(value, str)


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as plain numbers. This waits for the device, so it is done for saves only."""
    try:
        return {key: float(_detached(value)) for key, value in metrics.items()}
    except (TypeError, ValueError, RuntimeError, OverflowError, AttributeError) as error:
        raise MetricError(f"metrics must have one number for each name, not {metrics!r}: {error}") from error


def _detached(value: Any) -> Any:
    """Without the graph behind it, which would otherwise live until the next step."""
    return value.detach() if isinstance(value, torch.Tensor) else value


_MOST_POINTS = 400  # of a metric
_MOST_CURVES = 64


class _Curve:
    """Values of one metric, evenly thinned: every first, second, fourth, ... that it was given."""

    __slots__ = ("_stride", "points", "to_skip")

    def __init__(self) -> None:
        self.points: list[list[Any]] = []  # step, and value: a tensor on a device until `settle`
        self.to_skip = 0  # values before the next one that is kept
        self._stride = 1

    def keep(self, step: int, value: Any) -> None:
        self.points.append([step, _copied(value)])
        if len(self.points) > _MOST_POINTS:  # an odd number: the last one stays
            self.points = self.points[::2]
            self._stride *= 2
        self.to_skip = self._stride - 1


class MetricCurves:
    """The metrics of all steps, for the history of the root: a few hundred points of each.

    To note a step costs some tenths of a microsecond for each metric, and never waits for a device.
    """

    def __init__(self) -> None:
        self._curves: dict[str, _Curve] = {}

    def note(self, step: int, metrics: Mapping[str, Any]) -> None:
        curves = self._curves
        for name, value in metrics.items():
            curve = curves.get(name)
            if curve is None:
                if len(curves) == _MOST_CURVES:
                    continue
                curve = curves[name] = _Curve()
            if curve.to_skip:
                curve.to_skip -= 1
            else:
                curve.keep(step, value)

    def settle(self) -> None:
        """Fetch what is on devices. This waits for them, so it is done for saves only."""
        waiting = defaultdict(list)
        for curve in self._curves.values():
            for point in curve.points:
                if isinstance(point[1], torch.Tensor):
                    waiting[point[1].device].append(point)
        for points in waiting.values():
            with suppress(RuntimeError):  # a device that fails is an error of what the training needs from it
                numbers = torch.stack([value for _, value in points]).tolist()
                for point, number in zip(points, numbers, strict=True):
                    point[1] = number

    def numbers(self) -> dict[str, list[tuple[int, float]]]:
        """By name; without what is still on a device."""
        known = {
            name: [(step, value) for step, value in curve.points if isinstance(value, float)]
            for name, curve in list(self._curves.items())
            if is_text(name)
        }
        return {name: points for name, points in known.items() if points}


def _copied(value: Any) -> Any:
    """A number, or a copy of a tensor where it is: a script may write its next value into the same memory.

    None of what takes other ranks to be read, as a DTensor does, or is no real number.
    """
    try:
        if not isinstance(value, torch.Tensor) or (value.is_cpu and type(value) is torch.Tensor):
            return float(value)
        return value.to(torch.float32, copy=True).reshape(()) if type(value) is torch.Tensor else None
    except (TypeError, ValueError, OverflowError, RuntimeError):  # at a save, this is an error
        return None


@dataclass
class Progress:
    """Counts epochs, batches, steps and samples. ckpt saves these counters in every checkpoint.

    Attributes:
        epoch: The current epoch.
        batch: Batches of this epoch that the loop has received.
        step: Calls of `manager.step()` or, attached to an accelerator, steps of its first optimizer.
        samples: Samples of all ranks, over all epochs.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0

    @classmethod
    def from_json(cls, saved: Mapping[str, int]) -> Progress:
        """The counters of a manifest; a later version may have more of them."""
        return cls(**{counter.name: saved.get(counter.name, 0) for counter in fields(cls)})

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass
class Position:
    """Where a loader is in its epoch, and what it takes to restore that. Its fields are the saved format."""

    rng: dict[str, Any] = field(default_factory=dict)  # as the epoch began
    generators: list[Any] = field(default_factory=list)  # the loader's own, as the epoch began
    samplers: list[Any] = field(default_factory=list)  # those with a state_dict, as the epoch began
    world_size: int = 1
    batches: int = 0
    samples: int = 0  # of this rank, since `start`
    start: int = 0  # samples of all ranks that earlier layouts had consumed of this epoch
    digest: str = ""  # of the batches of indices handed out, as earlier versions wrote it
    indices: str = ""  # digest of the indices handed out since `start`, for any batch size
    dataset_size: int | None = None
    worn: bool = False  # the workers have served an earlier epoch, and their generators continue from there
    done: bool = False
    exhausted: bool = False  # no batch is left, but the loop has not asked for the next one yet
    generators_now: list[Any] = field(default_factory=list)
    state: Any = None  # of a loader or dataset that has a `state_dict`
    ahead: int = 0  # reads that had been made beyond what was handed out
    rng_ahead: dict[str, Any] = field(default_factory=dict)  # as the first of them began
    trained: bool = False  # an optimizer was stepped meanwhile
    split: bool = False  # every rank gets a piece of each batch, and not batches of its own
    before: int = 0  # batches handed out in this epoch before `start`
    layout: dict[str, Any] = field(default_factory=dict)  # how the epoch was divided: `Layout`
    sampler_size: int | None = None  # how many samples the sampler gives one rank
    skipped: int = 0  # batches that the loader itself leaves out, as `accelerate.skip_first_batches` makes it do
    contents: dict[str, str] = field(default_factory=dict)  # digests of what a stream handed out in this epoch

    @classmethod
    def from_saved(cls, saved: dict[str, Any]) -> Position:
        known = {known.name for known in fields(cls)}
        return cls(**{key: value for key, value in saved.items() if key in known})

"""Where a loader is in its epoch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


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

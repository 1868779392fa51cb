"""What many checkpoints in one root on S3 cost: listing them, resuming, saving beside them, pruning."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from unittest.mock import patch

import torch
from torch import nn

import ckpt
from benchmarks.shared.counted_objects import CountedObjects
from ckpt.cli import ls
from ckpt.storage.object_storage import ObjectStorage

LATENCY = 0.02  # seconds of each request, so that time shows how many follow each other

Figures = dict[str, tuple[float, int]]  # by task: seconds, and requests


def measure(count: int) -> Figures:
    objects = CountedObjects("bucket/many")
    with manager_of(objects) as manager:
        manager.resume()
        for number in range(count):
            manager.save_state(f"step-{number:08d}", wait=True)
    figures: Figures = {}

    def measured(task: str, do: Callable[[], object]) -> None:
        objects.requests.clear()
        objects.latency = LATENCY
        began = time.perf_counter()
        do()
        figures[task] = (time.perf_counter() - began, sum(objects.requests.values()))
        objects.latency = 0.0
        print(f"{count} checkpoints, {task}: {figures[task][0]:.2f} s, {figures[task][1]} requests", flush=True)

    with listed_from(objects):
        measured("ckpt ls", lambda: ls.show_checkpoints("s3://bucket/many"))
    measured("list_checkpoints", lambda: ckpt.list_checkpoints(ObjectStorage(objects)))
    with manager_of(objects, ckpt.Keep(last=count)) as manager:
        measured("resume", manager.resume)

        def save_and_remove() -> None:
            manager.save_state("next", wait=True)
            manager.wait()

        measured("save, and remove one", save_and_remove)
    measured("prune, nothing to remove", lambda: ckpt.prune(ObjectStorage(objects), keep=ckpt.Keep(last=count)))
    measured("prune 16", lambda: ckpt.prune(ObjectStorage(objects), keep=ckpt.Keep(last=count - 16)))
    return figures


def manager_of(objects: CountedObjects, keep: ckpt.Keep | None = None) -> ckpt.StateManager:
    torch.manual_seed(0)
    return ckpt.StateManager(ObjectStorage(objects), model=nn.Linear(2, 2), keep=keep)


@contextmanager
def listed_from(objects: CountedObjects) -> Iterator[None]:
    """`ckpt ls` opens URLs: for a while, all of them are these objects."""
    with patch.object(ls, "open_storage", lambda url: ObjectStorage(objects)), redirect_stdout(io.StringIO()):
        yield

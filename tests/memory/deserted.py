"""Places in memory with snapshots of a few bytes, runs that live in them and are killed, and their keepers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ckpt.memory.keeper_process import KeeperProcess, living_keeper, start_keeper
from ckpt.memory.place import MemoryPlace, identity_of, read_token, write_token
from ckpt.memory.slot_storage import hold_memory, slot_storage
from ckpt.storage import open_storage, place_of
from tests.helpers import byte_checkpoints
from tests.helpers.processes import DEADLINE, fork

FILES = {
    "model.safetensors": byte_checkpoints.tensor_file(bytes(range(256)) * 400),  # large enough to be held
    "state.json": b'{"here": "in memory"}',
}


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE:g} s"
        time.sleep(0.02)


def create_place(root: str | Path, *, held: bool = False) -> MemoryPlace:
    storage = open_storage(str(root))
    identity = identity_of(storage, read_token(storage) or write_token(storage))
    place = MemoryPlace.create(identity, root_shown=place_of(storage))
    if held:
        hold_memory(place)
    return place


def snapshot(place: MemoryPlace, name: str, *, sequence: int, files: Mapping[str, bytes] = FILES) -> None:
    """Commit a snapshot in the memory of a place."""
    byte_checkpoints.save(slot_storage(place), name, files, sequence=sequence)


@contextmanager
def no_keeper_left(memory: Path) -> Iterator[None]:
    """End, with the context, every keeper of a folder below this one, and remove what is there."""
    try:
        yield
    finally:
        places = MemoryPlace.list_places()
        keepers = [found for place in places if (found := living_keeper(place)) is not None]
        for place in places:
            place.remove()
        for keeper in keepers:
            if not keeper.wait(10.0):
                os.kill(keeper.process, signal.SIGKILL)
        # a keeper that removes its folder is found by nobody from the first moment of that on
        wait_until(lambda: not list(memory.iterdir()), f"{memory} is empty")


def start_run(memory: Path, root: Path, **options: Any) -> tuple[BaseProcess, MemoryPlace, KeeperProcess]:
    """A process of its own that lives in a place with two snapshots and a keeper; it ends when it is killed."""
    job = fork(_live, str(memory), str(root), options)
    wait_until(lambda: any(_is_ready(place) for place in MemoryPlace.list_places()), "the run is ready")
    [place] = MemoryPlace.list_places()
    keeper = living_keeper(place)
    assert keeper is not None
    return job, place, keeper


def kill(job: BaseProcess) -> None:
    """SIGKILL a run and its process group, as launchers do."""
    assert job.pid is not None
    os.killpg(job.pid, signal.SIGKILL)
    job.join(DEADLINE)
    assert job.exitcode == -signal.SIGKILL


def _live(memory: str, root: str, options: dict[str, Any]) -> None:
    os.setpgid(0, 0)
    os.environ |= {"CKPT_MEMORY_DIR": memory, "CKPT_MEMORY_KEEPER": "on"}
    os.environ["CKPT_MEMORY_LINGER"] = str(options.pop("linger", 3600))
    place = create_place(root, **options)
    assert start_keeper(place) is not None
    snapshot(place, "step-8", sequence=8)
    snapshot(place, "step-9", sequence=9)
    place.record(ready=True)
    time.sleep(DEADLINE)


def _is_ready(place: MemoryPlace) -> bool:
    return bool(place.facts.get("ready"))

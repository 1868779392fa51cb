"""Ctrl-C during a load ends it after the reads that are under way, and what was half loaded is not trained on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import ckpt
from tests.helpers.places import PassedOn, Place

BLOCKS = 60  # files of one block each: far more than threads that read


class Slow(PassedOn):
    """A storage that presses Ctrl-C when it is first asked for tensors, and reads them when that has been heard."""

    def __init__(self, root: Place | str) -> None:
        super().__init__(root)
        self.reads = 0
        self.pause = 0.1  # seconds of each read: the main thread must get its turn before all is read
        self._heard = threading.Event()
        self._turn = threading.Lock()

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        if key.endswith(".safetensors"):
            with self._turn:
                self.reads += 1
                if self.reads == 1:
                    os.kill(os.getpid(), signal.SIGINT)
            assert self._heard.wait(60)
            time.sleep(self.pause)
        super().read_into(key, start, *buffers, again=again)

    def hear(self, *_: Any) -> None:
        self._heard.set()
        raise KeyboardInterrupt


def models() -> dict[str, nn.Module]:
    return {f"model{number}": nn.Linear(2, 2) for number in range(BLOCKS)}


@pytest.fixture
def slow(root: Place) -> Iterator[Slow]:
    with ckpt.StateManager(root, model=models()) as manager:
        manager.save_state("a")
    storage = Slow(root)
    previous = signal.signal(signal.SIGINT, storage.hear)
    yield storage
    signal.signal(signal.SIGINT, previous)


@pytest.mark.also_on_s3
def test_ctrl_c_during_a_load_does_not_wait_until_all_is_read(root: Place, slow: Slow) -> None:
    with ckpt.StateManager(slow, model=models()) as manager:
        with pytest.raises(KeyboardInterrupt):
            manager.load_state()
        assert 0 < slow.reads < BLOCKS // 2
        slow.pause = 0.0
        for refused in (manager.step, manager.save_state):
            with pytest.raises(ckpt.StateError, match="a load of a failed halfway"):
                refused()
        assert manager.load_state().name == "a"
        manager.save_state("b", wait=True)
    assert ckpt.verify(root) == {"a": [], "b": []}


@pytest.mark.also_on_s3
def test_ctrl_c_while_a_checkpoint_is_verified_does_not_wait_until_all_is_read(root: Place, slow: Slow) -> None:
    with ckpt.StateManager(slow, model=models()) as manager:
        manager.progress.step = 1  # what was trained is precious, and replaced when all has been verified
        with pytest.raises(KeyboardInterrupt):
            manager.load_state()
        assert 0 < slow.reads < BLOCKS // 2
        slow.pause = 0.0
        assert manager.load_state().name == "a"

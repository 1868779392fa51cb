"""A script in a process of its own: notes the weights after every step of an optimizer, and may end it by SIGKILL."""

from __future__ import annotations

import hashlib
import os
import runpy
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import ckpt


@dataclass(frozen=True)
class Attempt:
    """A run of a script in its folder.

    After so many steps, and then some seconds, the process kills itself: nothing of it runs any more, as after the
    out-of-memory killer. Only the first checkpoint in the root is awaited; a later one may be half written.
    """

    script: Path
    arguments: list[str]
    packages: list[str]
    root: str
    notes: Path
    killed_at: int
    seconds: float

    def run(self) -> None:
        for number in (1, 2):
            os.dup2(os.open(f"{self.notes}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.chdir(self.script.parent)
        sys.argv = [str(self.script), *self.arguments]
        sys.path[:0] = [str(self.script.parent), *self.packages]
        register_optimizer_step_post_hook(self._steps())
        runpy.run_path(str(self.script), run_name="__main__")

    def _steps(self) -> Any:
        notes = open(self.notes, "a", buffering=1)  # noqa: SIM115 - to the end, which is sudden
        left = self.killed_at

        def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            nonlocal left
            notes.write(_digest(optimizer) + "\n")
            left -= 1
            if left == 0:
                while not any(found.committed for found in ckpt.list_checkpoints(self.root)):
                    time.sleep(0.01)
                threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

        return note


def _digest(optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found.update(parameter.detach().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]

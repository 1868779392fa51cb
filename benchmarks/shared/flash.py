"""DLRover's Flash Checkpoint, which keeps one snapshot in shared memory, started without its launcher."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import shutil
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.shared.checkpointers import Checkpointer
from benchmarks.shared.state import State

_MODULE = "dlrover.trainer.torch.flash_checkpoint"
_SEGMENT, _SOCKETS = Path("/dev/shm/ckpt_shm_0"), Path("/tmp/ckpt_sock")  # the same in every run


class FlashCheckpoint(Checkpointer):
    """Saves to memory alone. Its saver is a child that a killed run leaves behind, and that a restart then finds."""

    name = "DLRover Flash Checkpoint"
    needs = "dlrover"

    def __init__(self, state: State, root: Path) -> None:
        super().__init__(state, root)
        importlib.import_module("dlrover.python.common.log").default_logger.setLevel(logging.WARNING)
        self.checkpointer: Any = importlib.import_module(f"{_MODULE}.ddp").DdpCheckpointer(str(root))
        self.memory: Any = importlib.import_module(f"{_MODULE}.checkpointer").StorageType.MEMORY

    @classmethod
    def missing(cls) -> bool:
        return bool(cls.problem())

    @classmethod
    def problem(cls) -> str:
        """Why it cannot be measured; empty if it can. It imports what it does not depend on, grpc for one."""
        try:
            importlib.import_module(f"{_MODULE}.ddp")
        except ImportError as error:
            return str(error)
        return f"{_SEGMENT} is there, of another run of it" if _SEGMENT.exists() else ""

    def save(self, name: str) -> None:
        both: Mapping[str, Any] = {
            "model": self.state.model.state_dict(),
            "optimizer": self.state.optimizer.state_dict(),
        }
        self.checkpointer.save_checkpoint(int(name), both, storage_type=self.memory)

    def load(self, name: str) -> None:
        """Its tensors are views of the shared memory, and an optimizer on the CPU would train in there."""
        found = self.checkpointer.load_checkpoint()
        self.state.model.load_state_dict(found["model"])
        self.state.optimizer.load_state_dict(
            copy.deepcopy(found["optimizer"]) if self.state.on_cpu else found["optimizer"]
        )

    @staticmethod
    def find_saver() -> None:
        """Let this process use the saver that is there, as one that the launcher has started again."""
        os.environ["ROLE_NAME"] = "dlrover-trainer"

    @property
    def saver(self) -> int:
        """The process that is left behind."""
        return int(self.checkpointer._engine.saver_proc.pid)


def clean_up(saver: int) -> None:
    """End that process, and remove its segment and its sockets, which nobody else removes."""
    with suppress(ProcessLookupError):
        os.kill(saver, signal.SIGKILL)
    _SEGMENT.unlink(missing_ok=True)
    shutil.rmtree(_SOCKETS, ignore_errors=True)

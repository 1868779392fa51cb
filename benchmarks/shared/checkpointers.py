"""The libraries and calls that save and load training state, behind one interface."""

from __future__ import annotations

import io
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ckpt
from benchmarks.shared.state import State

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # by `no_dist`, which says so already


class Checkpointer:
    """Saves a state under names below a root, and loads it from there into other live objects.

    An instance lives as long as a training run does, and holds whatever is reused by the next save.
    """

    name: str
    needs: str = ""  # the package that must be installed
    durable = False  # on the disk when `wait` returns
    hashed = False  # `load` notices a flipped bit
    background = False  # is still writing when `save` returns
    reads_back = False  # reads what it wrote into the page cache, after the save is complete
    prepares = False  # allocates its buffers before the first save
    needs_moments = False  # `load` fills existing tensors, and creates none

    def __init__(self, state: State, root: Path) -> None:
        self.state, self.root = state, root

    @classmethod
    def missing(cls) -> bool:
        return bool(cls.needs) and find_spec(cls.needs) is None

    def prepare(self) -> None:
        """Called at the beginning of a run that will save. Does not wait for what it starts."""

    def save(self, name: str) -> None:
        """Return as soon as training may continue."""
        raise NotImplementedError

    def guard(self) -> AbstractContextManager[Any]:
        """The context in which a training loop has to call `optimizer.step()`."""
        return nullcontext()

    def saved(self, name: str) -> bool:
        """Whether a save is complete. Does not wait, and may be called from another thread."""
        return True

    def wait(self) -> None:
        """Until every save is complete."""

    def load(self, name: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Release what the instance holds."""

    def folder(self, name: str) -> Path:
        """The folder of a checkpoint, for libraries that expect it to exist."""
        path = self.root / name
        path.mkdir(exist_ok=True)
        return path


def time_a_load(
    kind: type[Checkpointer], target: State, root: Path, name: str, done: Callable[[], object] = int
) -> float:
    """Seconds of a load in a new run: constructing the checkpointer is part of it. `done` waits for the device."""
    started = time.perf_counter()
    with closing(kind(target, root)) as checkpointer:
        checkpointer.load(name)
        done()
        return time.perf_counter() - started


def time_a_save(checkpointer: Checkpointer, name: str) -> tuple[float, float]:
    """Seconds until `optimizer.step()` may change the state, and until everything is written."""
    started = time.perf_counter()
    checkpointer.save(name)
    with checkpointer.guard():
        blocked = time.perf_counter() - started
    checkpointer.wait()
    return blocked, time.perf_counter() - started


class Ours(Checkpointer):
    name = "ckpt save_state(wait=True)"
    durable = hashed = reads_back = True

    def __init__(self, state: State, root: Path) -> None:
        super().__init__(state, root)
        both = {"model": state.model, "optimizer": state.optimizer}
        self.manager = ckpt.StateManager(root, **both, saving=ckpt.SaveOptions(background=self.background))

    def save(self, name: str) -> None:
        self.manager.save_state(name, wait=True)

    def load(self, name: str) -> None:
        with redirect_stderr(io.StringIO()):  # it prints what it restored
            self.manager.load_state(name)

    def close(self) -> None:
        self.manager.close()


class OursInBackground(Ours):
    name = "ckpt save_state()"
    background = prepares = True

    def save(self, name: str) -> None:
        self.manager.save_state(name)

    def saved(self, name: str) -> bool:
        return (self.root / name / "manifest.json").exists()  # writing it is the commit

    def wait(self) -> None:
        self.manager.wait()


class TorchSave(Checkpointer):
    name = "torch.save / torch.load"

    def save(self, name: str) -> None:
        both = {"model": self.state.model.state_dict(), "optimizer": self.state.optimizer.state_dict()}
        torch.save(both, self.folder(name) / "state.pt")

    def load(self, name: str) -> None:
        both = torch.load(self.root / name / "state.pt", weights_only=True)
        self.state.model.load_state_dict(both["model"])
        self.state.optimizer.load_state_dict(both["optimizer"])


class Dcp(Checkpointer):
    name = "DCP save / load"
    durable = True

    def both(self) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(self.state.model, self.state.optimizer), strict=True))

    def save(self, name: str) -> None:
        dcp.save(self.both(), checkpoint_id=self.root / name, no_dist=True)

    def load(self, name: str) -> None:
        both = self.both()
        dcp.load(both, checkpoint_id=self.root / name, no_dist=True)
        model, optimizer = both["model"], both["optimizer"]
        set_state_dict(self.state.model, self.state.optimizer, model_state_dict=model, optim_state_dict=optimizer)


class DcpAsync(Dcp):
    name = "DCP async_save / load"
    background = True

    def __init__(self, state: State, root: Path) -> None:
        super().__init__(state, root)
        self.writing: Future[Any] | None = None
        self.in_a_group = False

    def prepare(self) -> None:
        """Saving from another thread than the main one needs a process group. Loading needs none."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.in_a_group = True

    def save(self, name: str) -> None:
        self.writing = dcp.async_save(self.both(), checkpoint_id=self.root / name)

    def saved(self, name: str) -> bool:
        return self.writing is not None and self.writing.done()

    def wait(self) -> None:
        if self.writing is not None:
            self.writing.result()

    def close(self) -> None:
        if self.in_a_group:
            dist.destroy_process_group()


class DcpAsyncPinned(DcpAsync):
    """Its stager copies the live tensors in a thread: a step must wait until it is done."""

    name = "DCP async_save, pinned + async stager"

    def __init__(self, state: State, root: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(state, root)
        cuda = not state.on_cpu
        options = {"use_pinned_memory": cuda, "use_non_blocking_copy": cuda, "use_shared_memory": False}
        self.stager = DefaultStager(StagingOptions(use_async_staging=True, **options))
        self.staging: Future[Any] | None = None

    @classmethod
    def missing(cls) -> bool:
        from torch.distributed.checkpoint import staging

        return not hasattr(staging, "DefaultStager")

    def save(self, name: str) -> None:
        started = dcp.async_save(self.both(), checkpoint_id=self.root / name, async_stager=self.stager)
        self.staging, self.writing = started.staging_completion, started.upload_completion

    @contextmanager
    def guard(self) -> Iterator[None]:
        if self.staging is not None:
            self.staging.result()
            self.staging = None
        yield

    def close(self) -> None:
        try:
            self.stager.close()
        finally:
            super().close()


class WithAccelerate(Checkpointer):
    name = "Accelerate save_state / load_state"
    needs = "accelerate"

    def __init__(self, state: State, root: Path) -> None:
        from accelerate import Accelerator

        super().__init__(state, root)
        self.accelerator = Accelerator(cpu=state.on_cpu)
        self.accelerator.prepare(state.model, state.optimizer)

    def save(self, name: str) -> None:
        self.accelerator.save_state(str(self.root / name))

    def load(self, name: str) -> None:
        self.accelerator.load_state(str(self.root / name))

    def close(self) -> None:
        from accelerate.state import AcceleratorState

        self.accelerator.free_memory()
        AcceleratorState._reset_state(reset_partial_state=True)  # or the next instance would find this one's device


class TorchCheckpointing(Checkpointer):
    """With O_DIRECT off: its unaligned last write fails on ext4. A separate process writes the files."""

    name = "torch_checkpointing"
    needs = "torch_checkpointing"
    background = prepares = True

    def __init__(self, state: State, root: Path) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().__init__(state, root)
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
        self.writing: Future[Any] | None = None

    def both(self) -> dict[str, Any]:
        return {"model": self.state.model.state_dict(), "optimizer": self.state.optimizer.state_dict()}

    def prepare(self) -> None:
        self.manager.prewarm_staging(self.both())

    def save(self, name: str) -> None:
        self.writing = self.manager.save(str(self.root / name), self.both())

    def guard(self) -> AbstractContextManager[Any]:
        return self.manager.lock()

    def saved(self, name: str) -> bool:
        return self.writing is not None and self.writing.done()

    def wait(self) -> None:
        if self.writing is not None:
            self.writing.result()

    def load(self, name: str) -> None:
        into = {"model": self.state.model.state_dict(), "optimizer": None}
        found = self.manager.load(str(self.root / name), into=into, strict=True)
        self.state.optimizer.load_state_dict(found["optimizer"])

    def close(self) -> None:
        self.manager.close()


class Safetensors(Checkpointer):
    name = "safetensors"
    needs = "safetensors"

    def save(self, name: str) -> None:
        from safetensors.torch import save_file

        groups = {"groups": json.dumps(self.state.groups)}
        save_file(self.state.tensors(), self.folder(name) / "state.safetensors", metadata=groups)

    def load(self, name: str) -> None:
        from safetensors import safe_open
        from safetensors.torch import load_file

        path = self.root / name / "state.safetensors"
        with safe_open(path, "pt") as file:
            groups = json.loads(file.metadata()["groups"])
        self.state.take(load_file(path), [group | {"betas": tuple(group["betas"])} for group in groups])


class DurableSafetensors(Safetensors):
    name = "safetensors + fsync"
    durable = True

    def save(self, name: str) -> None:
        super().save(name)
        for path in (self.root / name / "state.safetensors", self.root / name):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

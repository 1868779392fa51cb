"""A pytest plugin for the tests of Lightning itself: every Trainer that they build saves and resumes through ckpt.

`make test-lightning LIGHTNING=path/to/a/checkout` loads it, and runs those tests that save or resume, twice: with saves
in the foreground, and with `--background` as ckpt saves by itself.

A checkpoint of ckpt's is a folder, and its root has hidden files beside it. The tests look for files. So in their
modules, such a folder counts as a file, a listing leaves out hidden names, and to read a checkpoint means to load it.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.utilities import cloud_io
from lightning.pytorch import Trainer
from lightning.pytorch.core import saving
from lightning.pytorch.strategies import Strategy

from ckpt.integrations.lightning import CkptGenerators, CkptIO

pytest_plugins = ["chosen_tests"]
CHOSEN: dict[str, tuple[str, ...]] = {
    "test_checkpoint_callback_frequency.py": (),
    "test_model_checkpoint.py": (),
    "test_torch_saving.py": (),
    "test_trainer_checkpoint.py": (),
    "test_checkpoint_connector.py": (),
    "test_checkpoint_io_plugin.py": (),
    "test_restore.py": (),
}
CANNOT_APPLY = {
    "It resumes from a file that torch.save wrote. CkptIO reads none: `ckpt convert` turns it into a checkpoint.": (
        "test_stateful_trainer_ckpt_path_support",
    ),
    "It expects a FileNotFoundError in Lightning's words. CkptIO raises a MissingError, or refuses the name.": (
        "test_hpc_restore_attempt",
        "test_try_resume_from_non_existing_checkpoint",
    ),
    "Its hparams are OmegaConf's, which CkptIO refuses, and says how to turn them into plain values.": (
        "test_hparams_type[True]",
    ),
    "It gives storage_options, which CkptIO refuses: they belong to Lightning's way to open a file.": (
        "test_trainer_save_checkpoint_storage_options",
    ),
    "It looks in fsspec's memory://. For ckpt, that is a storage of its own.": ("test_ckpt_for_fsspec",),
    "It serves the checkpoint as one file over HTTP. ckpt's is a folder.": (
        "test_strict_model_load_more_params[True]",
        "test_strict_model_load_less_params[True]",
    ),
}
_build = Trainer.__init__
_background = False
_opened: list[CkptIO] = []


class _CountedIO(CkptIO):
    """Calls `torch.save` where a test has replaced it to count saves."""

    def __init__(self) -> None:
        super().__init__(background=_background)
        _opened.append(self)

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        if isinstance(torch.save, Mock):
            torch.save(checkpoint, io.BytesIO())


@functools.wraps(_build)
def _build_attached(self: Any, *, plugins: Any = None, callbacks: Any = None, **options: Any) -> None:
    plugins, callbacks = _listed(plugins), _listed(callbacks)
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins) and not _has_io(options.get("strategy")):
        plugins.append(_CountedIO())
        callbacks.append(CkptGenerators())
    _build(self, plugins=plugins, callbacks=callbacks, **options)


def _has_io(strategy: Any) -> bool:
    return isinstance(strategy, Strategy) and strategy._checkpoint_io is not None


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _is_checkpoint(path: Any) -> bool:
    return isinstance(path, str | os.PathLike) and os.path.isdir(path)


def _loading(own: Callable[..., Any]) -> Callable[..., Any]:
    """A function that reads a file of Lightning's, and a checkpoint of ckpt's as well."""

    @functools.wraps(own)
    def load(path: Any, *given: Any, **named: Any) -> Any:
        if _is_checkpoint(path):
            return CkptIO().load_checkpoint(path, named.get("map_location"))
        return own(path, *given, **named)

    return load


def pytest_configure(config: pytest.Config) -> None:
    global _background
    _background = config.getoption("--background")
    Trainer.__init__ = _build_attached
    torch.load = _loading(torch.load)
    cloud_io._load = saving.pl_load = _loading(cloud_io._load)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    while _opened:
        _opened.pop().teardown()  # as at the end of the process, where a test has saved after a training


@pytest.fixture(autouse=True)
def _checkpoints_as_files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    path = SimpleNamespace(**{**vars(os.path), "isfile": lambda path: os.path.isfile(path) or _is_checkpoint(path)})
    listed = {"listdir": lambda path: [name for name in os.listdir(path) if not name.startswith(".")]}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("here"))  # some tests write logs and checkpoints to where they run
        patch.setattr(request.module, "os", SimpleNamespace(**{**vars(os), "path": path, **listed}), raising=False)
        patch.setattr(Path, "iterdir", lambda folder: (folder / name for name in listed["listdir"](folder)))
        yield

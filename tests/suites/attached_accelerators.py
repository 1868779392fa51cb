"""A pytest plugin for the tests of Accelerate itself: every `Accelerator` that they build is attached to ckpt.

`make test-accelerate ACCELERATE=path/to/a/checkout` loads it, and runs those tests that save or load, twice: with saves
in the foreground, and with `--background` as ckpt saves by itself.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from ckpt import SaveOptions
from ckpt.integrations.accelerate import attach

pytest_plugins = ["chosen_tests"]
CHOSEN = {"test_state_checkpointing.py": (), "test_accelerator.py": ("save_load", "stateful_dataloader", "pickle")}
CANNOT_APPLY: dict[str, tuple[str, ...]] = {}
_build = Accelerator.__init__
_background = False


def _build_attached(self: Any, *args: Any, **options: Any) -> None:
    _build(self, *args, **options)
    root = None if self.project_dir else Path(tempfile.mkdtemp(), "root")
    attach(self, root, saving=SaveOptions(background=_background))


def pytest_configure(config: pytest.Config) -> None:
    global _background
    _background = config.getoption("--background")
    Accelerator.__init__ = _build_attached

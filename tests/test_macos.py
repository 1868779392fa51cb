"""ckpt on macOS and Windows, as far as Linux can show it: `tests/helpers/macos.py` says what is hidden."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import ckpt

HERE = Path(__file__).parent
SLICE = (
    "macos_cases.py",
    "test_manager.py",
    "guarantees/test_twice.py",
    "storage/test_local.py",
    "save/test_background.py",
)


@pytest.mark.slow
@pytest.mark.on_disk
def test_saves_and_loads_need_nothing_that_macos_lacks(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "tests.helpers.macos", "-p", "no:cacheprovider", "-m",
        "not slow and not gpu and not long and not on_linux", "--basetemp", str(tmp_path / "roots"),
        *(str(HERE / name) for name in SLICE),
    ]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | {"CI": ""}
    done = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_windows_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    spec = spec_from_file_location("ckpt_on_windows", ckpt.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"^ckpt does not run on Windows\. Use Linux, macOS, or WSL 2 on Windows\.$"):
        spec.loader.exec_module(module_from_spec(spec))

"""The folder that stands for this machine's memory, a test's own: `pytest.mark.usefixtures("memory")`."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(folder))
    return folder

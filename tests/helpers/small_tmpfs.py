"""A command with a small tmpfs of its own at a folder, as in a container. The mount ends with the command."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

_DEADLINE = 240.0  # seconds


def with_tmpfs(
    folder: Path, size: int, command: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to whose processes alone a folder is a tmpfs of so many bytes."""
    if shutil.which("unshare") is None:
        pytest.skip("a mount of its own needs unshare")
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    mount = f'mount -t tmpfs -o size={size} ckpt "$0"'
    tried = subprocess.run([*unshare, "sh", "-c", mount, str(folder)], capture_output=True, text=True, timeout=60)
    if tried.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {tried.stderr.strip()}")
    return subprocess.run(
        [*unshare, "sh", "-c", f'{mount} && exec "$@"', str(folder), *command],
        capture_output=True,
        text=True,
        timeout=_DEADLINE,
        env={**os.environ, **(environment or {})},
    )

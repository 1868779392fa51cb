"""What figures depend on: the processor, its memory, the file system, versions and the commit."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import ckpt


def processor() -> str:
    """The processor's name. What the platform module says of it is often empty."""
    found = re.search(r"^Model name:\s+(\S.*)$", _output("lscpu"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def describe(root: Path) -> dict[str, str | int | float]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = os.cpu_count() or 0
    return {
        "processor": processor(),
        "cores": cores,
        "memory, GB": round(memory / 1e9),
        "system": platform.system(),
        "file system": filesystem(root),
    }


def filesystem(root: Path) -> str:
    found = _output("df", "--output=fstype", str(root)).split()
    return found[-1] if found else "unknown"


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, of ckpt (which need not be installed), and of those packages that are installed."""
    found = {"Python": platform.python_version(), "ckpt": ckpt.__version__}
    commit = commit_of(Path(__file__).parent)
    if commit:
        found["commit"] = commit
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit_of(checkout: Path) -> str:
    """The commit that is checked out, marked if there are changes; empty outside of a repository."""
    return _output("git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*").strip()


def today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""

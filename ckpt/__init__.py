"""Checkpoints that are never half-written, resume exactly, and do not make training wait.

The public names are listed once, in `__init__.pyi`. They are imported when they are first used, so that the command
`ckpt` starts without importing torch.
"""

from __future__ import annotations

import ast
import pkgutil
import sys
from importlib import import_module
from typing import Any

if sys.platform == "win32":  # it has neither fork nor POSIX locks
    raise ImportError("ckpt does not run on Windows. Use Linux, macOS, or WSL 2 on Windows.")

from ckpt.shown import install_log_filter
from ckpt.util.console import install_console


def _read_homes() -> dict[str, str]:
    """The module of every public name."""
    stub = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"")
    imports = (node for node in stub.body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}


install_log_filter()
install_console()
_HOMES = _read_homes()
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

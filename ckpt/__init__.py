"""Checkpoints that are never half-written, resume exactly, and do not make training wait.

Names are imported when they are first used, so that the command `ckpt` starts without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt.version import __version__

if TYPE_CHECKING:
    from ckpt.data.progress import Progress
    from ckpt.errors import (
        AbsentError,
        CheckpointError,
        CkptError,
        ConfigError,
        ConflictError,
        DamagedError,
        DeniedError,
        FullError,
        LockedError,
        MetricError,
        MismatchError,
        MissingError,
        NotDurableError,
        Preempted,
        RanksError,
        SchemeError,
        StateError,
        StorageError,
        TransientError,
        TruncatedError,
        UnsupportedError,
        VersionError,
    )
    from ckpt.export.load_model import load_model
    from ckpt.export.merge import merge
    from ckpt.export.push import push_to_hub
    from ckpt.load.restored import Restored
    from ckpt.manager import StateManager
    from ckpt.root.catalog import Checkpoint, list_checkpoints
    from ckpt.root.retention import Keep
    from ckpt.root.verify import verify
    from ckpt.tools.convert import Converted, convert
    from ckpt.tools.diff import Diff, Difference, diff
    from ckpt.tools.prune import Pruned, prune
    from ckpt.tools.pull import pull

_HOMES = {
    "ckpt.root.catalog": ("Checkpoint", "list_checkpoints"),
    "ckpt.tools.diff": ("Diff", "Difference", "diff"),
    "ckpt.tools.convert": ("Converted", "convert"),
    "ckpt.errors": (
        "AbsentError",
        "CheckpointError",
        "CkptError",
        "ConfigError",
        "ConflictError",
        "DamagedError",
        "DeniedError",
        "FullError",
        "LockedError",
        "MetricError",
        "MismatchError",
        "MissingError",
        "NotDurableError",
        "Preempted",
        "RanksError",
        "SchemeError",
        "StateError",
        "StorageError",
        "TransientError",
        "TruncatedError",
        "UnsupportedError",
        "VersionError",
    ),
    "ckpt.export.load_model": ("load_model",),
    "ckpt.manager": ("StateManager",),
    "ckpt.export.merge": ("merge",),
    "ckpt.data.progress": ("Progress",),
    "ckpt.tools.prune": ("Pruned", "prune"),
    "ckpt.tools.pull": ("pull",),
    "ckpt.export.push": ("push_to_hub",),
    "ckpt.load.restored": ("Restored",),
    "ckpt.root.retention": ("Keep",),
    "ckpt.root.verify": ("verify",),
}

__all__ = [
    "AbsentError",
    "Checkpoint",
    "CheckpointError",
    "CkptError",
    "ConfigError",
    "ConflictError",
    "Converted",
    "DamagedError",
    "DeniedError",
    "Diff",
    "Difference",
    "FullError",
    "Keep",
    "LockedError",
    "MetricError",
    "MismatchError",
    "MissingError",
    "NotDurableError",
    "Preempted",
    "Progress",
    "Pruned",
    "RanksError",
    "Restored",
    "SchemeError",
    "StateError",
    "StateManager",
    "StorageError",
    "TransientError",
    "TruncatedError",
    "UnsupportedError",
    "VersionError",
    "__version__",
    "convert",
    "diff",
    "list_checkpoints",
    "load_model",
    "merge",
    "prune",
    "pull",
    "push_to_hub",
    "verify",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'ckpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""Checkpoints that are never half-written, resume exactly, and do not make training wait.

Names are imported when they are first used, so that the command `ckpt` starts without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt.version import __version__

if TYPE_CHECKING:
    from ckpt.catalog import Checkpoint, list_checkpoints
    from ckpt.comparing import Diff, Difference, diff
    from ckpt.converting import Converted, convert
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
    from ckpt.manager import StateManager
    from ckpt.merging import merge
    from ckpt.model_loading import load_model
    from ckpt.progress import Progress
    from ckpt.pruning import Pruned, prune
    from ckpt.pulling import pull
    from ckpt.pushing import push_to_hub
    from ckpt.restored import Restored
    from ckpt.retention import Keep
    from ckpt.verifying import verify

_HOMES = {
    "ckpt.catalog": ("Checkpoint", "list_checkpoints"),
    "ckpt.comparing": ("Diff", "Difference", "diff"),
    "ckpt.converting": ("Converted", "convert"),
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
    "ckpt.model_loading": ("load_model",),
    "ckpt.manager": ("StateManager",),
    "ckpt.merging": ("merge",),
    "ckpt.progress": ("Progress",),
    "ckpt.pruning": ("Pruned", "prune"),
    "ckpt.pulling": ("pull",),
    "ckpt.pushing": ("push_to_hub",),
    "ckpt.restored": ("Restored",),
    "ckpt.retention": ("Keep",),
    "ckpt.verifying": ("verify",),
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

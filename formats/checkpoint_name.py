"""What a checkpoint is called: `step-00001000` where nobody has named it, and which other names are possible."""

from __future__ import annotations

import re

from ckpt.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,199}")
_OF_STEP = re.compile(r"step-\d{8,}")


def name_of_step(step: int) -> str:
    """What a checkpoint, and its folder, is called where nobody has named it."""
    return f"step-{step:08d}"


def is_name_of_step(name: str) -> bool:
    return _OF_STEP.fullmatch(name) is not None


def check_name(name: str) -> str:
    """Refuse a name that is not a single path segment: it becomes a folder below the root, and must not lead out."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"{name!r} is not a valid checkpoint name: use letters, digits and . _ - + = @, start with a letter, a "
            "digit or '_', and don't use '..' or '/'. To save to another folder, give StateManager another root."
        )
    return name

"""Deprecation warnings that point to the user's own line, however deep inside ckpt they arise."""

from __future__ import annotations

import sys
import warnings

_PACKAGE = __name__.partition(".")[0]


def warn_deprecated(message: str) -> None:
    """Warn at the innermost caller outside ckpt: Python shows a DeprecationWarning by default only in `__main__`."""
    warnings.warn(message, DeprecationWarning, stacklevel=_level_outside())


def _level_outside() -> int:
    """The `stacklevel` of the first frame outside the package, for a call of `warn` by the caller of this function."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    return level

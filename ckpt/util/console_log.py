"""What ckpt says: records of the logger `ckpt`, on standard error unless another handler takes them to the console.

    logging.getLogger("ckpt").setLevel("WARNING")   # no line per save and resume; or "DEBUG", for more of them
    logging.basicConfig(...)                        # in the format of the script's own lines
    CKPT_LOG=warning python train.py                # the same without a change of the script; "off" for nothing

Imports no torch: the command `ckpt` starts without it.
"""

from __future__ import annotations

import logging
import os
import sys

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_OFF = "off"
_VARIABLE = "CKPT_LOG"


class ConsoleHandler(logging.Handler):
    """Prints the text of a record on what is standard error now, unless that is done by somebody else."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or any(map(_goes_to_console, _others(self))):
            return
        try:
            print(record.getMessage(), file=sys.stderr, flush=True)
        except Exception:  # as every handler of logging: a closed standard error is no error of the training
            self.handleError(record)


def install_console() -> None:
    """Let the logger `ckpt` be heard. A level that somebody has set already stays."""
    logger = logging.getLogger("ckpt")
    chosen = os.environ.get(_VARIABLE, "info").lower()
    if logger.level == logging.NOTSET:
        logger.setLevel(_LEVELS.get(chosen, logging.INFO))
    if chosen == _OFF:
        logger.addHandler(logging.NullHandler())  # or logging would print warnings by its last resort
    elif not any(isinstance(handler, ConsoleHandler) for handler in logger.handlers):
        logger.addHandler(ConsoleHandler())
    if chosen not in _LEVELS and chosen != _OFF:
        logger.warning("%s=%s is not known: %s or %s.", _VARIABLE, chosen, ", ".join(_LEVELS), _OFF)


def _others(handler: ConsoleHandler) -> list[logging.Handler]:
    logger = logging.getLogger("ckpt")
    further = logging.getLogger().handlers if logger.propagate else []
    return [other for other in (*logger.handlers, *further) if other is not handler]


def _goes_to_console(handler: logging.Handler) -> bool:
    """Whether a handler prints: to a standard stream, or as Rich's does, which has a console."""
    stream = getattr(handler, "stream", None)
    standard = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return hasattr(handler, "console") or (stream is not None and any(stream is one for one in standard))

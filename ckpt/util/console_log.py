"""What ckpt says: records of the logger `ckpt`, the only channel, each shown once.

INFO is progress (saved, resumed). WARNING is what the user should change or know; ERROR, what failed.

    logging.getLogger("ckpt").setLevel("WARNING")   # no line per save and resume; or "DEBUG", for more of them
    logging.basicConfig(...)                        # in the format of the script's own lines
    CKPT_LOG=warning python train.py                # the same without a change of the script; "quiet" for nothing

Without a handler of the script that shows records to a person, `ConsoleHandler` prints them on standard error.
Imports no torch: the command `ckpt` starts without it.
"""

from __future__ import annotations

import io
import logging
import os
import sys

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "quiet": logging.CRITICAL + 1,
}
_VARIABLE = "CKPT_LOG"
_STANDARD_STREAMS = (1, 2)


class ConsoleHandler(logging.Handler):
    """Prints the text of a record on what is standard error now, unless another handler shows it already."""

    def __init__(self) -> None:
        super().__init__()
        self.pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or any(map(self._shows, self._others())):
            return
        try:
            label = f"ckpt {record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            print(f"{label}{record.getMessage()}", file=sys.stderr, flush=True)
        except Exception:  # as every handler of logging: a closed standard error is no error of the training
            self.handleError(record)

    def _others(self) -> list[logging.Handler]:
        logger = logging.getLogger("ckpt")
        further = logging.getLogger().handlers if logger.propagate else []
        return [other for other in (*logger.handlers, *further) if other is not self]

    def _shows(self, handler: logging.Handler) -> bool:
        """Whether a person sees what a handler gets. If in doubt, no: twice is better than never.

        Rich's handler has a console. pytest prints what its handlers collect, but not what a child it forked collects.
        """
        if hasattr(handler, "console"):
            return True
        if not isinstance(handler, logging.StreamHandler) or isinstance(handler, logging.FileHandler):
            return False
        if any(handler.stream is stream for stream in (sys.stdout, sys.stderr)):
            return True
        try:
            return handler.stream.fileno() in _STANDARD_STREAMS
        except (AttributeError, io.UnsupportedOperation):  # no file: a notebook's stream or a tee, or memory
            of_pytest = type(handler).__module__ == "_pytest.logging" and self.pid == os.getpid()
            return of_pytest or not isinstance(handler.stream, io.StringIO)
        except (OSError, ValueError):  # closed
            return False


def install_console() -> None:
    """Let the logger `ckpt` be heard. A level that somebody has set already stays."""
    logger = logging.getLogger("ckpt")
    chosen = os.environ.get(_VARIABLE, "info").lower()
    if logger.level == logging.NOTSET:
        logger.setLevel(_LEVELS.get(chosen, logging.INFO))
    if not any(isinstance(handler, ConsoleHandler) for handler in logger.handlers):
        logger.addHandler(ConsoleHandler())
    if chosen not in _LEVELS:
        logger.warning("%s=%s is not known. Choose one of: %s.", _VARIABLE, chosen, ", ".join(_LEVELS))

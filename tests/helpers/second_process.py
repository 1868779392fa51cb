"""A test that starts a second process is marked `slow`, and `make check` leaves it out: one without the mark fails."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

MARKS = ("slow", "gpu")
platform.processor()  # libraries ask for it: Python starts `uname` for the first answer, and has it then
_GUARDED: tuple[tuple[Any, str], ...] = (
    (subprocess.Popen, "__init__"),
    (BaseProcess, "start"),
    (os, "fork"),
    (os, "forkpty"),
    (os, "posix_spawn"),
    (os, "posix_spawnp"),
)


def slow_where(word: str, names: Iterable[str]) -> list[Any]:
    """Parameters for a test: those that have the word in their name start a process."""
    return [pytest.param(name, marks=pytest.mark.slow) if word in name else name for name in names]


@contextmanager
def single_process(test: pytest.Item) -> Iterator[None]:
    """Make every way to start a process raise, and fail the test even if the error was caught."""
    refused: list[str] = []
    is_over = False

    def refusing(own: Any) -> Any:
        def refuse(*args: Any, **options: Any) -> Any:
            if is_over:  # a test had replaced it, and put this back at its end
                return own(*args, **options)
            refused.append(f"{test.nodeid} starts a second process: mark it slow")
            pytest.fail(refused[0])

        return refuse

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in _GUARDED:
            patch.setattr(owner, name, refusing(getattr(owner, name)))
        yield
    is_over = True
    if refused:
        pytest.fail(refused[0])

"""Which tests start a second process: found by what their code can reach, and enforced while the others run.

A test is marked `slow` if its function, a fixture that it takes or a helper that these call can start a process, and
`ranks` if the processes form a group. What cannot be found that way (a process that a library starts, a long
computation) carries the mark in its module. An unmarked test that starts a process nevertheless fails.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest

from tests.helpers import hosted, processes

MARKS = ("slow", "gpu", "ranks")
_STARTERS: dict[object, str] = {
    processes.run_alone: "slow",
    processes.start_alone: "slow",
    processes.fork: "slow",
    processes.run_ranks: "ranks",
    processes.start_rank: "ranks",
    hosted.hosted_ranks: "ranks",
    subprocess: "slow",
    multiprocessing: "slow",
}
_WRAPPERS = (MethodType, classmethod, staticmethod, property, partial)
_IN_A_GROUP = ("torch.distributed.run", "accelerate.commands.launch", "notebook_launcher", "init_process_group")
_GUARDED: tuple[tuple[Any, str], ...] = (
    (subprocess.Popen, "__init__"),
    (BaseProcess, "start"),
    (os, "fork"),
    (os, "forkpty"),
    (os, "posix_spawn"),
    (os, "posix_spawnp"),
)


def marks_of(test: pytest.Function) -> set[str]:
    """The marks that follow from what a test can reach."""
    parameters = list(test.callspec.params.values()) if hasattr(test, "callspec") else []
    search = _Search(test.cls, {value for value in parameters if isinstance(value, str)})
    fixtures = test._fixtureinfo.name2fixturedefs.values()
    search.visit([test.function, *(fixture.func for stack in fixtures for fixture in stack), *parameters])
    starts = search.found & {"slow", "ranks"} or ({"slow"} if "s3" in search.parameters else set())
    return starts | {"ranks"} if starts and "group" in search.found else starts


class _Search:
    """Follows the names in a function's code to the functions, classes and tables of the tests that they stand for."""

    def __init__(self, owner: type | None, parameters: set[str]) -> None:
        self.owner = owner  # the class whose methods the test calls on itself
        self.parameters = parameters
        self.found: set[str] = set()
        self._seen: dict[int, object] = {}  # held, or an id would be given again

    def visit(self, values: Iterable[object]) -> None:
        for value in values:
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._visit(value)

    def _visit(self, value: Any) -> None:
        if isinstance(value, str):
            self._read(value)
        elif isinstance(value, dict):
            chosen = self.parameters & value.keys()
            self.visit([value[key] for key in chosen] if chosen else value.values())
        elif isinstance(value, list | tuple):
            self.visit(value)
        elif isinstance(value, BaseContext):
            self.found.add("slow")
        elif isinstance(value, FunctionType | ModuleType) and value in _STARTERS:
            self.found.add(_STARTERS[value])
        elif isinstance(value, _WRAPPERS) or str(getattr(value, "__module__", "")).startswith("tests."):
            self._follow(value)

    def _follow(self, value: Any) -> None:
        if isinstance(value, type):
            self.visit([*vars(value).values(), *value.__mro__[1:]])
        elif isinstance(value, FunctionType):
            self.visit([*_enclosed(value), *vars(value).values()])
            for code in _codes(value.__code__):
                self._scan(code, value.__globals__)
        elif isinstance(value, _WRAPPERS):
            self.visit(getattr(value, name, None) for name in ("__func__", "fget", "func"))
        else:
            self.visit([type(value), *getattr(value, "__dict__", {}).values()])

    def _scan(self, code: CodeType, names: dict[str, Any]) -> None:
        self.visit(constant for constant in code.co_consts if isinstance(constant, str | tuple))
        self.visit(names[name] for name in code.co_names if name in names)
        self.visit(getattr(self.owner, name, None) for name in code.co_names)
        if "fork" in code.co_names:
            self.found.add("slow")
        if not set(_IN_A_GROUP).isdisjoint(code.co_names):
            self.found.add("group")

    def _read(self, text: str) -> None:
        if text == "num_workers":  # the keyword of a DataLoader
            self.found.add("slow")
        if any(word in text for word in _IN_A_GROUP):  # in a script or a command line
            self.found.add("group")


def _enclosed(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # empty
            yield cell.cell_contents


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


@contextmanager
def single_process(test: pytest.Item) -> Iterator[None]:
    """Make every way to start a process raise, and fail the test even if the error was caught."""
    refused: list[str] = []

    def refuse(*args: object, **options: object) -> None:
        refused.append(f"{test.nodeid} starts a second process: mark it slow, or ranks if the processes form a group")
        pytest.fail(refused[0])

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in _GUARDED:
            patch.setattr(owner, name, refuse)
        yield
    if refused:
        pytest.fail(refused[0])

"""`make check` starts no second process: tests that do are found by their code, and refused where they were not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context

import pytest

from tests.helpers.processes import run_alone, run_ranks
from tests.helpers.second_process import marks_of, single_process


def _nothing(rank: int) -> None:
    """For ranks."""


def _through_a_helper() -> None:
    subprocess.run(["true"], check=True)


class Launcher:
    """Starts a process in a method."""

    @property
    def code(self) -> int:
        return run_alone(_nothing)


BY_NAME: dict[str, Callable[[], object]] = {"none": lambda: None, "helper": _through_a_helper}


def _start_by_name(name: str) -> None:
    BY_NAME[name]()


@pytest.mark.parametrize(("function", "marks"), [
    (lambda: None, set()),
    (_through_a_helper, {"slow"}),
    (lambda: Launcher().code, {"slow"}),
    (lambda: run_ranks(2, _nothing), {"ranks"}),
    (lambda: os.fork(), {"slow"}),
    (lambda: subprocess.run(["python", "-m", "torch.distributed.run"]), {"slow", "ranks"}),
])  # fmt: skip
def test_marks_follow_from_the_code(
    request: pytest.FixtureRequest, function: Callable[[], None], marks: set[str]
) -> None:
    module = request.node.parent
    test = pytest.Function.from_parent(module, name="test_made_up", callobj=function)
    assert marks_of(test) == marks


@pytest.mark.parametrize("name", BY_NAME)
def test_of_a_table_only_the_entry_that_a_parameter_names_counts(request: pytest.FixtureRequest, name: str) -> None:
    assert (request.node.get_closest_marker("slow") is not None) == (name == "helper")
    _start_by_name(name)


@pytest.mark.parametrize("start", [
    lambda: subprocess.run(["true"]), lambda: os.fork(), lambda: get_context("fork").Process().start(),
])  # fmt: skip
def test_a_process_of_an_unmarked_test_is_refused(request: pytest.FixtureRequest, start: Callable[[], None]) -> None:
    with pytest.raises(pytest.fail.Exception, match="mark it slow"), single_process(request.node):
        start()


def test_a_refusal_that_was_caught_fails_the_test_in_the_end(request: pytest.FixtureRequest) -> None:
    refused = pytest.raises(pytest.fail.Exception, match="mark it slow")
    with refused, single_process(request.node), suppress(BaseException):
        subprocess.run(["true"])

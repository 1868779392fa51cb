"""`make check` starts no second process, and CI skips no test but for known reasons."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from types import SimpleNamespace

import pytest

from tests.helpers.expected_skips import ExpectedSkips
from tests.helpers.second_process import single_process


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


@pytest.mark.parametrize(
    ("reason", "status"),
    [("could not import 'torch_xla': No module named 'torch_xla'", 0), ("it is Monday", 1)],
)
def test_a_skip_for_a_reason_that_is_not_written_down_fails_the_run(reason: str, status: int) -> None:
    plugin = ExpectedSkips()
    skipped = pytest.TestReport("test", ("test.py", 1, "test"), {}, "skipped", ("test.py", 1, reason), "setup")
    plugin.pytest_runtest_logreport(skipped)
    session = SimpleNamespace(exitstatus=0)
    plugin.pytest_sessionfinish(session)  # type: ignore[arg-type]
    assert session.exitstatus == status

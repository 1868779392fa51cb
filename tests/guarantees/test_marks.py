"""`make check` starts no second process: a test that does without the mark `slow` fails."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context

import pytest

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

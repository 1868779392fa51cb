"""Calls in several threads at a time."""

from __future__ import annotations

import os
import threading

import pytest

from ckpt.util.threads import in_parallel, usable_cores


def test_results_are_in_the_order_of_the_items_and_calls_run_side_by_side() -> None:
    both = threading.Barrier(2, timeout=30.0)

    def call(item: int) -> int:
        both.wait()  # passes only if two calls are under way
        return item * item

    assert in_parallel(call, range(8), 2, "squares") == [item * item for item in range(8)]


def test_an_error_is_raised_and_no_more_calls_begin() -> None:
    called: list[int] = []

    def call(item: int) -> None:
        called.append(item)
        raise ValueError(f"of {item}")

    with pytest.raises(ValueError, match="of "):
        in_parallel(call, range(100), 4, "failing")
    assert len(called) <= 4


@pytest.mark.parametrize("threads", [1, 4])
def test_an_index_error_of_a_call_is_not_taken_for_the_end(threads: int) -> None:
    with pytest.raises(IndexError):
        in_parallel(lambda item: [][item], range(5), threads, "failing")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinities")
def test_cores_are_those_that_this_process_may_run_on() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert usable_cores() == len(allowed)

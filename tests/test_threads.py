"""Calls in threads, one or several at a time."""

from __future__ import annotations

import os
import sys
import threading
import weakref

import pytest

from ckpt.util.threads import Worker, in_parallel, usable_cores


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


def test_the_error_of_a_call_is_raised_once_and_the_next_call_runs() -> None:
    worker = Worker("failing").start(lambda: [][0])
    with pytest.raises(IndexError):
        worker.start(list)
    assert worker.wait() is None
    worker.start(lambda: {1: 1}[0])
    worker.close()
    with pytest.raises(KeyError):
        worker.check()
    assert worker.start(lambda: "result").wait() == "result"


@pytest.mark.parametrize("kept", [True, False])
def test_a_thread_ends_with_its_call_unless_it_is_kept_until_the_worker_is_closed(kept: bool) -> None:
    worker = Worker("calls", kept=kept)
    first, second = (worker.start(threading.current_thread).wait() for _ in range(2))
    assert (first is second) == kept == second.is_alive()
    worker.close()
    assert not second.is_alive()


def test_what_a_kept_thread_has_called_is_freed_before_the_next_call() -> None:
    freed = threading.Event()
    worker, held = Worker("calls", kept=True), {0}
    weakref.finalize(held, freed.set)
    worker.start(held.copy)
    del held
    try:
        assert freed.wait(30.0)
    finally:
        worker.close()


def test_a_call_begins_when_its_caller_has_gone_on() -> None:
    interval, gone_on = sys.getswitchinterval(), False
    sys.setswitchinterval(30.0)  # a thread that has the interpreter's lock keeps it, unless it waits
    try:
        worker = Worker("calls").start(lambda: gone_on)
        gone_on = True
        assert worker.wait()
    finally:
        sys.setswitchinterval(interval)

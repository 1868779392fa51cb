"""Calls in background threads, one or several at a time, their priority, and which process is meant."""

from __future__ import annotations

import copy
import os
import platform
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any, cast

import pytest

from ckpt.errors import ConfigError
from ckpt.util.aligned_memory import system_library
from ckpt.util.threads import (
    OwnerProcess,
    Worker,
    boot_id,
    in_parallel,
    is_identity,
    normal_io_priority,
    process_identity,
    refuse_copy,
    start_time,
    usable_cores,
    work_in_background,
)


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
def test_cores_are_those_that_this_process_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert usable_cores() == len(allowed)
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert usable_cores() == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


def test_after_an_error_or_an_interrupt_the_others_take_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def call(item: int) -> None:
        called.append(item)
        assert threading.current_thread().daemon  # a program that ends does not wait for it
        if item == 0:
            raise ValueError("first")
        time.sleep(0.02)

    with pytest.raises(ValueError, match="first"):
        in_parallel(call, range(200), 2, "failing")
    assert len(called) < 200

    def interrupted(self: Worker) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "close", interrupted)
    called.clear()
    with pytest.raises(KeyboardInterrupt):
        in_parallel(call, range(1, 200), 2, "interrupted")
    while any(thread.name == "interrupted" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert len(called) < 199


def test_few_items_are_called_here_and_others_in_no_more_threads_than_asked_for() -> None:
    here = threading.get_ident()
    assert in_parallel(lambda _: threading.get_ident(), [1], 4, "one") == [here]
    assert in_parallel(lambda _: threading.get_ident(), [1, 2, 3], 1, "one") == [here] * 3
    assert in_parallel(lambda _: threading.get_ident(), [], 4, "none") == []
    both = threading.Barrier(2, timeout=30.0)

    def call(_: int) -> int:
        both.wait()
        return threading.get_ident()

    found = set(in_parallel(call, range(8), 2, "two"))
    assert len(found) == 2
    assert here not in found


def test_which_process_it_was_is_known_from_a_document_or_not_at_all() -> None:
    mine = process_identity(os.getpid())
    assert mine == [boot_id(), os.stat("/proc/self/ns/pid").st_ino, os.getpid(), start_time(os.getpid())]
    assert start_time(os.getpid()) == Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19]
    assert start_time(2**22 + 1) is None  # the largest number is 2**22
    right = [[], mine, ["boot", 1, 2, None]]
    wrong = [None, (), "", ["boot"], mine[:3], [*mine, 5], [1, 1, 2, None], ["b", "1", 2, None], ["b", 1, 2, 3]]
    assert [is_identity(value) for value in (*right, *wrong)] == [True] * len(right) + [False] * len(wrong)


@pytest.mark.slow
def test_a_process_that_has_ended_has_no_start_even_before_its_parent_asks() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # a zombie
    try:
        assert start_time(child) is None
    finally:
        os.waitpid(child, 0)


def test_what_belongs_to_another_process_is_refused_and_nothing_is_copied() -> None:
    owner, end = OwnerProcess(), threading.Event()
    owner.require("save")
    owner.is_here = False  # as in a forked child
    with pytest.raises(ConfigError, match=f"save: this StateManager belongs to process {os.getpid()}"):
        owner.require("save")
    call = Worker("held").start(lambda: end.wait(60))
    call._owner.is_here = False
    for waits in (call.wait, call.close):
        with pytest.raises(ConfigError, match="held: this StateManager belongs to process"):
            waits()
    end.set()
    assert call.done_within(60)
    assert call.wait() is True  # nothing to wait for any more
    with pytest.raises(TypeError, match="you can't copy or pickle a Held"):
        copy.copy(type("Held", (), {"__reduce__": refuse_copy})())


class TestWorker:
    @pytest.mark.parametrize("kept", [True, False])
    @pytest.mark.parametrize("daemon", [True, False])
    def test_it_runs_beside_the_caller_who_gets_its_result_or_its_error(self, daemon: bool, kept: bool) -> None:
        go, done = threading.Event(), cast(Any, [])
        worker: Any = Worker("mine", daemon=daemon, kept=kept)
        assert (worker.wait(), worker.check(), worker.busy, worker.done_within(-1.0)) == (None, None, False, True)
        worker.close()  # there is no thread yet
        assert worker.start(lambda: (go.wait(60), done.append(1), threading.current_thread())) is worker
        assert worker.busy
        assert not worker.done_within(-1.0)
        worker.check()  # does not wait
        threading.Timer(0.05, go.set).start()
        worker.start(lambda: (done.append(2), threading.current_thread()))  # waits for the first
        assert done[0] == 1
        _, thread = worker.wait()
        assert done == [1, 2]
        assert (thread.name, thread.daemon) == ("mine", daemon)
        assert worker.wait() is None  # a result is given once
        assert not worker.busy
        assert worker.done_within(0.0)
        for raises in (worker.wait, worker.check, lambda: worker.start(lambda: None)):
            worker.start(lambda: 1 / 0)
            assert worker.done_within(60)
            with pytest.raises(ZeroDivisionError):
                raises()
            worker.wait()  # it was raised
        worker.close()
        assert [thread for thread in threading.enumerate() if thread.name == "mine"] == []

    def test_its_threads_are_neither_daemons_nor_kept_unless_it_is_told(self) -> None:
        worker = Worker("mine")
        thread = worker.start(threading.current_thread).wait()
        assert (thread.daemon, thread.is_alive(), worker._thread) == (False, False, None)

    def test_who_is_interrupted_before_a_call_begins_waits_for_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any) -> None:
            raise KeyboardInterrupt

        worker: Any = Worker("mine", kept=True)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(KeyboardInterrupt):
                worker.start(lambda: None)
        assert not worker.busy
        assert worker.start(lambda: 5).wait() == 5
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "mine")

        class Interrupted:
            def put(self, call: object) -> None:
                if call is not None:
                    raise KeyboardInterrupt
                given.put(None)

        given, worker._calls = worker._calls, Interrupted()
        with pytest.raises(KeyboardInterrupt):
            worker.start(lambda: None)
        assert not worker.busy
        thread.join(60)  # nothing was left for it to do
        assert not thread.is_alive()
        assert worker.start(lambda: 6).wait() == 6
        worker.close()


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


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the number of the call is not known")
def test_a_thread_in_the_background_gives_way_in_cores_and_disks_and_no_other_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ioprio_get = {"x86_64": 252, "aarch64": 31}[platform.machine()]

    def priorities() -> tuple[int, int, int]:
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return nice, *divmod(system_library().syscall(ioprio_get, 1, 0), 1 << 13)

    def work() -> list[tuple[int, int, int]]:
        work_in_background()
        found = [priorities()]
        with normal_io_priority():
            found.append(priorities())
        return [*found, priorities()]

    before = priorities()
    nice = min(19, before[0] + 5)
    assert Worker("background").start(work).wait() == [(nice, 3, 0), (nice, 2, 4), (nice, 3, 0)]

    def refuse(*_: int) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "setpriority", refuse)
        assert Worker("background").start(work).wait()[0] == (before[0], 3, 0)
    assert priorities() == before

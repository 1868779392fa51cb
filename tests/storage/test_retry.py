"""The retry policy: pauses that grow and are random, a deadline, and a server that was never reached."""

from __future__ import annotations

import random
import threading

import pytest

from ckpt.errors import ConfigError, TransientError
from ckpt.storage import retry
from ckpt.storage.retry import Requests, RetryPolicy, UnreachedError, time_left, within
from ckpt.util.threads import Worker


class Clock:
    """Stands for the module `time`: only pauses take time."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(retry, "time", clock)
    return clock


def all_pauses(policy: RetryPolicy, clock: Clock, *, reached: bool = True) -> list[float]:
    """The pauses of a request that fails again and again."""
    retries, found = policy.start(), []
    while (pause := retries.next_pause(reached=reached)) is not None:
        found.append(pause)
        clock.now += pause
    assert retries.tries == len(found) + 1
    return found


@pytest.mark.parametrize("seed", range(5))
def test_pauses_double_up_to_the_longest_and_the_last_try_is_at_the_deadline(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(retry, "_random", random.Random(seed))
    *pauses, last = all_pauses(RetryPolicy(deadline=100, first_pause=1, longest_pause=8), clock)
    for pause, most in zip(pauses, [1, 2, 4, *[8] * len(pauses)], strict=False):
        assert most / 2 <= pause <= most
    assert 0 < last <= 8
    assert clock.now == pytest.approx(100)


def test_two_clients_that_failed_together_do_not_come_back_together(clock: Clock) -> None:
    assert all_pauses(RetryPolicy(tries=5), clock) != all_pauses(RetryPolicy(tries=5), clock)


def test_a_policy_may_limit_the_number_of_tries(clock: Clock) -> None:
    assert len(all_pauses(RetryPolicy(tries=8), clock)) == 7


def test_without_time_there_is_one_try(clock: Clock) -> None:
    assert all_pauses(RetryPolicy(deadline=0), clock) == []


def test_a_server_that_was_never_reached_is_given_up_soon(clock: Clock) -> None:
    assert all_pauses(RetryPolicy(deadline=300), clock, reached=False)
    assert clock.now <= retry.FIRST_CONTACT
    assert all_pauses(RetryPolicy(deadline=300), clock, reached=True)
    assert clock.now > 300


def test_what_a_server_asks_for_is_waited_for(clock: Clock) -> None:
    assert RetryPolicy().start().next_pause(asked=37.0) == 37.0
    assert RetryPolicy(deadline=0).start().next_pause(asked=37.0) is None


@pytest.mark.parametrize("wrong", [{"deadline": -1}, {"deadline": float("nan")}, {"stall": 0}])
def test_a_policy_without_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"must be a number of seconds"):
        RetryPolicy(**wrong)  # type: ignore[arg-type]


def test_what_must_not_come_late_has_its_own_end_whatever_the_deadline(clock: Clock) -> None:
    with within(5):
        assert all_pauses(RetryPolicy(deadline=100), clock)
    assert clock.now == pytest.approx(5)
    with within(5), within(50):
        assert time_left() == pytest.approx(5)
    assert time_left() == float("inf")


class Pausing(threading.Event):
    """Nobody sets it, and waiting takes the clock's time alone."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        self.clock.now += timeout or 0.0
        return False


@pytest.mark.parametrize("first", [UnreachedError, TransientError])
def test_a_server_that_has_answered_once_is_waited_for_until_the_deadline(
    clock: Clock, first: type[TransientError]
) -> None:
    answers = [first("no.")]

    def attempt() -> None:
        raise answers.pop() if answers else UnreachedError("no.")

    with pytest.raises(TransientError, match=r"no\. Tried \d+ times"):
        Requests(RetryPolicy(deadline=100)).make(attempt, Pausing(clock))
    assert clock.now == pytest.approx(100) if first is TransientError else clock.now <= retry.FIRST_CONTACT


def test_a_request_that_is_given_up_is_not_made_again(clock: Clock) -> None:
    tried, stopped = [], threading.Event()
    stopped.set()

    def attempt() -> None:
        tried.append(1)
        raise TransientError("no.")

    with pytest.raises(TransientError, match="Tried 1 times"):
        Requests(RetryPolicy()).make(attempt, stopped)
    assert tried == [1]


def test_requests_that_wait_for_their_turn_lose_no_time(clock: Clock) -> None:
    requests, came, go = Requests(RetryPolicy(deadline=1), at_once=1), threading.Event(), threading.Event()

    def slow() -> None:
        came.set()
        go.wait()

    tries = iter([TransientError("no."), None])

    def attempt() -> None:
        if (problem := next(tries)) is not None:
            raise problem

    first = Worker("first").start(lambda: requests.make(slow, is_large=True))
    came.wait()
    second = Worker("second").start(lambda: requests.make(attempt, Pausing(clock), is_large=True))
    clock.now += 100
    go.set()
    first.wait()
    second.wait()  # it was tried twice

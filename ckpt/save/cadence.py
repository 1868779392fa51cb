"""How often to save: what an interval loses, the one that loses least, and the run that finds it with
`save_every="auto"` and `memory="auto"`.

Saves cost training time, and a failure costs what was trained since the last durable checkpoint. Daly's formula, whose
first term is Young's, balances the two for failures that come at random. `ckpt plan` reckons with the same functions.
Imports no torch.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

from ckpt.errors import ConfigError
from ckpt.root.catalog import History, PastAttempt

DAY = 86_400.0  # seconds, as everything here that has no other unit
# Failures of a node in a day. Meta's cluster RSC-1 had 6.5 per 1,000 node-days in eleven months, RSC-2 2.3 (arXiv
# 2410.21680). Llama 3 had 3.8: 419 unexpected interruptions in 54 days on 2,048 nodes (arXiv 2407.21783).
PUBLISHED = 0.0065
VARIABLE = "CKPT_FAILURES_PER_NODE_DAY"

_log = logging.getLogger("ckpt")

SHORTEST = 60.0  # a minute that is lost is little, and a disk that is never idle keeps others waiting
SHORTEST_IN_MEMORY = 5.0
LONGEST = 3600.0  # published rates count neither preemptions nor mistakes, which end runs too
_IDLE = 2  # a save begins no earlier than after so many times what one takes until it is durable
_CHEAP = 0.01  # the longest interval is longer where saves would cost training more than this share
_LAST = 20  # saves that count
_TELLING = 3  # failures from which the run's own rate is known better than the published one
_NOTICEABLE = 1.2  # a smaller change of the interval would gain less than 2 % of what it loses


def best_interval(save: float, every: float) -> float:
    """The time between saves that loses least, if one costs training `save`, and failures come `every` so often.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006.
    """
    if save >= 2 * every:
        return every
    part = save / (2 * every)
    return math.sqrt(2 * save * every) * (1 + math.sqrt(part) / 3 + part / 9) - save


def bounded(interval: float, save: float, durable: float, shortest: float | None = None) -> float:
    """The interval, neither so short that the disk is never idle, nor longer than an hour where saves cost little."""
    shortest = max(SHORTEST if shortest is None else shortest, _IDLE * durable)
    return min(max(interval, shortest), max(LONGEST, save / _CHEAP, shortest))


@dataclass(frozen=True)
class Lost:
    """Shares of all time: waiting for saves, training again what failures took, and starting again."""

    waiting: float
    repeated: float
    restarting: float

    @classmethod
    def of(cls, interval: float, save: float, durable: float, restart: float, every: float) -> Lost:
        """With failures at random, `every` so often. `durable`: from the call until a failure can't take the save."""
        saves = (interval + save) / every
        # of an interval's time, a failure at any moment takes all; so it does until the checkpoint is durable
        useful = math.exp(-(restart + durable) / every) * (interval / every / math.expm1(saves) if saves < 700 else 0)
        waiting, restarting = useful * save / interval, -math.expm1(-restart / every)
        return cls(waiting, max(0.0, 1 - useful - waiting - restarting), restarting)

    @property
    def total(self) -> float:
        return self.waiting + self.repeated + self.restarting


@dataclass(frozen=True)
class Past:
    """What earlier processes of a run have measured, as the history of its root has it.

    `saves`: of the last ones, what each cost training, and how long it took until it was durable. `seconds`: the time
    of all attempts, in which so many `failures` came. `step`: the seconds of one. `restart`: until a process could
    train. Each is 0 or empty if nothing is known.
    """

    saves: tuple[tuple[float, float], ...] = ()
    seconds: float = 0.0
    failures: int = 0
    step: float = 0.0
    restart: float = 0.0

    @property
    def save(self) -> tuple[float, float]:
        """What a save costs, and how long it takes: the medians."""
        cost, durable = (median(one) for one in zip(*self.saves, strict=True))
        return cost, durable

    @classmethod
    def of(cls, history: History) -> Past:
        attempts = history.attempts
        slowed = next((one.seconds["slowed"] for one in reversed(attempts) if "slowed" in one.seconds), 0.0)
        known = [each for save in history.saves if (each := save.seconds) and {"blocked", "total"} <= each.keys()]
        saves = [(_sane(each["blocked"] + slowed), _sane(each["total"])) for each in known[-_LAST:]]
        ready = [one.seconds.get("ready", 0.0) for one in attempts if one.resumed]
        seconds = sum(one.seconds.get("total", 0.0) for one in attempts)
        training = seconds - sum(one.seconds.get("ready", 0.0) + one.seconds.get("waited", 0.0) for one in attempts)
        return cls(
            tuple(saves),
            _sane(seconds),
            sum(map(_is_failure, attempts)),
            _sane(training) / max(1, sum(one.last - one.first + one.redone for one in attempts)),
            _sane(median(ready)) if ready else 0.0,
        )


def _sane(seconds: float) -> float:
    """What the file of a history says, whoever wrote it: no less than nothing, and no more than ten years."""
    return min(max(0.0, seconds), 3650 * DAY)


def _is_failure(attempt: PastAttempt) -> bool:
    """Whether its process was killed, or failed. Ctrl-C is no failure, and after SIGTERM a run saves and ends."""
    was_killed = not attempt.ended and not attempt.is_running
    return was_killed or (attempt.ended == "failed" and not attempt.reason.startswith("KeyboardInterrupt"))


@dataclass(frozen=True)
class Failures:
    """How often nodes fail: `rate` in a day, each of `nodes`. `source`: who says so."""

    nodes: int = 1
    rate: float = PUBLISHED
    source: str = f"the published rate; {VARIABLE} sets another"

    @classmethod
    def known(cls, nodes: int, given: float | None) -> Failures:
        """The rate that was given, or that of the environment, or the published one."""
        text = os.environ.get(VARIABLE, "")
        if given is not None:
            return cls(nodes, given, "as you said")
        if not text:
            return cls(nodes)
        try:
            rate = float(text)
        except ValueError:
            rate = math.nan
        if not 0 < rate < math.inf:
            raise ConfigError(f"{VARIABLE}={text!r} must be a number above 0: the failures per node per day.")
        return cls(nodes, rate, f"{VARIABLE}={text}")

    def every(self, past: Past, running: float = 0.0) -> tuple[float, str]:
        """Return the mean time between failures across all nodes, and the source of this number.

        The number comes from the run itself once the run has failed three times, or has lasted three times as long as
        the expected time between failures.
        """
        expected, lived = DAY / (self.rate * self.nodes), past.seconds + running
        if past.failures >= _TELLING or lived >= _TELLING * expected:
            return max(
                1.0, lived / max(1, past.failures)
            ), f"this run has failed {past.failures} times in {spelled(lived)}"
        return expected, self.source


@dataclass
class SlowSteps:
    """By how much the steps of training are longer while a save is under way, which needs processors and memory."""

    _slowed: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))  # by each save
    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    _during: list[float] = field(default_factory=list)
    _last: float = 0.0
    _was_busy: bool = False

    def step(self, now: float, busy: bool) -> bool:
        """Record that a training step is done. Returns whether a save has just ended."""
        took, last, was_busy = now - self._last, self._last, self._was_busy
        self._last, self._was_busy = now, busy
        if last:
            (self._during if busy or was_busy else self._usual).append(took)
        is_over = was_busy and not busy
        if is_over and self._usual:
            self._slowed.append(self._more())
        if is_over:
            self._during = []
        return is_over

    @property
    def slowed(self) -> float:
        """Seconds by which each save slows the steps down."""
        return max(0.0, median(self._slowed)) if self._slowed else 0.0

    def _more(self) -> float:
        """By medians, as an evaluation takes long at any time. A fiftieth is noise."""
        usual, during = median(self._usual), median(self._during)
        return (during - usual) * len(self._during) if abs(during - usual) > usual / 50 else 0.0


def _log_change(interval: float, why: str) -> None:
    _log.info('save_every="auto": ckpt saves every %s from now on, because %s', spelled(interval), why)


def _log_change_in_memory(interval: float, why: str) -> None:
    _log.info('memory="auto": ckpt takes a snapshot every %s from now on, because %s', spelled(interval), why)


@dataclass
class Cadence:
    """Decides, on the main rank, how long a run waits between saves: by what it has measured, and by how often it dies.

    `past`: reads what was measured before. `busy`: whether a save is under way. `slowed`: is told by how much each save
    slows the steps down. `tell`: is told the interval and why, when that has changed noticeably. `shortest`: the bound
    of snapshots in memory, if it is those that it is about.
    """

    failures: Failures
    past: Callable[[], Past] = Past
    busy: Callable[[], bool] = bool
    slowed: Callable[[float], object] = bool
    tell: Callable[[float, str], None] = _log_change
    shortest: float | None = None
    interval: float = 0.0  # the shortest, until there is something to reckon with
    _steps: SlowSteps = field(default_factory=SlowSteps)
    _earlier: Past = field(default_factory=Past)
    _saves: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_LAST))
    _began: float = field(default_factory=time.monotonic)

    @classmethod
    def in_memory(cls, failures: Failures, past: Callable[[], Past]) -> Cadence:
        """That of snapshots in memory. What they cost is measured anew by every process."""
        return cls(failures, lambda: replace(past(), saves=()), tell=_log_change_in_memory, shortest=SHORTEST_IN_MEMORY)

    def begin(self) -> None:
        """Start with what was measured before."""
        self._earlier = self.past()
        self._saves.extend(self._earlier.saves)
        self._decide(0.0)

    def after_step(self) -> float:
        """Seconds that must have passed since the last save; none are enough while one is under way."""
        busy = self.busy()
        if self._steps.step(time.monotonic(), busy):
            self.slowed(self._steps.slowed)
        return math.inf if busy else self.interval

    def saved(self, waited: float, durable: float, running: float | None = None) -> None:
        """Training has waited for a save, which then was durable. `running`: how old this process is."""
        self._saves.append((waited + self._steps.slowed, durable))
        self._decide(time.monotonic() - self._began if running is None else running)

    def _decide(self, running: float) -> None:
        if not self._saves:
            self.interval = SHORTEST if self.shortest is None else self.shortest
            return
        save, durable = Past(tuple(self._saves)).save
        every, source = self.failures.every(self._earlier, running)
        found = bounded(best_interval(save, every), save, durable, self.shortest)
        if self.interval / _NOTICEABLE < found < self.interval * _NOTICEABLE:
            return
        self.interval = found
        nodes = "its node fails" if self.failures.nodes == 1 else f"one of its {self.failures.nodes:,} nodes fails"
        what, done = ("save", "durable") if self.shortest is None else ("snapshot", "complete")
        cost = f"a {what} costs training {save:.2g} s and is {done} after {spelled(durable)}"
        self.tell(found, f"{cost}, and {nodes} about every {spelled(every)} ({source}).")


_UNITS = (("d", DAY), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def spelled(seconds: float) -> str:
    """A time in at most two units, as `save_every` takes it: `5min 16s`."""
    if seconds < 9.95:
        return f"{seconds:.2g}s"
    unit, size = next(each for each in _UNITS if seconds >= each[1] - 0.5)
    smaller, small = _UNITS[min(_UNITS.index((unit, size)) + 1, len(_UNITS) - 1)]
    whole, rest = divmod(round(seconds / small), round(size / small))
    return f"{whole}{unit}" + (f" {rest}{smaller}" if rest else "")

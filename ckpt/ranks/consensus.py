"""The ranks of a job, as everything above sees them, and how they decide together.

Every rank's result or error is gathered on rank 0, which decides; the same error is raised everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from ckpt import errors
from ckpt.errors import CkptError, RanksError
from ckpt.formats.layout import Members
from ckpt.ranks.store_and_heartbeats import LivenessWatch, format_ranks, ranks_by_value
from ckpt.shown import MOST_LINES, Lines, shown

MAIN = 0  # the rank that gathers, decides and broadcasts


class Ranks(Protocol):
    """The processes of one job. A single process has the same interface."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def members(self) -> Members:
        """Their numbers in the job, where they are some of its ranks: in messages, and for PyTorch's own calls."""

    @property
    def timeout(self) -> float:
        """Seconds to wait for a rank that sends no heartbeat."""

    def channel(self, name: str) -> Ranks:
        """The same ranks with keys of their own, for a thread that must not get in the way of other exchanges."""

    def gather(self, call: str, data: str) -> list[str]:
        """On the main rank: every rank's `data`, in the order of ranks. On the others: an empty list, at once."""

    def broadcast(self, call: str, data: str) -> str:
        """The main rank's `data`, on every rank."""

    def working(self, *, job_wide: bool = False) -> AbstractContextManager[None]:
        """Send heartbeats while the context lasts, so that the other ranks wait for this one beyond their timeout.

        With `job_wide`, ranks that wait in a call of another manager see them too. The block must not wait for any
        rank itself: two ranks that waited for each other would then wait forever.
        """

    def note(self, key: str, value: str) -> None:
        """Leave a note of this rank under a key, once. Does not wait."""

    def notes(self, key: str) -> dict[int, str]:
        """The notes left so far under a key, by rank. Does not wait; costs one request while there are none."""

    def publish(self, key: str, value: str) -> None:
        """Set the value of a key for all ranks. Does not wait."""

    def published(self, key: str) -> str | None:
        """The value that was last published under a key; None if there is none. Does not wait."""

    def first_wins(self, key: str, value: str) -> str:
        """Compare-and-set: the value of the first rank that calls this, on every rank. Does not wait."""

    def leave(self, key: str, value: str) -> None:
        """Leave a value of this rank under a key for one rank, which takes it. Does not wait."""

    def take(self, key: str, ranks: list[int]) -> list[str]:
        """The values that these ranks have left under a key, which are gone then. They must be there."""

    def speaks_for(self, text: str) -> bool:
        """Whether this rank is the first of all that ask with this text before the same gather: what ranks have alike
        need be sent once. Now and then, after a gather that was given up, several are the first. Does not wait."""

    def silent(self, ranks: list[int], watch: LivenessWatch) -> list[int]:
        """Those of `ranks` that have sent no heartbeat for the timeout. Does not wait."""

    def abandon(self) -> None:
        """Let what waits for other ranks in this channel, on another thread, fail at once: this rank ends."""

    def linger(self) -> None:
        """Return when the other ranks have read this rank's last broadcast, or after a while. Raises nothing.

        Must be called before the process ends: the main rank may host the store, which ends with it.
        """


class SingleProcess:
    """A job of one process: every exchange is with itself."""

    rank = MAIN
    world_size = 1
    timeout = math.inf

    def __init__(self, members: Members = None) -> None:
        self.members = members
        self._values: dict[str, str] = {}

    def channel(self, name: str) -> Ranks:
        return SingleProcess(self.members)

    def gather(self, call: str, data: str) -> list[str]:
        return [data]

    def broadcast(self, call: str, data: str) -> str:
        return data

    def working(self, *, job_wide: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def silent(self, ranks: list[int], watch: LivenessWatch) -> list[int]:
        return []

    def abandon(self) -> None:
        """No other rank is waited for."""

    def linger(self) -> None:
        """No other rank has anything to read."""

    def note(self, key: str, value: str) -> None:
        self._values[key] = value

    def notes(self, key: str) -> dict[int, str]:
        return {MAIN: self._values[key]} if key in self._values else {}

    def publish(self, key: str, value: str) -> None:
        self._values[key] = value

    def published(self, key: str) -> str | None:
        return self._values.get(key)

    def first_wins(self, key: str, value: str) -> str:
        return self._values.setdefault(key, value)

    def leave(self, key: str, value: str) -> None:
        self._values[key] = value

    def take(self, key: str, ranks: list[int]) -> list[str]:
        return [self._values.pop(key) for _ in ranks]

    def speaks_for(self, text: str) -> bool:
        return True


Value = TypeVar("Value")
Other = TypeVar("Other")

_MOST_TEXTS = 8  # errors of ranks that are named in one
_MOST_BEGINNINGS = 4


class FollowingError(RanksError):
    """An error that this rank raises only because another rank has failed. It is left out where that error is known."""


@dataclass
class Result(Generic[Value]):
    """The value of a step on this rank, or the error that every rank shall raise."""

    value: Value | None = None
    error: Exception | None = None

    @classmethod
    def capture(cls, do: Callable[[], Value]) -> Result[Value]:
        """Run it, and keep its error instead of raising it: the other ranks must learn of it first."""
        try:
            return cls(do())
        except Exception as error:
            return cls(error=error)

    def then(self, do: Callable[[Value], Other]) -> Result[Other]:
        """Continue with the value; an error is passed on."""
        return Result(error=self.error) if self.error is not None else Result.capture(lambda: do(self.get()))

    def get(self) -> Value:
        """The value; raises the error if there is one."""
        if self.error is not None:
            raise self.error
        return cast("Value", self.value)

    def to_json(self, call: str) -> str:
        if self.error is None:
            return json.dumps({"call": call, "value": self.value})
        ours = isinstance(self.error, CkptError)
        text = str(self.error) if ours else shown(f"{type(self.error).__name__}: {self.error}")
        follows = isinstance(self.error, FollowingError)
        return json.dumps({"call": call, "kind": _kind(self.error), "text": text, "follows": follows})

    @classmethod
    def from_json(cls, data: str) -> Result[Value]:
        return cls.from_fields(json.loads(data))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Result[Value]:
        if "kind" not in fields:
            return cls(fields["value"])
        text = fields["text"]
        return cls(error=FollowingError(text) if fields["follows"] else _make_error(fields["kind"], text))

    def raise_joint(self, decision: Result[Other], world_size: int) -> Other:
        """What all ranks decided; or the error that all of them raise, on this rank with the traceback of its own."""
        if self.error is not None and (world_size == 1 or str(self.error) == str(decision.error)):
            raise self.error
        if decision.error is not None:
            raise decision.error from self.error
        return decision.get()


def decide_together(ranks: Ranks, call: str, mine: Result[Value], decide: Callable[[list[Value]], Other]) -> Other:
    """Gather every rank's result on rank 0, run `decide` there, return its value on every rank.

    An error on any rank, or in `decide`, is raised on all of them. Values and the decision must be JSON.
    """
    try:
        answers = ranks.gather(call, mine.to_json(call))
        if ranks.rank != MAIN:
            decision = Result[Other].from_json(ranks.broadcast(call, ""))
    except RanksError as error:
        if mine.error is None or isinstance(mine.error, FollowingError):
            raise
        raise mine.error from error  # it came first, and may be why another rank has gone
    if ranks.rank == MAIN:
        with ranks.working():  # `decide` may remove files, or wait for a lock
            decision = Result.capture(lambda: decide(values_of(call, [mine.to_json(call), *answers[1:]])))
        ranks.broadcast(call, decision.to_json(call))
    return mine.raise_joint(decision, ranks.world_size)


def run_on_all_ranks(ranks: Ranks, call: str, do: Callable[[], Value]) -> Value:
    """Run `do` on every rank. Returns this rank's value; an error on any rank is raised on all of them."""
    with ranks.working():
        mine = Result.capture(do)
    decide_together(ranks, call, Result[None](error=mine.error), lambda _: None)
    return mine.get()


def values_of(call: str, answers: list[str]) -> list[Any]:
    """The values of all ranks; raises one error for all that failed, with the ranks where they did."""
    said = [json.loads(answer) for answer in answers]
    _require_same_call(call, said)
    results = [Result[Any].from_fields(fields) for fields in said]
    failed = {rank: result.error for rank, result in enumerate(results) if result.error is not None}
    if not failed:
        return [result.value for result in results]
    causes = {rank: error for rank, error in failed.items() if not isinstance(error, FollowingError)}
    raise _joined(causes or failed, world_size=len(answers))


def _require_same_call(call: str, said: list[Any]) -> None:
    calls = {rank: fields["call"] for rank, fields in enumerate(said)}
    if any(other != call for other in calls.values()):
        listed = "; ".join(f"{format_ranks(found)} called {other}" for other, found in ranks_by_value(calls).items())
        raise RanksError(
            f"the ranks make different calls: {listed}. Every rank must make the same calls in the same order."
        )


def _joined(failed: dict[int, Exception], world_size: int) -> CkptError:
    """One error for those of several ranks: of the first one's class, with the texts of the ranks unless all are equal.

    It has ten lines at most: a text of several lines is the first rank's, and of other ones the beginning is given.
    """
    kind = _kind(next(iter(failed.values())))
    texts = ranks_by_value({rank: str(error) for rank, error in failed.items()})
    if len(failed) == world_size and len(texts) == 1:
        return _make_error(kind, next(iter(texts)))
    named = [f"{format_ranks(found)}: {text}" for text, found in texts.items()]
    if len(named) == 1:
        return _make_error(kind, named[0])
    if not any("\n" in text for text in named):
        more = f"; and {len(named) - _MOST_TEXTS} other errors" if len(named) > _MOST_TEXTS else ""
        return _make_error(kind, "; ".join(named[:_MOST_TEXTS]) + more)
    others = "; ".join(_beginning(text) for text in named[1:_MOST_BEGINNINGS])
    more = f"; and {len(named) - _MOST_BEGINNINGS} other errors" if len(named) > _MOST_BEGINNINGS else ""
    return _make_error(kind, f"{_shortened(named[0], MOST_LINES - 1)}\n{others}{more}")


def _beginning(text: str) -> str:
    """The first sentence of a text, and the first offender that it lists."""
    first, *offenders = text.splitlines()
    return " ".join([first, *(offender.strip() for offender in offenders[:1])])


def _shortened(text: str, most: int) -> str:
    first, *lines = text.splitlines()
    if len(lines) < most:
        return text
    return "\n".join([first, *lines[: most - 3], "  and more", lines[-1]])


def _kind(error: Exception) -> str:
    """The name of the nearest class of an error that `ckpt.errors` has, so that other ranks can make it."""
    names = (kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    return next(names, CkptError.__name__)


def _make_error(kind: str, text: str) -> CkptError:
    """An error of another rank; `to_json` has made its text fit to be shown."""
    made: CkptError = getattr(errors, kind, CkptError)(Lines(text))
    return made

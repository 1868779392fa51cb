"""Rank consensus: gather every rank's result or error on rank 0, decide there, raise the same error everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from ckpt import errors
from ckpt.errors import CkptError, RanksError
from ckpt.ranks.group import MAIN, Ranks
from ckpt.ranks.store import format_ranks, ranks_by_value
from ckpt.shown import MOST_LINES, Lines, shown

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


def decide_together(ranks: Ranks, call: str, mine: Result[Value], decide: Callable[[list[Value]], Other]) -> Other:
    """Gather every rank's result on rank 0, run `decide` there, return its value on every rank.

    An error on any rank, or in `decide`, is raised on all of them. Values and the decision must be JSON.
    """
    try:
        answers = ranks.gather(call, mine.to_json(call))
    except RanksError as error:
        if mine.error is None:
            raise
        raise mine.error from error  # it came first, and may be why another rank has gone
    if ranks.rank == MAIN:
        with ranks.working():  # `decide` may remove files, or wait for a lock
            decision = Result.capture(lambda: decide(_values(call, [mine.to_json(call), *answers[1:]])))
        ranks.broadcast(call, decision.to_json(call))
    else:
        decision = Result[Other].from_json(ranks.broadcast(call, ""))
    if mine.error is not None and (ranks.world_size == 1 or str(mine.error) == str(decision.error)):
        raise mine.error  # it has its traceback
    if decision.error is not None:  # the same on every rank, whatever each of them met
        raise decision.error from mine.error
    return decision.get()


def first_of_each(digests: list[str]) -> list[int]:
    """On the main rank: the first rank of all that have the same digest, for every digest. It speaks for the others."""
    first: dict[str, int] = {}
    for rank, text in enumerate(digests):
        first.setdefault(text, rank)
    return list(first.values())


def run_on_all_ranks(ranks: Ranks, call: str, do: Callable[[], Value]) -> Value:
    """Run `do` on every rank. Returns this rank's value; an error on any rank is raised on all of them."""
    with ranks.working():
        mine = Result.capture(do)
    decide_together(ranks, call, Result[None](error=mine.error), lambda _: None)
    return mine.get()


def _values(call: str, answers: list[str]) -> list[Any]:
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
            f"the ranks do different things: {listed}. Every rank must make the same calls in the same order."
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

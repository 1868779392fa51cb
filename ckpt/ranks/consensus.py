"""What came of something on one rank, and what all ranks make of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckpt import errors
from ckpt.errors import CkptError, RanksError
from ckpt.ranks.group import MAIN, Ranks


class FollowingError(RanksError):
    """What a rank raises because another one has failed. Where that one tells its error, this one is left out."""


@dataclass
class Result:
    """A value, or an error that every rank shall raise."""

    value: Any = None
    error: Exception | None = None

    @classmethod
    def capture(cls, do: Callable[[], Any]) -> Result:
        """Do it here, and keep what it raises until the other ranks have been told."""
        try:
            return cls(do())
        except Exception as error:
            return cls(error=error)

    def then(self, do: Callable[[Any], Any]) -> Result:
        """Go on with the value; an error stays as it is."""
        return self if self.error is not None else Result.capture(lambda: do(self.value))

    def get(self) -> Any:
        """The value; raises the error if there is one."""
        if self.error is not None:
            raise self.error
        return self.value

    def to_json(self, call: str) -> str:
        if self.error is None:
            return json.dumps({"call": call, "value": self.value})
        ours = isinstance(self.error, CkptError)
        text = str(self.error) if ours else f"{type(self.error).__name__}: {self.error}"
        follows = isinstance(self.error, FollowingError)
        return json.dumps({"call": call, "kind": _kind(self.error), "text": text, "follows": follows})

    @classmethod
    def from_json(cls, data: str) -> Result:
        told = json.loads(data)
        if "kind" not in told:
            return cls(told["value"])
        return cls(error=FollowingError(told["text"]) if told["follows"] else _made(told["kind"], told["text"]))


def decide_together(ranks: Ranks, call: str, mine: Result, decide: Callable[[list[Any]], Any]) -> Any:
    """Every rank tells what came of its work, the main rank decides from the values of all, all get the decision.

    If anything failed on any rank, or the decision does, every rank raises it. Values and decision must be JSON.
    """
    try:
        told = ranks.gather(call, mine.to_json(call))
    except RanksError as error:
        if mine.error is None:
            raise
        raise mine.error from error  # it came first, and may be why another rank has gone
    if ranks.rank == MAIN:
        with ranks.working():  # it may clear up, or wait for a lock
            decision = Result.capture(lambda: decide(_joined(call, [mine.to_json(call), *told[1:]])))
        ranks.broadcast(call, decision.to_json(call))
    else:
        decision = Result.from_json(ranks.broadcast(call, ""))
    if mine.error is not None and (ranks.world_size == 1 or str(mine.error) == str(decision.error)):
        raise mine.error  # it has its traceback
    if decision.error is not None:  # the same on every rank, whatever each of them met
        raise decision.error from mine.error
    return decision.value


def run_on_all_ranks(ranks: Ranks, call: str, do: Callable[[], Any]) -> Any:
    """Do something on every rank, each for itself. Returns this rank's value, or raises on all ranks alike."""
    with ranks.working():
        mine = Result.capture(do)
    decide_together(ranks, call, Result(error=mine.error), lambda _: None)
    return mine.value


def _joined(call: str, told: list[str]) -> list[Any]:
    """The values of all ranks; raises one error for whatever went wrong, with the ranks where it did."""
    calls = {rank: json.loads(one)["call"] for rank, one in enumerate(told)}
    if any(other != call for other in calls.values()):
        listed = "; ".join(f"rank {rank} called {one}" for rank, one in calls.items())
        raise RanksError(
            f"the ranks do different things: {listed}. Every rank must make the same calls in the same order."
        )
    outcomes = [Result.from_json(one) for one in told]
    failed = {rank: one.error for rank, one in enumerate(outcomes) if one.error is not None}
    if not failed:
        return [one.value for one in outcomes]
    first = {rank: error for rank, error in failed.items() if not isinstance(error, FollowingError)}
    failed = first or failed
    kind = _kind(next(iter(failed.values())))
    texts = list(dict.fromkeys(str(error) for error in failed.values()))
    if len(failed) == len(told) and len(texts) == 1:
        raise _made(kind, texts[0])
    raise _made(kind, "; ".join(f"rank {rank}: {error}" for rank, error in failed.items()))


def _kind(error: Exception) -> str:
    """The nearest class of an error that others can make by its name."""
    names = (one.__name__ for one in type(error).__mro__ if getattr(errors, one.__name__, None) is one)
    return next(names, CkptError.__name__)


def _made(kind: str, text: str) -> CkptError:
    made: CkptError = getattr(errors, kind, CkptError)(text)
    return made

"""Operations that demand a signature: what they accept is what was signed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import ckpt
from tests.fuzz.live import Live
from tests.fuzz.operation import Operation, Place, WrongError, manager_of
from tests.fuzz.seeds import NAMES, signing_key

NEWEST = NAMES[-1]


@cache
def _demanding() -> dict[str, Any]:
    return {"verify_key": signing_key(), "require_signed": True}


@cache
def _signed_states() -> list[list[bytes]]:
    live = Live()
    found = []
    for _ in NAMES:
        live.train()
        found.append(live.snapshot())
    return found


def _loading_signed(load: Callable[[ckpt.StateManager], Any]) -> Operation:
    """A load that demands a signature: what it accepts is a state that was signed, in every bit."""

    def operation(place: Place) -> Any:
        live = Live()
        live.train()
        live.marked()
        before = live.snapshot()
        with manager_of(place, live, signing=ckpt.Signing(verify_key=signing_key(), required=True)) as manager:
            manager.register(seen=live.seen)
            done = load(manager)
        if live.snapshot() not in ([before] if done is None else _signed_states()):
            raise WrongError(f"a load that demands a signature accepted what was not signed: {done}")
        return done

    return operation


def _load_model_signed(place: Place) -> Any:
    live = Live().marked()
    done = ckpt.load_model(place.at(f"root/{NEWEST}"), live.model, **_demanding())
    if not any(state[: len(live.snapshot())] == live.snapshot() for state in _signed_states()):
        raise WrongError("load_model() demands a signature, and accepted what was not signed")
    return done


SIGNED: dict[str, Operation] = {
    "resume, signed": _loading_signed(lambda manager: manager.resume()),
    "load_state, signed": _loading_signed(lambda manager: manager.load_state(NEWEST)),
    "load_model, signed": _load_model_signed,
    "verify, signed": lambda place: ckpt.verify(place.at("root"), verify_key=signing_key()),
    "merge, signed": lambda place: ckpt.merge(
        place.at(f"root/{NEWEST}"), f"{place.out}/model.safetensors", **_demanding()
    ),
    "pull, signed": lambda place: ckpt.pull(place.at("root"), f"{place.out}/pulled", **_demanding()),
}

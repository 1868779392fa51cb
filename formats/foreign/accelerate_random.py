"""The states of random generators, as Accelerate names them and as ckpt does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEVICES = ("cuda", "xpu")
_NUMPY = ("bit_generator", "state", "has_gauss", "gauss")


def from_accelerate(states: Mapping[str, Any]) -> dict[str, Any]:
    """What `ckpt.rng` captures, out of a file `random_states_N.pkl`."""
    rng = {"python": states["random_state"], "torch": states["torch_manual_seed"]}
    if "numpy_random_seed" in states:
        rng["numpy"] = _numpy_from(states["numpy_random_seed"])
    return rng | {kind: list(states[_device(kind)]) for kind in _DEVICES if _device(kind) in states}


def to_accelerate(rng: Mapping[str, Any], step: int) -> dict[str, Any]:
    """What Accelerate saves as `random_states_N.pkl`."""
    states = {"step": step, "random_state": rng["python"], "numpy_random_seed": _numpy_to(rng.get("numpy"))}
    states["torch_manual_seed"] = rng["torch"]
    return states | {_device(kind): list(rng[kind]) for kind in _DEVICES if kind in rng}


def _device(kind: str) -> str:
    return f"torch_{kind}_manual_seed"


def _numpy_from(state: tuple[Any, ...]) -> dict[str, Any]:
    kind, key, position, has_gauss, gauss = state
    return {"bit_generator": kind, "state": {"key": key, "pos": position}, "has_gauss": has_gauss, "gauss": gauss}


def _numpy_to(state: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """NumPy's state as it was; of a run that had not imported it, a fresh one: at a missing one Accelerate stops."""
    import numpy as np

    if state is None:
        return tuple(np.random.RandomState(0).get_state(legacy=True))
    kind, inner, has_gauss, gauss = (state[key] for key in _NUMPY)
    return kind, inner["key"], inner["pos"], has_gauss, gauss

"""Random number generators of Python, NumPy, torch and its accelerators, and the user's own."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import torch
import xxhash

_ACCELERATORS = ("cuda", "xpu", "mps")


def capture() -> dict[str, Any]:
    """The state of every global generator of this process."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    for kind, module in _accelerators().items():
        if not getattr(module, "is_initialized", lambda: True)():
            continue  # nothing was drawn from it yet, and reading it would initialise the device
        state[kind] = module.get_rng_state_all() if hasattr(module, "get_rng_state_all") else [module.get_rng_state()]
    return state


def differ(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two captures differ in the generators of the CPU."""
    if not torch.equal(first["torch"], second["torch"]) or first["python"] != second["python"]:
        return True
    numpy_states = [
        (state["numpy"]["state"]["pos"], bytes(state["numpy"]["state"]["key"]))
        for state in (first, second)
        if "numpy" in state
    ]
    return len(set(numpy_states)) > 1


def restore(state: dict[str, Any]) -> None:
    """Restore every global generator. An accelerator that does not exist here is skipped."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    for kind, module in _accelerators().items():
        for index, device_state in enumerate(state.get(kind, [])[: module.device_count()]):
            if hasattr(module, "get_rng_state_all"):
                module.set_rng_state(device_state, index)
            else:
                module.set_rng_state(device_state)


def check(state: dict[str, Any]) -> None:
    """Raise, whatever error it is, for a state that `restore` would not accept. Changes no generator that is in use."""
    random.Random().setstate(state["python"])  # noqa: S311  # takes a state, and draws nothing
    torch.Generator().set_state(state["torch"])
    if "numpy" in state:
        _check_numpy(state["numpy"])
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.RandomState(0).set_state(state["numpy"])
    for kind in _ACCELERATORS:
        if any(device_state.dtype != torch.uint8 for device_state in state.get(kind, [])):
            raise ValueError(f"the state of a generator of {kind} is no bytes")


def check_one(generator: Any, state: Any) -> None:
    """The same for `restore_one`."""
    if isinstance(generator, torch.Generator):
        torch.Generator(generator.device).set_state(state)
    elif isinstance(generator, random.Random):
        random.Random().setstate(state)  # noqa: S311  # as above
    else:
        _check_numpy(state)
        restore_one(copy.deepcopy(generator), state)


def _check_numpy(state: dict[str, Any]) -> None:
    """NumPy itself does not check where in its numbers a generator is, and would read beyond them."""
    places = {"pos": (state["state"].get("pos", 0), 624), "buffer_pos": (state.get("buffer_pos", 0), 4)}
    for name, (place, most) in places.items():
        if not 0 <= int(place) <= most:
            raise ValueError(f"a generator of NumPy has {name} {place}")


def derive(state: dict[str, Any], rank: int) -> None:
    """Seed every global generator of a rank without saved state, from another rank's state and the rank's number."""
    seed = number(state["torch"], rank)
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


def number(state: torch.Tensor, *more: int) -> int:
    """A 63-bit number derived from a generator's state and further numbers."""
    digest = xxhash.xxh3_64(bytes(state.tolist()))
    for value in more:
        digest.update(value.to_bytes(8, "little", signed=True))
    return digest.intdigest() >> 1


def is_generator(value: Any) -> bool:
    """Whether `capture_one` and `restore_one` support this object."""
    return isinstance(value, torch.Generator | random.Random) or _is_numpy(value)


def capture_one(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def restore_one(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _accelerators() -> dict[str, Any]:
    modules = {kind: getattr(torch, kind, None) for kind in _ACCELERATORS}
    return {kind: module for kind, module in modules.items() if module is not None and module.is_available()}


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState)

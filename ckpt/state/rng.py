"""Random number generators of Python, NumPy, torch and its accelerators, and the user's own."""

from __future__ import annotations

import copy
import itertools
import operator
import random
import sys
from typing import Any

import torch
import xxhash

from ckpt.formats.checks import damage_reported

_DEVICES = ("cuda", "xpu", "mps")
_POSITIONS = {"pos": 624, "buffer_pos": 4}  # the last ones, of MT19937 and of Philox


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


def is_state(state: Any) -> bool:
    """Whether `restore` will take a state, which anybody may have written: it is tried out on other generators."""
    try:
        random.Random().setstate(state["python"])  # noqa: S311
        torch.Generator().set_state(state["torch"])
        if "numpy" in state and "numpy" in sys.modules:
            _require_positions(state["numpy"])
            sys.modules["numpy"].random.RandomState().set_state(state["numpy"])
        return all(map(_is_bytes, itertools.chain.from_iterable(state.get(kind, ()) for kind in _DEVICES)))
    except Exception:  # whatever a generator says of a state that is not its own
        return False


def _is_bytes(state: Any) -> bool:
    return isinstance(state, torch.Tensor) and state.dtype is torch.uint8


def _require_positions(state: Any) -> None:
    """Refuse a state of NumPy whose position is outside of its buffer: NumPy does not, and would read beyond it."""
    fields = {**state, **state["state"]} if isinstance(state.get("state"), dict) else state
    for name, last in _POSITIONS.items():
        if name in fields and not 0 <= operator.index(fields[name]) <= last:
            raise ValueError(f"{name} is {fields[name]}, beyond {last}")


def check_one(generator: Any, state: Any) -> None:
    """Raise, whatever error it is, for a state that `restore_one` would not accept. The generator is not changed."""
    if isinstance(generator, torch.Generator):
        torch.Generator(generator.device).set_state(state)
    elif isinstance(generator, random.Random):
        random.Random().setstate(state)  # noqa: S311
    else:
        _require_positions(state)
        restore_one(copy.deepcopy(generator), state)


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
    with damage_reported("the saved state of a generator", f"{type(generator).__name__} state"):
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            _require_positions(state)
            _restore_numpy(generator, state)


def _restore_numpy(generator: Any, state: Any) -> None:
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _accelerators() -> dict[str, Any]:
    modules = {kind: getattr(torch, kind, None) for kind in _DEVICES}
    return {kind: module for kind, module in modules.items() if module is not None and module.is_available()}


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState)

"""The samplers and random generators of a DataLoader, also inside Accelerate's wrapper around it."""

from __future__ import annotations

from typing import Any

from ckpt.state import rng


class SamplerWrapper:
    """A sampler that replaces another one in a loader; `inner` is the user's."""

    inner: Any


def reader(loader: Any) -> Any:
    """The loader that does the reading: the one inside, where Accelerate has put its own around it."""
    return getattr(loader, "base_dataloader", loader)


def samplers(loader: Any) -> list[Any]:
    """The loader's samplers, outermost first: each, and what it draws from."""
    found: list[Any] = []
    _collect_samplers(reader(loader), found)
    return found


def _collect_samplers(owner: Any, found: list[Any]) -> None:
    for name in ("batch_sampler", "sampler"):
        one = getattr(owner, name, None)
        one = unwrapped(one)
        if one is not None and not any(one is other for other in found):
            found.append(one)
            _collect_samplers(one, found)


def generators(loader: Any) -> list[Any]:
    """The generators of the loader and its samplers."""
    found: list[Any] = []
    for owner in [reader(loader), *samplers(loader)]:
        generator = getattr(owner, "generator", None)
        if rng.is_generator(generator) and not any(generator is other for other in found):
            found.append(generator)
    return found


def unwrapped(sampler: Any) -> Any:
    """The sampler that the user gave, without our wrapper around it."""
    return sampler.inner if isinstance(sampler, SamplerWrapper) else sampler

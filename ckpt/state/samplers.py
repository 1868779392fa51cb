"""The samplers and random generators of a DataLoader, also inside Accelerate's wrapper around it."""

from __future__ import annotations

from typing import Any

from ckpt.state import rng


class SamplerWrapper:
    """A sampler of ckpt that replaces the user's sampler, `inner`, in a loader."""

    inner: Any


def reader(loader: Any) -> Any:
    """The loader that reads: the inner one of Accelerate's wrapper, or the loader itself."""
    return getattr(loader, "base_dataloader", loader)


def samplers(loader: Any) -> list[Any]:
    """The loader's samplers, outermost first: each is followed by the sampler that it draws from."""
    found: list[Any] = []
    _collect_samplers(reader(loader), found)
    return found


def _collect_samplers(owner: Any, found: list[Any]) -> None:
    for name in ("batch_sampler", "sampler"):
        sampler = unwrapped(getattr(owner, name, None))
        if sampler is not None and not any(sampler is other for other in found):
            found.append(sampler)
            _collect_samplers(sampler, found)


def generators(loader: Any) -> list[Any]:
    """The generators of the loader and its samplers."""
    found: list[Any] = []
    for owner in [reader(loader), *samplers(loader)]:
        generator = getattr(owner, "generator", None)
        if rng.is_generator(generator) and not any(generator is other for other in found):
            found.append(generator)
    return found


def unwrapped(sampler: Any) -> Any:
    """The user's sampler inside a `SamplerWrapper`, or the sampler itself."""
    return sampler.inner if isinstance(sampler, SamplerWrapper) else sampler

"""Chooses where a manager finds its objects: in an accelerator, or in the arguments of its constructor."""

from __future__ import annotations

from typing import Any

from ckpt.errors import ConfigError
from ckpt.state.accelerator import AcceleratorObjects
from ckpt.state.objects import GivenObjects, ObjectSource


def find_source(accelerator: Any, **objects: Any) -> ObjectSource:
    """The accelerator's prepared objects, or the given ones. Both at once are refused."""
    if accelerator is None:
        return GivenObjects(**objects)
    given = [kind for kind, value in objects.items() if value is not None]
    if given:
        raise ConfigError(
            f"StateManager: accelerator= includes all that it has prepared, so {', '.join(given)} cannot be given as "
            "well. Pass them through accelerator.prepare(...), or give others to register(name=...)."
        )
    return AcceleratorObjects(accelerator)

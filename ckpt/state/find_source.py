"""Chooses where a manager finds its objects: in an accelerator, or in the arguments of its constructor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ckpt.errors import ConfigError
from ckpt.state.accelerator import AcceleratorObjects
from ckpt.state.objects import GivenObjects, ObjectSource


class UnnamedObjectError(ConfigError, TypeError):
    """An object without the keyword that says what it is: a TypeError too, as for any argument too many."""


def refuse_unnamed(root: Any, others: Sequence[Any]) -> None:
    """Refuse whatever is given without a keyword, the root aside: what it is would have to be guessed."""
    misplaced = [root] if isinstance(root, nn.Module | torch.optim.Optimizer) else []
    given = [*misplaced, *others]
    if given:
        kinds = ", ".join(type(value).__name__ for value in given)
        raise UnnamedObjectError(
            f"StateManager takes the root alone without a keyword, and was given {kinds} too. Say what each is: "
            'StateManager("runs/x", model=model, optimizer=optimizer).'
        )


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

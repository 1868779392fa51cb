"""The checkpoint that all ranks have agreed to load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ckpt.formats.native.manifest import Manifest
from ckpt.load.candidates import MEMORY

T = TypeVar("T")


@dataclass
class Choice(Generic[T]):
    """The checkpoint that all ranks will load, and the newer ones that cannot be used, with the reasons.

    `tier` is where it was found. The root may have another one by its name, which is damaged. `damaged` names those
    whose bytes in the root were shown to be missing or altered: not those that merely could not be read.
    """

    manifest: Manifest
    url: str
    tier: int
    ready: T
    passed_over: dict[str, str] = field(default_factory=dict)
    damaged: frozenset[str] = frozenset()
    root_step: int | None = None

    @property
    def in_memory(self) -> bool:
        return self.tier == MEMORY

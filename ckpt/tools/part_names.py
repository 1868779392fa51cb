"""The names of parts in a checkpoint of ours, for parts that another format calls as it likes."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from ckpt.load.accelerate_state import CUSTOM
from ckpt.state.objects import KINDS, is_part_name
from ckpt.state.registry import RESERVED
from ckpt.tools.portable_state import PortableState

_UNUSABLE = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST = 100  # a file is named after it


def with_part_names(found: PortableState) -> PortableState:
    """The same state under names that a manager can register and a file can have. Those that changed are told."""
    names: dict[str, str] = {key: key for key in found.parts if _is_usable(key)}
    for key in found.parts:
        if key not in names:
            names[key] = _usable(key, names.values())
    told = {
        new: f"{key!r} in the source, which cannot name a part: register it as {new!r}"
        for key, new in names.items()
        if new != key
    }
    parts = {names[key]: part for key, part in found.parts.items()}
    return replace(found, parts=parts, approximated={**found.approximated, **told})


def _is_usable(key: str) -> bool:
    head = key.partition(".")[0]
    free = head in (*KINDS, CUSTOM) if "." in key else key in KINDS
    return all(map(is_part_name, key.split("."))) and len(key) <= _LONGEST and (free or head not in RESERVED)


def _usable(key: str, taken: Collection[str]) -> str:
    stem = ".".join(_UNUSABLE.sub("_", word) or "_" for word in key[: _LONGEST // 2].split("."))
    flat = stem.replace(".", "_")
    tries = (stem, flat, *(f"{flat}_{number}" for number in range(1, len(taken) + 2)))
    return next(name for name in tries if name not in taken and _is_usable(name))

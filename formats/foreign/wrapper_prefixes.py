"""Parameter names without the prefixes that wrappers of the model have added."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from ckpt.errors import ConfigError

# the model inside torch.compile, FullyShardedDataParallel and checkpoint_wrapper: a word in the names of its tensors
INSIDE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_REPEATED = re.compile(r"(?:module\.)*")  # added by DistributedDataParallel


def unwrapped(names: Iterable[str], *, outside: bool = True) -> dict[str, str]:
    """The bare name for each name. `module.` is removed only if all names begin with it: a model may use it itself.

    `outside`: whether it is removed at all.
    """
    bare = {name: _without_inner(name) for name in names}
    if bare and outside:
        length = min(_length_outside(name) for name in bare.values())
        bare = {name: stripped[length:] for name, stripped in bare.items()}
    _check_distinct(bare)
    return bare


def removed_words(names: Iterable[str]) -> tuple[str, list[str]]:
    """What `unwrapped` removes: the prefix of all names, such as `module.`, and the words inside of some."""
    listed = list(names)
    bare = [_without_inner(name) for name in listed]
    length = min(map(_length_outside, bare), default=0)
    inside = [word for word in INSIDE if any(word in name.split(".") for name in listed)]
    return (bare[0][:length] if bare else ""), inside


def _length_outside(name: str) -> int:
    found = _REPEATED.match(name)
    return found.end() if found else 0


def _without_inner(name: str) -> str:
    return ".".join(word for word in name.split(".") if word not in INSIDE)


def _check_distinct(bare: dict[str, str]) -> None:
    wrapped = defaultdict(list)
    for name, stripped in bare.items():
        wrapped[stripped].append(name)
    doubled = [" and ".join(names) for names in wrapped.values() if len(names) > 1]
    if doubled:
        raise ConfigError(f"without the prefixes of wrappers these are the same name: {'; '.join(doubled)}.")

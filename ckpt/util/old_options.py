"""Keywords of `StateManager` in version 0.1: what replaces each, and the warning that says so."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt.errors import ConfigError

# the argument, and the field of its option object, that replace each
OLD = {
    **{name: ("saving", name) for name in ("layout", "gradients", "background", "when_busy", "host_memory")},
    **{name: ("ranks", name) for name in ("timeout", "shared", "broadcast", "handle_sigterm")},
    **{f"mirror_{name}": ("mirror", name) for name in ("keep", "bandwidth", "backlog")},
}


def merged(into: str, given: Any, old: Mapping[str, Any], classes: Mapping[str, type]) -> Any:
    """An option object with the old keywords that belong to it. Not beside one that was given."""
    values = {OLD[name][1]: value for name, value in old.items() if OLD[name][0] == into}
    if into == "mirror":
        return None if given is None else replace(given, **values)
    if given is not None:
        names = ", ".join(name for name in old if OLD[name][0] == into)
        raise ConfigError(f"StateManager: {names} cannot be given beside {into}=: say it there.")
    return classes[into](**values)


def warn_of(old: Mapping[str, Any], classes: Mapping[str, type]) -> None:
    """Say how these keywords are spelled now, at the line that has built the manager."""
    by_object: dict[str, list[str]] = {}
    for name, value in old.items():
        into, option = OLD[name]
        by_object.setdefault(into, []).append(f"{option}={value!r}")
    new = ", ".join(f"{into}=ckpt.{classes[into].__name__}({', '.join(said)})" for into, said in by_object.items())
    warnings.warn(
        f"StateManager({'=, '.join(old)}=) is spelled {new.replace('Mirror(', 'Mirror(url, ')} now. "
        "Version 0.2 no longer knows the old spelling.",
        DeprecationWarning,
        stacklevel=4,
    )

"""What every option of a manager must be, and the one error that names all that make no sense."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch.distributed as dist

from ckpt.errors import ConfigError
from ckpt.root.retention import Keep
from ckpt.save.capture import LAYOUTS
from ckpt.save.finite_guard import ON_NAN
from ckpt.storage.urls import is_storage
from ckpt.util import option_values as check
from ckpt.util.option_values import parse_duration

_BUSY = ("wait", "skip", "replace")


def refuse(what: str, wrong: Collection[str]) -> None:
    """Raise one error that names every option that makes no sense."""
    if wrong:
        raise ConfigError(f"{what}: {'; '.join(wrong)}.")


def problems(options: Mapping[str, Any]) -> list[str]:
    """What is wrong with options."""
    return [
        f"{name}={check.kind_of(value) if name in _SECRET else check.said(value)} must be {MUST_BE[name][1]}"
        for name, value in options.items()
        if not MUST_BE[name][0](value)
    ]


def _is_group(value: Any) -> bool:
    if value is None or not dist.is_available():
        return value is None
    return isinstance(value, dist.ProcessGroup) or value is dist.GroupMember.NON_GROUP_MEMBER


def is_place(value: Any) -> bool:
    return check.is_path(value) or is_storage(value)


_FLAG = (check.is_kind(bool), "True or False")
_MAYBE = (check.optional(check.is_kind(bool)), "True, False or None")
_KEEP = (check.optional(check.is_kind(Keep)), "a ckpt.Keep, for example Keep(last=3)")
_WHERE = (is_place, "a path, a URL or a storage")
_STEPS = (check.optional(check.is_count), "a number of steps, 1 or more")
_SIZE = (check.optional(check.is_size), "a size, as '8GB' or in bytes")
MUST_BE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "root": (check.optional(is_place), _WHERE[1]),
    "save_every": (
        lambda value: value is None or check.is_count(value) or parse_duration(value) is not None,
        "a number of steps, 1 or more, or a time, as '10min', '90s' or '2h'",
    ),
    "save_at_epoch_end": _FLAG,
    "save_on_exception": _FLAG,
    "keep": _KEEP,
    "storage_options": (check.optional(check.is_settings), "a dict of what the storage of a URL takes"),
    "memory_every": _STEPS,
    "memory_rescue": _FLAG,
    "sign": (
        lambda value: value is None or isinstance(value, bool) or check.is_path(value),
        "a path of a PEM file, its text, or False",
    ),
    "verify_key": (check.optional(check.is_path), "a path of a PEM file, or its text"),
    "require_signed": _FLAG,
    "memory_replicas": (
        lambda value: check.is_count(value, 0) and value <= 1,
        "0 or 1: how many other hosts keep a copy",
    ),
    "layout": (check.is_one_of(*LAYOUTS), f"one of {', '.join(LAYOUTS)}"),
    "gradients": _MAYBE,
    "background": _FLAG,
    "when_busy": (check.is_one_of(*_BUSY), "'wait', 'skip' or 'replace'"),
    "host_memory": _SIZE,
    "device_memory": _SIZE,
    "read_back": _MAYBE,
    "sha256": _FLAG,
    "on_nan": (check.optional(check.is_one_of(*ON_NAN)), "'warn', 'raise', 'skip' or None"),
    "timeout": (check.is_seconds, "a number of seconds, up to ten years"),
    "shared": _MAYBE,
    "broadcast": _MAYBE,
    "handle_sigterm": _FLAG,
    "handle_sigint": _FLAG,
    "save_on_sigusr1": _FLAG,
    "grace": (check.optional(check.is_seconds), "a number of seconds, up to ten years"),
    "alone": _FLAG,
    "process_group": (_is_group, "a process group, as torch.distributed.new_group returns it"),
    "url": _WHERE,
    "bandwidth": (check.optional(check.is_rate), "bytes per second, as '50MB'"),
    "at_start": (check.is_seconds, "a number of seconds, up to ten years"),
    "at_end": (check.is_seconds, "a number of seconds, up to ten years"),
    "backlog": (check.is_count, "a number of checkpoints, 1 or more"),
}
_SECRET = ("storage_options", "sign", "verify_key")  # not shown, whatever they are: a key may be given as its text

"""The facts that a run records of itself in its folder in memory, and by which a restart knows its own.

Imports no torch: the keeper and `ckpt memory` use it too.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections.abc import Mapping
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

from ckpt.storage.local.files import open_regular
from ckpt.util.checked_json import Rule, broken_rules, is_count, is_finite, is_mapping, is_text, parse_json
from ckpt.version import __version__

_MOST_FACTS = 64 << 10  # bytes
_RESCUE = {
    "root": Rule(is_text, "text"),
    "after": Rule(is_finite, "a number of seconds"),
    "deadline": Rule(is_finite, "a number of seconds"),
}
_RULES = {
    "format": Rule(is_count, "a number"),
    "uid": Rule(is_count, "a number"),
    "created": Rule(is_text, "text"),
    "root_sha256": Rule(is_text, "text"),
    "versions": Rule(is_mapping(is_text), "names with text"),
    "rescue": Rule(lambda value: value is None or not broken_rules(value, _RESCUE), "settings", required=False),
}


def boot_id() -> str:
    """The identity of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def code_versions() -> dict[str, str]:
    """The versions by which a snapshot in memory is read only by the code that wrote it. Imports no torch."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return {"ckpt": __version__, "python": platform.python_version(), "torch": torch}


def digest_of(root_identity: str) -> str:
    """What a folder records of its root's identity: enough to find it by, nothing to read a secret from."""
    return sha256(root_identity.encode()).hexdigest()


def read_facts(path: Path) -> dict[str, Any] | None:
    """The facts in a regular file of this user's; None if it is anything else."""
    try:
        descriptor = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or status.st_size > _MOST_FACTS:
            return None
        try:
            facts: Any = parse_json(file.read(_MOST_FACTS))
        except ValueError:
            return None
    return None if broken_rules(facts, _RULES) else dict(facts)


def write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Replace the file at once: a reader finds the old facts or the new ones."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as file:
        json.dump(facts, file, indent=1)
    os.replace(new, path)

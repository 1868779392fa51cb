"""Options from a YAML file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection
from typing import Any

from ckpt.errors import ConfigError
from ckpt.root.retention import Keep


def read_config(path: str | os.PathLike[str], known: Collection[str]) -> dict[str, Any]:
    """The options in a YAML file, `keep` already built. Every unknown one is named, with the nearest known one."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            options = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{os.fspath(path)} is not YAML: {error}") from error
    if not isinstance(options, dict) or "root" not in options:
        raise ConfigError(f"{os.fspath(path)} must be a mapping of options with at least 'root: ...'.")
    _refuse_unknown(path, options, known)
    for name in {"keep", "mirror_keep"} & options.keys():
        options[name] = _keep(path, name, options[name])
    return options


def _keep(path: str | os.PathLike[str], name: str, fields: Any) -> Keep:
    if not isinstance(fields, dict):
        raise ConfigError(f"{os.fspath(path)}: {name!r} must be a mapping, for example '{name}: {{last: 3}}'.")
    _refuse_unknown(path, fields, Keep.__dataclass_fields__, f"{name}.")
    return Keep(**fields)


def _refuse_unknown(
    path: str | os.PathLike[str], options: dict[str, Any], known: Collection[str], prefix: str = ""
) -> None:
    wrong = []
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            wrong.append(f"{prefix}{name}" + (f" (did you mean {near[0]}?)" if near else ""))
    if wrong:
        raise ConfigError(
            f"{os.fspath(path)} has options that do not exist: {', '.join(wrong)}. Known: {', '.join(sorted(known))}."
        )

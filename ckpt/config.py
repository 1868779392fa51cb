"""The options of a `StateManager` from a YAML file."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

from ckpt.errors import ConfigError
from ckpt.options import Mirror, RankOptions, SaveOptions, known_options
from ckpt.root.retention import Keep
from ckpt.util.option_values import refuse_unknown

_OBJECTS: dict[str, type] = {"keep": Keep, "mirror": Mirror, "saving": SaveOptions, "ranks": RankOptions}


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The options in a YAML file. Mappings become the objects that they describe: `keep: {last: 3}` a `Keep`."""
    import yaml

    where = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            options = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {error}") from error
    if not isinstance(options, dict) or "root" not in options:
        raise ConfigError(f"{where} must be a mapping of options with at least 'root: ...'.")
    refuse_unknown(where, options, {"root", *known_options()})
    return {name: _built(where, name, value) for name, value in options.items()}


def _built(where: str, name: str, value: Any) -> Any:
    kind = _OBJECTS.get(name)
    if kind is None or (kind is Mirror and not isinstance(value, dict)):
        return value
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {name!r} must be a mapping, for example '{name}: {{{_EXAMPLES[kind]}}}'.")
    refuse_unknown(f"{where}: {name}", value, [field.name for field in fields(kind)])
    if "keep" in value:
        value = {**value, "keep": _built(where, "keep", value["keep"])}
    if kind is Mirror and "url" not in value:
        raise ConfigError(f"{where}: 'mirror' needs a url, for example 'mirror: {{{_EXAMPLES[kind]}}}'.")
    return kind(**value)


_EXAMPLES = {
    Keep: "last: 3",
    Mirror: "url: s3://bucket/x",
    SaveOptions: "background: false",
    RankOptions: "timeout: 60",
}

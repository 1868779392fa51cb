"""The options of a `StateManager` from a YAML file."""

from __future__ import annotations

import os
from typing import Any

from ckpt.errors import ConfigError
from ckpt.options import OBJECTS, ManagerOptions, Mirror
from ckpt.util.option_values import names_of, refuse_unknown


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The options in a YAML file. Mappings become the objects that they describe: `keep: {last: 3}` a `Keep`."""
    import yaml

    where = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            options = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{where} is not UTF-8: save it in that encoding.") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply: no option needs more than two levels.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {error}") from error
    if not isinstance(options, dict) or "root" not in options:
        raise ConfigError(f"{where} must be a mapping of options with at least 'root: ...'.")
    _refuse_other_keys(where, options)
    refuse_unknown(where, options, names_of(ManagerOptions))
    return {name: _built(where, name, value) for name, value in options.items()}


def _refuse_other_keys(where: str, options: dict[Any, Any]) -> None:
    wrong = [repr(key) for key in options if not isinstance(key, str)]
    if wrong:
        raise ConfigError(f"{where}: the names of options are words, and not {', '.join(wrong)}.")


def _built(where: str, name: str, value: Any) -> Any:
    kind = OBJECTS.get(name)
    if kind is None or value is None:
        return value
    if not isinstance(value, dict):
        if kind.example:
            raise ConfigError(f"{where}: {name!r} must be a mapping, for example '{name}: {{{kind.example}}}'.")
        return value
    _refuse_other_keys(f"{where}: {name}", value)
    refuse_unknown(f"{where}: {name}", value, names_of(kind))
    if kind is Mirror and "url" not in value:
        raise ConfigError(f"{where}: 'mirror' needs a url, for example 'mirror: {{url: s3://bucket/x}}'.")
    return kind(**{inner: _built(where, inner, given) if inner == "keep" else given for inner, given in value.items()})

"""The options of a `StateManager` from a YAML file."""

from __future__ import annotations

import os
from typing import Any

from ckpt.errors import ConfigError
from ckpt.options import ManagerOptions, Mirror
from ckpt.util.option_values import Options, names_of, objects_in, refuse_unknown


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
        raise ConfigError(f"{where} is not UTF-8 text. Save the file as UTF-8.") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply: no option needs more than two levels.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {error}") from error
    if not isinstance(options, dict) or "root" not in options:
        raise ConfigError(f"{where} must map options to values, with at least 'root: ...'.")
    return _values(where, ManagerOptions, options)


def _values(where: str, kind: type[Options], options: dict[Any, Any]) -> dict[str, Any]:
    wrong = [repr(key) for key in options if not isinstance(key, str)]
    if wrong:
        raise ConfigError(f"{where}: the name of an option must be a word, not {', '.join(wrong)}.")
    refuse_unknown(where, options, names_of(kind))
    inner = objects_in(kind)
    return {
        name: _built(where, name, inner[name], given) if name in inner else given for name, given in options.items()
    }


def _built(where: str, name: str, kind: type[Options], value: Any) -> Any:
    if isinstance(value, dict):
        if kind is Mirror and "url" not in value:
            raise ConfigError(f"{where}: 'mirror' needs a 'url', for example 'mirror: {{url: s3://bucket/x}}'.")
        return kind(**_values(f"{where}: {name}", kind, value))
    if kind.example and value is not None:
        raise ConfigError(f"{where}: {name!r} must be a mapping, for example '{name}: {{{kind.example}}}'.")
    return value

"""Values of a script that belong into the checkpoint: numbers, text, and lists and dicts of them, under names."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from ckpt.errors import ConfigError

_PLAIN = (bool, int, float, str, type(None))
_TOO_DEEP = 50


class PlainValues(MutableMapping[str, Any]):
    """A dict that is saved with every checkpoint, and is as it was after a resume.

    What is given before a load (`register(best_loss=1e9)`) is the value where the checkpoint has none by that name.
    A tensor or NumPy scalar with one element becomes a number.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._is_loaded = False

    def __getitem__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            known = ", ".join(map(repr, self._values)) or "none"
            raise KeyError(f"{name!r} is no value of this run. There are: {known}") from None

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise ConfigError(f"values are kept under names, not under {name!r}.")
        self._values[name] = _plain(name, value)

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"PlainValues({self._values!r})"

    def begin_with(self, values: Mapping[str, Any]) -> None:
        """Add values, unless a checkpoint has brought others under their names."""
        for name, value in values.items():
            if not (self._is_loaded and name in self._values):
                self[name] = value

    def to_save(self) -> dict[str, Any]:
        """All values as they are now, for the state of a rank; nothing if there are none.

        Lists and dicts may have got anything since they were given, so they are checked again.
        """
        return {"values": {name: _plain(name, value) for name, value in self._values.items()}} if self._values else {}

    def restore(self, values: Mapping[str, Any]) -> list[str]:
        """Take these. Returns the names of others that are there, and keep what they have."""
        kept = [name for name in self._values if name not in values]
        self._values |= values
        self._is_loaded = True
        return kept


def is_plain(value: Any) -> bool:
    """Whether it is a single number, text, or None: not an object with state."""
    return isinstance(value, (*_PLAIN, *_of_numpy("generic")))


def are_plain(values: Any) -> bool:
    """Whether these can be the values of a checkpoint."""
    try:
        return (
            isinstance(values, dict) and all(type(name) is str for name in values) and bool(_plain("", values) or True)
        )
    except ConfigError:
        return False


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    arrays: tuple[Any, ...] = (torch.Tensor, *_of_numpy("ndarray", "generic"))
    if isinstance(value, arrays) and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if type(value) in _PLAIN:
        return value
    if depth < _TOO_DEEP and type(value) in (list, tuple):
        return type(value)(_plain(name, item, depth + 1) for item in value)
    if depth < _TOO_DEEP and type(value) is dict and all(type(key) in (str, int) for key in value):
        return {key: _plain(name, item, depth + 1) for key, item in value.items()}
    raise ConfigError(
        f"values[{name!r}] has a {type(value).__name__} in it: values are numbers, text, None, and lists, "
        "tuples and dicts of them. Objects with state_dict and load_state_dict are saved by register(name=object)."
    )


def _of_numpy(*names: str) -> tuple[type, ...]:
    """Classes of NumPy; none where nobody has imported it, and so no value can be of them."""
    numpy = sys.modules.get("numpy")
    return tuple(getattr(numpy, name) for name in names) if numpy is not None else ()

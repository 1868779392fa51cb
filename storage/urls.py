"""A URL picks the storage."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from urllib.parse import unquote

from ckpt.errors import ConfigError, SchemeError
from ckpt.storage.base import Storage
from ckpt.storage.hub import HubStorage
from ckpt.storage.local import LocalStorage
from ckpt.storage.memory import MemoryStorage

ENTRY_POINTS = "ckpt.storage"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def open_storage(root: str | os.PathLike[str] | Storage) -> Storage:
    """The storage that `root` names: a path, a URL, or a storage already."""
    if isinstance(root, Storage):
        return root
    url = os.fspath(root) if isinstance(root, str | os.PathLike) else None
    if not isinstance(url, str) or not url:
        raise ConfigError(f"the root must be a path or a URL, not {root!r}.")
    match = _URL.fullmatch(url)
    if match is None:
        return LocalStorage(url)
    scheme, rest = match.group(1).lower(), match.group(2)
    return _factory(scheme, url)(rest)


def _open_file(rest: str) -> Storage:
    path = rest.removeprefix("localhost")
    if not path.startswith("/"):
        raise ConfigError(f"file://{rest} is not a file URL: write file:///absolute/path, or a plain path.")
    return LocalStorage(unquote(path))


_BUILT_IN: dict[str, Callable[[str], Storage]] = {"file": _open_file, "hub": HubStorage, "memory": MemoryStorage}


def _factory(scheme: str, url: str) -> Callable[[str], Storage]:
    if scheme in _BUILT_IN:
        return _BUILT_IN[scheme]
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if scheme in installed:
        factory: Callable[[str], Storage] = installed[scheme].load()
        return factory
    known = ", ".join(["a plain path", *(f"{name}://" for name in sorted({*_BUILT_IN, *installed}))])
    raise SchemeError(
        f"no storage serves {scheme}:// (in {_masked(url)!r}). Known here: {known}. For another one, install a package "
        f"that provides it through the entry point group {ENTRY_POINTS!r}."
    )


def _masked(url: str) -> str:
    """Without a user's name and password."""
    return re.sub(r"//[^/]*@", "//***@", url)

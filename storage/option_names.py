"""Which options a client of a store does not take: many swallow what they do not know."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

# of fsspec's own machinery, which reads them from what is left
_OF_FSSPEC = {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "asynchronous", "loop"}


def unknown_options(options: Iterable[str], *clients: type) -> list[str]:
    """The options that are no parameter of these clients, nor of classes that they derive from."""
    known = set(_OF_FSSPEC)
    for kind in (kind for client in clients for kind in client.__mro__ if "__init__" in vars(kind)):
        known |= set(inspect.signature(vars(kind)["__init__"]).parameters)
    return sorted(set(options) - known)

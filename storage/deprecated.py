"""Names of the storage protocol that were changed: the former ones work for one more version, with a warning."""

from __future__ import annotations

from typing import Any

from ckpt.util.deprecation import warn_deprecated


class FormerName:
    """Class attribute under an attribute's former name: reads and sets it under the present one, and warns."""

    def __init__(self, present: str) -> None:
        self._present = present

    def __set_name__(self, owner: type, former: str) -> None:
        self._former = former

    def __get__(self, storage: object, owner: type) -> Any:
        warn_deprecated(f"{owner.__name__}.{self._former} is {self._present} now: use that name.")
        return getattr(owner if storage is None else storage, self._present)

    def __set__(self, storage: object, value: object) -> None:
        warn_deprecated(f"{type(storage).__name__}.{self._former} is {self._present} now: set that.")
        setattr(storage, self._present, value)


class _ReadsNear:
    """`is_local` of a class that was written with `near`."""

    def __get__(self, storage: Any, owner: type) -> Any:
        return self if storage is None else storage.near


def accept_near(storage: object) -> None:
    """Give the class of a storage that defines `near`, and not `is_local`, an `is_local` that reads it.

    A class that derives from one of ckpt's and overrides `near` counts as well, or its answer would be ignored.
    """
    (near, near_depth), (is_local, is_local_depth) = _look_up(storage, "near"), _look_up(storage, "is_local")
    if near_depth >= is_local_depth or isinstance(near, FormerName) or isinstance(is_local, _ReadsNear):
        return
    kind = type(storage)
    warn_deprecated(f"{kind.__name__} defines `near`, which is `is_local` now: rename the attribute.")
    kind.is_local = _ReadsNear()  # type: ignore[attr-defined]


def _look_up(storage: object, name: str) -> tuple[object, int]:
    """What defines an attribute, and how far from the object: 0 for itself, then its class and the bases."""
    scopes = [getattr(storage, "__dict__", {}), *(vars(kind) for kind in type(storage).__mro__)]
    return next(((scope[name], depth) for depth, scope in enumerate(scopes) if name in scope), (None, len(scopes)))

"""Private names of other libraries: what each is used for, since when it is known, and what happens without it.

Nobody promises such a name. So no module of ckpt but those in `ckpt/compat/` has one, and each has a way without it:
the import works, saves and loads work, and what cannot be done is named once.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any

_log = logging.getLogger("ckpt")

ALL: dict[str, Private] = {}  # every name that has been declared, by its path


@dataclass(eq=False)
class Private:
    """A private name.

    Args:
        path: Library, class or module, and the name: `torch.Tensor._version`.
        since: The oldest version of the library in which it was seen; older ones are not supported either.
        use: What it is needed for.
        without: What happens without it, as a sentence for the user.
    """

    path: str
    since: str
    use: str
    without: str

    def __post_init__(self) -> None:
        self.owner, _, self.name = self.path.rpartition(".")
        self.library = self.path.partition(".")[0]
        self._told = False
        ALL[self.path] = self

    def of(self, owner: Any, default: Any = None) -> Any:
        """The attribute of an object that has it in all known versions; else what is lost is named, once."""
        try:
            return getattr(owner, self.name)
        except (
            AttributeError
        ):  # a default could not be compared: torch.compile may trace this, and cannot compare all values
            self.tell()
            return default

    def imported(self) -> Any:
        """The name, as its module has it; None without it, which is named."""
        try:
            return getattr(import_module(self.owner), self.name)
        except (ImportError, AttributeError):
            self.tell()
            return None

    def tell(self) -> None:
        """Name what is lost without it, once in a job: it is lost on all ranks."""
        if not self._told:
            self._told = True
            if os.environ.get("RANK", "0") != "0":
                return
            _log.warning("%s has no %s. %s", _release(self.library), self.path, self.without)


def _release(library: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # takes 20 ms

    try:
        return f"{library} {version(library)}"
    except PackageNotFoundError:
        return library

"""Numbers of bytes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_LARGEST = 2**63
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", re.IGNORECASE)


def parse_size(size: int | str) -> int | None:
    """Bytes for `5GB`, `512MiB` or a number, 1 or more; None if it is no size, or larger than any disk."""
    if isinstance(size, bool):
        return None
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found:
        given = float(found[1]) * _UNITS[found[2].upper()]
        size = int(given) if given < _LARGEST else 0
    return size if isinstance(size, int) and 0 < size < _LARGEST else None

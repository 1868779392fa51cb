"""Times as people write them."""

from __future__ import annotations

import re

_UNITS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_LONGEST = 10 * 365 * 86400.0  # seconds
_PART = r"(\d{1,12}(?:\.\d{1,12})?)\s*([a-z]+)\s*"


def parse_duration(text: object) -> float | None:
    """Seconds for `90s`, `10min`, `2h` or `1h30min`, more than 0; None if it is no time, or longer than ten years."""
    if not isinstance(text, str) or not re.fullmatch(f"(?:{_PART})+", said := text.strip().lower()):
        return None
    parts = re.findall(_PART, said)
    if any(unit not in _UNITS for _, unit in parts):
        return None
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return seconds if 0 < seconds <= _LONGEST else None

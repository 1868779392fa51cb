"""No image is looked at."""

from __future__ import annotations

from typing import Any


def save_image(*arguments: Any, **options: Any) -> None: ...

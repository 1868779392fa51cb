"""Timestamps in the answers of S3, of which a page of a listing has a thousand.

botocore guesses at the format of each, and that takes three quarters of the time of reading such a page.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any


def session_with_fast_timestamps(options: dict[str, Any]) -> Any:
    """A session of aiobotocore, built from the options for it, as s3fs would build it."""
    from aiobotocore.session import AioSession

    session = AioSession(**options)
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=parsed)
    return session


def parsed(value: Any) -> datetime:
    """The time that a timestamp stands for. What is not written as S3 does, botocore parses."""
    if isinstance(value, str) and value.endswith("Z"):
        try:
            return datetime.fromisoformat(f"{value[:-1]}+00:00")
        except ValueError:
            pass
    from botocore.utils import parse_timestamp

    found: datetime = parse_timestamp(value)
    return found

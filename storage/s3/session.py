"""Sessions of aiobotocore that do not repeat what takes long.

A page of a listing has a thousand timestamps. botocore guesses at the format of each, and that takes three quarters of
the time of reading such a page. Each of its sessions also reads the description of the service anew, though a process
opens several: one for the root, one for its mirror.
"""

from __future__ import annotations

from datetime import datetime
from functools import cache
from typing import Any


def fast_session(options: dict[str, Any]) -> Any:
    """A session of aiobotocore, built from the options for it, as s3fs would build it."""
    from aiobotocore.session import AioSession

    session = AioSession(**options)
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=parsed)
    session.register_component("data_loader", _descriptions(session.get_config_variable("data_path")))
    return session


@cache
def _descriptions(path: str | None) -> Any:
    from botocore.loaders import create_loader

    return create_loader(path)


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

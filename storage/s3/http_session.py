"""The HTTP sessions of S3: they follow no redirect, read no answer beyond a bound, and wait for no 100 Continue.

A redirect would take the session token to a host that the server names. Objects are not read here, but streamed. With
`Expect: 100-continue`, aiohttp sends no body before the server has said so, and some servers never do.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ckpt.compat import s3fs
from ckpt.errors import StorageError, UnsupportedError

LONGEST_ANSWER = 64 << 20  # bytes: a page of a thousand keys has less than 3 MB
_CHUNK = 1 << 16


class EndlessError(StorageError):
    """A server sends more than anybody has asked for."""


def session_class() -> type[Any]:
    """The class of sessions for `AioConfig(http_session_cls=...)`."""
    found = s3fs.session_class(_Plain)
    if found is None:
        raise UnsupportedError(s3fs.SESSION.without)
    return found


class _Plain:
    """A session of aiohttp that answers a redirect with the redirect itself, and sends a body at once. What an answer
    holds is read up to a bound."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, *arguments: Any, **options: Any) -> Any:
        options["headers"].pop("Expect", None)
        response = await self._session.request(*arguments, allow_redirects=False, **options)
        response.read = partial(_bounded, response)
        return response


async def _bounded(response: Any) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK):
        body += chunk
        if len(body) > LONGEST_ANSWER:
            response.close()
            raise EndlessError(f"the server's answer has more than {LONGEST_ANSWER >> 20} MB, which none of S3's has.")
    return bytes(body)

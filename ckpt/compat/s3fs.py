"""Private names of s3fs, and of aiobotocore and aiohttp below it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt.compat.private import Private

CALL = Private(
    "s3fs.S3FileSystem._call_s3",
    since="2025.3",
    use="a request with the options, the retries and the errors of s3fs",
    without="Requests go to the client below s3fs: req_kw= and requester_pays= have no effect.",
)
SESSION = Private(
    "aiobotocore.httpsession.AIOHTTPSession._get_session",
    since="2.21",
    use="a session that follows no redirect, and sends a body at once",
    without="S3 is refused: a redirect of the server would be followed, with the credentials.",
)
RESPONSES = Private(
    "aiohttp.ClientSession._response_class",
    since="3.11",
    use="reads no answer beyond a bound",
    without="An S3 server that sends an endless answer can fill the memory.",
)


async def call(filesystem: Any, method: str, **arguments: Any) -> Any:
    """A single request."""
    found = CALL.of(filesystem)
    if found is None:
        found = getattr(await filesystem.set_session(), method)
        return await found(**arguments)
    return await found(method, **arguments)


def session_class(responses: type[Any], wrapped: Callable[[Any], Any]) -> type[Any] | None:
    """A class of aiobotocore's sessions: answers are `responses`, and sessions of aiohttp pass through `wrapped`."""
    from aiobotocore.httpsession import AIOHTTPSession

    own = SESSION.of(AIOHTTPSession)
    if own is None:
        return None

    async def get_session(self: Any, proxy_url: Any) -> Any:
        session = await own(self, proxy_url)
        if RESPONSES.of(session) is not None:
            setattr(session, RESPONSES.name, responses)
        return wrapped(session)

    return type("Session", (AIOHTTPSession,), {SESSION.name: get_session})

"""Private names of aiobotocore, below s3fs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt.compat.private import Private

SESSION = Private(
    "aiobotocore.httpsession.AIOHTTPSession._get_session",
    since="2.21",
    use="a session that follows no redirect, and sends a body at once",
    without="S3 is refused: a redirect of the server would be followed, with the credentials.",
)


def session_class(wrapped: Callable[[Any], Any]) -> type[Any] | None:
    """A class of aiobotocore's sessions: those of aiohttp inside pass through `wrapped`."""
    from aiobotocore.httpsession import AIOHTTPSession

    own = SESSION.of(AIOHTTPSession)
    if own is None:
        return None

    async def get_session(self: Any, proxy_url: Any) -> Any:
        return wrapped(await own(self, proxy_url))

    return type("Session", (AIOHTTPSession,), {SESSION.name: get_session})

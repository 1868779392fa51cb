"""Checks the Hub's answers for what its client would take from them unseen.

The client makes names of files in its cache of ETags and commits, follows links from page to page with the token, and
reads lists into memory and files to the disk, however long they are.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from ckpt.errors import StorageError

MOST_PAGES = 2000  # of a thousand files each: whoever lists more does not end
LONGEST_LIST = 256 << 20  # bytes of all answers of one list
_NAMES = ("ETag", "X-Linked-Etag", "X-Repo-Commit")
_PLAIN = re.compile(r"[\w.:+=-]{0,200}", re.ASCII)


class _Asking(threading.local):
    """What this thread asks of the Hub through ckpt: others in the process are left alone."""

    stall: float | None = None  # seconds without a byte, after which a request has failed: the client has no limit
    pages: int | None = None  # that may still come; without a bound outside `bounded_answers`
    bytes: int = 0  # the same, of their bodies
    most: int = 0


_asking = _Asking()


@contextmanager
def guarded_requests(stall: float) -> Iterator[None]:
    """Check the answers to what this thread asks for in this context, and do not wait for them forever."""
    from huggingface_hub.utils import get_session

    client = get_session()
    hooks = client.event_hooks
    for kind, hook in (("request", _limit_wait), ("response", _check)):
        if hook not in hooks.get(kind, ()):
            client.event_hooks = {**client.event_hooks, kind: [*hooks.get(kind, ()), hook]}
    outer, _asking.stall = _asking.stall, stall
    try:
        yield
    finally:
        _asking.stall = outer


@contextmanager
def bounded_answers(most: int | None = None) -> Iterator[None]:
    """Bound the bytes of all answers that this thread reads in this context: of lists into memory, unless told."""
    outer = _asking.pages, _asking.bytes, _asking.most
    _asking.most = LONGEST_LIST if most is None else most
    _asking.pages, _asking.bytes = MOST_PAGES, _asking.most
    try:
        yield
    finally:
        _asking.pages, _asking.bytes, _asking.most = outer


def _limit_wait(request: Any) -> None:
    if _asking.stall is not None:
        limits = request.extensions.get("timeout") or dict.fromkeys(("connect", "read", "write", "pool"))
        request.extensions["timeout"] = {
            kind: _asking.stall if given is None else min(given, _asking.stall) for kind, given in limits.items()
        }


def _check(response: Any) -> None:
    url = str(response.request.url)
    where = f"{response.request.method} {urlsplit(url).path}"
    if response.request.method == "HEAD" and "/resolve/" in url:
        odd = [name for name in _NAMES if not _is_plain(response.headers.get(name, ""))]
        if odd:
            raise strange_answer(where, f"has a strange {odd[0]}")
    following = response.links.get("next", {}).get("url")
    if following and _origin(following) != _origin(url):
        raise strange_answer(where, "continues on another host")
    if _asking.pages is not None and response.request.method == "GET":
        _asking.pages -= 1
        if _asking.pages < 0:
            raise strange_answer(where, f"has more than {MOST_PAGES:,} pages")
        response.stream = _bounded(response.stream, where)


def _is_plain(value: str) -> bool:
    """Whether a header can be the name of a file."""
    bare = value.removeprefix("W/").strip('"')
    return bool(_PLAIN.fullmatch(bare)) and ".." not in bare


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def strange_answer(where: str, what: str) -> StorageError:
    """The error for an answer that the Hub does not give: to ask again would not help."""
    return StorageError(f"the Hub's answer to {where} {what}. Check HF_ENDPOINT: that is no answer of the Hub.")


class _Bounded:
    """The body of an answer, as far as there is room for it."""

    def __init__(self, stream: Any, where: str) -> None:
        self._stream = stream
        self._where = where

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            _asking.bytes -= len(piece)
            if _asking.pages is not None and _asking.bytes < 0:
                raise strange_answer(self._where, f"has more than {_asking.most:,} bytes")
            yield piece

    def close(self) -> None:
        self._stream.close()


def _bounded(stream: Any, where: str) -> Any:
    """A stream of the client's own kind: it takes no other."""
    kind = next((base for base in type(stream).__mro__ if base.__name__ == "SyncByteStream"), object)
    return type("BoundedStream", (_Bounded, kind), {})(stream, where)

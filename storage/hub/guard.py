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
_SLACK = 16 << 20  # bytes that are received more than once, where a connection failed
_NAMES = ("ETag", "X-Linked-Etag", "X-Repo-Commit")
_PLAIN = re.compile(r"[\w.:+=-]{0,200}", re.ASCII)


class _Room(threading.local):
    """What lists that this thread asks for may still bring; without a bound outside `guarded_lists`."""

    pages: int | None = None
    bytes: int = 0


_room = _Room()


def check_answers() -> None:
    """Let every answer that the client gets in this process be checked."""
    from huggingface_hub.utils import get_session

    client = get_session()
    hooks = client.event_hooks
    if _check not in hooks.get("response", ()):
        client.event_hooks = {**hooks, "response": [*hooks.get("response", ()), _check]}


@contextmanager
def guarded_lists() -> Iterator[None]:
    """Check answers, and bound what this thread reads into memory in this context."""
    check_answers()
    outer = _room.pages, _room.bytes
    _room.pages, _room.bytes = MOST_PAGES, LONGEST_LIST
    try:
        yield
    finally:
        _room.pages, _room.bytes = outer


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
    if _room.pages is not None and response.request.method == "GET":
        _room.pages -= 1
        if _room.pages < 0:
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
            _room.bytes -= len(piece)
            if _room.pages is not None and _room.bytes < 0:
                raise strange_answer(self._where, f"has more than {LONGEST_LIST >> 20} MB")
            yield piece

    def close(self) -> None:
        self._stream.close()


def _bounded(stream: Any, where: str) -> Any:
    """A stream of the client's own kind: it takes no other."""
    kind = next((base for base in type(stream).__mro__ if base.__name__ == "SyncByteStream"), object)
    return type("BoundedStream", (_Bounded, kind), {})(stream, where)


def bounded_progress(most: int, where: str) -> Any:
    """A class of progress bars for the client, which end a download of more bytes than the files have by the list."""
    from huggingface_hub.utils import tqdm

    received = [0.0]

    class Bounded(tqdm):
        def update(self, n: float | None = 1) -> Any:
            received[0] += n or 0
            if received[0] > most + _SLACK:
                raise StorageError(
                    f"could not download {where}: the Hub sends more than the {most} bytes that it listed."
                )
            return super().update(n)

    return Bounded

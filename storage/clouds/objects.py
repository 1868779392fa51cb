"""Objects of S3, Azure and Google Cloud Storage: retries, parts, and writes whose answers were lost."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from ckpt.errors import AbsentError, ConfigError, ConflictError, StorageError
from ckpt.storage.base import ANY, LARGEST_DOCUMENT, Buffer, Entry, Unfinished, changed
from ckpt.storage.clouds.errors import UploadGoneError, strange_answer
from ckpt.storage.multipart import Body, scatter, split_into_parts
from ckpt.storage.retry import Requests
from ckpt.util.threads import Worker

_T = TypeVar("_T")
_Item = TypeVar("_Item")
_READ_AT_ONCE = 8 << 20
_MOST_PAGES = 20_000  # whoever lists more does not end
WRITE = "ckpt_write"  # metadata that identifies a write whose answer was lost


class Head(NamedTuple):
    """What a store says about an object: `token` is that of the write that made it."""

    size: int
    version: str
    token: str | None


class Retried(Protocol):
    """Makes a request, again and again while its failures may pass."""

    def __call__(
        self, attempt: Callable[[], _T], *, stopped: threading.Event | None = None, is_large: bool = False
    ) -> _T:
        """Its result. No further try is made when `stopped` is set."""


class Client(Protocol):
    """Single requests to one store. Keys are those of the store; errors are those of its library."""

    removed_at_once: int  # objects, by one request

    def head(self, key: str) -> Head:
        """What is known about an object. A key that stands for a folder is absent."""

    def put(self, key: str, body: Body, over: str | None, token: str) -> str:
        """Write a small object in one request, and return its version. The server compares the version it has."""

    def put_in_parts(self, key: str, parts: Iterator[Body], over: str | None, token: str, retried: Retried) -> str:
        """Write a large one, which appears with the last request. That has the condition."""

    def read(self, key: str, start: int, stop: int, stopped: threading.Event) -> list[bytes]:
        """A range, as it has come; nothing if the object ends before `start`. May end early when `stopped` is set."""

    def copy(self, source: str, target: str, size: int, retried: Retried) -> None:
        """Copy inside the store."""

    def page(self, prefix: str, marker: Any) -> tuple[list[Entry], Any]:
        """Some of the objects whose keys begin so, and where the next ones begin; None if these were the last."""

    def remove(self, keys: list[str]) -> None:
        """Remove objects. That there is none is no error."""

    def translate(self, error: Exception, what: str, where: str) -> StorageError | ConfigError | None:
        """The error to raise for one of the library. Quotes no secret. None: it is not the store's."""


def several(call: Callable[[_Item, threading.Event], _T], items: Iterable[_Item], at_once: int, name: str) -> list[_T]:
    """The results of calls with items as they come, several concurrently.

    When this returns or raises, no call is under way, and none reads or fills the caller's buffers. The event is set to
    end them early.
    """
    stopped, running, results = threading.Event(), list[Worker](), list[_T]()
    left = iter(items)

    def collect() -> None:
        results.append(running[0].wait())  # listed until then: an interrupt waits for it, too
        del running[0]

    first = list(itertools.islice(left, 2))
    if len(first) < 2:
        return [call(item, stopped) for item in first]
    try:
        for item in itertools.chain(first, left):
            if len(running) >= at_once:
                collect()
            running.append(Worker(name).start(partial(copy_context().run, call, item, stopped)))  # with `within`
        while running:
            collect()
    except BaseException:
        stopped.set()
        for ending in running:
            ending.close()
        raise
    return results


class CloudObjects:
    """The objects below `url`, whose keys in the store begin with `prefix`."""

    def __init__(self, url: str, prefix: str, client: Client, requests: Requests) -> None:
        self._url = url
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = client
        self._requests = requests

    @property
    def url(self) -> str:
        return self._url

    @property
    def progress(self) -> int:
        return self._requests.progress

    def giving_up(self) -> AbstractContextManager[None]:
        return self._requests.giving_up()

    def put(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> str:
        parts = (Body(views, self._requests.note_progress) for views in split_into_parts(pieces))
        first, second = next(parts, Body([])), next(parts, None)
        name, token = self._prefix + key, uuid.uuid4().hex
        retried = self._retried("write", key)
        try:
            if second is None:
                return retried(lambda: self._client.put(name, first, over, token))
            return self._client.put_in_parts(name, itertools.chain([first, second], parts), over, token, retried)
        except (ConflictError, AbsentError) as error:  # perhaps with itself: it was sent twice, by us or on its way
            with suppress(AbsentError):
                found = self._head(key)
                if found.token == token:
                    return found.version
            if isinstance(error, ConflictError | UploadGoneError) or over in (None, ANY):
                raise
        raise changed(self._where(key))  # the object was removed, and some servers say 404

    def version(self, key: str) -> str | None:
        try:
            return self._head(key).version
        except AbsentError:
            return None

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is not None and stop <= start:
            self._head(key)
            return b""
        most = start + LARGEST_DOCUMENT
        found = b"".join(self._read(key, start, most + 1 if stop is None else stop, threading.Event()))
        if stop is None and len(found) > LARGEST_DOCUMENT:  # whoever lies about its end sends without one
            raise strange_answer(self._where(key), f"the server sent over {LARGEST_DOCUMENT >> 20} MB for a document")
        return found

    def _read(
        self, key: str, start: int, stop: int, stopped: threading.Event, *, is_large: bool = False
    ) -> list[bytes]:
        def attempt() -> list[bytes]:
            return self._client.read(self._prefix + key, start, stop, stopped)

        found = self._retried("read", key)(attempt, stopped=stopped, is_large=is_large)
        if sum(map(len, found)) > stop - start:
            raise strange_answer(self._where(key), "the server sent more bytes than ckpt asked for")
        return found

    def fill(self, key: str, start: int, buffers: list[memoryview]) -> int:
        def fill_one(span: tuple[int, int, list[memoryview]], stopped: threading.Event) -> int:
            begin, end, views = span
            for chunk in self._read(key, begin, end, stopped, is_large=True):
                views, begin = scatter(chunk, views), begin + len(chunk)
            return end - begin

        spans, at = [], start
        for views in split_into_parts(buffers, _READ_AT_ONCE):
            spans.append((at, at + sum(map(len, views)), views))
            at = spans[-1][1]
        return sum(several(fill_one, spans, self._requests.at_once, "ckpt-read"))

    def copy(self, source: str, target: str) -> None:
        size = self._head(source).size
        self._client.copy(self._prefix + source, self._prefix + target, size, self._retried("copy", target))

    def entries(self, prefix: str) -> Iterator[Entry]:
        for found in self._pages("", lambda marker: self._client.page(self._prefix + prefix, marker)):
            yield from self._below(prefix, found)

    def _below(self, prefix: str, found: list[Entry]) -> list[Entry]:
        """The objects of an answer, with their keys here."""
        for entry in found:
            if not entry.key.startswith(self._prefix + prefix):
                raise strange_answer(self.url, "the server listed keys below a prefix that ckpt did not ask for")
            if entry.size < 0:
                raise strange_answer(self.url, "the server listed an object with a negative size")
        return [
            Entry(entry.key.removeprefix(self._prefix), entry.size, entry.version)
            for entry in found
            if not entry.key.endswith("/")  # a placeholder for a folder, as consoles create them
        ]

    def _pages(self, key: str, ask: Callable[[Any], tuple[_T, Any]]) -> Iterator[_T]:
        """The pages of a listing. `ask` returns one, and where the next begins, which it is given then."""
        marker = None
        for _ in range(_MOST_PAGES):
            found, following = self._retried("list", key)(partial(ask, marker))
            yield found
            if following is None:
                return
            if not following or following == marker:
                raise strange_answer(self._where(key), "the server said that its list continues, but not where")
            marker = following
        raise strange_answer(self._where(key), f"the server sent an endless list: more than {_MOST_PAGES:,} pages")

    def remove(self, keys: list[str]) -> None:
        def remove_some(start: int, stopped: threading.Event) -> None:
            some = [self._prefix + key for key in keys[start : start + step]]
            where = keys[start] if step == 1 else ""
            self._retried("delete", where)(lambda: self._client.remove(some), stopped=stopped)

        step = self._client.removed_at_once
        several(remove_some, range(0, len(keys), step), self._requests.at_once, "ckpt-delete")

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """None: neither store lists them by size and age, and both discard them after a week."""
        return iter(())

    def abort(self, prefix: str, age: float) -> None:
        """Nothing to do: both stores discard what was not completed for a week."""

    def _head(self, key: str) -> Head:
        return self._retried("read", key)(lambda: self._client.head(self._prefix + key))

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}".rstrip("/")

    def _retried(self, what: str, key: str) -> Retried:
        def retried(attempt: Callable[[], _T], *, stopped: threading.Event | None = None, is_large: bool = False) -> _T:
            return self._requests.make(lambda: self._translated(what, key, attempt), stopped, is_large=is_large)

        return retried

    def _translated(self, what: str, key: str, attempt: Callable[[], _T]) -> _T:
        try:
            return attempt()
        except Exception as error:
            problem = self._problem(error, what, key)
            if problem is None:
                raise
        raise problem  # not where it was caught: what is chained might quote a secret

    def _problem(self, error: Exception, what: str, key: str) -> StorageError | ConfigError | None:
        if type(error) is StorageError:  # of an answer, which does not say where
            return StorageError(f"could not {what} {self._where(key)}: {error}")
        if isinstance(error, StorageError | ConfigError):
            return error
        return self._client.translate(error, what, self._where(key))


def refuse_unknown(
    scheme: str, options: Mapping[str, Any], taken: Iterable[str], silent: Iterable[str], instead: Mapping[str, str]
) -> None:
    """Refuse options by name that would have no effect, but for the `silent`. `instead`: what to use for some."""
    known = {*taken, "deadline", "stall", "allow_unconditional"}
    wrong = sorted(options.keys() - known - {*silent})
    if wrong:
        hints = "".join(f" {name}: {instead[name]}." for name in wrong if name in instead)
        raise ConfigError(
            f"{scheme}:// does not accept these storage_options: {', '.join(wrong)}.{hints} {scheme}:// "
            f"accepts {', '.join(sorted(known))}."
        )

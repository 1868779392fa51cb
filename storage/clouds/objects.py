"""Objects of Azure and of Google Cloud Storage: retries, parts, and writes whose answers were lost."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

from ckpt.errors import AbsentError, ConfigError, DeniedError, StorageError, TransientError
from ckpt.storage.base import ANY, Buffer, Entry, Unfinished
from ckpt.storage.clouds.errors import strange_answer
from ckpt.storage.multipart import scatter, split_into_parts
from ckpt.storage.retry import Requests, RetryPolicy
from ckpt.util.threads import in_parallel

_T = TypeVar("_T")
AT_ONCE = 8
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

    def __call__(self, attempt: Callable[[], _T], *, stopped: threading.Event | None = None) -> _T:
        """Its result. No further try is made when `stopped` is set."""


class Client(Protocol):
    """Single requests to one store. Keys are those of the store; errors are those of its library."""

    def head(self, key: str) -> Head:
        """What is known about an object. A key that stands for a folder is absent."""

    def put(self, key: str, views: list[memoryview], over: str | None, token: str) -> str:
        """Write a small object in one request, and return its version. The server compares the version it has."""

    def put_in_parts(
        self, key: str, parts: Iterator[list[memoryview]], over: str | None, token: str, retried: Retried
    ) -> str:
        """Write a large one, which appears with the last request. That has the condition."""

    def read(self, key: str, start: int, stop: int | None) -> bytes:
        """A range; nothing if the object ends before `start`."""

    def copy(self, source: str, target: str) -> None:
        """Copy inside the store."""

    def page(self, prefix: str, marker: str | None) -> tuple[list[Entry], str | None]:
        """Some of the objects whose keys begin so, and where the next ones begin; None if these were the last."""

    def remove(self, key: str) -> None:
        """Remove an object. That there is none is no error."""

    def translate(self, error: Exception, what: str, where: str) -> StorageError | ConfigError | None:
        """The error to raise for one of the library. Quotes no secret. None: it is not the store's."""


class CloudObjects:
    """The objects below `url`, whose keys in the store begin with `prefix`."""

    def __init__(self, url: str, prefix: str, client: Client, policy: RetryPolicy, at_once: int = AT_ONCE) -> None:
        self._url = url
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = client
        self._requests = Requests(policy)
        self._at_once = at_once

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> str:
        parts = split_into_parts(pieces)
        first, second = next(parts, []), next(parts, None)
        name, token = self._prefix + key, uuid.uuid4().hex
        retried = self._retried("write", key)
        try:
            if second is None:
                return retried(lambda: self._client.put(name, first, over, token))
            return self._client.put_in_parts(name, itertools.chain([first, second], parts), over, token, retried)
        except (TransientError, DeniedError):
            raise
        except StorageError:  # a conflict with itself: it was sent twice, by us or on its way
            with suppress(StorageError):
                found = self._head(key)
                if found.token == token:
                    return found.version
            raise

    def version(self, key: str) -> str | None:
        try:
            return self._head(key).version
        except AbsentError:
            return None

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is not None and stop <= start:
            self._head(key)
            return b""
        found = self._retried("read", key)(lambda: self._client.read(self._prefix + key, start, stop))
        if stop is not None and len(found) > stop - start:
            raise strange_answer(self._where(key), "sends more bytes than were asked for")
        return found

    def fill(self, key: str, start: int, buffers: list[memoryview]) -> int:
        spans, at = [], start
        for views in split_into_parts(buffers, _READ_AT_ONCE):
            spans.append((at, views))
            at += sum(map(len, views))
        return sum(in_parallel(lambda span: self._fill_one(key, *span), spans, self._at_once, "ckpt-read"))

    def _fill_one(self, key: str, start: int, views: list[memoryview]) -> int:
        size = sum(map(len, views))
        found = self.get(key, start, start + size)
        scatter(found, views)
        return size - len(found)

    def copy(self, source: str, target: str) -> None:
        self._head(source)
        self._retried("copy", target)(lambda: self._client.copy(self._prefix + source, self._prefix + target))

    def entries(self, prefix: str) -> Iterator[Entry]:
        marker: str | None = None
        for _ in range(_MOST_PAGES):
            found, following = self._page(self._prefix + prefix, marker)
            for entry in found:
                if not entry.key.startswith(self._prefix + prefix):
                    raise strange_answer(self.url, "lists keys below another prefix than was asked for")
                if entry.size < 0:
                    raise strange_answer(self.url, "lists objects of less than no bytes")
                if not entry.key.endswith("/"):  # a placeholder for a folder, as consoles create them
                    yield Entry(entry.key.removeprefix(self._prefix), entry.size, entry.version)
            if following is None:
                return
            if following == marker:
                raise strange_answer(self.url, "says that its list continues, but not where")
            marker = following
        raise strange_answer(self.url, f"lists without an end: more than {_MOST_PAGES:,} pages")

    def _page(self, top: str, marker: str | None) -> tuple[list[Entry], str | None]:
        return self._retried("list", "")(lambda: self._client.page(top, marker))

    def remove(self, keys: list[str]) -> None:
        def remove_one(key: str) -> None:
            self._retried("delete", key)(lambda: self._client.remove(self._prefix + key))

        in_parallel(remove_one, keys, self._at_once, "ckpt-delete")

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
        def retried(attempt: Callable[[], _T], *, stopped: threading.Event | None = None) -> _T:
            return self._requests.make(lambda: self._translated(what, key, attempt), stopped)

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
            f"{scheme}:// does not take the storage_options {', '.join(wrong)}.{hints} It takes "
            f"{', '.join(sorted(known))}."
        )

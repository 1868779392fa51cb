"""Places that are only read from: web servers, archives, SFTP, hf://. fsspec knows how to list and to read them.

That is known before anything is asked for: nothing is written there to find out. Nothing can be locked there, and
nobody is kept from changing what is read: hashes notice it.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import IO, Any, NoReturn, TypeVar

from ckpt.errors import AbsentError, ConfigError, DeniedError, StorageError, TruncatedError
from ckpt.storage.base import ANY, Buffer, Entry, Unfinished, below, check_key
from ckpt.storage.fsspec_objects import translated_errors
from ckpt.storage.option_names import unknown_options
from ckpt.storage.retry import Requests, RetryPolicy
from ckpt.util.checked_json import is_relative

_T = TypeVar("_T")
_OF_REQUESTS = {  # what aiohttp's requests take, as its documentation lists it
    "params", "data", "json", "cookies", "headers", "skip_auto_headers", "auth", "allow_redirects", "max_redirects",
    "compress", "chunked", "expect100", "raise_for_status", "read_until_eof", "proxy", "proxy_auth", "timeout", "ssl",
    "verify_ssl", "fingerprint", "ssl_context", "server_hostname", "proxy_headers", "trace_request_ctx", "read_bufsize",
    "auto_decompress", "max_line_size", "max_field_size", "middlewares",
}  # fmt: skip
_MOST_COPIED = 64 << 20  # bytes of a piece while a file is copied that cannot be read in ranges


class ReadOnlyStorage:
    """The files below a URL of fsspec's. Whatever would write is a `DeniedError`."""

    is_local = False

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.url = url
        self._options = dict(options)
        self._known: tuple[str, ...] = ()
        given = dict(options)
        policy = RetryPolicy.taken_from(given)
        self._requests = Requests(policy)
        self._fs, path = _opened(url, given, policy)
        self._prefix = path.rstrip("/")
        self._whole: dict[str, IO[bytes]] = {}  # copies of files that the server does not send in parts
        self._sizes: dict[str, int] = {}
        self._guard = threading.Lock()
        # clients that are not made for several requests at a time answer one thread with what another has asked for
        self._turn: AbstractContextManager[Any] = nullcontext() if self._fs.async_impl else threading.RLock()

    def __repr__(self) -> str:
        return f"ReadOnlyStorage({self.url!r})"

    @property
    def parent(self) -> tuple[ReadOnlyStorage, str]:
        """The storage one folder higher, and the name of this one's folder in it."""
        inside, chain, archive = self.url.partition("::")
        above, _, name = inside.rstrip("/").rpartition("/")
        if not above or above.endswith(":/"):
            raise StorageError(
                f"{self.url} has the files of a checkpoint at its top, and not its folder, which is its name: put the "
                "folder there."
            )
        return ReadOnlyStorage(f"{above}{'/' if above.endswith(':/') else ''}{chain}{archive}", self._options), name

    def know(self, keys: Iterable[str]) -> None:
        """List these where the server shows no list of its files, as many do not."""
        self._known = tuple(keys)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        size = self._size(key)
        stop = size if stop is None else min(stop, size)
        return self._range(key, start, stop) if start < stop else b""

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        for view in (memoryview(buffer).cast("B") for buffer in buffers if buffer.nbytes):
            stop = start + len(view)
            if stop > self._size(key):
                raise TruncatedError(f"{self._where(key)} ends {stop - self._size(key)} bytes too early.")
            view[:] = self._range(key, start, stop)
            start = stop

    def list(self, prefix: str = "") -> Iterator[Entry]:
        top = prefix and check_key(prefix)
        try:
            found = self._asked("list", f"{self.url}/{top}".rstrip("/"), lambda: self._found(self._path(top)))
        except AbsentError:
            found = {}
        keys = [str(path).removeprefix(self._prefix).strip("/") for path in found]
        for key in keys or self._known:
            if is_relative(key) and below(key, top):
                with suppress(AbsentError):
                    yield Entry(key, self._size(key))

    def _found(self, path: str) -> dict[str, Any]:
        """All files below a path. fsspec leaves out a folder that it cannot list, unless it is told not to."""
        self._fs.invalidate_cache()
        told = {"on_error": _raise_unless_absent} if self._fs.async_impl else {}
        return dict(self._fs.find(path, detail=True, **told))

    def version(self, key: str) -> str | None:
        path = self._path(check_key(key))

        def ask() -> str | None:
            return None if self._fs.info(path)["type"] == "directory" else str(self._fs.ukey(path))

        try:
            return self._asked("read", self._where(key), ask)
        except AbsentError:
            return None

    def lock(self, key: str, *, shared: bool = False, note: str = "") -> AbstractContextManager[None]:
        check_key(key)
        if not shared:
            self._refuse()
        return nullcontext()

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        return iter(())

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> NoReturn:
        self._refuse()

    def link(self, source: str, target: str) -> NoReturn:
        self._refuse()

    def delete(self, keys: Iterable[str]) -> NoReturn:
        self._refuse()

    def sweep(self, prefix: str = "", *, age: float | None = None) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise DeniedError(
            f"{self.url} can only be read: load, verify, show, merge and pull take it. To save there, give a root that "
            "can be written to: a folder, s3://, gs://, az:// or, for the Hub, hub://."
        )

    def _asked(self, what: str, where: str, ask: Callable[[], _T]) -> _T:
        """What the server says. It is asked again if it did not answer."""

        def attempt() -> _T:
            with self._turn, translated_errors(what, where):
                return ask()

        return self._requests.make(attempt)

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}".strip("/") if not self._prefix else f"{self._prefix}/{key}".rstrip("/")

    def _where(self, key: str) -> str:
        return f"{self.url}/{check_key(key)}"

    def _size(self, key: str) -> int:
        if key not in self._sizes:
            facts = self._asked("read", self._where(key), lambda: self._fs.info(self._path(key)))
            if facts.get("type") == "directory":
                raise AbsentError(f"{self._where(key)} does not exist.")
            if facts.get("size") is None or facts.get("partial") is False:
                self._copy(key)
            else:
                self._sizes[key] = int(facts["size"])
        return self._sizes[key]

    def _range(self, key: str, start: int, stop: int) -> bytes:
        if key not in self._whole:
            data = self._asked("read", self._where(key), lambda: self._part(key, start, stop))
            if len(data) == stop - start:
                return data
            if len(data) != self._size(key):
                raise StorageError(
                    f"{self._where(key)}: {stop - start} bytes were asked for, and {len(data)} came. The server does "
                    "not send parts of files as it should."
                )
            self._copy(key)  # it was sent whole: once is enough
        with self._guard:
            file = self._whole[key]
            file.seek(start)
            return file.read(stop - start)

    def _copy(self, key: str) -> None:
        """Copy a file to the local disk, without a name, as the server sends it only whole."""
        with self._guard:
            if key in self._whole:
                return
            copy = self._asked("read", self._where(key), lambda: self._received(key))
            self._sizes[key] = copy.tell()
            self._whole[key] = copy

    def _part(self, key: str, start: int, stop: int) -> bytes:
        return bytes(self._fs.cat_file(self._path(key), start=start, end=stop))

    def _received(self, key: str) -> IO[bytes]:
        copy = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the storage
        with self._fs.open(self._path(key), "rb", block_size=0) as file:
            while piece := file.read(_MOST_COPIED):
                copy.write(piece)
        copy.flush()
        return copy


def _raise_unless_absent(error: Exception) -> None:
    """A link of an index that leads nowhere is no file."""
    if not isinstance(error, FileNotFoundError) or error.__cause__ is not None:
        raise error


def _opened(url: str, options: Mapping[str, Any], policy: RetryPolicy) -> tuple[Any, str]:
    from fsspec import get_filesystem_class
    from fsspec.core import url_to_fs

    scheme = url.lower().partition(":")[0]
    if scheme.startswith("http"):
        unknown, options = _unknown_of_http(options), _with_timeout(options, policy)
    else:
        unknown = unknown_options(options, get_filesystem_class("hf")) if scheme == "hf" else []
    if unknown:
        raise ConfigError(f"{scheme}:// does not take the storage_options {', '.join(unknown)}.")
    try:
        filesystem, path = url_to_fs(url, **options)
        return filesystem, str(path)
    except ImportError as error:
        raise ConfigError(f"{url} needs a package that is not installed: {error}.") from None
    except FileNotFoundError as error:
        raise AbsentError(f"{url} does not exist: {error}.") from None
    except OSError as error:
        raise StorageError(f"{url} cannot be opened: {error}.") from None
    except Exception as error:
        kind = type(error).__name__
        given = f" with the storage_options {', '.join(options)}" if options else ""
        raise StorageError(f"{url} cannot be opened{given} ({kind}): {str(error).rstrip('.')}.") from None


def _with_timeout(options: Mapping[str, Any], policy: RetryPolicy) -> dict[str, Any]:
    """The options, with an end to how long a server is waited for, unless the user has set one."""
    from aiohttp import ClientTimeout

    limit = ClientTimeout(total=None, sock_connect=min(10.0, policy.stall), sock_read=policy.stall)
    return {**options, "client_kwargs": {"timeout": limit, **options.get("client_kwargs", {})}}


def _unknown_of_http(options: Mapping[str, Any]) -> list[str]:
    """Options that neither the filesystem nor a request takes, to which the rest goes: the first would fail."""
    from fsspec.implementations.http import HTTPFileSystem

    return unknown_options(options.keys() - _OF_REQUESTS, HTTPFileSystem)

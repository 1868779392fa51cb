"""Places that fsspec reaches: object stores such as oss://, and what is only read (web servers, zip, SFTP, hf://).

That something is only read is known before anything is asked for: nothing is written there to find out. Nothing can be
locked there, and nobody is kept from changing what is read: hashes notice it.
"""

from __future__ import annotations

import base64
import inspect
import math
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import IO, Any, NoReturn, TypeVar, cast
from weakref import WeakValueDictionary

from ckpt.errors import AbsentError, ConfigError, DeniedError, StorageError, TransientError, TruncatedError
from ckpt.storage.base import (
    ANY,
    LARGEST_DOCUMENT,
    Buffer,
    Entry,
    StablePieces,
    Unfinished,
    below,
    changed,
    check_key,
)
from ckpt.storage.multipart import PART_SIZE, split_into_parts
from ckpt.storage.retry import Requests, RetryPolicy, UnreachedError
from ckpt.util.checked_json import is_relative
from ckpt.util.option_values import settings

# of fsspec's own machinery, which reads them from what is left
_OF_FSSPEC = {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "asynchronous", "loop"}


def unknown_options(options: Iterable[str], *clients: type) -> list[str]:
    """The options that are no parameter of these clients, nor of classes that they derive from."""
    known = set(_OF_FSSPEC)
    for kind in (kind for client in clients for kind in client.__mro__ if "__init__" in vars(kind)):
        known |= set(inspect.signature(vars(kind)["__init__"]).parameters)
    return sorted(set(options) - known)


_turns: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
_guard = threading.Lock()
_NOTHING_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class FilesystemObjects:
    """`scheme://prefix`, through fsspec. Retries are the filesystem's own.

    A small object that must be new is created by the filesystem's exclusive mode. Any other conditional write compares
    versions and then writes: fsspec cannot do both atomically, so of two processes that write at the same time both may
    succeed.
    """

    def __init__(self, scheme: str, prefix: str, options: Mapping[str, Any]) -> None:
        self._scheme = scheme
        self._shown = prefix
        self._fs, self._prefix = _open(scheme, prefix, options)

    @property
    def url(self) -> str:
        return f"{self._scheme}://{self._shown}"

    def put(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> str:
        if over == ANY:
            with self._translated_errors("write", key):
                self._stream(self._path(key), pieces)
            return ""
        with _turn(f"{self.url}/{key}"), self._translated_errors("write", key):
            self._expect(key, over)
            stable = StablePieces.of(pieces)
            if over is None and stable is not None and stable.size < PART_SIZE:
                self._create(key, b"".join(stable))
            else:
                self._stream(self._path(key), pieces, lambda: self._expect(key, over))
            return self.version(key) or ""

    def _expect(self, key: str, version: str | None) -> None:
        if self.version(key) != version:
            raise changed(f"{self.url}/{key}")

    def version(self, key: str) -> str | None:
        with self._translated_errors("read", key):
            try:
                facts = self._fs.info(self._path(key), refresh=True)
            except _NOTHING_THERE:
                return None
            return None if facts["type"] == "directory" else str(self._fs.ukey(self._path(key)))

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        with self._translated_errors("read", key):
            size = self._fs.size(self._path(key))
            stop = size if stop is None else min(stop, size)
            return bytes(self._fs.cat_file(self._path(key), start, stop)) if start < stop else b""

    def fill(self, key: str, start: int, buffers: list[memoryview]) -> int:
        missing = 0
        for buffer in buffers:
            found = self.get(key, start, start + len(buffer))
            buffer[: len(found)] = found
            missing += len(buffer) - len(found)
            start += len(buffer)
        return missing

    def copy(self, source: str, target: str) -> None:
        with self._translated_errors("copy", source):
            if not self._fs.isfile(self._path(source)):
                raise FileNotFoundError(source)
            self._with_folder(self._path(target), lambda path: self._fs.cp_file(self._path(source), path))

    def entries(self, prefix: str) -> Iterator[Entry]:
        self._fs.invalidate_cache()
        with self._translated_errors("list", prefix):
            found = self._fs.find(f"{self._prefix}/{prefix}".rstrip("/"), detail=True)
        for path, facts in found.items():
            key = path.removeprefix(f"{self._prefix}/")
            if key.startswith(prefix):
                yield Entry(key, facts["size"])

    def remove(self, keys: list[str]) -> None:
        for key in keys:
            with self._translated_errors("delete", key), suppress(*_NOTHING_THERE):
                if self._fs.isfile(self._path(key)):
                    self._fs.rm_file(self._path(key))

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """None: fsspec does not list them."""
        return iter(())

    def abort(self, prefix: str, age: float) -> None:
        """Nothing to do: fsspec has no call for it, and unfinished objects are not listed."""

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _create(self, key: str, data: bytes) -> None:
        try:
            self._with_folder(self._path(key), lambda there: self._fs.pipe_file(there, data, mode="create"))
        except FileExistsError:
            raise changed(f"{self.url}/{key}") from None

    def _stream(self, path: str, pieces: Iterable[Buffer], confirm: Callable[[], None] = lambda: None) -> None:
        """Write parts as they come. The object appears when all are written and `confirm` does not raise, or never."""
        try:
            file = self._with_folder(
                path, lambda there: self._fs.open(there, "wb", block_size=PART_SIZE, autocommit=False)
            )
        except NotImplementedError:
            raise DeniedError(f"{self.url} is read-only: fsspec can't write an object there in one step.") from None
        try:
            for part in split_into_parts(pieces):
                for view in part:
                    file.write(view)
            file.close()
            confirm()  # writing may have taken long
        except BaseException:
            with suppress(AttributeError):
                file.closed = True  # or the garbage collector would complete it
            file.discard()
            raise
        self._with_folder(path, lambda there: file.commit())

    def _with_folder(self, path: str, call: Any) -> Any:
        """Call with a path, and if its folder is missing, create that and call again."""
        try:
            return call(path)
        except FileNotFoundError:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            return call(path)

    def _translated_errors(self, what: str, key: str) -> AbstractContextManager[None]:
        return translated_errors(what, f"{self.url}/{key}")


@contextmanager
def translated_errors(what: str, where: str) -> Iterator[None]:
    """Raise `StorageError`s for those of a filesystem."""
    try:
        yield
        return
    except StorageError:
        raise
    except Exception as error:
        problem = _problem(error, what, where)
        if problem is None:  # not the filesystem's
            raise
    raise problem from None  # a server may repeat what it was sent, and its words are in the error


def _turn(name: str) -> threading.Lock:
    """The lock under which this process compares and writes an object.

    Every object has its own, so that a lease is renewed while a large file is uploaded.
    """
    with _guard:
        return _turns.setdefault(name, threading.Lock())


def _problem(error: Exception, what: str, where: str) -> StorageError | None:
    """The `StorageError` for an error of a filesystem, whose class differs between clients; None for other errors."""
    wrapped = isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception)
    if wrapped:  # fsspec says of a web server that did not answer, or oddly, that the file is missing
        error = cast(Exception, error.__cause__)
    status = _status(error)
    begin = f"could not {what} {where}"
    if isinstance(error, _NOTHING_THERE) or status in (404, 410):
        return AbsentError(f"{where} does not exist.")
    if isinstance(error, _archives()):
        return TruncatedError(f"{where} cannot be unpacked: the archive is damaged there ({type(error).__name__}).")
    if isinstance(error, PermissionError) or status in (401, 403):
        return DeniedError(f"{begin}: the credentials are missing or do not allow it.")
    if status >= 500 or status in (408, 429):
        return TransientError(f"{begin}: the server says {status}.")
    if status:  # to ask again would not help: a redirect that leads nowhere, for instance
        return StorageError(f"{begin}: the server says {status}. Check the URL.")
    if isinstance(error, _network()):
        silent = isinstance(error, TimeoutError)  # if it has never answered: a server that did is asked for longer
        kind = UnreachedError if silent or isinstance(error, _never_connected()) else TransientError
        return kind(f"{begin}: the connection failed ({type(error).__name__}). Look at the network.")
    if isinstance(error, OSError) or wrapped:
        return StorageError(f"{begin}: {getattr(error, 'strerror', '') or type(error).__name__}.")
    return None


def _status(error: BaseException) -> int:
    """The HTTP status that is no success, under any name that clients use; 0 if an error has none."""
    said = (error, getattr(error, "response", None))
    found = (getattr(one, name, None) for one in said for name in ("status_code", "status", "code"))
    return next((status for status in found if isinstance(status, int) and 300 <= status < 600), 0)


def _archives() -> tuple[type[Exception], ...]:
    """What is raised for an archive whose bytes are not those that were packed, once one was opened."""
    named = (("zipfile", "BadZipFile"), ("zlib", "error"))
    return tuple(getattr(sys.modules[module], name) for module, name in named if module in sys.modules)


def _network() -> tuple[type[Exception], ...]:
    import asyncio  # only here: local roots do without it, and the command starts faster

    return (ConnectionError, TimeoutError, asyncio.TimeoutError, *_of_clients("ClientError", "TransportError"))


def _never_connected() -> tuple[type[Exception], ...]:
    return (ConnectionRefusedError, *_of_clients("ClientConnectorError", "ConnectError"))


def _of_clients(of_aiohttp: str, of_httpx: str) -> list[type[Exception]]:
    """Errors of the clients that filesystems use, of those that were imported."""
    named = (("aiohttp", of_aiohttp), ("httpx", of_httpx), ("httpx2", of_httpx))
    return [getattr(sys.modules[module], name) for module, name in named if module in sys.modules]


def _open(scheme: str, prefix: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The filesystem, and the prefix as it has it."""
    from fsspec import get_filesystem_class, url_to_fs

    try:
        unknown = unknown_options(options, get_filesystem_class(scheme)) if scheme == "local" else []
        if unknown:
            raise ConfigError(f"{scheme}:// does not accept these storage_options: {', '.join(unknown)}.")
        found: tuple[Any, str] = url_to_fs(f"{scheme}://{prefix}", **{"use_listings_cache": False, **options})
        return found
    except ImportError as error:
        raise ConfigError(f"{scheme}:// needs a package that is not installed: {error}.") from None
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        kind = type(error).__name__
        raise ConfigError(
            f"{scheme}:// does not accept these storage_options ({kind}): {', '.join(options)}."
        ) from None


_T = TypeVar("_T")
_OF_REQUESTS = {  # what aiohttp's requests take, as its documentation lists it
    "params", "data", "json", "cookies", "headers", "skip_auto_headers", "auth", "allow_redirects", "max_redirects",
    "compress", "chunked", "expect100", "raise_for_status", "read_until_eof", "proxy", "proxy_auth", "timeout", "ssl",
    "verify_ssl", "fingerprint", "ssl_context", "server_hostname", "proxy_headers", "trace_request_ctx", "read_bufsize",
    "auto_decompress", "max_line_size", "max_field_size", "middlewares",
}  # fmt: skip
_DEEPEST = 32  # folders
_MOST_FILES = 100_000  # that a listing may have: whoever shows more makes them up
_MOST_WITHOUT_LENGTH = 1 << 30  # bytes of a file whose length the server does not say: it may have no end
_SLOWEST = 1 << 10  # bytes a second of a file that is copied
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
        self._patience = max(policy.deadline, policy.stall)  # seconds
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
                f"{self.url} has a checkpoint's files at its top level, so the checkpoint has no name. Put the "
                "checkpoint's folder there instead."
            )
        return ReadOnlyStorage(f"{above}{'/' if above.endswith(':/') else ''}{chain}{archive}", self._options), name

    def know(self, keys: Iterable[str]) -> None:
        """List these where the server shows no list of its files, as many do not."""
        self._known = tuple(keys)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is not None and key not in self._sizes and self._is_sent_whole(key):
            data = self._asked("read", self._where(key), lambda: self._received(key, stop).read())
            return data[start:stop]
        size = self._size(key)
        stop = size if stop is None else min(stop, size)
        return self._range(key, start, stop) if start < stop else b""

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        for view in (memoryview(buffer).cast("B") for buffer in buffers if buffer.nbytes):
            stop = start + len(view)
            if stop > self._size(key):
                raise TruncatedError(f"{self._where(key)} is {stop - self._size(key)} bytes too short.")
            view[:] = self._range(key, start, stop)
            start = stop

    def list(self, prefix: str = "") -> Iterator[Entry]:
        top = prefix and check_key(prefix)
        try:
            found = self._asked("list", f"{self.url}/{top}".rstrip("/"), lambda: self._found(self._path(top)))
        except AbsentError:
            found = {}
        if len(found) > _MOST_FILES:
            raise StorageError(f"can't list {self.url}: it has more than {_MOST_FILES:,} files.")
        keys = [str(path).removeprefix(self._prefix).strip("/") for path in found]
        for key in keys or self._known:
            if is_relative(key) and below(key, top):
                with suppress(AbsentError):
                    yield Entry(key, self._size(key))

    def _found(self, path: str) -> dict[str, Any]:
        """All files below a path. fsspec leaves out a folder that it cannot list, unless it is told not to."""
        self._fs.invalidate_cache()
        told: dict[str, Any] = {}
        if self._fs.async_impl:  # a tree without an end is one of a server that makes it up
            told = {"on_error": _raise_unless_absent, "timeout": self._patience}
        try:
            return dict(self._fs.find(path, maxdepth=_DEEPEST, detail=True, **told))
        except RecursionError:
            raise StorageError(f"can't list {self.url}: its folders nest endlessly.") from None

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
            f"{self.url} is read-only: you can load, verify, show, merge and pull from it. To save, give a root that "
            "ckpt can write to: a folder, s3://, gs://, az:// or, for the Hub, hub://."
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
        if key not in self._sizes and self._is_sent_whole(key):
            self._copy(key)
        return self._sizes[key]

    def _is_sent_whole(self, key: str) -> bool:
        """Whether a file must be copied whole: the server does not say how long it is, or sends no parts of it."""
        facts = self._asked("read", self._where(key), lambda: self._fs.info(self._path(key)))
        if facts.get("type") == "directory":
            raise AbsentError(f"{self._where(key)} does not exist.")
        if (size := facts.get("size")) is not None:
            if not isinstance(size, int) or size < 0:
                raise StorageError(f"the server says that {self._where(key)} has {size} bytes. Check the URL.")
            self._sizes[key] = size
        return key not in self._sizes or facts.get("partial") is False

    def _range(self, key: str, start: int, stop: int) -> bytes:
        if key not in self._whole:
            data = self._asked("read", self._where(key), lambda: self._part(key, start, stop))
            if len(data) == stop - start:
                return data
            if len(data) < stop - start:
                raise StorageError(
                    f"could not read {self._where(key)}: ckpt asked for {stop - start} bytes, and the server sent "
                    f"{len(data)}. The server does not support range requests correctly."
                )
            self._copy(key)  # it is sent whole: once is enough
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
            size = copy.seek(0, os.SEEK_END)
            if self._sizes.setdefault(key, size) != size:
                raise StorageError(
                    f"the server says that {self._where(key)} has {self._sizes[key]:,} bytes, but sent {size:,}."
                )
            self._whole[key] = copy

    def _part(self, key: str, start: int, stop: int) -> bytes:
        return bytes(self._fs.cat_file(self._path(key), start=start, end=stop))

    def _received(self, key: str, stop: int | None = None) -> IO[bytes]:
        """A copy of a file, or of its beginning up to `stop`. A byte more than it may have shows that it has no end."""
        copy = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the storage
        left = min(self._sizes.get(key, _MOST_WITHOUT_LENGTH) + 1, stop or math.inf)
        began = time.monotonic()
        with self._fs.open(self._path(key), "rb", block_size=0) as file:
            while left and (piece := file.read(int(min(left, _MOST_COPIED)))):
                copy.write(piece)
                left -= len(piece)
                if copy.tell() < _SLOWEST * (time.monotonic() - began - self._patience):
                    raise TransientError(
                        f"could not read {self._where(key)}: the server sends too slowly. Try again later."
                    )
        if key not in self._sizes and copy.tell() > _MOST_WITHOUT_LENGTH:
            raise StorageError(
                f"could not read {self._where(key)}: the server does not say how long the file is, and sent more than "
                f"{_MOST_WITHOUT_LENGTH >> 30} GiB."
            )
        copy.seek(0)
        return copy


def _raise_unless_absent(error: Exception) -> None:
    """A link of an index that leads nowhere is no file."""
    if not isinstance(error, FileNotFoundError) or error.__cause__ is not None:
        raise error


def _opened(url: str, options: Mapping[str, Any], policy: RetryPolicy) -> tuple[Any, str]:
    from fsspec import get_filesystem_class
    from fsspec.core import url_to_fs

    scheme, *inner = [link.lower().partition(":")[0] for link in url.split("::")]
    unknown: list[str] = []
    if scheme.startswith("http"):
        unknown, options = _unknown_of_http(options), _for_http(options, policy)
    elif scheme == "hf":
        unknown = unknown_options(options, get_filesystem_class("hf"))
    for name in {name for name in inner if name.startswith("http")}:  # an archive there
        options = {**options, name: _for_http(settings(options.get(name)), policy)}
    if unknown:
        raise ConfigError(f"{scheme}:// does not accept these storage_options: {', '.join(unknown)}.")
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


def _for_http(options: Mapping[str, Any], policy: RetryPolicy) -> dict[str, Any]:
    """The options, with an end to how long a server is waited for, unless the user has set one.

    What the user sends a server, such as `PRIVATE-TOKEN`, is for that server: another one, to which it redirects,
    gets none of it.
    """
    from aiohttp import ClientTimeout, TraceConfig

    limit = ClientTimeout(total=None, sock_connect=min(10.0, policy.stall), sock_read=policy.stall)
    redirects = TraceConfig()
    redirects.on_request_redirect.append(_leave_headers_behind)
    client = dict(options.get("client_kwargs") or {})
    traces = [*client.pop("trace_configs", ()), redirects]
    ours = {"timeout": limit, "trace_configs": traces, "response_class": _answers(max(policy.deadline, policy.stall))}
    found = {**options, "client_kwargs": {**ours, **client}}
    auth = found.pop("auth", None)
    if auth is not None:
        if not (isinstance(auth, tuple | list) and len(auth) > 1 and all(isinstance(word, str) for word in auth)):
            raise ConfigError("storage_options: auth= must be a user name and a password: ('name', 'password').")
        code = base64.b64encode(":".join(auth[:2]).encode()).decode()  # aiohttp's BasicAuth is a tuple, too
        found["headers"] = {**(options.get("headers") or {}), "Authorization": f"Basic {code}"}
    return found


_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_LINK = re.compile(
    r"""href\s{0,9}=\s{0,9}["']([^"'<>\r\n]{1,2048})|(https?://[-a-z0-9@:%_+.~#?&/=]{1,2048})""", re.IGNORECASE
)


def _answers(seconds: float) -> type:
    """aiohttp's answers, of which no more is read than was asked for, for so long. A redirect to nowhere fails."""
    import asyncio

    from aiohttp import ClientResponse, ClientResponseError

    class Answer(ClientResponse):
        def raise_for_status(self) -> None:
            super().raise_for_status()
            if self.status >= 300:
                raise ClientResponseError(self.request_info, self.history, status=self.status)

        async def read(self) -> bytes:
            """The bytes; where more come than were asked for, one of those, and the rest is not read."""
            span = _RANGE.fullmatch(self.request_info.headers.get("Range", ""))
            most = int(span[2]) - int(span[1]) + 1 if span else LARGEST_DOCUMENT
            found = await asyncio.wait_for(self._received(most + 1), None if math.isinf(seconds) else seconds)
            if len(found) > most:
                self.close()
                if not span:
                    raise StorageError(f"{self.url} is endless, or larger than {most >> 20} MB.")
            return found

        async def _received(self, most: int) -> bytes:
            pieces, left = [], most
            while left and (piece := await self.content.read(left)):
                pieces.append(piece)
                left -= len(piece)
            return b"".join(pieces)

        async def text(self, encoding: str | None = None, errors: str = "strict") -> str:
            """The links of an index, without the rest, in which fsspec would look for them in cubic time."""
            found = _LINK.findall((await self.read()).decode(encoding or "utf-8", errors))
            return "\n".join(f'<a href="{link}">' if link else url for link, url in found)

    return Answer


_OF_EVERY_REQUEST = {"accept", "accept-encoding", "range", "user-agent"}


async def _leave_headers_behind(session: Any, context: Any, redirect: Any) -> None:
    """Before a redirect to another origin: aiohttp sends the headers of the last request, which this empties."""
    target = redirect.response.headers.get("Location") or redirect.response.headers.get("URI") or ""
    try:
        stays = redirect.url.join(type(redirect.url)(target)).origin() == redirect.url.origin()
    except ValueError:  # no URL, or none of a server: aiohttp refuses it next
        stays = False
    if not stays:
        for name in [name for name in redirect.headers if name.lower() not in _OF_EVERY_REQUEST]:
            redirect.headers.popall(name, None)


def _unknown_of_http(options: Mapping[str, Any]) -> list[str]:
    """Options that neither the filesystem nor a request takes, to which the rest goes: the first would fail."""
    from fsspec.implementations.http import HTTPFileSystem

    return unknown_options(options.keys() - _OF_REQUESTS, HTTPFileSystem)

"""Object stores through fsspec's filesystems: oss:// and others."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeGuard
from weakref import WeakValueDictionary

from ckpt.errors import AbsentError, ConfigError, DeniedError, StorageError, TransientError, TruncatedError
from ckpt.storage.base import ANY, Buffer, Entry, StablePieces, Unfinished, changed
from ckpt.storage.multipart import PART_SIZE, split_into_parts
from ckpt.storage.option_names import unknown_options
from ckpt.storage.retry import UnreachedError

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
            raise DeniedError(
                f"{self.url} can only be read: fsspec cannot make a complete object appear there."
            ) from None
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
    raise problem


def _turn(name: str) -> threading.Lock:
    """The lock under which this process compares and writes an object.

    Every object has its own, so that a lease is renewed while a large file is uploaded.
    """
    with _guard:
        return _turns.setdefault(name, threading.Lock())


def _problem(error: Exception, what: str, where: str) -> StorageError | None:
    """The `StorageError` for an error of a filesystem, whose class differs between clients; None for other errors."""
    if isinstance(error, FileNotFoundError) and _is_of_network(error.__cause__):
        error = error.__cause__  # fsspec says of a web server that did not answer that the file is missing
    status = _status(error)
    begin = f"could not {what} {where}"
    if isinstance(error, _NOTHING_THERE):
        return AbsentError(f"{where} does not exist.")
    if isinstance(error, _archives()):
        return TruncatedError(f"{where} cannot be unpacked: the archive is damaged there ({type(error).__name__}).")
    if isinstance(error, PermissionError) or status in (401, 403):
        return DeniedError(f"{begin}: the credentials are missing or do not allow it.")
    if status >= 500 or status == 429:
        return TransientError(f"{begin}: the server says {status}.")
    if isinstance(error, _network()):
        kind = UnreachedError if isinstance(error, _never_connected()) else TransientError
        return kind(f"{begin}: the connection failed ({type(error).__name__}). Look at the network.")
    if isinstance(error, OSError) or status:
        return StorageError(f"{begin}: {getattr(error, 'strerror', '') or type(error).__name__}.")
    return None


def _is_of_network(error: BaseException | None) -> TypeGuard[Exception]:
    """Whether nothing is known, as the connection failed or the server did."""
    return isinstance(error, _network()) and _status(error) not in (404, 410)


def _status(error: BaseException) -> int:
    """The HTTP status of an error, under any name that clients use; 0 if it has none."""
    said = (error, getattr(error, "response", None))
    found = (getattr(one, name, None) for one in said for name in ("status_code", "status", "code"))
    return next((status for status in found if isinstance(status, int) and 400 <= status < 600), 0)


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
            raise ConfigError(f"{scheme}:// does not take the storage_options {', '.join(unknown)}.")
        found: tuple[Any, str] = url_to_fs(f"{scheme}://{prefix}", **{"use_listings_cache": False, **options})
        return found
    except ImportError as error:
        raise ConfigError(f"{scheme}:// needs a package that is not installed: {error}.") from None
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        kind = type(error).__name__
        raise ConfigError(f"{scheme}:// does not take these storage_options ({kind}): {', '.join(options)}.") from None

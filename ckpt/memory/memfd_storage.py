"""A storage in the memory of a keeper process, for a tmpfs that is too small: objects are memfds that the keeper holds.

They outlive the processes of the run, and end with the keeper. Where it has ended nothing is left: nothing is listed,
and a write is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt.errors import AbsentError, FullError, StorageError, TransientError, TruncatedError
from ckpt.memory import memfd_wire
from ckpt.memory.memfd_wire import Message
from ckpt.memory.open_descriptors import OpenDescriptors
from ckpt.storage.base import ANY, Buffer, Entry, StablePieces, Unfinished, changed, check_key
from ckpt.storage.local.files import translated
from ckpt.storage.local.locks import LocalLocks
from ckpt.storage.local.tmpfs_write import overwrite

LOCKS = "locks"
PATIENCE = 10.0  # seconds for an answer of the keeper, which takes microseconds, before a resume does without it
_BUFFERS_AT_ONCE = 512
_KEYS_AT_ONCE = 100
_COPIED_AT_ONCE = 8 << 20


class MemfdStorage:
    """Objects in the memfds of the keeper that serves a folder. Locks are files of that folder.

    `patience`: seconds for an answer. A keeper that was silent once (it is stopped, or its host is) is not asked again
    through this object, or each file to write, and each to clean up after that, would wait as long.
    """

    is_local = True

    def __init__(self, folder: str | os.PathLike[str], patience: float | None = None) -> None:
        self.patience = PATIENCE if patience is None else patience
        self._is_silent = False
        self._folder = Path(os.path.abspath(os.fspath(folder)))
        self._locks = LocalLocks(self._folder / LOCKS, self.url)

    @property
    def url(self) -> str:
        return f"memfd://{self._folder}"

    def __repr__(self) -> str:
        return f"MemfdStorage({str(self._folder)!r})"

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        self._check_length(key)
        stable = StablePieces.of(pieces)
        with self._errors("write", key), self._connected() as keeper:
            self._locks.confirm()
            keeper.ask("new", size=stable.size if stable else 0)
            overwrite(keeper.take_descriptor(), pieces if stable is None else stable)
            keeper.close_descriptor()  # before it has its name: then nobody can change it any more
            self._locks.confirm()
            keeper.ask("put", key=key, over=over)

    def version(self, key: str) -> str | None:
        try:
            version: str = self._ask("read", key, "version", key=check_key(key))["version"]
        except AbsentError:
            return None
        return version

    def link(self, source: str, target: str) -> None:
        self._check_length(target)
        self._locks.confirm()
        self._ask("read", source, "link", source=check_key(source), target=target)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        check_key(key)
        with self._errors("read", key), self._connected() as keeper:
            keeper.ask("get", key=key)
            descriptor = keeper.take_descriptor()
            size = os.fstat(descriptor).st_size
            data = bytearray(max(0, min(size, size if stop is None else stop) - start))
            missing = _read(descriptor, start, [memoryview(data)])
            return bytes(data[: len(data) - missing])

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        check_key(key)
        with self._errors("read", key), self._connected() as keeper:
            keeper.ask("get", key=key)
            missing = _read(keeper.take_descriptor(), start, [memoryview(buffer).cast("B") for buffer in buffers])
        if missing:
            raise TruncatedError(f"{self.url}/{key} ends {missing} bytes too early.")

    def list(self, prefix: str = "") -> Iterator[Entry]:
        top, after = f"{check_key(prefix)}/" if prefix else "", ""
        while True:
            try:
                found = self._ask("list", prefix, "list", prefix=top, after=after)["entries"]
            except AbsentError:  # the keeper has ended
                return
            yield from (Entry(key, size) for key, size in found)
            if not found:
                return
            after = found[-1][0]

    def delete(self, keys: Iterable[str]) -> None:
        self._locks.confirm()
        left = [check_key(key) for key in keys]
        with suppress(AbsentError):
            for begin in range(0, len(left), _KEYS_AT_ONCE):
                self._ask("delete", left[begin], "delete", keys=left[begin : begin + _KEYS_AT_ONCE])
        for folder in {os.path.dirname(key) for key in left}:
            self._drop_lock_folder(folder)

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        return iter(())

    def sweep(self, prefix: str = "", *, age: float | None = None) -> None:
        """An unfinished write ends with its process, and leaves nothing behind."""

    def trim(self) -> None:
        """Free the memory of removed objects, which is otherwise kept for the next write."""
        with suppress(AbsentError):
            self._ask("trim", "", "trim")

    @contextmanager
    def lock(self, key: str, *, shared: bool = False, note: str = "") -> Iterator[None]:
        """An flock on a file or folder of the same name below `locks`: the kernel releases it with the process."""
        path = self._folder / LOCKS / check_key(key)
        with self._errors("lock", key):
            with suppress(FileExistsError):
                os.mkdir(self._folder / LOCKS, 0o700)  # not its parents: a folder that was removed is not made again
            if shared:
                self._make_lock_folder(key, path)
            held = self._locks.acquire(key, path, shared=shared, note=note)
        try:
            yield
        finally:
            if held is not None:
                self._locks.release(held)

    def _make_lock_folder(self, key: str, path: Path) -> None:
        """A folder to lock in place of the objects below a key, where there are any."""
        if not path.exists() and any(True for _ in self.list(key)):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _drop_lock_folder(self, folder: str) -> None:
        if folder and not any(True for _ in self.list(folder)):
            with suppress(OSError):  # there is none, or another one in it
                os.rmdir(self._folder / LOCKS / folder)

    def _check_length(self, key: str) -> None:
        if len(check_key(key).encode()) > memfd_wire.LONGEST_KEY:
            raise StorageError(f"could not write {self.url}/{key}: a key has at most {memfd_wire.LONGEST_KEY} bytes.")

    def _ask(self, verb: str, name: str, request: str, **fields: object) -> Message:
        with self._errors(verb, name), self._connected() as keeper:
            return keeper.ask(request, **fields)

    def _connected(self) -> _Connection:
        if self._is_silent:
            raise TimeoutError
        return _Connection(self._folder, self.patience)

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        where = f"{self.url}/{key}"
        try:
            yield
        except _RefusedError as error:
            raise _refusal(error.word, where) from None
        except StorageError:
            raise
        except _GONE as error:
            if verb in ("write", "lock"):
                raise StorageError(
                    f"could not {verb} {where}: the keeper process has ended, and what it held is gone."
                ) from error
            raise AbsentError(f"{where} does not exist: the keeper process has ended.") from error
        except TimeoutError as error:
            self._is_silent = True
            why = f"the keeper process did not answer for {self.patience:g} s (is it stopped?)"
            raise TransientError(f"could not {verb} {where}: {why}.") from error
        except ConnectionError as error:
            raise TransientError(f"could not {verb} {where}: the keeper hung up.") from error
        except OSError as error:
            raise translated(error, verb, where, self._folder, self.url) from error


_GONE = (ConnectionRefusedError, FileNotFoundError, NotADirectoryError)


class _RefusedError(Exception):
    def __init__(self, word: str) -> None:
        super().__init__(word)
        self.word = word


def _refusal(word: str, where: str) -> StorageError:
    if word == "absent":
        return AbsentError(f"{where} does not exist.")
    if word == "conflict":
        return changed(where)
    if word == "full":
        return FullError(f"could not write {where}: the keeper holds as much memory as it may.")
    return StorageError(f"{where}: the keeper refused: {word}.")


class _Connection:
    """A connection to the keeper of a folder, with the descriptor that it has sent."""

    def __init__(self, folder: Path, patience: float) -> None:
        self._folder = folder
        self._patience = patience
        self._descriptor: int | None = None

    def __enter__(self) -> _Connection:
        with _open.guard:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                self._socket = memfd_wire.connect(folder, self._patience)
            finally:
                os.close(folder)
            _open.add(self._socket.fileno())
        return self

    def __exit__(self, *_: object) -> None:
        self.close_descriptor()
        with _open.guard:
            _open.discard(self._socket.fileno())
            self._socket.close()

    def ask(self, request: str, **fields: object) -> Message:
        memfd_wire.send(self._socket, {"do": request, **fields})
        memfd_wire.wait(self._socket, self._patience)
        with _open.guard:
            reply, self._descriptor = memfd_wire.receive(self._socket)
            if self._descriptor is not None:
                _open.add(self._descriptor)
        if "refused" in reply:
            raise _RefusedError(reply["refused"])
        return reply

    def take_descriptor(self) -> int:
        assert self._descriptor is not None
        return self._descriptor

    def close_descriptor(self) -> None:
        if self._descriptor is not None:
            with _open.guard:
                _open.close(self._descriptor)
            self._descriptor = None


_open = OpenDescriptors()


def _read(descriptor: int, start: int, buffers: list[memoryview]) -> int:
    """Fill the buffers. Returns how many bytes are missing because the object ends earlier."""
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        count = os.preadv(descriptor, left[:_BUFFERS_AT_ONCE], start)
        if not count:
            break
        start += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
    return sum(map(len, left))

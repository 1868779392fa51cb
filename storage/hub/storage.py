"""A repository on the Hub as a storage: `hub://user/repo[@revision][/path]`."""

from __future__ import annotations

import base64
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from ckpt.errors import AbsentError, ConfigError, StorageError, TruncatedError
from ckpt.storage.base import ANY, Buffer, Entry, Unfinished, below, changed, check_key
from ckpt.storage.deprecated import FormerName
from ckpt.storage.hub.errors import explained
from ckpt.storage.hub.pending import Pending, Receipt
from ckpt.storage.hub.repo import MAIN_BRANCH, Hub, HubFile, HubRepo
from ckpt.storage.memory import MemoryStorage
from ckpt.storage.retry import RetryPolicy

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

_REST = re.compile(r"([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.*))?")
_SMALL = 1 << 20  # bytes: what is larger goes through a file, so that it need not be in memory as a whole
INTERVAL = 60.0  # seconds between commits: the Hub limits them to about a hundred an hour
DEADLINE = 300.0  # seconds for which a request that fails is tried again


@dataclass(frozen=True)
class _Snapshot:
    """A commit and the files below the root in it."""

    commit: str = ""
    files: Mapping[str, HubFile] = field(default_factory=dict)


class HubStorage:
    """Files of a repository, below a path in it. It is made, as a private one, when the first object is written.

    A commit has many files, and there can be only so many commits: what `publish` and `delete` are given within
    `interval` seconds of a commit goes into the next one. `write` and `settle` do not wait. When another writer has
    committed in between, a commit is made again on top of theirs. What fails is tried again for `deadline` seconds.

    Large files are read in ranges, at the commit that was last looked at. The Hub has no locks: `lock` holds against
    others in this process only.
    """

    is_local = False
    near = FormerName("is_local")

    def __init__(
        self, rest: str, *, token: str | None = None, interval: float = INTERVAL, deadline: float = DEADLINE
    ) -> None:
        match = _REST.fullmatch(rest.rstrip("/"))
        if match is None:
            raise ConfigError(
                f"hub://{rest} names no repository: write hub://user/repo, or hub://user/repo@branch/path."
            )
        repo, revision, path = match.groups()
        if not interval >= 0:
            raise ConfigError(f"interval={interval!r} must be a number of seconds between two commits.")
        hub = Hub(RetryPolicy(deadline=deadline, shortest=1.0))
        self._repo = HubRepo(repo, unquote(revision or MAIN_BRANCH), token, hub)
        self._top = check_key(path) + "/" if path else ""
        self._pending = Pending(self._repo, interval, self._forget)
        self._seen: _Snapshot | None = None
        self._locks = MemoryStorage(f"locks of {self.url}")

    @property
    def url(self) -> str:
        return f"{self._repo.url}/{self._top}".rstrip("/")

    @property
    def repo(self) -> HubRepo:
        return self._repo

    @property
    def folder(self) -> str:
        """Where in the repository the root is; empty at its top."""
        return self._top.rstrip("/")

    def __repr__(self) -> str:
        return f"HubStorage({self.url.removeprefix('hub://')!r})"

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        receipt = self.stage(key, pieces)
        if over == ANY:
            self.publish({key: receipt})
        self.settle()
        if over != ANY:
            self._write_over(key, Receipt.from_text(receipt), over)

    def version(self, key: str) -> str | None:
        """As it was last committed: what waits for a commit shall go on waiting."""
        found = self._refreshed().files.get(self._path(key))
        return found.oid if found else None

    def _write_over(self, key: str, receipt: Receipt, over: str | None) -> None:
        """A commit of its own, on a head that has that version of the object and no other."""
        path = self._path(key)

        def make(head: str) -> list[CommitOperationAdd | CommitOperationDelete]:
            there = self._repo.files(head, self.folder).get(path)
            if (there.oid if there else None) != over:
                raise changed(f"{self.url}/{key}")
            return [receipt.addition(path)]

        self._repo.commit_on_head(make, f"ckpt: write {key}")
        self._forget()

    def stage(self, key: str, pieces: Iterable[Buffer]) -> str:
        path = self._path(key)
        with _spooled(pieces) as content:
            return self._sent(path, content).to_text()

    def publish(self, receipts: Mapping[str, str], *, gone: Iterable[str] = ()) -> None:
        shown = {self._path(key): Receipt.from_text(text) for key, text in receipts.items()}
        removed = dict.fromkeys(self._path(key) for key in gone if key not in receipts)
        self._pending.add({**removed, **shown})

    def settle(self) -> None:
        self._pending.settle()

    def link(self, source: str, target: str) -> None:
        """The same large file under a second path: its bytes are neither read nor sent."""
        _, found = self._found(source, fresh=True)
        if len(found.oid) == 64:
            receipt = Receipt(found.size, oid=found.oid)
        else:
            receipt = Receipt(found.size, content=base64.b64encode(self.read(source)).decode())
        self.publish({target: receipt.to_text()})
        self.settle()

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        fresh = start == 0 and stop is None  # small, or new: what it says must not be of yesterday
        commit, found = self._found(key, fresh=fresh)
        stop = found.size if stop is None else min(stop, found.size)
        return self._repo.read(found.path, commit, start, stop) if start < stop else b""

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        stop = start + sum(map(len, views))
        commit, found = self._found(key)
        missing = min(stop - found.size, stop - start)
        if missing > 0:
            raise TruncatedError(f"{self.url}/{key} ends {missing} bytes too early.")
        data = memoryview(self._repo.read(found.path, commit, start, stop) if start < stop else b"")
        for view in views:
            view[:], data = data[: len(view)], data[len(view) :]

    def list(self, prefix: str = "") -> Iterator[Entry]:
        top = prefix and check_key(prefix)
        waiting = self._pending.changes  # before the commit is looked at, in which they may be meanwhile
        sizes = {path: file.size for path, file in self._refreshed().files.items()}
        for path, receipt in waiting.items():
            if receipt is None:
                sizes.pop(path, None)
            else:
                sizes[path] = receipt.size
        entries = (Entry(path.removeprefix(self._top), size) for path, size in sizes.items() if below(path, self._top))
        return (entry for entry in list(entries) if below(entry.key, top))

    def delete(self, keys: Iterable[str]) -> None:
        gone = {self._path(key): None for key in keys}
        there = {f"{self._top}{entry.key}" for entry in self.list()} if gone else set()
        if gone.keys() & there:
            self._pending.add({path: None for path in gone if path in there})

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        return iter(())

    def sweep(self, prefix: str = "", *, age: float | None = None) -> None:
        """Nothing to do: what is not committed is not there."""

    def lock(self, key: str, *, shared: bool = False, note: str = "") -> AbstractContextManager[None]:
        return self._locks.lock(key, shared=shared, note=note)

    def _path(self, key: str) -> str:
        return self._top + check_key(key)

    def _forget(self) -> None:
        self._seen = None

    def _refreshed(self) -> _Snapshot:
        """The newest commit. Where there is no repository yet, nothing."""
        seen = self._seen  # another thread may forget it at any time
        try:
            head = self._repo.head()
            if seen is None or seen.commit != head:
                seen = _Snapshot(head, self._repo.files(head, self.folder))
        except AbsentError:
            return _Snapshot()
        self._seen = seen
        return seen

    def _found(self, key: str, *, fresh: bool = False) -> tuple[str, HubFile]:
        """An object, and the commit to read it at: that which was last looked at, unless it has no such object."""
        path = self._path(key)
        self.settle()
        seen = None if fresh else self._seen
        if seen is None or path not in seen.files:
            seen = self._refreshed()
        if path not in seen.files:
            raise AbsentError(f"{self.url}/{key} does not exist.")
        return seen.commit, seen.files[path]

    def _sent(self, path: str, content: bytes | Path) -> Receipt:
        """Send the bytes of a large file; those of a small one go with the commit."""
        from huggingface_hub import CommitOperationAdd

        with explained("write", f"{self._repo.url}/{path}"):
            addition = CommitOperationAdd(path, content)
            size = addition.upload_info.size
            try:
                self._repo.upload([addition])
            except AbsentError:
                self._repo.create(private=True)
                self._repo.upload([addition])
            if addition._should_ignore:
                raise StorageError(f"{self._repo.url}: .gitignore leaves {path} out. Take it out of there.")
            if addition._upload_mode == "lfs":
                return Receipt(size, oid=addition.upload_info.sha256.hex())
            whole = content if isinstance(content, bytes) else content.read_bytes()
            return Receipt(size, content=base64.b64encode(whole).decode())


@contextmanager
def _spooled(pieces: Iterable[Buffer]) -> Iterator[bytes | Path]:
    """The pieces as bytes, or in a file, which the client can send by whichever protocol it likes."""
    with tempfile.TemporaryFile() as file:  # it has no name: whoever is killed leaves nothing behind
        for piece in pieces:
            file.write(memoryview(piece).cast("B"))
        file.flush()
        path = Path(f"/proc/self/fd/{file.fileno()}")
        yield path if file.tell() > _SMALL else path.read_bytes()

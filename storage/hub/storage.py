"""A repository on the Hub as a storage: `hub://user/repo[@revision][/path]`.

Changes are batched into commits: those that follow soon after a commit wait for the next one.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from ckpt.compat.huggingface_hub import is_ignored, is_separate, mark_uploaded
from ckpt.errors import AbsentError, CkptError, ConfigError, StorageError, TruncatedError
from ckpt.storage.base import ANY, LARGEST_DOCUMENT, Buffer, Entry, Unfinished, below, changed, check_key
from ckpt.storage.hub.repo import MAIN_BRANCH, HubFile, HubRepo, hashed_like, translated_errors
from ckpt.storage.memory import MemoryStorage
from ckpt.storage.retry import Requests, RetryPolicy
from ckpt.util.option_values import is_seconds, said

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete


_log = logging.getLogger("ckpt")
_LOOK = 0.2  # seconds between checks of a waiting thread whether the program ends


@dataclass(frozen=True)
class Receipt:
    """A staged file: the hash of a large one, whose bytes the Hub has, or the bytes of a small one for the commit."""

    size: int
    oid: str = ""
    content: str = ""  # base64

    def to_text(self) -> str:
        return json.dumps({key: value for key, value in vars(self).items() if value or key == "size"})

    @classmethod
    def from_text(cls, text: str) -> Receipt:
        return cls(**json.loads(text))

    @property
    def hash(self) -> str:
        """As the Hub lists it: sha256 of a large file, git's of a small one."""
        if self.oid:
            return self.oid
        content = base64.b64decode(self.content)
        return hashed_like("", [content], len(content))

    def addition(self, path: str) -> CommitOperationAdd:
        from huggingface_hub import CommitOperationAdd
        from huggingface_hub.lfs import UploadInfo

        if not self.oid:
            return CommitOperationAdd(path, base64.b64decode(self.content))
        addition = CommitOperationAdd(path, b"")
        addition.upload_info = UploadInfo(self.size, b"", bytes.fromhex(self.oid))
        mark_uploaded(addition)
        return addition


Changes = dict[str, Receipt | None]  # by path; None to remove the file


class Pending:
    """The changes that are not committed yet. Except by `settle`, commits are at least `interval` seconds apart."""

    def __init__(self, repo: HubRepo, interval: float, committed: Callable[[], None]) -> None:
        self._repo = repo
        self._interval = interval
        self._committed = committed  # called after each commit
        self._changes: Changes = {}
        self._last = float("-inf")
        self._guard = threading.RLock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def changes(self) -> Changes:
        return dict(self._changes)

    def add(self, changes: Mapping[str, Receipt | None]) -> None:
        """Commit changes now, or later if the last commit is recent. If a commit now fails, they are dropped."""
        with self._guard:
            before, self._changes = self._changes, {**self._changes, **changes}
            if time.monotonic() < self._last + self._interval:
                self._commit_later()
                return
            try:
                self._commit()
            except BaseException:
                self._changes = before
                raise

    def settle(self) -> None:
        """Commit the pending changes now."""
        with self._guard:
            self._commit()
            self._wake.set()

    def _commit_later(self) -> None:
        if self._thread is None:
            # not a daemon: a program that ends waits for the commit
            self._thread = threading.Thread(target=self._commit_when_due, name="ckpt-hub")
            self._thread.start()

    def _commit_when_due(self) -> None:
        due = self._last + self._interval
        while True:
            is_running = self._wait(due)
            with self._guard:
                if is_running and self._changes and time.monotonic() < self._last + self._interval:
                    due = self._last + self._interval  # `settle` has committed meanwhile, and there are new changes
                    continue
                try:
                    self._commit()
                except CkptError as error:  # retried here, and by `settle`, which raises
                    later = "; ckpt will try again" if is_running else ""
                    _log.warning("ckpt could not commit its changes to %s%s: %s", self._repo.url, later, error)
                    due = time.monotonic() + self._interval
                if not self._changes or not is_running:
                    self._thread = None
                    return

    def _wait(self, due: float) -> bool:
        """Wait until `due`, or until `settle` has committed. Returns False if the program ends."""
        while time.monotonic() < due and not self._wake.wait(_LOOK):
            if not threading.main_thread().is_alive():
                return False
        self._wake.clear()
        return True

    def _commit(self) -> None:
        if not self._changes:
            return
        self._repo.commit_on_head(self._operations, self._message())
        self._changes = {}
        self._last = time.monotonic()
        self._committed()

    def _operations(self, head: str) -> list[CommitOperationAdd | CommitOperationDelete]:
        """What is to change. Nothing, if a commit that seemed to fail was made after all: there is no second one."""
        from huggingface_hub import CommitOperationDelete

        there = self._repo.files(head)
        added = [
            receipt.addition(path)
            for path, receipt in self._changes.items()
            if receipt is not None and (path not in there or there[path].oid != receipt.hash)
        ]
        gone = [path for path, receipt in self._changes.items() if receipt is None and path in there]
        return [*added, *(CommitOperationDelete(path) for path in gone)]

    def _message(self) -> str:
        added = sum(receipt is not None for receipt in self._changes.values())
        counts = {"add": added, "remove": len(self._changes) - added}
        folders = sorted({path.rpartition("/")[0].rpartition("/")[2] for path in self._changes} - {""})
        where = f" in {', '.join(folders)}" if len(folders) < 4 else ""
        return "ckpt: " + ", ".join(f"{word} {count} files" for word, count in counts.items() if count) + where


_REST = re.compile(r"([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.*))?")
_SMALL = 1 << 20  # bytes: larger objects go through a temporary file instead of memory
INTERVAL = 60.0  # seconds between commits: the Hub limits them to about a hundred an hour
DEADLINE = 300.0  # seconds for which a failing request is retried
STALL = 60.0  # seconds without a byte moved, after which it has failed


@dataclass(frozen=True)
class _Snapshot:
    """A commit and the files below the root in it."""

    commit: str = ""
    files: Mapping[str, HubFile] = field(default_factory=dict)


class HubStorage:
    """Files of a repository, below a path in it. A private repository is created when the first object is written.

    The Hub limits the number of commits: changes by `publish` and `delete` within `interval` seconds of a commit go
    into the next one. `write` and `settle` do not wait. When another writer has committed in between, the commit is
    made again on top of theirs. Failing requests are retried for `deadline` seconds, and
    have failed after `stall` seconds without a byte.

    Large files are read in ranges, at the commit that was last listed. The Hub has no locks: `lock` excludes others in
    this process only.
    """

    is_local = False

    def __init__(
        self,
        rest: str,
        *,
        token: str | None = None,
        interval: float = INTERVAL,
        deadline: float = DEADLINE,
        stall: float = STALL,
    ) -> None:
        match = _REST.fullmatch(rest.rstrip("/"))
        if match is None:
            raise ConfigError(
                f"hub://{rest} names no repository. Write hub://user/repo, or hub://user/repo@branch/path."
            )
        repo, revision, path = match.groups()
        if interval != 0 and not is_seconds(interval):
            raise ConfigError(f"interval={said(interval)} must be the number of seconds between two commits.")
        requests = Requests(RetryPolicy(deadline=deadline, stall=stall, first_pause=1.0), "the Hub")
        self._repo = HubRepo(repo, unquote(revision or MAIN_BRANCH), token, requests)
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
        """The path of the root in the repository; empty at its top."""
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
        """The committed version: asking for it does not commit pending changes."""
        found = self._refreshed().files.get(self._path(key))
        return found.oid if found else None

    def _write_over(self, key: str, receipt: Receipt, over: str | None) -> None:
        """A commit of its own, on a head that has the expected version of the object."""
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

    def squash_history(self) -> None:
        """Forget the older commits of the branch: until then, what was removed takes as much space as before."""
        self.settle()
        self._repo.squash("ckpt: forget what was removed")
        self._forget()

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
        # a whole small file, such as a manifest, must not be outdated
        fresh = start == 0 and (stop is None or stop > LARGEST_DOCUMENT)
        commit, found = self._found(key, fresh=fresh)
        stop = found.size if stop is None else min(stop, found.size)
        return self._repo.read(found.path, commit, start, stop) if start < stop else b""

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        stop = start + sum(map(len, views))
        commit, found = self._found(key)
        missing = min(stop - found.size, stop - start)
        if missing > 0:
            raise TruncatedError(f"{self.url}/{key} is {missing} bytes too short.")
        data = memoryview(self._repo.read(found.path, commit, start, stop) if start < stop else b"")
        for view in views:
            view[:], data = data[: len(view)], data[len(view) :]

    def list(self, prefix: str = "") -> Iterator[Entry]:
        top = prefix and check_key(prefix)
        waiting = self._pending.changes  # before the head is read, which may contain them by then
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
        """Nothing to do: files that are not committed are not visible."""

    def lock(self, key: str, *, shared: bool = False, note: str = "") -> AbstractContextManager[None]:
        return self._locks.lock(key, shared=shared, note=note)

    def _path(self, key: str) -> str:
        return self._top + check_key(key)

    def _forget(self) -> None:
        self._seen = None

    def _refreshed(self) -> _Snapshot:
        """The head and its files; nothing if there is no repository yet."""
        seen = self._seen  # another thread may reset it at any time
        try:
            head = self._repo.head()
            if seen is None or seen.commit != head:
                seen = _Snapshot(head, self._repo.files(head, self.folder))
        except AbsentError:
            return _Snapshot()
        self._seen = seen
        return seen

    def _found(self, key: str, *, fresh: bool = False) -> tuple[str, HubFile]:
        """An object, and the commit to read it at: the one last listed, unless it has no such object."""
        path = self._path(key)
        self.settle()
        seen = None if fresh else self._seen
        if seen is None or path not in seen.files:
            seen = self._refreshed()
        if path not in seen.files:
            raise AbsentError(f"{self.url}/{key} does not exist.")
        return seen.commit, seen.files[path]

    def _sent(self, path: str, content: bytes | Path) -> Receipt:
        """Upload a large file; the bytes of a small one go with the commit."""
        from huggingface_hub import CommitOperationAdd

        with translated_errors("write", f"{self._repo.url}/{path}"):
            addition = CommitOperationAdd(path, content)
            size = addition.upload_info.size
            try:
                self._repo.upload([addition])
            except AbsentError:
                self._repo.create(private=True)
                self._repo.upload([addition])
            if is_ignored(addition):
                raise StorageError(
                    f"could not commit {path} to {self._repo.url}: the repository's .gitignore excludes this file. "
                    "Change .gitignore."
                )
            if is_separate(addition):
                return Receipt(size, oid=addition.upload_info.sha256.hex())
            whole = content if isinstance(content, bytes) else content.read_bytes()
            return Receipt(size, content=base64.b64encode(whole).decode())


@contextmanager
def _spooled(pieces: Iterable[Buffer]) -> Iterator[bytes | Path]:
    """The pieces as bytes or as a temporary file, which the client can send by any protocol."""
    linux = sys.platform == "linux"
    # on Linux without a name: a killed process leaves nothing behind
    with tempfile.TemporaryFile() if linux else tempfile.NamedTemporaryFile() as file:
        for piece in pieces:
            file.write(memoryview(piece).cast("B"))
        file.flush()
        path = Path(f"/proc/self/fd/{file.fileno()}" if linux else file.name)
        yield path if file.tell() > _SMALL else path.read_bytes()

"""Changes to a repository, batched into commits: those that follow soon after a commit wait for the next one."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.compat.huggingface_hub import mark_uploaded
from ckpt.errors import CkptError
from ckpt.storage.hub.repo import HubRepo

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
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()

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
                    fate = "wait to be" if is_running else "were not"
                    _log.warning("changes %s committed to %s: %s", fate, self._repo.url, error)
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

"""A repository on the Hub, through `huggingface_hub`: its files at a commit, and new commits on its head."""

from __future__ import annotations

import logging
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from ckpt.errors import ConfigError, StorageError, TransientError
from ckpt.shown import remember_secrets
from ckpt.storage.base import LARGEST_DOCUMENT
from ckpt.storage.hub.client import require_client
from ckpt.storage.hub.errors import MovedError, asked_to_wait, cause_of, is_transient, status_of, translated_errors
from ckpt.storage.hub.guard import bounded_answers, guarded_requests, strange_answer
from ckpt.storage.retry import Retries, RetryPolicy

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    Operation = CommitOperationAdd | CommitOperationDelete

Result = TypeVar("Result")

MAIN_BRANCH = "main"
_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_COMMIT = re.compile(r"[\w.-]{1,200}", re.ASCII)
_MAY_NOT = 403
_EXISTS = 409
_CONFLICTS = (_EXISTS, 412)
_COMMIT_RETRIES = RetryPolicy(tries=8, longest_pause=6.4)  # when others have committed first
_log = logging.getLogger("ckpt")


@dataclass(frozen=True)
class HubFile:
    """A file in a repository: its size, and its hash: sha256 of large files, git's of others."""

    path: str
    size: int
    oid: str


@dataclass
class Hub:
    """Requests to the Hub, retried where that may help."""

    retry_policy: RetryPolicy = field(default_factory=lambda: RetryPolicy(first_pause=1.0))
    reached: bool = False

    def with_retries(self, call: Callable[[], Result]) -> Result:
        """The result of a call. Transient failures are retried until the deadline, as late as the Hub asks."""
        retries = self.retry_policy.start()
        while True:
            try:
                with guarded_requests(self.retry_policy.stall):
                    result = call()
            except Exception as error:
                pause = self._pause_after(cause_of(error), retries)
                if pause is None:
                    raise
                time.sleep(pause)
            else:
                self.reached = True
                return result

    def _pause_after(self, error: BaseException, retries: Retries) -> float | None:
        """Seconds to wait before the next try; None if there is none."""
        self.reached = self.reached or status_of(error) > 0
        pause = retries.next_pause(reached=self.reached, asked=asked_to_wait(error)) if is_transient(error) else None
        if pause is not None:
            _log.warning("the Hub is asked again in %.1f s: %s", pause, status_of(error) or type(error).__name__)
        return pause


@dataclass(frozen=True)
class HubRepo:
    """A repository and a branch of it. Without a token, that of `HF_TOKEN` or of a login is used."""

    id: str
    revision: str = MAIN_BRANCH
    token: str | None = field(default=None, repr=False)
    hub: Hub = field(default_factory=Hub, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not _ID.fullmatch(self.id):
            raise ConfigError(f"{self.id!r} is not the id of a repository: write user/name, the end of its page's URL.")

    @property
    def url(self) -> str:
        return f"hub://{self.id}" + (f"@{quote(self.revision, safe='')}" if self.revision != MAIN_BRANCH else "")

    @property
    def page(self) -> str:
        """The address of its web page."""
        return f"{self.api.endpoint}/{self.id}"

    @cached_property
    def api(self) -> HfApi:
        require_client()
        from huggingface_hub import HfApi, get_token

        remember_secrets({"token": self.token or get_token()})
        return HfApi(token=self.token, library_name="torch-ckpt")

    def create(self, *, private: bool | None = None) -> bool:
        """Create the repository and the branch if they do not exist; but no pull request (`refs/pr/1`).

        Returns whether this call has certainly created the repository.
        """
        made = self._ask("create", lambda: self._made(private=private))
        if self.revision != MAIN_BRANCH and not self.revision.startswith("refs/"):
            self._ask("create", lambda: self.api.create_branch(self.id, branch=self.revision, exist_ok=True))

        return made

    def _made(self, *, private: bool | None) -> bool:
        try:
            self.api.create_repo(self.id, private=private)
        except Exception as error:
            status = status_of(cause_of(error))
            if status not in (_EXISTS, _MAY_NOT):
                raise
            if status == _MAY_NOT and not self.api.repo_exists(self.id):  # if it exists, the token may still push
                raise
            return False
        return True

    def remove_if_untouched(self) -> bool:
        """Remove a repository that has nothing but its first commit. Returns whether it is gone."""
        with suppress(StorageError):
            commits = self._ask("look at", lambda: self.api.list_repo_commits(self.id))
            branches = self._ask("look at", lambda: self.api.list_repo_refs(self.id)).branches
            files = self.files(self.head()) if len(commits) <= 1 and len(branches) <= 1 else {"others have committed"}
            if not set(files) - {".gitattributes"}:
                self._ask("remove", lambda: self.api.delete_repo(self.id))
                return True
        return False

    def is_private(self) -> bool:
        return bool(self._ask("look at", lambda: self.api.repo_info(self.id)).private)

    def head(self) -> str:
        """The commit that the branch stands at."""
        with bounded_answers():
            found = str(self._ask("look at", lambda: self.api.repo_info(self.id, revision=self.revision)).sha)
        if not _COMMIT.fullmatch(found):
            raise strange_answer(self.url, "names no commit")
        return found

    def files(self, commit: str, folder: str = "") -> dict[str, HubFile]:
        """Every file of a commit below a folder, by its path. A folder that is not there has none."""
        from huggingface_hub.errors import EntryNotFoundError

        def listed() -> list[Any]:
            try:
                return list(self.api.list_repo_tree(self.id, folder or None, recursive=True, revision=commit))
            except EntryNotFoundError:
                return []

        with bounded_answers():
            entries = self._ask("list", listed)
        return {entry.path: _file(entry, self.url) for entry in entries if hasattr(entry, "blob_id")}

    def read(self, path: str, commit: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes of a file at a commit. `stop` must not lie beyond its end."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(self.id, path, revision=commit, endpoint=self.api.endpoint)
        headers = build_hf_headers(token=self.token, library_name="torch-ckpt")
        if start or stop is not None:
            headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"

        most = LARGEST_DOCUMENT if stop is None else stop - start
        found = self._ask("read", lambda: _received(url, headers, most), f"{self.url}/{path}")
        if stop is not None and len(found) != stop - start:
            raise StorageError(
                f"could not read {self.url}/{path}: asked for {stop - start} bytes, the Hub sent {len(found)}. A proxy "
                "on the way may not know ranges."
            )
        return found

    def upload(self, additions: Sequence[CommitOperationAdd]) -> None:
        """Upload large files ahead of their commit, and release their memory. Files that the Hub has are not sent."""

        def send() -> None:
            self.api.preupload_lfs_files(self.id, additions, revision=self.revision, free_memory=True)

        with client_bars(show=False):  # training continues meanwhile
            self._ask("upload to", send)

    def commit_on_head(self, make: Callable[[str], Sequence[Operation]], message: str) -> tuple[str, int]:
        """Commit the operations that `make` returns for a head; again on the new head if others have committed first.

        Returns the commit that contains them, and their number. Without operations there is no commit.
        """
        retries = _COMMIT_RETRIES.start()
        while True:
            head = self.head()
            operations = make(head)
            try:
                return self._commit(operations, message, head) if operations else head, len(operations)
            except MovedError:
                pause = retries.next_pause()
                if pause is None:
                    break
            time.sleep(pause)
        raise TransientError(
            f"{self.url}: others commit there again and again, so nothing was changed. Try again later, or use a "
            "branch of your own."
        )

    def squash(self, message: str) -> None:
        """Let the branch have one commit, with the files of its head. What older ones alone had is gone for good."""
        self._ask(
            "squash", lambda: self.api.super_squash_history(self.id, branch=self.revision, commit_message=message)
        )

    def _commit(self, operations: Sequence[Operation], message: str, parent: str) -> str:
        """A commit on top of `parent`. If the branch has another head, raises `MovedError`, and nothing has changed.

        A try whose answer was lost may have made it. So the branch is looked at before it is sent again: the mark in
        the description of a commit tells whose it is.
        """
        mark, tries = f"ckpt {secrets.token_hex(8)}", 0

        def send() -> str:
            nonlocal tries
            tries += 1
            if tries > 1 and (made := self._marked(mark, parent)):
                return made
            try:
                answer = self.api.create_commit(
                    self.id,
                    operations,
                    commit_message=message,
                    commit_description=mark,
                    revision=self.revision,
                    parent_commit=parent,
                )
            except OSError as error:
                if status_of(error) not in _CONFLICTS:
                    raise
            else:
                return str(answer.oid)
            if made := self._marked(mark, parent):  # it was sent twice on its way
                return made
            raise self._moved(parent)

        with translated_errors("commit to", self.url), client_bars(show=sys.stderr.isatty()):
            return self.hub.with_retries(send)

    def _marked(self, mark: str, parent: str) -> str | None:
        """The commit with this mark. None while the branch is at `parent`; if others have moved it, a `MovedError`."""
        commits = self.api.list_repo_commits(self.id, revision=self.revision)
        made = next((commit.commit_id for commit in commits if mark in commit.message), None)
        if made is None and (not commits or commits[0].commit_id != parent):
            raise self._moved(parent)
        return made

    def _moved(self, parent: str) -> MovedError:
        return MovedError(f"{self.url} has moved on from {parent[:8]}: somebody else has committed.")

    def _ask(self, verb: str, call: Callable[[], Result], where: str = "") -> Result:
        with translated_errors(verb, where or self.url):
            return self.hub.with_retries(call)


@contextmanager
def client_bars(*, show: bool) -> Iterator[None]:
    """Whether the client shows its progress bars: one for every file."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if show or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _received(url: str, headers: Mapping[str, str], most: int) -> bytes:
    """The body of an answer; of one that is longer than `most` a little more than that.

    Without the client's own retries: they cannot begin again once a body was begun, and hide why it ended.
    """
    from huggingface_hub.utils import get_session, hf_raise_for_status

    body = bytearray()
    with get_session().stream("GET", url, headers=headers) as response:
        if response.status_code >= 400:
            response.read()  # or its message could not be told
        hf_raise_for_status(response)
        for piece in response.iter_bytes():
            body += piece
            if len(body) > most:
                break
    return bytes(body)


def _file(entry: Any, where: str) -> HubFile:
    oid = entry.lfs.sha256 if entry.lfs else entry.blob_id
    whole = type(entry.size) is int and entry.size >= 0 and isinstance(oid, str) and isinstance(entry.path, str)
    if not whole:
        raise strange_answer(where, "lists files without a path, a size or a hash")
    return HubFile(entry.path, entry.size, oid)

"""A repository on the Hub, through `huggingface_hub`: its files at a commit, new commits on its head, pull requests.

Requests are retried where that may help, and their errors are ckpt's, without a token. Answers are checked for what the
client would take from them unseen: it makes names of files in its cache of ETags and commits, follows links from page
to page with the token, and reads lists into memory and files to the disk, however long they are.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

from ckpt.errors import AbsentError, CkptError, ConfigError, DeniedError, FullError, StorageError, TransientError
from ckpt.shown import remember_secrets
from ckpt.storage.base import LARGEST_DOCUMENT
from ckpt.storage.retry import BusyError, FinalError, Requests, RetryPolicy, UnreachedError

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi


def require_client() -> None:
    """Refuse a client before 1.0: its answers cannot be checked as they come in. Only what uses the Hub needs it."""
    import huggingface_hub

    version = huggingface_hub.__version__
    if version.startswith("0."):
        raise ConfigError(
            f"the Hub needs huggingface_hub 1.0 or newer, but {version} is installed, because transformers 4 allows no "
            "newer version. Install transformers 5; or use another storage, and push from another environment."
        )


_AGAIN = (408, 429, 500, 502, 503, 504)
_LONGEST_WAIT = 600.0  # seconds that the Hub may ask for
_LOGIN = "Log in with 'hf auth login', set HF_TOKEN, or give token=..."
_KEPT = "The Hub keeps what was uploaded, so the next push does not send it again."


class MovedError(FinalError):
    """The head of a branch is not the parent that a commit was made for: somebody else has committed."""


@contextmanager
def translated_errors(verb: str, where: str) -> Iterator[None]:
    """Translate the errors that the client raises in this context."""
    try:
        yield
    except CkptError:
        raise
    except Exception as error:
        problem = translate_error(cause_of(error), f"could not {verb} {where}")
        raise problem from None  # the cause holds the request's headers


def translate_error(error: BaseException, what: str) -> Exception:
    """The error that a user sees in place of the client's."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    status = status_of(error)
    if isinstance(error, GatedRepoError):
        return DeniedError(f"{what}: it is gated. Ask for access on its page, with the account of your token. {_LOGIN}")
    if isinstance(error, RepositoryNotFoundError) and status != 401:
        return AbsentError(f"{what}: there is no such repository, or the token may not see it. {_LOGIN}")
    if isinstance(error, RevisionNotFoundError):
        return AbsentError(f"{what}: the repository has no such revision. Name a branch, a tag or a commit of it.")
    if isinstance(error, EntryNotFoundError):
        return AbsentError(f"{what}: it does not exist.")
    if status:
        return _by_status(status, error, what)
    if _is_unreachable(error):
        kind = FinalError if isinstance(error, OfflineModeIsEnabled) else UnreachedError
        return kind(
            f"{what}: the Hub cannot be reached ({type(error).__name__}: {error}). Check the network, HF_ENDPOINT and "
            f"HF_HUB_OFFLINE, then try again. {_KEPT}"
        )
    if isinstance(error, ValueError):  # what the client itself refuses: a name, the front matter of a card
        advice = " Correct its front matter, or push with card=False." if "README.md" in str(error) else ""
        return ConfigError(f"{what}: {error}{advice}")
    return StorageError(f"{what}: {type(error).__name__}: {error}")


def _by_status(status: int, error: BaseException, what: str) -> Exception:
    said = getattr(error, "server_message", None)
    about = f"{what}: the Hub answered {status}" + (f" ({said})" if said else "")
    if status == 401:
        return DeniedError(
            f"{about}: the token is missing or invalid, or there is no such repository (without a token, the Hub does "
            f"not say which). {_LOGIN}"
        )
    if status == 403:
        return DeniedError(
            f"{about}: the token may not do that. Give it write access to this repository at "
            "https://huggingface.co/settings/tokens, or use another."
        )
    if status == 404:
        return AbsentError(f"{about}. Is the name right, and may the token see it? {_LOGIN}")
    if status in (409, 412):
        return MovedError(f"{about}: somebody else changed the repository in the meantime. Try again.")
    if status == 413:
        return FullError(f"{about}: it is too large. Use a smaller max_shard_size.")
    if status == 429:
        return _busy(
            error,
            f"{about}: there were too many requests or commits, even after waiting. Try again later, or save less "
            f"often. {_KEPT}",
        )
    if status in _AGAIN:
        return _busy(error, f"{about}, also when asked again. Try again later. {_KEPT}")
    return StorageError(f"{about}.")


def cause_of(error: BaseException) -> BaseException:
    """The original error: the client wraps that of a file among many, and that of one which is not in its cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    while isinstance(error, RuntimeError | LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def status_of(error: BaseException) -> int:
    """The HTTP status of the Hub's answer; 0 if there was none."""
    response = getattr(error, "response", None)
    return int(getattr(response, "status_code", 0) or 0)


def _busy(error: BaseException, said: str) -> BusyError:
    """The error, with the seconds of a Retry-After header, if there is one."""
    headers: Any = getattr(getattr(error, "response", None), "headers", {})
    asked, problem = headers.get("Retry-After", ""), BusyError(said)
    problem.asked = min(float(asked), _LONGEST_WAIT) if asked.isdigit() else None
    return problem


def _is_unreachable(error: BaseException) -> bool:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    http_error = HfHubHTTPError.__bases__[0]  # of whichever HTTP library the client uses
    return isinstance(error, http_error | OfflineModeIsEnabled | ConnectionError | TimeoutError)


MOST_PAGES = 2000  # of a thousand files each: whoever lists more does not end
LONGEST_LIST = 256 << 20  # bytes of all answers of one list
SLACK = 16 << 20  # bytes of answers that are no files
_NAMES = ("ETag", "X-Linked-Etag", "X-Repo-Commit")
_PLAIN = re.compile(r"[\w.:+=-]{0,200}", re.ASCII)


@dataclass
class _Room:
    """What may still come of answers that are read into memory, or of a download."""

    most: int  # bytes
    bytes: int = 0
    pages: int = 0

    def take(self, count: int, where: str) -> None:
        self.bytes += count
        if self.bytes > self.most:
            raise strange_answer(where, f"the server sent more than {self.most:,} bytes")

    def turn_page(self, where: str) -> None:
        self.pages += 1
        if self.pages > MOST_PAGES:
            raise strange_answer(where, f"the server sent more than {MOST_PAGES:,} pages")


class _Asking(threading.local):
    """What this thread asks of the Hub through ckpt: others in the process are left alone."""

    stall: float | None = None  # seconds without a byte, after which a request has failed: the client has no limit
    room: _Room | None = None  # for the answers


_asking = _Asking()


@contextmanager
def guarded_requests(stall: float) -> Iterator[None]:
    """Check the answers to what this thread asks for in this context, and wait for them and read them within bounds."""
    from huggingface_hub.utils import get_session

    client = get_session()
    hooks = client.event_hooks
    for kind, hook in (("request", _prepare), ("response", _check)):
        if hook not in hooks.get(kind, ()):
            client.event_hooks = {**client.event_hooks, kind: [*hooks.get(kind, ()), hook]}
    outer, _asking.stall = _asking.stall, stall
    try:
        with bounded_answers(LONGEST_LIST):
            yield
    finally:
        _asking.stall = outer


@contextmanager
def bounded_answers(most: int) -> Iterator[None]:
    """Bound the bytes of all answers that this thread reads in this context."""
    outer, _asking.room = _asking.room, _Room(most)
    try:
        yield
    finally:
        _asking.room = outer


def _prepare(request: Any) -> None:
    if _asking.stall is not None:
        request.headers["Accept-Encoding"] = "identity"  # a thousandth of the bytes could fill the memory: see `_check`
        limits = request.extensions.get("timeout") or dict.fromkeys(("connect", "read", "write", "pool"))
        request.extensions["timeout"] = {
            kind: _asking.stall if given is None else min(given, _asking.stall) for kind, given in limits.items()
        }


def _check(response: Any) -> None:
    url = str(response.request.url)
    where = f"{response.request.method} {urlsplit(url).path}"
    if response.request.method == "HEAD" and "/resolve/" in url:
        odd = [name for name in _NAMES if not _is_plain(response.headers.get(name, ""))]
        if odd:
            raise strange_answer(where, f"the server sent an unexpected {odd[0]}")
    following = response.links.get("next", {}).get("url")
    if following and _origin(following) != _origin(url):
        raise strange_answer(where, "the server continued its list on another host")
    _bound(response, where)


def _bound(response: Any, where: str) -> None:
    """Let no more be read of an answer than there is room for.

    The client's own threads have none of `_asking`: they send parts of large files, and each answer has its own room.
    What the process itself downloads is left alone.
    """
    method, room = response.request.method, _asking.room
    if method == "HEAD":
        return
    if room is not None and response.headers.get("Content-Encoding", "identity") != "identity":
        raise strange_answer(where, "the server compressed its answer")
    if room is None and method != "GET":
        room = _Room(LONGEST_LIST)
    if room is not None:
        if method == "GET":  # a file is sent in any number of parts
            room.turn_page(where)
        response.stream = _bounded(response.stream, room, where)


def _is_plain(value: str) -> bool:
    """Whether a header can be the name of a file."""
    bare = value.removeprefix("W/").strip('"')
    return bool(_PLAIN.fullmatch(bare)) and ".." not in bare


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def strange_answer(where: str, what: str) -> StorageError:
    """The error for an answer that the Hub does not give: to ask again would not help."""
    return StorageError(f"{what} when ckpt asked for {where}. The Hub does not do that: check HF_ENDPOINT.")


class _Bounded:
    """The body of an answer, as far as there is room for it."""

    def __init__(self, stream: Any, room: _Room, where: str) -> None:
        self._stream = stream
        self._room = room
        self._where = where

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            self._room.take(len(piece), self._where)
            yield piece

    def close(self) -> None:
        self._stream.close()


def _bounded(stream: Any, room: _Room, where: str) -> Any:
    """A stream of the client's own kind: it takes no other."""
    kind = next((base for base in type(stream).__mro__ if base.__name__ == "SyncByteStream"), object)
    return type("BoundedStream", (_Bounded, kind), {})(stream, room, where)


Result = TypeVar("Result")

MAIN_BRANCH = "main"
_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_COMMIT = re.compile(r"[\w.-]{1,200}", re.ASCII)
_MAY_NOT = 403
_EXISTS = 409
_SHA256_DIGITS = 64
_PIECE = 8 << 20
_CONFLICTS = (_EXISTS, 412)
_COMMIT_RETRIES = RetryPolicy(tries=8, longest_pause=6.4)  # when others have committed first
_log = logging.getLogger("ckpt")


def hashed_like(oid: str, pieces: Iterable[bytes], size: int) -> str:
    """The hash of bytes, of the kind that another one of the Hub's is: sha256 of large files, git's of others."""
    is_large = len(oid) == _SHA256_DIGITS
    hasher = hashlib.sha256() if is_large else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def pieces_of(path: str | os.PathLike[str], advance: Callable[[float], None] = lambda count: None) -> Iterator[bytes]:
    """The bytes of a file, a few at a time."""
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            yield piece
            advance(len(piece))


@dataclass(frozen=True)
class HubFile:
    """A file in a repository: its size, and its hash: sha256 of large files, git's of others."""

    path: str
    size: int
    oid: str


@dataclass(frozen=True)
class HubRepo:
    """A repository and a branch of it. Without a token, that of `HF_TOKEN` or of a login is used."""

    id: str
    revision: str = MAIN_BRANCH
    token: str | None = field(default=None, repr=False)
    requests: Requests = field(
        default_factory=lambda: Requests(RetryPolicy(first_pause=1.0), "the Hub"), repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not _ID.fullmatch(self.id):
            raise ConfigError(f"{self.id!r} is not a repository id. Write user/name, as in the repository's URL.")

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
        made = self.ask("create", lambda: self._made(private=private))
        if self.revision != MAIN_BRANCH and not self.revision.startswith("refs/"):
            self.ask("create", lambda: self.api.create_branch(self.id, branch=self.revision, exist_ok=True))

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
            commits = self.ask("look at", lambda: self.api.list_repo_commits(self.id))
            branches = self.ask("look at", lambda: self.api.list_repo_refs(self.id)).branches
            files = self.files(self.head()) if len(commits) <= 1 and len(branches) <= 1 else {"others have committed"}
            if not set(files) - {".gitattributes"}:
                self.ask("remove", lambda: self.api.delete_repo(self.id))
                return True
        return False

    def is_private(self) -> bool:
        return bool(self.ask("look at", lambda: self.api.repo_info(self.id)).private)

    def head(self) -> str:
        """The commit that the branch stands at."""
        found = str(self.ask("look at", lambda: self.api.repo_info(self.id, revision=self.revision)).sha)
        if not _COMMIT.fullmatch(found):
            raise strange_answer(self.url, "the server named no commit")
        return found

    def files(self, commit: str, folder: str = "") -> dict[str, HubFile]:
        """Every file of a commit below a folder, by its path. A folder that is not there has none."""
        from huggingface_hub.errors import EntryNotFoundError

        def listed() -> list[Any]:
            try:
                return list(self.api.list_repo_tree(self.id, folder or None, recursive=True, revision=commit))
            except EntryNotFoundError:
                return []

        entries = self.ask("list", listed)
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
        found = self.ask("read", lambda: _received(url, headers, most), f"{self.url}/{path}")
        if stop is not None and len(found) != stop - start:
            raise StorageError(
                f"could not read {self.url}/{path}: ckpt asked for {stop - start} bytes, and the Hub sent "
                f"{len(found)}. A proxy between this machine and the Hub may not support range requests."
            )
        return found

    def upload(self, additions: Sequence[CommitOperationAdd]) -> None:
        """Upload large files ahead of their commit, and release their memory. Files that the Hub has are not sent."""

        def send() -> None:
            self.api.preupload_lfs_files(self.id, additions, revision=self.revision, free_memory=True)

        with client_bars(show=False):  # training continues meanwhile
            self.ask("upload to", send)

    def commit_on_head(
        self, make: Callable[[str], Sequence[CommitOperationAdd | CommitOperationDelete]], message: str
    ) -> tuple[str, int]:
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
            f"could not commit to {self.url}: other processes keep committing there, so nothing was changed. Try "
            "again later, or use a branch of your own."
        )

    def squash(self, message: str) -> None:
        """Let the branch have one commit, with the files of its head. What older ones alone had is gone for good."""
        self.ask("squash", lambda: self.api.super_squash_history(self.id, branch=self.revision, commit_message=message))

    def _commit(
        self, operations: Sequence[CommitOperationAdd | CommitOperationDelete], message: str, parent: str
    ) -> str:
        """A commit on top of `parent`. If the branch has another head, raises `MovedError`, and nothing has changed.

        A try whose answer was lost may have made it. So the branch is looked at before it is sent again: the mark in
        the description of a commit tells whose it is.
        """

        def send(mark: str) -> str:
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

        is_awaited = threading.current_thread() is threading.main_thread()  # or training continues meanwhile
        with client_bars(show=sys.stderr.isatty() and is_awaited):
            return self.ask_once("commit to", send, lambda mark: self._marked(mark, parent))

    def _marked(self, mark: str, parent: str) -> str | None:
        """The commit with this mark. None while the branch is at `parent`; if others have moved it, a `MovedError`."""
        commits = self.api.list_repo_commits(self.id, revision=self.revision)
        made = next((commit.commit_id for commit in commits if mark in commit.message), None)
        if made is None and (not commits or commits[0].commit_id != parent):
            raise self._moved(parent)
        return made

    def _moved(self, parent: str) -> MovedError:
        return MovedError(f"{self.url} is no longer at {parent[:8]}: somebody else has committed.")

    def ask(self, verb: str, call: Callable[[], Result], where: str = "") -> Result:
        """The result of a call of the client, made again where that may help."""

        def attempt() -> Result:
            with translated_errors(verb, where or self.url), guarded_requests(self.requests.policy.stall):
                return call()

        return self.requests.make(attempt)

    def ask_once(self, verb: str, call: Callable[[str], Result], made: Callable[[str], Result | None]) -> Result:
        """The result of a change that is made once, though its answer may be lost: `made` finds it by its mark."""
        mark, tries = f"ckpt {secrets.token_hex(8)}", 0

        def attempt() -> Result:
            nonlocal tries
            tries += 1
            known = made(mark) if tries > 1 else None
            return call(mark) if known is None else known

        return self.ask(verb, attempt)


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
    with bounded_answers(most + SLACK), get_session().stream("GET", url, headers=headers) as response:
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
        raise strange_answer(where, "the server listed files without a path, a size or a hash")
    return HubFile(entry.path, entry.size, oid)


_SHORTEST_TITLE = 3  # characters, of the Hub's


def open_pull_request(repo: HubRepo, title: str) -> HubRepo:
    """Open a pull request to the main branch, and return the repository at its branch: what it proposes is committed
    there.

    If the answer to a request was lost, the mark in its description tells whether it was opened: there is one, not two.
    """
    if len(title.strip()) < _SHORTEST_TITLE:
        raise ConfigError(f"a pull request's title needs at least {_SHORTEST_TITLE} characters; yours is {title!r}.")

    def opened(mark: str) -> int:
        return int(repo.api.create_pull_request(repo.id, title=title, description=f"Opened by {mark}.").num)

    number = repo.ask_once("open a pull request in", opened, partial(_marked, repo, title))
    return replace(repo, revision=f"refs/pr/{number}")


def page_of(request: HubRepo) -> str:
    """The address of a pull request's web page."""
    return f"{request.page}/discussions/{request.revision.rpartition('/')[2]}"


def _marked(repo: HubRepo, title: str, mark: str) -> int | None:
    for found in repo.api.get_repo_discussions(repo.id, discussion_type="pull_request"):
        if found.title == title.strip():
            events = repo.api.get_discussion_details(repo.id, found.num).events
            if any(mark in str(getattr(event, "content", "")) for event in events):
                return int(found.num)
    return None

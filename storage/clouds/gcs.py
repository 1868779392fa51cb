"""Google Cloud Storage: `gs://`, `gcs://`.

gcsfs reads `storage_options` and finds the credentials. Requests are those of the documented JSON API, because gcsfs
has no condition on the generation of an object: `ifGenerationMatch`, which the server compares when the object appears.
Of an answer no more is read than was asked for. Large objects are resumable uploads.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from ckpt.errors import ConfigError, StorageError
from ckpt.storage.base import ANY, Entry
from ckpt.storage.clouds import errors
from ckpt.storage.clouds.errors import CutError
from ckpt.storage.clouds.objects import WRITE, CloudObjects, Head, Retried, refuse_unknown
from ckpt.storage.multipart import Body
from ckpt.storage.retry import AT_ONCE, Requests, RetryPolicy

_WITHOUT_BODY = (204, 304)
_HTTP_1_1 = 11
LARGEST = 64 << 20  # bytes of an answer that describes objects; a page of a listing has one


class AnswerError(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Answer:
    """A complete answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def fields(self) -> dict[str, Any]:
        """The JSON object that it is; a `CutError` if it is the beginning of one, a `ValueError` if it is none."""
        try:
            return dict(json.loads(self.body))
        except json.JSONDecodeError:
            if self.body.lstrip()[:1] in (b"", b"{"):
                raise CutError from None
            raise


def receive(response: Any, most: int = LARGEST) -> Answer:
    """Read an answer whose body is still to come. A longer one than `most` bytes is an error, and is not read.

    A server that closes the connection in the middle is noticed by the length that it announced: the client takes what
    has come for all of it.
    """
    with response:
        body = response.raw.read(most + 1)
    if len(body) > most:
        raise StorageError(f"the server sent more than the {most:,} bytes that ckpt asked for. Check the endpoint.")
    if _is_cut(response, len(body)):
        raise CutError
    return Answer(response.status_code, response.headers, body)


def _is_cut(response: Any, received: int) -> bool:
    """Whether bytes are missing: of the body, or of the headers, if they name no end that HTTP/1.1 knows."""
    headers = response.headers
    if announced := headers.get("Content-Length"):
        return received < int(announced)
    has_end = "Transfer-Encoding" in headers or headers.get("Connection") == "close"
    return response.raw.version == _HTTP_1_1 and response.status_code not in _WITHOUT_BODY and not has_end


def successful(answer: Answer) -> Answer:
    """The answer, if it is a success."""
    if answer.status < 300:
        return answer
    code = ""
    with suppress(CutError, ValueError, KeyError, IndexError, TypeError):
        code = str(answer.fields()["error"]["errors"][0]["reason"])
    raise AnswerError(answer.status, code)


class Sender(Protocol):
    """Sends parts of an upload."""

    def send(self, session: str, views: list[memoryview], span: str) -> Answer:
        """The answer to a part, or without views to the question how much has arrived."""


class Part:
    """A part of an upload. Sent again, it first asks how much of it has arrived."""

    def __init__(self, client: Sender, session: str, start: int, views: list[memoryview], total: int | None) -> None:
        self._client = client
        self._session = session
        self._start = start
        self._views = views
        self._stop = start + sum(map(len, views))
        self._total = "*" if total is None else str(total)
        self._is_sent = False

    def __call__(self) -> dict[str, Any] | None:
        """What the server says about the object, if it is complete."""
        at, views = self._start, self._views
        if self._is_sent:
            answer = self._client.send(self._session, [], f"*/{self._total}")
            if answer.status != 308:
                return answer.fields()
            at = _arrived(answer)
            if at >= self._stop and self._total == "*":
                return None
            if not self._start <= at < self._stop:
                raise StorageError("the server lost a part of an upload. Save again.")
            views = _after(views, at - self._start)
        self._is_sent = True
        answer = self._sent(views, at)
        if answer.status != 308:
            return answer.fields()
        arrived = _arrived(answer)
        if arrived < self._stop:  # the server may take less than it was sent
            raise AnswerError(503, "")
        return None

    def _sent(self, views: list[memoryview], at: int) -> Answer:
        """The answer to the part. Sent twice on its way, the second is refused, and the server has the first."""
        try:
            return self._client.send(self._session, views, f"{at}-{self._stop - 1}/{self._total}")
        except AnswerError as error:
            if error.status != 400:
                raise
            answer = self._client.send(self._session, [], f"*/{self._total}")
            if answer.status == 308 and _arrived(answer) < self._stop:
                raise
            return answer


def _arrived(answer: Answer) -> int:
    """The bytes of the upload that the server has; without a range it has none."""
    span = answer.headers.get("Range")
    return int(span.rpartition("-")[2]) + 1 if span else 0


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    left = []
    for view in views:
        left.append(view[count:])
        count = max(0, count - len(view))
    return [view for view in left if view]


_TAKEN = ("project", "access", "token", "endpoint_url", "requester_pays")
# about listings, caches and new buckets, which ckpt does not use: without an effect before, too
_WITHOUT_EFFECT = (
    "asynchronous", "block_size", "cache_timeout", "check_connection", "default_location", "secure_serialize",
    "use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache",
)  # fmt: skip
_INSTEAD = {
    "timeout": "use stall",
    "requests_timeout": "use stall",
    "consistency": "every file is verified by its own digests",
    "version_aware": "versions of a bucket are not used",
    "session_kwargs": "proxies and certificates are taken from the environment (HTTPS_PROXY, REQUESTS_CA_BUNDLE)",
}
_MOST_REWRITES = 100_000  # requests for one copy, each of which copies a part
_FIELDS = "generation,size,metadata"


def open_gcs(scheme: str, rest: str, options: Mapping[str, Any]) -> CloudObjects:
    """The objects of `gs://bucket/prefix`."""
    given = dict(options)
    bucket, _, prefix = rest.partition("/")
    url = f"{scheme}://{rest}".rstrip("/")
    if not bucket:
        raise ConfigError(f"{url} names no bucket: write {scheme}://bucket/folder.")
    refuse_unknown(scheme, given, _TAKEN, _WITHOUT_EFFECT, _INSTEAD)
    policy = RetryPolicy.taken_from(given)
    return CloudObjects(url, prefix.strip("/"), _client(scheme, bucket, given, policy), Requests(policy, url))


class GcsClient:
    """Requests about the objects of one bucket."""

    removed_at_once = 1

    def __init__(self, session: Any, endpoint: str, bucket: str, common: dict[str, str], timeout: Any) -> None:
        self._session = session
        self._endpoint = endpoint
        self._inside = f"/b/{quote(bucket, safe='')}/o"
        self._objects = f"{endpoint}/storage/v1{self._inside}"
        self._uploads = f"{endpoint}/upload/storage/v1{self._inside}"
        self._common = common
        self._timeout = timeout
        self._advice = errors.Advice(
            f"bucket {bucket!r}",
            "the credentials (GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or "
            "storage_options={'token': ...})",
            "the endpoint (STORAGE_EMULATOR_HOST, or storage_options={'endpoint_url': ...})",
        )

    def head(self, key: str) -> Head:
        return _head(self._request("GET", self._path(key), fields=_FIELDS).fields())

    def put(self, key: str, body: Body, over: str | None, token: str) -> str:
        """Metadata and bytes in one request."""
        boundary = uuid.uuid4().hex
        begin = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{_resource(key, token)}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        data = b"".join([begin.encode(), *body.views, f"\r\n--{boundary}--\r\n".encode()])
        answer = self._request(
            "POST", self._uploads, data=data, headers={"Content-Type": f"multipart/related; boundary={boundary}"},
            uploadType="multipart", fields=_FIELDS, **_condition(over),
        )  # fmt: skip
        return _head(answer.fields()).version

    def put_in_parts(self, key: str, parts: Iterator[Body], over: str | None, token: str, retried: Retried) -> str:
        """A resumable upload, one part after the other. The server compares the generation again with the last."""
        session = retried(lambda: self._begin(key, over, token))
        try:
            start, waiting = 0, next(parts)
            for following in parts:
                retried(Part(self, session, start, waiting.views, None), is_large=True)
                start, waiting = start + len(waiting), following
            answer = retried(Part(self, session, start, waiting.views, start + len(waiting)), is_large=True)
        except BaseException:
            with suppress(Exception):  # the server forgets it after a week
                self._session.delete(session, timeout=self._timeout)
            raise
        if answer is None:
            raise StorageError(f"could not write {key}: the server did not confirm that the upload is complete.")
        return _head(answer).version

    def _begin(self, key: str, over: str | None, token: str) -> str:
        answer = self._request(
            "POST", self._uploads, data=_resource(key, token).encode(),
            headers={"Content-Type": "application/json; charset=UTF-8"}, uploadType="resumable", **_condition(over),
        )  # fmt: skip
        address = urlsplit(answer.headers["Location"])
        return f"{self._endpoint}{address.path}?{address.query}"  # nowhere else: credentials are sent there

    def send(self, session: str, views: list[memoryview], span: str) -> Answer:
        """A part of an upload, or with no views the question how much of it has arrived."""
        size = sum(map(len, views))
        headers = {"Content-Range": f"bytes {span}", "Content-Length": str(size)}
        data = Body(views) if size else b""
        answer = self._ask("PUT", session, data=data, headers=headers)
        if answer.status in (404, 410):
            raise AnswerError(answer.status, errors.NO_UPLOAD)
        return answer if answer.status == 308 else successful(answer)

    def read(self, key: str, start: int, stop: int, stopped: threading.Event) -> list[bytes]:
        span = {"Range": f"bytes={start}-{stop - 1}"}
        try:
            answer = self._request("GET", self._path(key), headers=span, most=stop - start, alt="media")
        except AnswerError as error:
            if error.status == 416:
                return []
            raise
        if start and answer.headers.get("Content-Range", "").partition("-")[0] != f"bytes {start}":
            raise StorageError("the server sent a different range of bytes than ckpt asked for. Check the endpoint.")
        return [answer.body]

    def copy(self, source: str, target: str, size: int, retried: Retried) -> None:
        retried(lambda: self._copy(source, target))

    def _copy(self, source: str, target: str) -> None:
        address = f"{self._path(source)}/rewriteTo{self._inside}/{quote(target, safe='')}"
        more: dict[str, Any] = {}
        for _ in range(_MOST_REWRITES):
            answer = self._request("POST", address, data=b"", **more).fields()
            if answer.get("done"):
                return
            more = {"rewriteToken": answer["rewriteToken"]}
        raise StorageError("the server does not finish copying an object. Check the endpoint.")

    def page(self, prefix: str, marker: Any) -> tuple[list[Entry], Any]:
        more: dict[str, Any] = {} if marker is None else {"pageToken": marker}
        fields = "nextPageToken,items(name,size,generation)"
        found = self._request("GET", self._objects, prefix=prefix, fields=fields, **more).fields()
        entries = [Entry(item["name"], int(item["size"]), str(item["generation"])) for item in found.get("items", ())]
        return entries, found.get("nextPageToken") or None

    def remove(self, keys: list[str]) -> None:
        try:
            self._request("DELETE", self._path(keys[0]))
        except AnswerError as error:
            if error.status != 404:
                raise

    def translate(self, error: Exception, what: str, where: str) -> StorageError | None:
        from google.auth import exceptions
        from requests import exceptions as network
        from urllib3.exceptions import HTTPError

        begin = f"could not {what} {where}"
        if isinstance(error, AnswerError):
            if (
                error.status == 404 and error.code != errors.NO_UPLOAD and what in ("write", "list")
            ):  # the object need not be there, only its bucket
                return errors.no_container(begin, self._advice)
            return errors.from_answer(error.status, error.code, what, where, self._advice)
        if isinstance(error, network.ConnectionError | exceptions.TransportError):
            return errors.unreached(begin, self._advice)
        if isinstance(error, exceptions.GoogleAuthError):
            return errors.refused(begin, self._advice)
        if isinstance(error, network.RequestException | HTTPError | OSError):
            return errors.cut_off(begin, error)
        if isinstance(error, (*errors.OF_BELIEVERS, ValueError)):
            return errors.strange_answer(where, "the server gave an answer that GCS never gives")
        return None

    def _request(
        self,
        method: str,
        address: str,
        *,
        data: Any = None,
        headers: Mapping[str, str] | None = None,
        most: int = LARGEST,
        **query: str,
    ) -> Answer:
        plain = {"Accept-Encoding": "identity", **(headers or {})}
        params = {**query, **self._common}
        return successful(self._ask(method, address, most, data=data, headers=plain, params=params))

    def _ask(self, method: str, address: str, most: int = LARGEST, **given: Any) -> Answer:
        safe = {"timeout": self._timeout, "allow_redirects": False, "stream": True}
        return receive(self._session.request(method, address, **given, **safe), most)

    def _path(self, key: str) -> str:
        return f"{self._objects}/{quote(key, safe='')}"


def _head(found: Mapping[str, Any]) -> Head:
    return Head(int(found["size"]), str(found["generation"]), (found.get("metadata") or {}).get(WRITE))


def _resource(key: str, token: str) -> str:
    return json.dumps({"name": key, "contentType": "application/octet-stream", "metadata": {WRITE: token}})


def _condition(over: str | None) -> dict[str, Any]:
    if over == ANY:
        return {}
    if over is not None and not over.isdecimal():  # no generation of this store
        raise AnswerError(412, "")
    return {"ifGenerationMatch": over or "0"}


def _client(scheme: str, bucket: str, options: dict[str, Any], policy: RetryPolicy) -> GcsClient:
    """A session with the credentials that gcsfs has found."""
    try:
        from gcsfs.core import GCSFileSystem
        from google.auth.credentials import AnonymousCredentials
        from google.auth.transport.requests import AuthorizedSession
        from requests.adapters import HTTPAdapter
    except ImportError as error:
        raise ConfigError(
            f"{scheme}:// needs gcsfs, which is not installed ({error.name}): pip install 'torch-ckpt[gcs]'"
        ) from None
    try:
        fs = GCSFileSystem(**{**options, "use_listings_cache": False, "skip_instance_cache": True})
    except Exception as error:  # of several packages: a file that is missing, a token that is none
        kind, names = type(error).__name__, ", ".join(sorted(options)) or "nothing"
        raise ConfigError(
            f"can't open {scheme}://{bucket}: gcsfs finds no credentials ({kind}). You gave these storage_options: "
            f"{names}."
        ) from None
    session = AuthorizedSession(fs.credentials.credentials or AnonymousCredentials())
    for kind in ("https://", "http://"):
        session.mount(kind, HTTPAdapter(pool_connections=AT_ONCE, pool_maxsize=2 * AT_ONCE))
    payer = fs.requester_pays and (fs.requester_pays if isinstance(fs.requester_pays, str) else fs.project)
    common = {"userProject": str(payer)} if payer else {}
    endpoint = fs.base.removesuffix("/").removesuffix("/storage/v1")
    return GcsClient(session, endpoint, bucket, common, (min(10.0, policy.stall), policy.stall))

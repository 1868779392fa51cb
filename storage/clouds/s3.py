"""Objects in a bucket of S3, or of a server with the same API: `s3://`, `s3a://`.

Requests run in the event loop of s3fs, from any thread, and are cancelled when their caller is interrupted or no byte
moves any more.

Sessions follow no redirect, read no answer beyond a bound, and wait for no 100 Continue. A redirect would take the
session token to a host that the server names. With `Expect: 100-continue`, aiohttp sends no body before the server has
said so, and some servers never do. Objects are not read here, but streamed.

Nor do sessions repeat what takes long. A page of a listing has a thousand timestamps: botocore guesses at the format of
each, and that takes three quarters of the time of reading such a page. Each of its sessions also reads the description
of the service and registers 200 handlers anew, though a process opens several: one for the root, one for its mirror.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager, suppress
from copy import copy
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt.compat import s3fs
from ckpt.errors import AbsentError, ConfigError, StorageError, TransientError, UnsupportedError
from ckpt.storage.base import ANY, LARGEST_DOCUMENT, Entry, Unfinished
from ckpt.storage.clouds.errors import (
    TRANSIENT,
    Advice,
    cut_off,
    from_answer,
    quotable,
    refused,
    strange_answer,
    unreached,
)
from ckpt.storage.clouds.objects import CloudObjects, Head, Retried, several
from ckpt.storage.fsspec_stores import unknown_options
from ckpt.storage.multipart import Body
from ckpt.storage.retry import AT_ONCE, SMALL_AT_ONCE, Requests, RetryPolicy, UnreachedError, time_left
from ckpt.util.option_values import is_settings

if TYPE_CHECKING:
    from s3fs import S3FileSystem

_T = TypeVar("_T")
_log = logging.getLogger("ckpt")
COPIED_AT_ONCE = 256 << 20  # bytes
LONGEST_ANSWER = 64 << 20  # bytes: a page of a thousand keys has less than 3 MB
_CHUNK = 1 << 16
_READ_CHUNK = 1 << 20
_LOOK = 0.2  # seconds between checks whether a request is to end
_TOKEN = "ckpt-write"  # noqa: S105  # metadata that identifies a write whose answer was lost
# where the next page of a list begins, and how it is asked for
_OBJECTS = {"NextContinuationToken": "ContinuationToken"}
_OF_A_LIST = {"IsTruncated", "Name", "KeyCount", "Contents"}
_PARTS = {"NextPartNumberMarker": "PartNumberMarker"}
_UPLOADS = {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"}
_WRITES = (
    "PutObject",
    "CreateMultipartUpload",
    "UploadPart",
    "CompleteMultipartUpload",
    "CopyObject",
    "UploadPartCopy",
)


class S3Objects(CloudObjects):
    """`s3://bucket/prefix`."""

    def __init__(self, bucket: str, prefix: str, options: Mapping[str, Any]) -> None:
        given = dict(options)
        url, policy = f"s3://{bucket}/{prefix}".rstrip("/"), RetryPolicy.taken_from(given)
        fs = _open(given, policy)
        requests = Requests(policy, url, fs.max_concurrency)
        self._s3 = S3Client(bucket, fs, requests)
        self._has_warned = False  # of uploads
        super().__init__(url, prefix, self._s3, requests)

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Those under way end, too."""
        with super().giving_up():
            self._s3.cancel_all()
            yield

    def page(self, after: str) -> tuple[list[Entry], bool]:
        begins = {"StartAfter": self._prefix + after} if after else None
        found, following = self._retried("list", "")(lambda: self._s3.page(self._prefix, begins))
        return self._below("", found), following is not None

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        for key, upload, begun in self._uploads(self._prefix + prefix):
            with suppress(AbsentError):  # completed meanwhile
                pages = self._pages(key, partial(self._s3.parts, self._prefix + key, upload))
                yield Unfinished(key, sum(int(part["Size"]) for page in pages for part in page), begun)

    def abort(self, prefix: str, age: float) -> None:
        try:
            for key, upload, begun in list(self._uploads(self._prefix + prefix)):
                if begun >= age:
                    with suppress(AbsentError):
                        self._retried("write", key)(partial(self._s3.abort, self._prefix + key, upload))
        except TransientError:
            raise
        except StorageError as error:
            self._warn_of_uploads(error)

    def _uploads(self, top: str) -> Iterator[tuple[str, str, float]]:
        """Unfinished multipart uploads: key, id, and age in seconds by the server's clock. None if it lists none."""
        try:
            for page in self._pages("", partial(self._s3.uploads, top)):
                for upload, age in page:
                    if upload["Key"].startswith(top):
                        yield upload["Key"].removeprefix(self._prefix), upload["UploadId"], age
        except TransientError:
            raise
        except StorageError as error:  # housekeeping: a server may lack it, and credentials may not have the right
            self._warn_of_uploads(error)

    def _warn_of_uploads(self, error: StorageError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s: ckpt could not remove interrupted uploads: %s Such uploads take up space until a lifecycle "
                "rule of the bucket removes them.", self.url, error,
            )  # fmt: skip


class S3Client:
    """Requests about the objects of one bucket."""

    removed_at_once = 1000

    def __init__(self, bucket: str, fs: S3FileSystem, requests: Requests) -> None:
        self.fs = fs
        self._bucket = bucket
        self._requests = requests
        self._running: set[asyncio.Task[Any]] = set()

    def head(self, key: str) -> Head:
        found = self._call("head_object", Key=key)
        return Head(int(found["ContentLength"]), str(found["ETag"]), found.get("Metadata", {}).get(_TOKEN))

    def put(self, key: str, body: Body, over: str | None, token: str) -> str:
        named = {"Metadata": {_TOKEN: token}, **_condition(over)}
        return str(self._call("put_object", body, Key=key, **named)["ETag"])

    def put_in_parts(self, key: str, parts: Iterator[Body], over: str | None, token: str, retried: Retried) -> str:
        return self._in_parts(key, _upload_part, parts, {"Metadata": {_TOKEN: token}}, _condition(over), retried)

    def copy(self, source: str, target: str, size: int, retried: Retried) -> None:
        origin: dict[str, Any] = {"CopySource": {"Bucket": self._bucket, "Key": source}}
        if size <= COPIED_AT_ONCE:
            retried(lambda: self._call("copy_object", Key=target, **origin))
            return
        ends = ((start, min(size, start + COPIED_AT_ONCE) - 1) for start in range(0, size, COPIED_AT_ONCE))
        spans = ({**origin, "CopySourceRange": f"bytes={start}-{last}"} for start, last in ends)
        self._in_parts(target, _copy_part, spans, {}, {}, retried)

    def _in_parts(
        self,
        key: str,
        send: Callable[[Callable[..., Any], Any], Mapping[str, Any]],
        parts: Iterable[Any],
        named: dict[str, Any],
        condition: dict[str, Any],
        retried: Retried,
    ) -> str:
        """An upload of parts, each of which `send` sends. Returns the version of the object."""
        upload = str(retried(lambda: self._call("create_multipart_upload", Key=key, **named))["UploadId"])

        def sent(numbered: tuple[int, Any], stopped: threading.Event) -> dict[str, Any]:
            number, part = numbered
            place: dict[str, Any] = {"Key": key, "UploadId": upload, "PartNumber": number, "stopped": stopped}
            attempt = partial(send, partial(self._call, **place), part)
            return _completed_part(number, retried(attempt, stopped=stopped, is_large=True))

        try:
            done = several(sent, enumerate(parts, 1), self._requests.at_once, "ckpt-upload")
            whole = {"UploadId": upload, "MultipartUpload": {"Parts": done}, **condition}
            return str(retried(lambda: self._call("complete_multipart_upload", Key=key, **whole)["ETag"]))
        except BaseException:
            with suppress(StorageError):  # `sweep` removes what is left
                retried(lambda: self.abort(key, upload))
            raise

    def abort(self, key: str, upload: str) -> None:
        self._call("abort_multipart_upload", Key=key, UploadId=upload)

    def read(self, key: str, start: int, stop: int, stopped: threading.Event) -> list[bytes]:
        chunks: list[bytes] = []
        is_document = not start and stop > LARGEST_DOCUMENT  # asked for whole: only then is its checksum compared
        span = {} if is_document else {"Range": f"bytes={start}-{stop - 1}"}

        async def receive() -> None:
            answer = await self.send("get_object", Key=key, **span)
            if start and answer.get("ContentRange", "").partition("-")[0] != f"bytes {start}":
                raise StorageError(
                    "the server sent a different range of bytes than ckpt asked for. Check the endpoint."
                )
            left = stop - start
            async with answer["Body"] as body:
                while left >= 0 and (chunk := await body.read(_READ_CHUNK)):
                    chunks.append(chunk[:left] if is_document else chunk)
                    left -= len(chunk)
                    self._requests.note_progress()

        try:
            self._run(receive, lambda: len(chunks), stopped)
        except Exception as error:
            if _code_of(error) not in ("InvalidRange", "416"):
                raise
        return chunks

    def page(self, prefix: str, marker: Any) -> tuple[list[Entry], Any]:
        page, following = self._page("list_objects_v2", _OBJECTS, marker, Prefix=prefix)
        if not page.keys() & _OF_A_LIST:  # of a proxy, or a portal: the root would look empty
            raise StorageError("the server's answer is not a list of objects. Check the endpoint.")
        return [Entry(found["Key"], found["Size"], found.get("ETag")) for found in page.get("Contents", ())], following

    def parts(self, key: str, upload: str, marker: Any) -> tuple[list[Any], Any]:
        """Some of the parts of an upload that have arrived."""
        page, following = self._page("list_parts", _PARTS, marker, Key=key, UploadId=upload)
        return list(page.get("Parts", ())), following

    def uploads(self, prefix: str, marker: Any) -> tuple[list[tuple[Any, float]], Any]:
        """Some of the unfinished uploads, with their ages in seconds."""
        page, following = self._page("list_multipart_uploads", _UPLOADS, marker, Prefix=prefix)
        now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
        found = [(one, (now - one["Initiated"]).total_seconds()) for one in page.get("Uploads", ())]
        return [(one, age) for one, age in found if one["Key"] and one["UploadId"]], following

    def _page(self, method: str, markers: Mapping[str, str], marker: Any, **arguments: Any) -> tuple[Any, Any]:
        page = self._call(method, **arguments, **(marker or {}))
        following = {asked: page[given] for given, asked in markers.items() if page.get(given)}
        return page, following if page.get("IsTruncated") else None

    def remove(self, keys: list[str]) -> None:
        answer = self._call("delete_objects", Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True})
        if answer.get("Errors"):
            raise _not_deleted(answer["Errors"], f"s3://{self._bucket}")

    def translate(self, error: Exception, what: str, where: str) -> StorageError | ConfigError | None:
        return translate_error(error, what, where, self._bucket)

    def cancel_all(self) -> None:
        """End all requests that are under way."""
        self.fs.loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._running])

    def _call(
        self, method: str, body: Body | None = None, stopped: threading.Event | None = None, **arguments: Any
    ) -> Any:
        """The answer to a single request."""
        if body is not None:
            body.seek(0)
            arguments["Body"] = body if len(body) else b""
        return self._run(lambda: self.send(method, **arguments), lambda: body.sent if body else 0, stopped)

    async def send(self, method: str, **arguments: Any) -> Any:
        """The answer to a request, whose body is still to come if it is that of an object."""
        request = type(self.fs).call_s3.__wrapped__  # the coroutine: `call_s3` itself waits for it in another thread
        return await request(self.fs, method, Bucket=self._bucket, **arguments)

    def _run(
        self, work: Callable[[], Awaitable[_T]], moved: Callable[[], int], stopped: threading.Event | None = None
    ) -> _T:
        """The result of a request. When this returns or raises, it does not access the caller's buffers any more."""
        tasks: list[Any] = []
        future = asyncio.run_coroutine_threadsafe(self._watched(work, moved, tasks), self.fs.loop)
        try:
            while not wait([future], _LOOK if stopped else None).done:
                if stopped and stopped.is_set():
                    raise TransientError("the request was cancelled.")
            return future.result()
        except CancelledError:
            raise TransientError("the request was cancelled.") from None
        finally:
            if not future.done():
                asyncio.run_coroutine_threadsafe(_end(tasks), self.fs.loop).result()

    async def _watched(self, work: Callable[[], Awaitable[_T]], moved: Callable[[], int], tasks: list[Any]) -> _T:
        """A request, cancelled when no byte has moved for `stall` seconds, or its time is over."""
        tasks.append(asyncio.current_task())
        stall = self._requests.policy.stall
        with suppress(Exception):  # what is wrong with the client, the request meets again
            # reads the description of S3, which takes seconds on a busy machine: no server is slow then
            await asyncio.wait_for(self.fs.set_session(), stall)
        task = asyncio.ensure_future(work())
        self._running.add(task)
        try:
            while True:
                before = moved()
                await asyncio.wait({task}, timeout=min(stall, time_left()))
                if task.done():
                    return task.result()
                if moved() == before or not time_left():
                    raise asyncio.TimeoutError
        finally:
            self._running.discard(task)
            await _end([task])


async def _end(tasks: Iterable[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _condition(over: str | None) -> dict[str, Any]:
    return {} if over == ANY else {"IfNoneMatch": "*"} if over is None else {"IfMatch": over}


def _upload_part(call: Callable[..., Any], body: Body) -> Any:
    return call("upload_part", body)


def _copy_part(call: Callable[..., Any], span: Mapping[str, Any]) -> Any:
    return call("upload_part_copy", **span)["CopyPartResult"]


def _completed_part(number: int, answer: Mapping[str, Any]) -> dict[str, Any]:
    """A part as `complete_multipart_upload` wants it: its tag, and the checksum that the server has compared."""
    sums = {name: value for name, value in answer.items() if name.startswith("Checksum") and name != "ChecksumType"}
    return {"PartNumber": number, "ETag": answer["ETag"], **sums}


class EndlessError(Exception):
    """A server sends more than anybody has asked for."""


def session_class() -> type[Any]:
    """The class of sessions for `AioConfig(http_session_cls=...)`."""
    found = s3fs.session_class(_Plain)
    if found is None:
        raise UnsupportedError(s3fs.SESSION.without)
    return found


class _Plain:
    """A session of aiohttp that answers a redirect with the redirect itself, and sends a body at once. What an answer
    holds is read up to a bound."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, *arguments: Any, **options: Any) -> Any:
        options["headers"].pop("Expect", None)
        response = await self._session.request(*arguments, allow_redirects=False, **options)
        response.read = partial(_bounded, response)
        return response


async def _bounded(response: Any) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK):
        body += chunk
        if len(body) > LONGEST_ANSWER:
            response.close()
            raise EndlessError(
                f"the server's answer is longer than {LONGEST_ANSWER >> 20} MB, but S3 never sends that much."
            )
    return bytes(body)


_ELSEWHERE = {
    "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException",
    "301", "302", "303", "307", "308",
}  # fmt: skip


def _advice(bucket: str) -> Advice:
    return Advice(
        f"bucket {bucket!r}",
        "the credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or storage_options)",
        "the endpoint (AWS_ENDPOINT_URL, or storage_options={'endpoint_url': ...})",
    )


def _code_of(error: BaseException) -> str:
    """The error code of the server's answer; empty if there is none."""
    answer = _answer(error)
    return str(answer.get("Error", {}).get("Code", "")) if answer else ""


def _not_deleted(errors: Iterable[Mapping[str, Any]], where: str) -> StorageError:
    """The error for objects that a bulk delete has not removed, although the request itself succeeded."""
    wrong = {str(error.get("Key")): str(error.get("Code") or "") for error in errors}
    is_transient = all(code in TRANSIENT or not code for code in wrong.values())  # SeaweedFS gives none
    listed = ", ".join(f"{key} ({quotable(code) or 'without a reason'})" for key, code in wrong.items())
    return (TransientError if is_transient else StorageError)(f"could not delete in {where}: {listed}.")


def translate_error(error: BaseException, what: str, where: str, bucket: str) -> StorageError | ConfigError:
    """The error for one of botocore, aiohttp or the system. Quotes no secret."""
    from botocore import exceptions

    answer = _answer(error)
    if answer is not None:
        return _translate_answer(answer, what, where, bucket)
    if (endless := _endless(error)) is not None:
        return StorageError(f"could not {what} {where}: {endless}")
    if _is(error, exceptions.NoCredentialsError, exceptions.PartialCredentialsError):
        return refused(f"could not {what} {where}", _advice(bucket))
    if _is(error, exceptions.ProfileNotFound):
        return ConfigError(
            f"could not {what} {where}: ~/.aws/config has no such profile. Check AWS_PROFILE, or storage_options="
            "{'profile': ...}."
        )
    if isinstance(error, ValueError) and str(error).startswith("Invalid endpoint"):
        return ConfigError(
            f"could not {what} {where}: the endpoint (AWS_ENDPOINT_URL, or storage_options={{'endpoint_url': ...}}) is "
            "no URL: write http://host:port or https://host."
        )
    if _lacks_certificates(error):
        return ConfigError(
            f"could not {what} {where}: ckpt can't read the file of trusted certificates. Check AWS_CA_BUNDLE, or "
            f"storage_options={{'client_kwargs': {{'verify': ...}}}}."
        )
    if _is(error, exceptions.SSLError):
        return UnreachedError(
            f"could not {what} {where}: no secure connection. Check the endpoint (https:// or http://?) and its "
            "certificate (AWS_CA_BUNDLE, or storage_options={'client_kwargs': {'verify': ...}})."
        )
    if _is(error, exceptions.EndpointConnectionError, exceptions.ConnectTimeoutError, ConnectionRefusedError):
        return unreached(f"could not {what} {where}", _advice(bucket))
    kind = type(error.__cause__ or error).__name__
    if _is_network_failure(error):
        return cut_off(f"could not {what} {where}", error.__cause__ or error)
    if isinstance(error, KeyError):
        return strange_answer(where, f"the server gave an answer without {error}, which S3 never does")
    if _is(error, exceptions.BotoCoreError, ValueError, TypeError):
        return ConfigError(f"could not {what} {where}: {kind}. Check storage_options and the URL.")
    return StorageError(f"could not {what} {where}: {kind}.")


def _lacks_certificates(error: BaseException) -> bool:
    """Whether the bundle of certificates is missing, or is none. Nothing else here is read from a file."""
    inner = getattr(error, "kwargs", {}).get("error")  # botocore wraps what it does not expect
    return isinstance(inner, FileNotFoundError) or "NO_CERTIFICATE" in str(getattr(inner, "reason", ""))


def _endless(error: BaseException | None) -> EndlessError | None:
    """The error of an answer that was too long, which the client wraps."""
    while error is not None and not isinstance(error, EndlessError):
        error = error.__cause__ or error.__context__
    return error


def _is(error: BaseException, *kinds: type[BaseException]) -> bool:
    """Whether an error is of these classes, or was caused by one."""
    return isinstance(error, kinds) or isinstance(error.__cause__, kinds)


def _answer(error: BaseException) -> dict[str, Any] | None:
    from botocore.exceptions import ClientError

    found = error if isinstance(error, ClientError) else error.__cause__
    return found.response if isinstance(found, ClientError) else None


def _translate_answer(answer: dict[str, Any], what: str, where: str, bucket: str) -> StorageError:
    code = str(answer.get("Error", {}).get("Code", ""))
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    begin = f"could not {what} {where}: the server says {code}"
    if code in _ELSEWHERE:
        return StorageError(
            f"{begin}. The bucket is in another region, or at another address: set AWS_REGION, or check the endpoint."
        )
    if code == "RequestTimeTooSkewed":
        return StorageError(f"{begin}. Set this machine's clock.")
    return from_answer(status, code, what, where, _advice(bucket))


def _is_network_failure(error: BaseException) -> bool:
    from aiohttp import ClientError as ConnectionFailure
    from botocore.exceptions import FlexibleChecksumError as Altered
    from botocore.exceptions import HTTPClientError
    from botocore.exceptions import IncompleteReadError as Truncated
    from botocore.parsers import ResponseParserError

    network = (OSError, asyncio.TimeoutError, EOFError, ConnectionFailure)
    return _is(error, *network, HTTPClientError, Truncated, Altered, ResponseParserError)


def _fast_session(options: dict[str, Any]) -> Any:
    """A session of aiobotocore, built from the options for it, as s3fs would build it."""
    from aiobotocore.session import AioSession
    from botocore.exceptions import BotoCoreError

    hooks = {"event_hooks": copy(_handlers()), "include_builtin_handlers": False}
    session = AioSession(**{**hooks, **options})
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=parsed)
    with suppress(BotoCoreError):  # a profile that is missing, say: the first request tells it with its place
        session.register_component("data_loader", _descriptions(session.get_config_variable("data_path")))
    return session


@cache
def _handlers() -> Any:
    """What every session calls before and after a request. To register it takes as long as to make a client."""
    from aiobotocore.hooks import AioHierarchicalEmitter
    from aiobotocore.session import AioSession

    hooks = AioHierarchicalEmitter()
    AioSession(event_hooks=hooks)
    return hooks


@cache
def _descriptions(path: str | None) -> Any:
    from botocore.loaders import create_loader

    return create_loader(path)


def parsed(value: Any) -> datetime:
    """The time that a timestamp stands for. What is not written as S3 does, botocore parses."""
    if isinstance(value, str) and value.endswith("Z"):
        try:
            return datetime.fromisoformat(f"{value[:-1]}+00:00")
        except ValueError:
            pass
    from botocore.utils import parse_timestamp

    found: datetime = parse_timestamp(value)
    return found


def _open(options: dict[str, Any], policy: RetryPolicy) -> S3FileSystem:
    from aiobotocore.session import AioSession
    from s3fs import S3FileSystem

    unknown = unknown_options(options, S3FileSystem, AioSession)
    if unknown:
        raise ConfigError(f"s3:// does not accept these storage_options: {', '.join(unknown)}.")
    ours = {
        "retries": {"total_max_attempts": 1},  # `Requests` does it, with a deadline
        "read_timeout": policy.stall,
        "connect_timeout": min(10.0, policy.stall),
        "connector_args": {"resolver": _resolver()},
        "http_session_cls": session_class(),
    }
    if "@" in str(options.get("endpoint_url", "")):
        raise ConfigError(
            "the endpoint_url contains a user name or a password. Pass credentials in the storage_options 'key' and "
            "'secret'."
        )
    _refuse_unknown_fields(options.get("s3_additional_kwargs"))
    options.setdefault("max_concurrency", AT_ONCE)
    names = ", ".join(sorted(options))
    try:
        config = {
            "max_pool_connections": 2 * options["max_concurrency"] + SMALL_AT_ONCE,
            **ours,
            **options.pop("config_kwargs", {}),
        }
        uncached = {"use_listings_cache": False, "skip_instance_cache": True}
        fs = S3FileSystem(**{**options, **uncached}, config_kwargs=config)
    except (TypeError, ValueError, KeyError) as error:
        kind = type(error).__name__
        raise ConfigError(f"s3fs does not accept these storage_options ({kind}): {names}.") from None
    fs.retries = 1
    if fs.session is None:
        fs.session = _fast_session(fs.kwargs)
    return fs


def _refuse_unknown_fields(fields: Any) -> None:
    """s3fs leaves out what a request does not take: with a misspelt name, nothing would be encrypted, for example."""
    if not fields:
        return
    if not is_settings(fields):
        raise ConfigError("storage_options: s3_additional_kwargs must be a dict of arguments for S3 requests.")
    from botocore.session import get_session

    model = get_session().get_service_model("s3")
    known = {name for operation in _WRITES for name in model.operation_model(operation).input_shape.members}
    if unknown := sorted(fields.keys() - known):
        raise ConfigError(f"storage_options: S3 writes don't accept these s3_additional_kwargs: {', '.join(unknown)}.")


def _resolver() -> Any:
    """A resolver with its own threads: an executor refuses work when the program ends, during its last save."""
    from aiohttp.abc import AbstractResolver

    class Resolver(AbstractResolver):
        async def resolve(self, host: str, port: int = 0, family: int = socket.AF_UNSPEC) -> list[Any]:
            future: Future[list[Any]] = Future()
            future.set_running_or_notify_cancel()  # from now on it cannot be cancelled: the thread settles it

            def work() -> None:
                try:
                    future.set_result(socket.getaddrinfo(host, port, family, socket.SOCK_STREAM))
                except OSError as error:
                    future.set_exception(error)

            threading.Thread(target=work, name="ckpt-resolve", daemon=True).start()
            return [
                {"hostname": host, "host": address[0], "port": port, "family": kind, "proto": proto, "flags": 0}
                for kind, _, proto, _, address in await asyncio.wrap_future(future)
            ]

        async def close(self) -> None:
            """Nothing to close."""

    return Resolver()

"""Calls to S3 through s3fs, from any thread: retried, cancelled when their caller is interrupted, errors as ours.

Sessions follow no redirect, read no answer beyond a bound, and wait for no 100 Continue. A redirect would take the
session token to a host that the server names. With `Expect: 100-continue`, aiohttp sends no body before the server has
said so, and some servers never do. Objects are not read here, but streamed.

Nor do sessions repeat what takes long. A page of a listing has a thousand timestamps: botocore guesses at the format of
each, and that takes three quarters of the time of reading such a page. Each of its sessions also reads the description
of the service anew, though a process opens several: one for the root, one for its mirror.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt.compat import s3fs
from ckpt.errors import AbsentError, ConfigError, StorageError, TransientError, UnsupportedError
from ckpt.storage.clouds.errors import TRANSIENT, Advice, cut_off, from_answer, refused, unreached
from ckpt.storage.fsspec_stores import unknown_options
from ckpt.storage.retry import Retries, RetryPolicy, UnreachedError, time_left
from ckpt.util.option_values import is_settings

if TYPE_CHECKING:
    from s3fs import S3FileSystem


LONGEST_ANSWER = 64 << 20  # bytes: a page of a thousand keys has less than 3 MB
_CHUNK = 1 << 16


class EndlessError(StorageError):
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
            raise EndlessError(f"the server's answer has more than {LONGEST_ANSWER >> 20} MB, which none of S3's has.")
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


def code_of(error: BaseException) -> str:
    """The error code of the server's answer; empty if there is none."""
    answer = _answer(error)
    return str(answer.get("Error", {}).get("Code", "")) if answer else ""


def not_deleted(errors: Iterable[Mapping[str, Any]], where: str) -> StorageError:
    """The error for objects that a bulk delete has not removed, although the request itself succeeded."""
    wrong = {str(error.get("Key")): str(error.get("Code") or "") for error in errors}
    is_transient = all(code in TRANSIENT or not code for code in wrong.values())  # SeaweedFS gives none
    listed = ", ".join(f"{key} ({code or 'without a reason'})" for key, code in wrong.items())
    return (TransientError if is_transient else StorageError)(f"could not delete in {where}: {listed}.")


def translate_error(error: BaseException, what: str, where: str, bucket: str) -> StorageError | ConfigError:
    """The error for one of botocore, aiohttp or the system. Quotes no secret."""
    from botocore import exceptions

    answer = _answer(error)
    if answer is not None:
        return _translate_answer(answer, what, where, bucket)
    if isinstance(error, StorageError | ConfigError):
        return error
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
            f"could not {what} {where}: the file of certificates to trust cannot be read. Check AWS_CA_BUNDLE, or "
            "storage_options={'client_kwargs': {'verify': ...}}."
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
    if code == "NoSuchUpload":
        return AbsentError(f"{begin}: that upload was completed or aborted meanwhile.")
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


def fast_session(options: dict[str, Any]) -> Any:
    """A session of aiobotocore, built from the options for it, as s3fs would build it."""
    from aiobotocore.session import AioSession
    from botocore.exceptions import BotoCoreError

    session = AioSession(**options)
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=parsed)
    with suppress(BotoCoreError):  # a profile that is missing, say: the first request tells it with its place
        session.register_component("data_loader", _descriptions(session.get_config_variable("data_path")))
    return session


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


_T = TypeVar("_T")
_AT_ONCE = 8  # requests that move large pieces
_WRITES = (
    "PutObject",
    "CreateMultipartUpload",
    "UploadPart",
    "CompleteMultipartUpload",
    "CopyObject",
    "UploadPartCopy",
)
_SMALL_AT_ONCE = 32  # whole small objects, and questions
_SWALLOWED = 1 << 20  # bytes: so much is sent into the buffers of a network on which nobody listens


class BytesMoved:
    """Bytes that a try of a request has sent or received so far.

    `on_more` is called when it has moved more than any try before it: what is sent again is no progress, and the first
    bytes are none either. An answer is a sign of life of its own.
    """

    def __init__(self, on_more: Callable[[], None] = lambda: None) -> None:
        self._count = self._most = 0
        self._on_more = on_more

    @property
    def count(self) -> int:
        return self._count

    @count.setter
    def count(self, value: int) -> None:
        self._count = value
        if value > self._most:
            self._most = value
            if value > _SWALLOWED:
                self._on_more()


class Connection:
    """A bucket, through the event loop that s3fs runs in its own thread."""

    def __init__(self, bucket: str, options: Mapping[str, Any]) -> None:
        given = dict(options)
        self._retry_policy = RetryPolicy.taken_from(given)
        self.bucket = bucket
        self.fs = _open(given, self._retry_policy)
        self.at_once: int = self.fs.max_concurrency
        self._slots = asyncio.Semaphore(self.at_once)
        self._small_slots = asyncio.Semaphore(max(self.at_once, _SMALL_AT_ONCE))
        self._reached = False
        self.progress = 0  # see `Interruptible`
        self._running: set[asyncio.Task[Any]] = set()
        self._given_up = 0  # contexts of `giving_up` that were not left
        self._last_problem = ""  # of a request that is tried again

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Until the context is left, requests fail at once, those under way too."""
        self._given_up += 1
        try:
            self.fs.loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._running])
            yield
        finally:
            self._given_up -= 1

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end. If this thread is interrupted, the coroutine is cancelled first."""
        tasks: set[asyncio.Task[Any]] = set()
        future = self.start(work, tasks)
        try:
            return future.result()
        except BaseException:
            self.stop(tasks)
            raise

    def start(self, work: Coroutine[Any, Any, _T], tasks: set[asyncio.Task[Any]]) -> Future[_T]:
        """Start a coroutine in the loop. While it runs, its task is in `tasks`."""
        return asyncio.run_coroutine_threadsafe(self._tracked(tasks, work), self.fs.loop)

    def stop(self, tasks: set[asyncio.Task[Any]]) -> None:
        """Cancel the tasks. When this returns, none of them accesses the caller's buffers any more."""
        asyncio.run_coroutine_threadsafe(_stop(tasks), self.fs.loop).result()

    async def call(self, method: str, **arguments: Any) -> Any:
        """A single request."""
        request = type(self.fs).call_s3.__wrapped__  # the coroutine: `call_s3` itself waits for it in another thread
        answer = await request(self.fs, method, Bucket=self.bucket, **arguments)
        self._reached = True
        self._note_progress()
        return answer

    def _note_progress(self) -> None:
        self.progress += 1
        self._last_problem = ""

    async def _tracked(self, tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        self._running.add(task)
        try:
            if self._given_up:
                work.close()
                raise self._no_answer()
            return await work
        except asyncio.CancelledError:
            if self._given_up:
                raise self._no_answer() from None
            raise
        finally:
            self._running.discard(task)
            tasks.discard(task)

    def _no_answer(self) -> TransientError:
        why = self._last_problem or f"the server of s3://{self.bucket} did not answer."
        return TransientError(f"given up: {why}")

    async def with_retries(
        self, what: str, where: str, attempt: Callable[[BytesMoved], Awaitable[_T]], *, small: bool = False
    ) -> _T:
        """The result of an attempt. Transient failures are retried until the deadline, others raised at once."""
        problem: StorageError | ConfigError
        retries: Retries | None = None
        moved = BytesMoved(self._note_progress)
        while True:
            async with self._small_slots if small else self._slots:
                if retries is None:  # time in the queue for a slot does not count
                    await self._make_client()
                    retries = self._retry_policy.start()
                try:
                    return await self._watched(attempt, moved)
                except Exception as error:
                    problem = translate_error(error, what, where, self.bucket)
            if not isinstance(problem, TransientError):
                raise problem  # not where `error` was caught: what is chained might quote a secret
            self._reached = self._reached or not isinstance(problem, UnreachedError)
            tries, pause = retries.tries, retries.next_pause(reached=self._reached)
            if pause is None:
                raise TransientError(f"{problem} Tried {tries} times.")
            self._last_problem = str(problem)
            await asyncio.sleep(pause)

    async def _make_client(self) -> None:
        """Read the description of S3, which takes seconds on a busy machine: no server is slow then."""
        with suppress(Exception):  # the attempt meets it again, and says what is wrong
            await asyncio.wait_for(self.fs.set_session(), self._retry_policy.stall)

    async def _watched(self, attempt: Callable[[BytesMoved], Awaitable[_T]], moved: BytesMoved) -> _T:
        """An attempt, cancelled when no byte has moved for `stall` seconds, or its time is over."""
        moved.count = 0
        task = asyncio.ensure_future(attempt(moved))
        try:
            while True:
                before = moved.count
                await asyncio.wait({task}, timeout=min(self._retry_policy.stall, time_left()))
                if task.done():
                    return task.result()
                if moved.count == before or not time_left():
                    raise asyncio.TimeoutError
        finally:
            await _stop({task})


async def gather_or_cancel(works: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """The results of all coroutines. If one fails, the others are cancelled before its error is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _stop(tasks)


async def _stop(tasks: Iterable[Any]) -> None:
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _open(options: dict[str, Any], policy: RetryPolicy) -> S3FileSystem:
    from aiobotocore.session import AioSession
    from s3fs import S3FileSystem

    unknown = unknown_options(options, S3FileSystem, AioSession)
    if unknown:
        raise ConfigError(f"s3:// does not take the storage_options {', '.join(unknown)}.")
    ours = {
        "retries": {"total_max_attempts": 1},  # `with_retries` does it, with a deadline
        "read_timeout": policy.stall,
        "connect_timeout": min(10.0, policy.stall),
        "connector_args": {"resolver": _resolver()},
        "http_session_cls": session_class(),
    }
    if "@" in str(options.get("endpoint_url", "")):
        raise ConfigError("the endpoint_url has a name or a password in it. Give them as key and secret.")
    _refuse_unknown_fields(options.get("s3_additional_kwargs"))
    options.setdefault("max_concurrency", _AT_ONCE)
    names = ", ".join(sorted(options))
    try:
        config = {
            "max_pool_connections": 2 * options["max_concurrency"] + _SMALL_AT_ONCE,
            **ours,
            **options.pop("config_kwargs", {}),
        }
        uncached = {"use_listings_cache": False, "skip_instance_cache": True}
        fs = S3FileSystem(**{**options, **uncached}, config_kwargs=config)
    except (TypeError, ValueError, KeyError) as error:
        kind = type(error).__name__
        raise ConfigError(f"s3fs does not take these storage_options ({kind}): {names}.") from None
    fs.retries = 1
    if fs.session is None:
        fs.session = fast_session(fs.kwargs)
    return fs


def _refuse_unknown_fields(fields: Any) -> None:
    """s3fs leaves out what a request does not take: with a misspelt name, nothing would be encrypted, for example."""
    if not fields:
        return
    if not is_settings(fields):
        raise ConfigError("storage_options: s3_additional_kwargs must be a dict of what requests of S3 take.")
    from botocore.session import get_session

    model = get_session().get_service_model("s3")
    known = {name for operation in _WRITES for name in model.operation_model(operation).input_shape.members}
    if unknown := sorted(fields.keys() - known):
        raise ConfigError(f"storage_options: no write of S3 takes the s3_additional_kwargs {', '.join(unknown)}.")


def _resolver() -> Any:
    """A resolver with its own threads: an executor refuses work when the program ends, during its last save."""
    from aiohttp.abc import AbstractResolver

    class Resolver(AbstractResolver):
        async def resolve(self, host: str, port: int = 0, family: int = socket.AF_UNSPEC) -> list[Any]:
            found = await _in_thread(lambda: socket.getaddrinfo(host, port, family, socket.SOCK_STREAM))
            return [
                {"hostname": host, "host": address[0], "port": port, "family": kind, "proto": proto, "flags": 0}
                for kind, _, proto, _, address in found
            ]

        async def close(self) -> None:
            """Nothing to close."""

    return Resolver()


async def _in_thread(call: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def work() -> None:
        try:
            result = call()
        except OSError as error:
            loop.call_soon_threadsafe(_settle, done, None, error)
        else:
            loop.call_soon_threadsafe(_settle, done, result, None)

    threading.Thread(target=work, name="ckpt-resolve", daemon=True).start()
    return await done


def _settle(done: asyncio.Future[Any], result: Any, error: OSError | None) -> None:
    if done.cancelled():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)

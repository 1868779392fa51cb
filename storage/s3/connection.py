"""Calls to S3 through s3fs, from any thread: retried, and cancelled when their caller is interrupted.

Sessions do not repeat what takes long. A page of a listing has a thousand timestamps: botocore guesses at the format of
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
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt.errors import ConfigError, StorageError, TransientError
from ckpt.storage.fsspec_stores import unknown_options
from ckpt.storage.retry import Retries, RetryPolicy, UnreachedError, time_left
from ckpt.storage.s3.errors import translate_error
from ckpt.storage.s3.http_session import session_class
from ckpt.util.option_values import is_settings

if TYPE_CHECKING:
    from s3fs import S3FileSystem


def fast_session(options: dict[str, Any]) -> Any:
    """A session of aiobotocore, built from the options for it, as s3fs would build it."""
    from aiobotocore.session import AioSession

    session = AioSession(**options)
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=parsed)
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

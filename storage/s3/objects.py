"""Objects in a bucket of S3, or of a server with the same API: read, listed, and written in a single request, in parts,
or as a copy inside the server.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt.errors import AbsentError, StorageError, TransientError
from ckpt.storage.base import ANY, Buffer, Entry, Unfinished, changed
from ckpt.storage.clouds.errors import strange_answer
from ckpt.storage.multipart import Body, scatter, split_into_parts
from ckpt.storage.s3.connection import BytesMoved, Connection, code_of, gather_or_cancel, not_deleted

if TYPE_CHECKING:
    import asyncio


COPIED_AT_ONCE = 256 << 20
_CONFLICTS = ("PreconditionFailed", "412")
_ABSENT = ("NoSuchKey", "404")
_TOKEN = "ckpt-write"  # noqa: S105  # metadata that identifies a write whose answer was lost


class Write:
    """A write of an object. Its token tells, after a lost answer, whether the object in the bucket is its own."""

    def __init__(self, s3: Connection, key: str, where: str, over: str | None) -> None:
        self._s3 = s3
        self._key = key
        self._where = where
        self._token = uuid.uuid4().hex
        self._condition = {} if over == ANY else {"IfNoneMatch": "*"} if over is None else {"IfMatch": over}

    async def put_whole(self, views: list[memoryview]) -> str:
        async def attempt(moved: BytesMoved) -> str:
            body = Body(views, moved) if views else b""
            named = {"Metadata": {_TOKEN: self._token}, **self._condition}
            return await self._send_once("put_object", Body=body, **named)

        return await self._s3.with_retries("write", self._where, attempt)

    def put_in_parts(self, parts: Iterable[list[memoryview]]) -> str:
        return self._in_parts(lambda upload: self._uploaded(upload, parts))

    def copy_in_parts(self, origin: dict[str, Any], size: int) -> None:
        self._in_parts(lambda upload: self._s3.run(self._copy_parts(upload, origin, size)))

    def _in_parts(self, sent: Callable[[str], list[dict[str, Any]]]) -> str:
        """An upload of the parts that `sent` has sent to it. Returns the version of the object."""
        named = {"Metadata": {_TOKEN: self._token}}
        upload = str(self._s3.run(self._request("create_multipart_upload", **named))["UploadId"])
        try:
            return self._s3.run(self._complete(upload, sent(upload)))
        except BaseException:
            with suppress(StorageError):  # `sweep` removes what is left
                self._s3.run(self._request("abort_multipart_upload", UploadId=upload))
            raise

    def _uploaded(self, upload: str, parts: Iterable[list[memoryview]]) -> list[dict[str, Any]]:
        """Upload parts as they come, several concurrently. No request is in flight when this returns or raises."""
        tasks: set[asyncio.Task[Any]] = set()
        running: set[Future[dict[str, Any]]] = set()
        done: list[dict[str, Any]] = []
        try:
            for number, views in enumerate(parts, 1):
                running.add(self._s3.start(self._upload_part(upload, number, views), tasks))
                if len(running) >= self._s3.at_once:
                    running = _collect_done(running, done)
            while running:
                running = _collect_done(running, done)
        except BaseException:
            self._s3.stop(tasks)
            raise
        return sorted(done, key=lambda part: int(part["PartNumber"]))

    async def _upload_part(self, upload: str, number: int, views: list[memoryview]) -> dict[str, Any]:
        async def attempt(moved: BytesMoved) -> dict[str, Any]:
            place = {"Key": self._key, "UploadId": upload, "PartNumber": number}
            return _completed_part(number, await self._s3.call("upload_part", Body=Body(views, moved), **place))

        return await self._s3.with_retries("write", self._where, attempt)

    async def _copy_parts(self, upload: str, origin: dict[str, Any], size: int) -> list[dict[str, Any]]:
        async def copy_part(number: int, start: int) -> dict[str, Any]:
            span = f"bytes={start}-{min(size, start + COPIED_AT_ONCE) - 1}"
            place = {"UploadId": upload, "PartNumber": number, "CopySourceRange": span}
            answer = await self._request("upload_part_copy", **place, **origin)
            return _completed_part(number, answer["CopyPartResult"])

        starts = range(0, size, COPIED_AT_ONCE)
        return await gather_or_cancel(copy_part(number, start) for number, start in enumerate(starts, 1))

    async def _complete(self, upload: str, parts: list[dict[str, Any]]) -> str:
        async def attempt(moved: BytesMoved) -> str:
            whole = {"UploadId": upload, "MultipartUpload": {"Parts": parts}, **self._condition}
            return await self._send_once("complete_multipart_upload", **whole)

        return await self._s3.with_retries("write", self._where, attempt)

    async def _send_once(self, method: str, **arguments: Any) -> str:
        """Send the request that makes the object appear, and return its version.

        When it is sent twice, by a retry or by a proxy, and the first has taken effect, the server reports a conflict
        that is none: the token of what is there decides.
        """
        try:
            return str((await self._s3.call(method, Key=self._key, **arguments))["ETag"])
        except Exception as error:
            failure, code = error, code_of(error)
        if code in (*_CONFLICTS, "NoSuchUpload", *_ABSENT) and (version := await self._own_version()):
            return version
        if code in _ABSENT and "IfMatch" in self._condition:  # the object was removed; some servers say 412
            raise changed(self._where)
        raise failure

    async def _own_version(self) -> str | None:
        """The version of the object in the bucket, if this write has made it."""
        try:
            there = await self._s3.call("head_object", Key=self._key)
        except Exception as error:
            if code_of(error) not in _ABSENT:
                raise
            return None
        return str(there["ETag"]) if there.get("Metadata", {}).get(_TOKEN) == self._token else None

    async def _request(self, method: str, **arguments: Any) -> Any:
        async def attempt(moved: BytesMoved) -> Any:
            return await self._s3.call(method, Key=self._key, **arguments)

        return await self._s3.with_retries("write", self._where, attempt)


def _completed_part(number: int, answer: Mapping[str, Any]) -> dict[str, Any]:
    """A part as `complete_multipart_upload` wants it: its tag, and the checksum that the server has compared."""
    sums = {name: value for name, value in answer.items() if name.startswith("Checksum") and name != "ChecksumType"}
    return {"PartNumber": number, "ETag": answer["ETag"], **sums}


def _collect_done(running: set[Future[dict[str, Any]]], done: list[dict[str, Any]]) -> set[Future[dict[str, Any]]]:
    """Wait for at least one, collect results, and return the futures that are still running."""
    ended, left = wait(running, return_when=FIRST_COMPLETED)
    done.extend(future.result() for future in ended)
    return left


_log = logging.getLogger("ckpt")
_DELETED_AT_ONCE = 1000
_READ_AT_ONCE = 8 << 20
_CHUNK = 1 << 20
_MOST_PAGES = 20_000  # of a thousand objects each: whoever lists more does not end
# where the next page of a list begins, and how it is asked for
_OBJECTS = {"NextContinuationToken": "ContinuationToken"}
_PARTS = {"NextPartNumberMarker": "PartNumberMarker"}
_UPLOADS = {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"}


class S3Objects:
    """`s3://bucket/prefix`."""

    def __init__(self, bucket: str, prefix: str, options: Mapping[str, Any]) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._s3 = Connection(bucket, options)
        self._has_warned = False  # of uploads

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def progress(self) -> int:
        return self._s3.progress

    def giving_up(self) -> AbstractContextManager[None]:
        return self._s3.giving_up()

    def put(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> str:
        parts = split_into_parts(pieces)
        first = next(parts, [])
        second = next(parts, None)
        write = Write(self._s3, self._prefix + key, self._where(key), over)
        if second is None:
            return self._s3.run(write.put_whole(first))
        return write.put_in_parts(itertools.chain([first, second], parts))

    def version(self, key: str) -> str | None:
        try:
            return str(self._head(key, "ETag"))
        except AbsentError:
            return None

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is not None and stop <= start:
            self._head(key, "ContentLength")
            return b""

        async def attempt(moved: BytesMoved) -> bytes:
            found = [chunk async for chunk in self._chunks(key, start, stop, moved)]
            return b"".join(found)

        return self._s3.run(self._s3.with_retries("read", self._where(key), attempt, small=True))

    def fill(self, key: str, start: int, buffers: list[memoryview]) -> int:
        return self._s3.run(self._fill_all(key, start, buffers))

    def copy(self, source: str, target: str) -> None:
        size = int(self._head(source, "ContentLength"))
        origin: dict[str, Any] = {"CopySource": {"Bucket": self._bucket, "Key": self._prefix + source}}
        write = Write(self._s3, self._prefix + target, self._where(target), ANY)
        if size <= COPIED_AT_ONCE:
            self._s3.run(self._request("copy_object", target, **origin))
        else:
            write.copy_in_parts(origin, size)

    def entries(self, prefix: str) -> Iterator[Entry]:
        for page in self._pages("list_objects_v2", _OBJECTS, Prefix=self._prefix + prefix):
            for found in _listed(page, "Contents", self.url):
                if not found["Key"].startswith(self._prefix + prefix):
                    raise strange_answer(self.url, "lists keys below another prefix than was asked for")
                if not found["Key"].endswith("/"):  # a placeholder for a folder, as consoles create them
                    yield Entry(found["Key"].removeprefix(self._prefix), found["Size"], found.get("ETag"))

    def _pages(self, method: str, markers: Mapping[str, str], key: str = "", **arguments: Any) -> Iterator[Any]:
        """The pages of a listing. `markers`: the fields that say where the next begins, and how it is asked for."""
        more: dict[str, Any] = {}
        for _ in range(_MOST_PAGES):
            page = self._s3.run(self._request(method, key, "list", **arguments, **more))
            yield page
            if not page.get("IsTruncated"):
                return
            following = {asked: page[given] for given, asked in markers.items() if page.get(given)}
            if not following or following == more:
                raise strange_answer(self._where(key), "says that its list continues, but not where")
            more = following
        raise strange_answer(self._where(key), f"lists without an end: more than {_MOST_PAGES:,} pages")

    def remove(self, keys: list[str]) -> None:
        for start in range(0, len(keys), _DELETED_AT_ONCE):
            some = keys[start : start + _DELETED_AT_ONCE]
            self._s3.run(self._s3.with_retries("delete", self.url, partial(self._remove, some)))

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        for key, upload, begun in self._uploads(self._prefix + prefix):
            with suppress(AbsentError):  # completed meanwhile
                yield Unfinished(key, self._size_of(key, upload), begun)

    def _size_of(self, key: str, upload: str) -> int:
        """The bytes of a multipart upload that have arrived."""
        pages = self._pages("list_parts", _PARTS, key, UploadId=upload)
        return sum(int(part["Size"]) for page in pages for part in page.get("Parts", ()))

    def abort(self, prefix: str, age: float) -> None:
        try:
            for key, upload, begun in list(self._uploads(self._prefix + prefix)):
                if begun >= age:
                    with suppress(AbsentError):
                        self._s3.run(self._request("abort_multipart_upload", key, UploadId=upload))
        except TransientError:
            raise
        except StorageError as error:
            self._warn_of_uploads(error)

    def _uploads(self, top: str) -> Iterator[tuple[str, str, float]]:
        """Unfinished multipart uploads: key, id, and age in seconds by the server's clock. None if it lists none."""
        try:
            yield from self._listed_uploads(top)
        except TransientError:
            raise
        except StorageError as error:  # housekeeping: a server may lack it, and credentials may not have the right
            self._warn_of_uploads(error)

    def _warn_of_uploads(self, error: StorageError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s: uploads that were cut off are not removed, and take room there until a rule of the bucket removes "
                "them: %s", self.url, error,
            )  # fmt: skip

    def _listed_uploads(self, top: str) -> Iterator[tuple[str, str, float]]:
        for page in self._pages("list_multipart_uploads", _UPLOADS, Prefix=top):
            for upload in _listed(page, "Uploads", self.url):
                if upload["Key"].startswith(top):
                    age = (_date(page) - upload["Initiated"]).total_seconds()
                    yield upload["Key"].removeprefix(self._prefix), upload["UploadId"], age

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}".rstrip("/")

    def _head(self, key: str, field: str) -> Any:
        """A field of what the server says about an object."""
        answer = self._s3.run(self._request("head_object", key, "read"))
        if answer.get(field) is None:
            raise strange_answer(self._where(key), f"does not give its {field}")
        return answer[field]

    async def _request(self, method: str, key: str, what: str = "write", **arguments: Any) -> Any:
        if key:
            arguments["Key"] = self._prefix + key

        async def attempt(moved: BytesMoved) -> Any:
            return await self._s3.call(method, **arguments)

        return await self._s3.with_retries(what, self._where(key), attempt, small=True)

    async def _remove(self, keys: list[str], moved: BytesMoved) -> None:
        listed = {"Objects": [{"Key": self._prefix + key} for key in keys], "Quiet": True}
        answer = await self._s3.call("delete_objects", Delete=listed)
        if answer.get("Errors"):
            raise not_deleted(answer["Errors"], self.url)

    async def _chunks(self, key: str, start: int, stop: int | None, moved: BytesMoved) -> AsyncIterator[bytes]:
        """The bytes of a range as they arrive; nothing if the object ends before `start`."""
        span = {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"} if start or stop is not None else {}
        try:
            answer = await self._s3.call("get_object", Key=self._prefix + key, **span)
        except Exception as error:
            if code_of(error) in ("InvalidRange", "416"):
                return
            raise
        if start and answer.get("ContentRange", "").partition("-")[0] != f"bytes {start}":
            raise strange_answer(self._where(key), "sends other bytes than the range that was asked for")
        left = None if stop is None else stop - start
        async with answer["Body"] as body:
            while chunk := await body.read(_CHUNK):
                moved.count += len(chunk)
                left = left if left is None else left - len(chunk)
                if left is not None and left < 0:
                    raise strange_answer(self._where(key), "sends more bytes than were asked for")
                yield chunk

    async def _fill_all(self, key: str, start: int, buffers: list[memoryview]) -> int:
        """Read several ranges concurrently. Returns how many bytes are missing at the end."""
        requests, at = [], start
        for views in split_into_parts(buffers, _READ_AT_ONCE):
            requests.append(self._fill_one(key, at, views))
            at += sum(map(len, views))
        return sum(await gather_or_cancel(requests))

    async def _fill_one(self, key: str, start: int, views: list[memoryview]) -> int:
        size = sum(map(len, views))

        async def attempt(moved: BytesMoved) -> int:
            left, got = list(views), 0
            async for chunk in self._chunks(key, start, start + size, moved):
                left, got = scatter(chunk, left), got + len(chunk)
            return size - got

        return await self._s3.with_retries("read", self._where(key), attempt)


def _listed(page: Mapping[str, Any], field: str, where: str) -> Iterable[Any]:
    """The objects or uploads of a page, each with its fields."""
    needed = {"Contents": ("Key", "Size"), "Uploads": ("Key", "UploadId", "Initiated")}[field]
    found = page.get(field, ())
    if any(item.get(name) is None for item in found for name in needed):
        raise strange_answer(where, f"lists without {' or '.join(needed)}")
    if any(item.get("Size", 0) < 0 for item in found):
        raise strange_answer(where, "lists objects of less than no bytes")
    return list(found)


def _date(answer: Mapping[str, Any]) -> datetime:
    """The time of the server's clock."""
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])

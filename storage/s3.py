"""Objects in a bucket of S3, or of anything that speaks its language."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from ckpt.errors import AbsentError, StorageError
from ckpt.storage.base import ANY, Buffer, Entry
from ckpt.storage.parts import Body, cut
from ckpt.storage.s3_connection import Connection, Moved, together
from ckpt.storage.s3_errors import code_of

if TYPE_CHECKING:
    import asyncio

_COPIED_AT_ONCE = 256 << 20
_DELETED_AT_ONCE = 1000
_READ_AT_ONCE = 8 << 20
_CHUNK = 1 << 20
_TOKEN = "ckpt-write"  # noqa: S105  # names a write, so that one whose answer was lost is known again


class S3Objects:
    """`s3://bucket/prefix`."""

    def __init__(self, bucket: str, prefix: str, options: Mapping[str, Any]) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._s3 = Connection(bucket, options)

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def put(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> str:
        parts = cut(pieces)
        first = next(parts, [])
        second = next(parts, None)
        write = _Write(self._s3, self._prefix + key, self._where(key), over)
        if second is None:
            return self._s3.run(write.at_once(first))
        return write.in_parts(first, second, parts)

    def version(self, key: str) -> str | None:
        try:
            return str(self._head(key)["ETag"])
        except AbsentError:
            return None

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is not None and stop <= start:
            self._head(key)
            return b""

        async def attempt(moved: Moved) -> bytes:
            found = [chunk async for chunk in self._chunks(key, start, stop, moved)]
            return b"".join(found)

        return self._s3.run(self._s3.tried("read", self._where(key), attempt))

    def fill(self, key: str, start: int, buffers: list[memoryview]) -> int:
        return self._s3.run(self._fill_all(key, start, buffers))

    def copy(self, source: str, target: str) -> None:
        size = int(self._head(source)["ContentLength"])
        origin: dict[str, Any] = {"CopySource": {"Bucket": self._bucket, "Key": self._prefix + source}}
        write = _Write(self._s3, self._prefix + target, self._where(target), ANY)
        if size <= _COPIED_AT_ONCE:
            self._s3.run(self._request("copy_object", target, **origin))
        else:
            write.copied(origin, size)

    def entries(self, prefix: str) -> Iterator[Entry]:
        more: dict[str, str] = {}
        while True:
            page = self._s3.run(self._request("list_objects_v2", "", "list", Prefix=self._prefix + prefix, **more))
            for one in page.get("Contents", ()):
                yield Entry(one["Key"].removeprefix(self._prefix), one["Size"])
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def remove(self, keys: list[str]) -> None:
        for start in range(0, len(keys), _DELETED_AT_ONCE):
            some = keys[start : start + _DELETED_AT_ONCE]
            listed = {"Objects": [{"Key": self._prefix + key} for key in some], "Quiet": True}
            answer = self._s3.run(self._request("delete_objects", "", "delete", Delete=listed))
            wrong = [f"{one.get('Key')} ({one.get('Code')})" for one in answer.get("Errors", ())]
            if wrong:
                raise StorageError(f"could not delete in {self.url}: {', '.join(wrong)}.")

    def abort(self, prefix: str, age: float) -> None:
        for key, upload, begun in list(self._uploads(self._prefix + prefix)):
            if begun >= age:
                with suppress(AbsentError):
                    self._s3.run(self._request("abort_multipart_upload", key, UploadId=upload))

    def _uploads(self, top: str) -> Iterator[tuple[str, str, float]]:
        """Unfinished uploads: their keys, their ids, and how many seconds ago they began, by the server's clock."""
        more: dict[str, str] = {}
        while True:
            page = self._s3.run(self._request("list_multipart_uploads", "", "list", Prefix=top, **more))
            for one in page.get("Uploads", ()):
                if one["Key"].startswith(top):
                    begun = (_date(page) - one["Initiated"]).total_seconds()
                    yield one["Key"].removeprefix(self._prefix), one["UploadId"], begun
            if not page.get("IsTruncated"):
                return
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}".rstrip("/")

    def _head(self, key: str) -> Any:
        return self._s3.run(self._request("head_object", key, "read"))

    async def _request(self, method: str, key: str, what: str = "write", **arguments: Any) -> Any:
        if key:
            arguments["Key"] = self._prefix + key

        async def attempt(moved: Moved) -> Any:
            return await self._s3.call(method, **arguments)

        return await self._s3.tried(what, self._where(key), attempt)

    async def _chunks(self, key: str, start: int, stop: int | None, moved: Moved) -> AsyncIterator[bytes]:
        """The bytes as they come. None where the object has ended before `start`."""
        span = {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"} if start or stop is not None else {}
        try:
            answer = await self._s3.call("get_object", Key=self._prefix + key, **span)
        except Exception as error:
            if code_of(error) in ("InvalidRange", "416"):
                return
            raise
        async with answer["Body"] as body:
            while chunk := await body.read(_CHUNK):
                moved.count += len(chunk)
                yield chunk

    async def _fill_all(self, key: str, start: int, buffers: list[memoryview]) -> int:
        """Several ranges at the same time. How many bytes are missing at the end."""
        requests, at = [], start
        for views in cut(buffers, _READ_AT_ONCE):
            requests.append(self._fill_one(key, at, views))
            at += sum(map(len, views))
        return sum(await together(requests))

    async def _fill_one(self, key: str, start: int, views: list[memoryview]) -> int:
        size = sum(map(len, views))

        async def attempt(moved: Moved) -> int:
            left, got = list(views), 0
            async for chunk in self._chunks(key, start, start + size, moved):
                left, got = _scatter(chunk, left), got + len(chunk)
            return size - got

        return await self._s3.tried("read", self._where(key), attempt)


class _Write:
    """One write of one object, which is known again when an answer was lost."""

    def __init__(self, s3: Connection, key: str, where: str, over: str | None) -> None:
        self._s3 = s3
        self._key = key
        self._where = where
        self._token = uuid.uuid4().hex
        self._condition = {} if over == ANY else {"IfNoneMatch": "*"} if over is None else {"IfMatch": over}
        self._tries = 0

    async def at_once(self, views: list[memoryview]) -> str:
        async def attempt(moved: Moved) -> str:
            body = Body(views, moved) if views else b""
            named = {"Metadata": {_TOKEN: self._token}, **self._condition}
            return await self._settled("put_object", Body=body, **named)

        return await self._s3.tried("write", self._where, attempt)

    def in_parts(self, first: list[memoryview], second: list[memoryview], rest: Iterable[list[memoryview]]) -> str:
        upload = self._begin()
        try:
            parts = self._uploaded(upload, first, second, rest)
            return self._s3.run(self._complete(upload, parts))
        except BaseException:
            self._give_up(upload)
            raise

    def copied(self, origin: dict[str, Any], size: int) -> None:
        upload = self._begin()
        try:
            parts = self._s3.run(self._copy_parts(upload, origin, size))
            self._s3.run(self._complete(upload, parts))
        except BaseException:
            self._give_up(upload)
            raise

    def _begin(self) -> str:
        named = {"Metadata": {_TOKEN: self._token}}
        return str(self._s3.run(self._request("create_multipart_upload", **named))["UploadId"])

    def _uploaded(
        self, upload: str, first: list[memoryview], second: list[memoryview], rest: Iterable[list[memoryview]]
    ) -> list[dict[str, Any]]:
        """Upload parts as they come, a few at the same time. Nothing is on its way when this returns or raises."""
        tasks: set[asyncio.Task[Any]] = set()
        running: set[Future[dict[str, Any]]] = set()
        done: list[dict[str, Any]] = []
        try:
            for number, views in enumerate(_chained(first, second, rest), 1):
                running.add(self._s3.start(self._upload_part(upload, number, views), tasks))
                if len(running) >= self._s3.at_once:
                    running = _collected(running, done)
            while running:
                running = _collected(running, done)
        except BaseException:
            self._s3.stop(tasks)
            raise
        return sorted(done, key=lambda part: int(part["PartNumber"]))

    async def _upload_part(self, upload: str, number: int, views: list[memoryview]) -> dict[str, Any]:
        async def attempt(moved: Moved) -> dict[str, Any]:
            place = {"Key": self._key, "UploadId": upload, "PartNumber": number}
            return _part(number, await self._s3.call("upload_part", Body=Body(views, moved), **place))

        return await self._s3.tried("write", self._where, attempt)

    async def _copy_parts(self, upload: str, origin: dict[str, Any], size: int) -> list[dict[str, Any]]:
        async def one(number: int, start: int) -> dict[str, Any]:
            span = f"bytes={start}-{min(size, start + _COPIED_AT_ONCE) - 1}"
            place = {"UploadId": upload, "PartNumber": number, "CopySourceRange": span}
            answer = await self._request("upload_part_copy", **place, **origin)
            return _part(number, answer["CopyPartResult"])

        starts = range(0, size, _COPIED_AT_ONCE)
        return await together(one(number, start) for number, start in enumerate(starts, 1))

    async def _complete(self, upload: str, parts: list[dict[str, Any]]) -> str:
        async def attempt(moved: Moved) -> str:
            whole = {"UploadId": upload, "MultipartUpload": {"Parts": parts}, **self._condition}
            return await self._settled("complete_multipart_upload", **whole)

        return await self._s3.tried("write", self._where, attempt)

    async def _settled(self, method: str, **arguments: Any) -> str:
        """The version after a request that counts once. If an earlier one has been heeded, that is no conflict."""
        self._tries += 1
        try:
            return str((await self._s3.call(method, Key=self._key, **arguments))["ETag"])
        except Exception as error:
            if self._tries == 1 or code_of(error) not in ("PreconditionFailed", "412", "NoSuchUpload", "404"):
                raise
            there = await self._s3.call("head_object", Key=self._key)
            if there.get("Metadata", {}).get(_TOKEN) != self._token:
                raise
            return str(there["ETag"])

    def _give_up(self, upload: str) -> None:
        with suppress(StorageError):  # what is left is swept later
            self._s3.run(self._request("abort_multipart_upload", UploadId=upload))

    async def _request(self, method: str, **arguments: Any) -> Any:
        async def attempt(moved: Moved) -> Any:
            return await self._s3.call(method, Key=self._key, **arguments)

        return await self._s3.tried("write", self._where, attempt)


def _part(number: int, answer: Mapping[str, Any]) -> dict[str, Any]:
    """What completes a part: its tag, and the checksum that the server has compared."""
    sums = {name: value for name, value in answer.items() if name.startswith("Checksum") and name != "ChecksumType"}
    return {"PartNumber": number, "ETag": answer["ETag"], **sums}


def _chained(
    first: list[memoryview], second: list[memoryview], rest: Iterable[list[memoryview]]
) -> Iterator[list[memoryview]]:
    yield first
    yield second
    yield from rest


def _collected(running: set[Future[dict[str, Any]]], done: list[dict[str, Any]]) -> set[Future[dict[str, Any]]]:
    """Wait for at least one, keep the results, and return those that go on."""
    ended, left = wait(running, return_when=FIRST_COMPLETED)
    done.extend(one.result() for one in ended)
    return left


def _scatter(chunk: bytes, views: list[memoryview]) -> list[memoryview]:
    """Copy bytes to the beginning of the views. Returns what is left of them."""
    data = memoryview(chunk)
    while data:
        count = min(len(data), len(views[0]))
        views[0][:count] = data[:count]
        data = data[count:]
        views = views[1:] if count == len(views[0]) else [views[0][count:], *views[1:]]
    return views


def _date(answer: Mapping[str, Any]) -> datetime:
    """What time it is for the server."""
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])

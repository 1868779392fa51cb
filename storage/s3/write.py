"""The write of an object to S3: in a single request, in parts, or as a copy inside the server."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ckpt.errors import StorageError
from ckpt.storage.base import ANY, changed
from ckpt.storage.multipart import Body
from ckpt.storage.s3.connection import BytesMoved, Connection, gather_or_cancel
from ckpt.storage.s3.errors import code_of

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

    def put_in_parts(self, first: list[memoryview], second: list[memoryview], rest: Iterable[list[memoryview]]) -> str:
        upload = self._begin()
        try:
            parts = self._uploaded(upload, first, second, rest)
            return self._s3.run(self._complete(upload, parts))
        except BaseException:
            self._give_up(upload)
            raise

    def copy_in_parts(self, origin: dict[str, Any], size: int) -> None:
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
        """Upload parts as they come, several concurrently. No request is in flight when this returns or raises."""
        tasks: set[asyncio.Task[Any]] = set()
        running: set[Future[dict[str, Any]]] = set()
        done: list[dict[str, Any]] = []
        try:
            for number, views in enumerate(_chain(first, second, rest), 1):
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

    def _give_up(self, upload: str) -> None:
        with suppress(StorageError):  # `sweep` removes what is left
            self._s3.run(self._request("abort_multipart_upload", UploadId=upload))

    async def _request(self, method: str, **arguments: Any) -> Any:
        async def attempt(moved: BytesMoved) -> Any:
            return await self._s3.call(method, Key=self._key, **arguments)

        return await self._s3.with_retries("write", self._where, attempt)


def _completed_part(number: int, answer: Mapping[str, Any]) -> dict[str, Any]:
    """A part as `complete_multipart_upload` wants it: its tag, and the checksum that the server has compared."""
    sums = {name: value for name, value in answer.items() if name.startswith("Checksum") and name != "ChecksumType"}
    return {"PartNumber": number, "ETag": answer["ETag"], **sums}


def _chain(
    first: list[memoryview], second: list[memoryview], rest: Iterable[list[memoryview]]
) -> Iterator[list[memoryview]]:
    yield first
    yield second
    yield from rest


def _collect_done(running: set[Future[dict[str, Any]]], done: list[dict[str, Any]]) -> set[Future[dict[str, Any]]]:
    """Wait for at least one, collect results, and return the futures that are still running."""
    ended, left = wait(running, return_when=FIRST_COMPLETED)
    done.extend(future.result() for future in ended)
    return left

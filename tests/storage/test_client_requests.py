"""What the clients of object stores ask for, request by request, and what they make of answers: without a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.asyn import get_loop

from ckpt.errors import AbsentError, DeniedError, StorageError, TransientError
from ckpt.storage import Entry
from ckpt.storage.base import LARGEST_DOCUMENT
from ckpt.storage.clouds import azure, gcs, s3
from ckpt.storage.clouds.azure import AzureClient, FolderError
from ckpt.storage.clouds.errors import CutError
from ckpt.storage.clouds.gcs import AnswerError, GcsClient, receive
from ckpt.storage.clouds.objects import WRITE
from ckpt.storage.clouds.s3 import S3Client, S3Objects
from ckpt.storage.multipart import Body
from ckpt.storage.retry import Requests, RetryPolicy


def body(data: bytes) -> Body:
    return Body([memoryview(data)])


class Retried:
    """Makes each attempt once, and counts them."""

    def __init__(self) -> None:
        self.large: list[bool] = []

    def __call__(self, attempt: Any, *, stopped: Any = None, is_large: bool = False) -> Any:
        self.large.append(is_large)
        return attempt()


class Bucket(S3Client):
    """A client whose requests are noted and answered by the test."""

    def __init__(self, **answers: Any) -> None:
        fs: Any = SimpleNamespace(loop=get_loop(), set_session=self._no_session)
        super().__init__("bucket", fs, Requests(RetryPolicy(deadline=0), "s3://bucket", 2))
        self.answers, self.asked = answers, list[tuple[str, dict[str, Any]]]()

    async def _no_session(self) -> None:
        pass

    async def send(self, method: str, **arguments: Any) -> Any:
        if isinstance(sent := arguments.get("Body"), Body):
            arguments["Body"] = sent.read()
        self.asked.append((method, arguments))
        answer = self.answers[method]
        answer = answer(arguments) if callable(answer) else answer
        if isinstance(answer, Exception):
            raise answer
        return answer


class TestS3Client:
    def test_a_request_begins_when_the_description_of_s3_has_been_read_which_takes_seconds(self) -> None:
        async def read_description() -> None:
            asked.append("description")

        def answer(arguments: object) -> dict[str, object]:
            asked.append("head")
            return {"ContentLength": 7, "ETag": '"v"'}

        asked: list[str] = []
        bucket = Bucket(head_object=answer)
        bucket.fs.set_session = read_description
        bucket.head("a")
        assert asked == ["description", "head"]

    def test_an_object_is_looked_at_and_written_in_one_request(self) -> None:
        head = {"ContentLength": "7", "ETag": '"v"', "Metadata": {"ckpt-write": "token"}}
        bucket = Bucket(head_object=head, put_object={"ETag": '"w"'})
        found = bucket.head("a/x")
        assert (found.size, found.version, found.token) == (7, '"v"', "token")
        bucket.answers["head_object"] = {"ContentLength": 7, "ETag": '"v"'}
        assert bucket.head("a/x").token is None
        moved = body(b"0123")
        moved.read(2)
        assert bucket.put("a/x", moved, '"v"', "t") == '"w"'
        assert bucket.put("a/y", body(b""), None, "t") == '"w"'
        assert bucket.asked[2:] == [
            ("put_object", {"Key": "a/x", "Body": b"0123", "Metadata": {"ckpt-write": "t"}, "IfMatch": '"v"'}),
            ("put_object", {"Key": "a/y", "Body": b"", "Metadata": {"ckpt-write": "t"}, "IfNoneMatch": "*"}),
        ]

    def test_a_large_object_is_written_in_numbered_parts_and_its_condition_is_that_of_the_last_request(self) -> None:
        bucket = Bucket(
            create_multipart_upload={"UploadId": "u"},
            upload_part=lambda given: {"ETag": f"e{given['PartNumber']}", "ChecksumCRC32": "c", "ChecksumType": "x"},
            complete_multipart_upload={"ETag": '"done"'},
        )
        retried: Any = Retried()
        assert bucket.put_in_parts("k", iter([body(b"01"), body(b"2")]), None, "t", retried) == '"done"'
        assert bucket.asked[0] == ("create_multipart_upload", {"Key": "k", "Metadata": {"ckpt-write": "t"}})
        parts = sorted(given["PartNumber"] for method, given in bucket.asked if method == "upload_part")
        assert parts == [1, 2]
        done = [{"PartNumber": n, "ETag": f"e{n}", "ChecksumCRC32": "c"} for n in (1, 2)]
        assert bucket.asked[-1] == (
            "complete_multipart_upload",
            {"Key": "k", "UploadId": "u", "MultipartUpload": {"Parts": done}, "IfNoneMatch": "*"},
        )
        assert sorted(retried.large) == [False, False, True, True]

    @pytest.mark.parametrize("aborted", [{}, StorageError("not allowed")])
    def test_an_upload_that_fails_is_aborted_and_its_error_raised(self, aborted: Any) -> None:
        bucket = Bucket(
            create_multipart_upload={"UploadId": "u"}, upload_part=TransientError("cut off"),
            abort_multipart_upload=aborted,
        )  # fmt: skip
        with pytest.raises(TransientError, match="cut off"):
            bucket.put_in_parts("k", iter([body(b"01")]), None, "t", Retried())
        assert bucket.asked[-1] == ("abort_multipart_upload", {"Key": "k", "UploadId": "u"})

    def test_a_copy_is_one_request_up_to_a_size_and_else_made_in_ranges(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(s3, "COPIED_AT_ONCE", 10)
        bucket = Bucket(
            copy_object={}, create_multipart_upload={"UploadId": "u"},
            upload_part_copy=lambda given: {"CopyPartResult": {"ETag": given["CopySourceRange"]}},
            complete_multipart_upload={"ETag": "e"},
        )  # fmt: skip
        source = {"Bucket": "bucket", "Key": "from"}
        bucket.copy("from", "to", 10, Retried())
        assert bucket.asked == [("copy_object", {"Key": "to", "CopySource": source})]
        bucket.copy("from", "to", 25, Retried())
        done = bucket.asked[-1][1]
        assert [part["ETag"] for part in done["MultipartUpload"]["Parts"]] == [
            "bytes=0-9",
            "bytes=10-19",
            "bytes=20-24",
        ]
        assert {given["Key"] for _, given in bucket.asked} == {"to"}
        assert all(given["CopySource"] == source for method, given in bucket.asked if method == "upload_part_copy")

    @pytest.mark.parametrize(
        ("start", "stop", "said", "found"),
        [
            (0, 4, None, b"0123"), (2, 6, "bytes 2-5/9", b"2345"), (2, 6, "bytes 0-3/9", None), (2, 6, "", None),
        ],
    )  # fmt: skip
    def test_a_range_is_read_in_chunks_and_must_be_the_one_that_was_asked_for(
        self, start: int, stop: int, said: str | None, found: bytes | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(s3, "_READ_CHUNK", 3)
        left = bytearray(b"012345678"[start:stop])

        class Stream:
            async def __aenter__(self) -> Stream:
                return self

            async def __aexit__(self, *_: object) -> None:
                pass

            async def read(self, size: int) -> bytes:
                chunk = bytes(left[:size])
                del left[:size]
                return chunk

        bucket, progress = Bucket(get_object={"Body": Stream(), "ContentRange": said or ""}), list[int]()
        monkeypatch.setattr(bucket._requests, "note_progress", lambda: progress.append(1))
        if found is None:
            with pytest.raises(StorageError, match="the endpoint"):
                bucket.read("k", start, stop, threading.Event())
        else:
            assert b"".join(bucket.read("k", start, stop, threading.Event())) == found
            assert len(progress) == 2
        assert bucket.asked == [("get_object", {"Key": "k", "Range": f"bytes={start}-{stop - 1}"})]

    def test_no_more_is_read_than_shows_that_too_much_is_sent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(s3, "_READ_CHUNK", 3)

        class Endless:
            async def __aenter__(self) -> Endless:
                return self

            async def __aexit__(self, *_: object) -> None:
                pass

            async def read(self, size: int) -> bytes:
                return b"x" * size

        bucket = Bucket(get_object={"Body": Endless(), "ContentRange": "bytes 6-11/20"})
        assert len(b"".join(bucket.read("k", 6, 12, threading.Event()))) == 9
        monkeypatch.setattr(s3, "LARGEST_DOCUMENT", 4)  # one is asked for whole, or no checksum is compared
        assert b"".join(bucket.read("k", 0, 5, threading.Event())) == b"xxxxx"
        assert bucket.asked[-1] == ("get_object", {"Key": "k"})

    def test_an_error_is_told_with_its_place(self) -> None:
        found = Bucket().translate(KeyError("ETag"), "read", "s3://bucket/k")
        assert isinstance(found, StorageError)
        assert "s3://bucket/k" in str(found)
        assert "ETag" in str(found)

    def test_beyond_the_end_there_is_nothing_and_other_errors_are_raised(self) -> None:
        from botocore.exceptions import ClientError

        for code, raised in (("InvalidRange", False), ("416", False), ("AccessDenied", True)):
            error = ClientError({"Error": {"Code": code}}, "GetObject")
            if raised:
                with pytest.raises(ClientError):
                    Bucket(get_object=error).read("k", 9, 12, threading.Event())
            else:
                assert Bucket(get_object=error).read("k", 9, 12, threading.Event()) == []

    def test_a_page_says_where_the_next_begins_if_there_is_one(self) -> None:
        bucket = Bucket(list_objects_v2={
            "IsTruncated": True, "NextContinuationToken": "n",
            "Contents": [{"Key": "a", "Size": 3, "ETag": "e"}, {"Key": "b", "Size": 0}],
        })  # fmt: skip
        entries, following = bucket.page("p/", None)
        assert [(entry.key, entry.size, entry.version) for entry in entries] == [("a", 3, "e"), ("b", 0, None)]
        assert following == {"ContinuationToken": "n"}
        bucket.answers["list_objects_v2"] = {"IsTruncated": False, "NextContinuationToken": "n", "Name": "bucket"}
        assert bucket.page("p/", following) == ([], None)
        assert bucket.asked[-1] == ("list_objects_v2", {"Prefix": "p/", "ContinuationToken": "n"})
        bucket.answers["list_objects_v2"] = {"html": "login"}
        with pytest.raises(StorageError, match="not a list of objects"):
            bucket.page("p/", None)
        bucket.answers["list_parts"] = {"Parts": [{"Size": 3}], "NextPartNumberMarker": 5}
        assert bucket.parts("k", "u", None) == ([{"Size": 3}], None)
        assert bucket.asked[-1] == ("list_parts", {"Key": "k", "UploadId": "u"})

    def test_uploads_are_as_old_as_the_servers_clock_says(self) -> None:
        begun = datetime(2026, 1, 1, tzinfo=timezone.utc)
        bucket = Bucket(list_multipart_uploads={
            "ResponseMetadata": {"HTTPHeaders": {"date": "Thu, 01 Jan 2026 00:01:00 GMT"}}, "IsTruncated": True,
            "NextKeyMarker": "k", "NextUploadIdMarker": "",
            "Uploads": [
                {"Key": "a", "UploadId": "1", "Initiated": begun}, {"Key": "", "UploadId": "2", "Initiated": begun},
                {"Key": "b", "UploadId": "", "Initiated": begun},
                {"Key": "c", "UploadId": "3", "Initiated": begun + timedelta(seconds=30)},
            ],
        })  # fmt: skip
        found, following = bucket.uploads("p/", None)
        assert [(upload["Key"], age) for upload, age in found] == [("a", 60.0), ("c", 30.0)]
        assert following == {"KeyMarker": "k"}

    def test_a_removal_that_the_server_did_not_make_is_an_error(self) -> None:
        bucket = Bucket(delete_objects={})
        bucket.remove(["a", "b"])
        assert bucket.asked == [
            ("delete_objects", {"Delete": {"Objects": [{"Key": "a"}, {"Key": "b"}], "Quiet": True}})
        ]
        for codes, kind in (
            (["SlowDown"], TransientError), ([""], TransientError), (["SlowDown", "AccessDenied"], StorageError),
        ):  # fmt: skip
            bucket.answers["delete_objects"] = {"Errors": [{"Key": f"k{n}", "Code": c} for n, c in enumerate(codes)]}
            with pytest.raises(StorageError, match="k0") as raised:
                bucket.remove(["k0"])
            assert type(raised.value) is kind

    def test_a_request_ends_when_its_caller_stops_or_all_are_given_up(self) -> None:
        import asyncio

        async def forever(*_: Any, **__: Any) -> None:
            await asyncio.sleep(600)

        bucket, stopped = Bucket(), threading.Event()
        bucket._requests = Requests(RetryPolicy(deadline=60), "s3://bucket", 2)
        bucket.send = forever  # type: ignore[method-assign]
        stopped.set()
        with pytest.raises(TransientError):
            bucket._call("x", stopped=stopped)
        waiting = threading.Timer(0.2, bucket.cancel_all)
        waiting.start()
        with pytest.raises(TransientError):
            bucket._call("x")
        waiting.join()
        assert bucket._running == set()


class TestS3Objects:
    @pytest.fixture
    def objects(self) -> Any:
        made: Any = S3Objects.__new__(S3Objects)
        made._has_warned, made._prefix, made._url = False, "run/", "s3://bucket/run"
        made._requests = Requests(RetryPolicy(deadline=0), "s3://bucket/run", 2)
        made.aborted = []
        uploads = [({"Key": key, "UploadId": key[-1]}, age) for key, age in (("run/a/1", 9.0), ("run/b/2", 5.0))]
        made._s3 = made._client = SimpleNamespace(
            uploads=lambda top, marker: (uploads, None),
            parts=lambda key, upload, marker: ([{"Size": "3"}, {"Size": 4}], None),
            abort=lambda key, upload: made.aborted.append((key, upload)),
            translate=lambda error, what, where: error,
        )
        return made

    def test_a_page_begins_after_a_key_and_says_whether_there_are_more(self, objects: Any) -> None:
        asked: list[Any] = []
        answers = [([Entry("run/a", 1)], {"token": "t"}), ([Entry("run/b", 2)], None)]

        def page(prefix: str, marker: Any) -> Any:
            asked.append((prefix, marker))
            return answers[len(asked) - 1]

        objects._s3.page = page
        assert objects.page("") == ([Entry("a", 1)], True)
        assert objects.page("a") == ([Entry("b", 2)], False)
        assert asked == [("run/", None), ("run/", {"StartAfter": "run/a"})]

    def test_uploads_that_were_cut_off_are_listed_with_their_bytes_below_a_prefix(self, objects: Any) -> None:
        assert [(one.key, one.size, one.age) for one in objects.unfinished("a/")] == [("a/1", 7, 9.0)]
        assert len(list(objects.unfinished(""))) == 2

        def completed(*_: Any) -> Any:
            raise AbsentError("completed")

        objects._s3.parts = completed
        assert list(objects.unfinished("")) == []

    def test_those_that_are_old_enough_are_aborted(self, objects: Any) -> None:
        objects.abort("", 9.0)
        assert objects.aborted == [("run/a/1", "1")]
        objects.abort("b/", 0.0)
        assert objects.aborted[1:] == [("run/b/2", "2")]

    def test_a_server_that_lists_none_is_warned_of_once_and_one_that_is_away_is_an_error(
        self, objects: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fails(*_: Any) -> Any:
            raise error

        objects._s3.uploads, error = fails, DeniedError("not allowed")
        for _ in range(2):
            objects.abort("", 0.0)
            assert list(objects.unfinished("")) == []
        assert caplog.text.count("not allowed") == 1
        error = TransientError("away")  # type: ignore[assignment]
        with pytest.raises(TransientError):
            objects.abort("", 0.0)
        with pytest.raises(TransientError):
            list(objects.unfinished(""))


class Blob:
    """A blob that notes what it is asked."""

    url = "https://account/container/from"

    def __init__(self, **answers: Any) -> None:
        self.answers, self.asked = answers, list[tuple[Any, ...]]()

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self.asked.append((name, *given, named))
            answer = self.answers[name]
            answer = answer.pop(0) if isinstance(answer, list) else answer
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


def test_an_answer_that_was_too_long_is_found_in_whatever_wraps_it() -> None:
    endless = s3.EndlessError("too long")
    for caused, met in ((endless, None), (None, endless), (endless, ValueError("met while it was handled"))):
        wrapped = ValueError("wrapped")
        wrapped.__cause__, wrapped.__context__ = caused, met
        outer = KeyError("outer")
        outer.__context__ = wrapped
        for error in (endless, wrapped, outer):
            assert s3._endless(error) is endless
    assert s3._endless(ValueError("another")) is None


@pytest.mark.parametrize(
    ("wanted", "sent", "ok", "most"),
    [
        ("bytes=5-9", "bytes 5-9/20", True, 5), ("bytes=5-9", "bytes 4-9/20", True, None),
        ("bytes=5-9", "", True, None),
        ("bytes=5-9", "", False, 5), ("bytes=0-9", "", True, 10),
        (None, "", True, LARGEST_DOCUMENT - azure._SLACK),
        ("bytes=50-", "", True, LARGEST_DOCUMENT - azure._SLACK),
    ],
)  # fmt: skip
@pytest.mark.parametrize("header", ["x-ms-range", "Range"])
def test_of_an_answer_of_azure_no_more_is_read_than_was_asked_for(
    header: str, wanted: str | None, sent: str, ok: bool, most: int | None
) -> None:
    class Raw:
        closed = 0

        def close(self) -> None:
            self.closed += 1

        def stream(self, size: int) -> Iterator[bytes]:
            yield from (bytes(1), bytes(size - 1))

    raw = Raw()
    request = SimpleNamespace(headers={header: wanted} if wanted else {})
    response = SimpleNamespace(request=request, headers={"Content-Range": sent}, ok=ok, raw=raw, close=raw.close)
    if most is None:
        with pytest.raises(StorageError, match="sent a different range of bytes"):
            azure._bound(response)
        assert (raw.closed, response.raw) == (1, raw)
        return
    azure._bound(response)
    most += azure._SLACK
    assert sum(map(len, response.raw.stream(most))) == most
    assert raw.closed == 0
    with pytest.raises(StorageError, match=f"more than the {most:,} bytes"):
        list(response.raw.stream(most + 1))
    assert raw.closed == 1


def azure_client(blob: Blob) -> AzureClient:
    container = SimpleNamespace(get_blob_client=lambda key: blob)
    return AzureClient(SimpleNamespace(get_container_client=lambda name: container), "container", 2, 60.0)


class TestAzure:
    def test_an_object_is_looked_at_and_a_folder_is_none(self) -> None:
        for metadata, token in ((None, None), ({}, None), ({WRITE: "t"}, "t")):
            found = azure_client(Blob(get_blob_properties=SimpleNamespace(size=3, etag="e", metadata=metadata))).head(
                "k"
            )
            assert (found.size, found.version, found.token) == (3, "e", token)
        folder = SimpleNamespace(size=0, etag="e", metadata={"hdi_isfolder": "true"})
        with pytest.raises(FolderError):
            azure_client(Blob(get_blob_properties=folder)).head("k")
        cut = SimpleNamespace(size=3, etag=None, metadata=None)
        with pytest.raises(CutError):
            azure_client(Blob(get_blob_properties=cut)).head("k")

    def test_a_write_has_the_condition_of_the_version(self) -> None:
        from azure.core import MatchConditions

        for over, named in (
            (None, {"overwrite": False}),
            ("*", {"overwrite": True}),
            ("v", {"overwrite": True, "etag": "v", "match_condition": MatchConditions.IfNotModified}),
        ):
            blob = Blob(upload_blob={"etag": "new"})
            assert azure_client(blob).put("k", body(b"0123"), over, "t") == "new"
            assert blob.asked == [("upload_blob", b"0123", {"length": 4, "metadata": {WRITE: "t"}, **named})]
        assert azure._condition(None) == {"match_condition": MatchConditions.IfMissing}

    def test_blocks_have_names_of_their_writer_and_are_committed_in_order(self) -> None:
        blob, retried = Blob(stage_block=None, commit_block_list={"etag": "new"}), Retried()
        parts: Iterator[Body] = iter([body(b"01"), body(b"2")])
        assert azure_client(blob).put_in_parts("k", parts, "*", "token", retried) == "new"
        staged = [call[1] for call in blob.asked if call[0] == "stage_block"]
        assert len(set(staged)) == 2
        _, blocks, named = blob.asked[-1]
        assert [block.id for block in blocks] == sorted(staged)
        assert named == {"metadata": {WRITE: "token"}}
        assert sorted(retried.large) == [False, True, True]

    def test_a_range_is_read_and_an_empty_answer_is_looked_at_again(self) -> None:
        from azure.core.exceptions import HttpResponseError

        there = SimpleNamespace(size=3, etag="e", metadata=None)

        def refused(status: int) -> HttpResponseError:
            error = HttpResponseError("x")
            error.status_code = status
            return error

        for start, stop, length in ((0, 4, 4), (2, 6, 4)):
            blob = Blob(download_blob=SimpleNamespace(readall=lambda: b"data"))
            assert azure_client(blob).read("k", start, stop, threading.Event()) == [b"data"]
            assert blob.asked == [("download_blob", {"offset": start, "length": length})]
        empty = Blob(download_blob=SimpleNamespace(readall=lambda: b""), get_blob_properties=there)
        beyond = Blob(download_blob=refused(416), get_blob_properties=there)
        for blob in (empty, beyond):
            assert azure_client(blob).read("k", 5, 6, threading.Event()) == [b""]
            assert blob.asked[-1][0] == "get_blob_properties"
        with pytest.raises(HttpResponseError):
            azure_client(Blob(download_blob=refused(500))).read("k", 0, 1, threading.Event())

    def test_a_copy_is_waited_for_and_given_up_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(azure, "_COPY_POLL", 0.0)

        def state(status: str) -> Any:
            return SimpleNamespace(copy=SimpleNamespace(status=status))

        def begun(status: str) -> dict[str, str]:
            return {"copy_status": status, "copy_id": "c"}

        blob = Blob(start_copy_from_url=begun("success"))
        azure_client(blob).copy("a", "b", 3, Retried())
        assert blob.asked == [("start_copy_from_url", Blob.url, {})]
        slow = Blob(start_copy_from_url=begun("pending"), get_blob_properties=[state("pending"), state("success")])
        azure_client(slow)._copy("a", "b")
        assert [call[0] for call in slow.asked[1:]] == ["get_blob_properties"] * 2
        failed = Blob(start_copy_from_url=begun("failed"))
        with pytest.raises(StorageError, match="failed"):
            azure_client(failed)._copy("a", "b")
        assert len(failed.asked) == 1
        late = Blob(start_copy_from_url=begun("pending"), abort_copy=None)
        given_up = azure_client(late)
        given_up._deadline = -1.0
        with pytest.raises(StorageError, match="pending"):
            given_up._copy("a", "b")
        assert late.asked[-1] == ("abort_copy", "c", {})

    def test_what_is_gone_is_removed_and_other_errors_are_raised(self) -> None:
        from azure.core.exceptions import HttpResponseError, ResourceNotFoundError

        for kind, code, raised in (
            (ResourceNotFoundError, "BlobNotFound", False), (ResourceNotFoundError, "ContainerNotFound", True),
            (HttpResponseError, "DirectoryIsNotEmpty", False), (HttpResponseError, "InternalError", True),
        ):  # fmt: skip
            error: Any = kind("x")
            error.error_code = code
            if raised:
                with pytest.raises(kind):
                    azure_client(Blob(delete_blob=error)).remove(["k"])
            else:
                azure_client(Blob(delete_blob=error)).remove(["k"])


class Response:
    """An answer over HTTP, its body still to come."""

    def __init__(self, status: int = 200, data: Any = b"", **headers: str) -> None:
        self.status_code = status
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.headers = {"Content-Length": str(len(content))} | {key.replace("_", "-"): v for key, v in headers.items()}
        self.raw = SimpleNamespace(read=lambda most: content[:most], version=11)

    def __enter__(self) -> Response:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Session:
    """Answers requests in turn, and notes them."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), list[dict[str, Any]]()

    def request(self, method: str, address: str, **given: Any) -> Any:
        if isinstance(given.get("data"), Body):
            given["data"] = given["data"].read()
        self.asked.append({"method": method, "address": address.removeprefix("http://gcs"), **given})
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def put(self, address: str, **given: Any) -> Any:
        return self.request("PUT", address, **given)

    def delete(self, address: str, **given: Any) -> Any:
        return self.request("DELETE", address, **given)


def gcs_client(*answers: Any) -> tuple[GcsClient, Session]:
    session = Session(*answers)
    return GcsClient(session, "http://gcs", "my bucket", {"userProject": "p"}, 7.0), session


OBJECTS, UPLOADS = "/storage/v1/b/my%20bucket/o", "/upload/storage/v1/b/my%20bucket/o"
WRITTEN = {"size": "4", "generation": 5}


class TestGcs:
    def test_an_object_is_looked_at_by_its_quoted_name(self) -> None:
        made, session = gcs_client(Response(data={**WRITTEN, "metadata": {WRITE: "t"}}), Response(data=WRITTEN))
        found = made.head("a/x y")
        assert (found.size, found.version, found.token) == (4, "5", "t")
        assert made.head("a").token is None
        first = session.asked[0]
        assert (first["method"], first["address"], first["timeout"]) == ("GET", f"{OBJECTS}/a%2Fx%20y", 7.0)
        assert first["params"] == {"fields": "generation,size,metadata", "userProject": "p"}
        assert (first["allow_redirects"], first["stream"]) == (False, True)
        assert first["headers"] == {"Accept-Encoding": "identity"}

    @pytest.mark.parametrize(
        ("over", "condition"), [(None, {"ifGenerationMatch": "0"}), ("*", {}), ("5", {"ifGenerationMatch": "5"})]
    )
    def test_a_write_has_the_condition_of_the_version(self, over: str | None, condition: dict[str, str]) -> None:
        made, session = gcs_client(Response(data=WRITTEN))
        assert made.put("k", body(b"0123"), over, "t") == "5"
        (asked,) = session.asked
        assert (asked["method"], asked["address"]) == ("POST", UPLOADS)
        fields = {"uploadType": "multipart", "fields": "generation,size,metadata", "userProject": "p"}
        assert asked["params"] == {**fields, **condition}
        boundary = asked["headers"]["Content-Type"].partition("boundary=")[2].encode()
        assert asked["data"].count(b"--" + boundary) == 3
        assert b"\r\n\r\n0123\r\n--" in asked["data"]
        assert json.dumps({WRITE: "t"}).encode() in asked["data"]

    def test_a_version_of_another_store_is_a_conflict(self) -> None:
        made, session = gcs_client()
        with pytest.raises(AnswerError) as raised:
            made.put("k", body(b""), '"etag"', "t")
        assert (raised.value.status, session.asked) == (412, [])

    def test_parts_follow_each_other_and_the_last_says_how_many_bytes_there_are(self) -> None:
        begun = Response(Location="http://elsewhere/up?id=1")
        made, session = gcs_client(begun, Response(308, Range="bytes=0-3"), Response(data=WRITTEN))
        retried = Retried()
        assert made.put_in_parts("k", iter([body(b"0123"), body(b"45")]), "*", "t", retried) == "5"
        assert [asked["address"] for asked in session.asked] == [UPLOADS, "/up?id=1", "/up?id=1"]
        assert [asked["headers"].get("Content-Range") for asked in session.asked[1:]] == ["bytes 0-3/*", "bytes 4-5/6"]
        assert [asked["data"] for asked in session.asked[1:]] == [b"0123", b"45"]
        assert retried.large == [False, True, True]

    def test_an_upload_that_fails_is_given_up_and_one_without_an_end_is_an_error(self) -> None:
        begun = Response(Location="http://gcs/up?id=1")
        made, session = gcs_client(begun, Response(404), OSError("away"))
        with pytest.raises(AnswerError):
            made.put_in_parts("k", iter([body(b"0123")]), "*", "t", Retried())
        assert session.asked[-1]["method"] == "DELETE"
        made, _ = gcs_client(begun, Response(308, Range="bytes=0-3"))
        with pytest.raises(StorageError, match="k"):
            made.put_in_parts("k", iter([body(b"0123")]), "*", "t", Retried())

    def test_a_page_says_where_the_next_begins_if_there_is_one(self) -> None:
        items = [{"name": "a", "size": "3", "generation": 7}]
        made, session = gcs_client(Response(data={"items": items, "nextPageToken": "n"}), Response(data={}))
        (entry,), following = made.page("p/", None)
        assert (entry.key, entry.size, entry.version, following) == ("a", 3, "7", "n")
        assert made.page("p/", "n") == ([], None)
        assert "pageToken" not in session.asked[0]["params"]
        assert session.asked[1]["params"]["pageToken"] == "n"
        assert session.asked[1]["address"] == OBJECTS

    def test_what_is_gone_is_removed_and_other_errors_are_raised(self) -> None:
        made, session = gcs_client(Response(204), Response(404), Response(403))
        made.remove(["a"])
        made.remove(["a"])
        with pytest.raises(AnswerError):
            made.remove(["a"])
        assert {asked["method"] for asked in session.asked} == {"DELETE"}

    def test_an_answer_that_is_cut_off_or_too_long_is_none(self) -> None:
        assert receive(Response(data=b"0123"), 4).body == b"0123"
        with pytest.raises(StorageError):
            receive(Response(data=b"0123"), 3)
        with pytest.raises(CutError):
            receive(Response(data=b"0123", Content_Length="5"), 9)
        for headers, status, version, cut in (
            ({}, 200, 11, True), ({}, 200, 10, False), ({}, 204, 11, False), ({"Connection": "close"}, 200, 11, False),
            ({"Connection": "keep-alive"}, 200, 11, True), ({"Transfer-Encoding": "chunked"}, 200, 11, False),
        ):  # fmt: skip
            response: Any = Response(status)
            response.headers, response.raw.version = headers, version
            assert gcs._is_cut(response, 0) == cut, (headers, status, version)

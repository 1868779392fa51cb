"""What the clients of object stores make of answers and errors, without a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.errors import AbsentError, ConfigError, ConflictError, DeniedError, FullError, StorageError, TransientError
from ckpt.storage import Entry, multipart
from ckpt.storage.clouds import azure, gcs, objects, s3
from ckpt.storage.clouds.azure import AzureClient
from ckpt.storage.clouds.errors import Advice, from_answer
from ckpt.storage.clouds.gcs import Answer, AnswerError, GcsClient, receive, successful
from ckpt.storage.clouds.objects import CloudObjects, Head, several
from ckpt.storage.clouds.s3 import translate_error
from ckpt.storage.multipart import Body
from ckpt.storage.retry import Requests, RetryPolicy, UnreachedError


class Store:
    """A client of a store in this process, whose answers a test may lose."""

    removed_at_once = 2

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, str, str]] = {}  # content, version, token
        self.asked: list[tuple[Any, ...]] = []
        self.fails: list[Exception] = []  # after the request has taken effect

    def _version(self, key: str) -> str | None:
        return self.objects[key][1] if key in self.objects else None

    def head(self, key: str) -> Head:
        if key not in self.objects:
            raise AbsentError(f"{key} does not exist.")
        content, version, token = self.objects[key]
        return Head(len(content), version, token)

    def put(self, key: str, body: Body, over: str | None, token: str) -> str:
        self.asked.append(("put", key, len(body)))
        body.seek(0)
        return self._store(key, body.read(), over, token)

    def put_in_parts(self, key: str, parts: Iterator[Body], over: str | None, token: str, retried: Any) -> str:
        content = [retried(part.read) for part in parts]
        self.asked.append(("parts", key, *map(len, content)))
        return self._store(key, b"".join(content), over, token)

    def _store(self, key: str, content: bytes, over: str | None, token: str) -> str:
        if over != "*" and over != self._version(key):
            raise ConflictError(key)
        self.objects[key] = (content, f"v{len(self.asked)}", token)
        if self.fails:
            raise self.fails.pop(0)
        return self.objects[key][1]

    def read(self, key: str, start: int, stop: int, stopped: threading.Event) -> list[bytes]:
        self.asked.append(("read", key, start, stop))
        self.head(key)
        found = self.objects[key][0][start:stop]
        return [found[:3], found[3:]]

    def copy(self, source: str, target: str, size: int, retried: Any) -> None:
        self.asked.append(("copy", source, target, size))
        self.objects[target] = self.objects[source]

    def page(self, prefix: str, marker: str | None) -> tuple[list[Entry], str | None]:
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > (marker or ""))
        entries = [Entry(key, len(self.objects[key][0]), self.objects[key][1]) for key in keys[:2]]
        return entries, keys[1] if len(keys) > 2 else None

    def remove(self, keys: list[str]) -> None:
        self.asked.append(("remove", *keys))
        for key in keys:
            self.objects.pop(key, None)

    def translate(self, error: Exception, what: str, where: str) -> StorageError | None:
        return None


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def cloud(store: Store) -> CloudObjects:
    return CloudObjects("az://container/run", "run", store, Requests(RetryPolicy(deadline=0), "az://container/run"))


class TestObjects:
    def test_small_objects_are_one_request_and_large_ones_come_in_parts(
        self, cloud: CloudObjects, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(multipart, "PART_SIZE", 4)
        monkeypatch.setattr(
            objects, "split_into_parts", lambda pieces, size=4: multipart.split_into_parts(pieces, size)
        )
        for content, asked in ((b"", ("put", "run/a", 0)), (b"1234", ("put", "run/a", 4))):
            cloud.put("a", iter([content]))
            assert store.asked[-1] == asked
        cloud.put("b", iter([b"123456789"]))
        assert store.asked[-1] == ("parts", "run/b", 4, 4, 1)
        assert cloud.get("b") == b"123456789"

    def test_a_write_whose_answer_was_lost_is_known_by_its_token(self, cloud: CloudObjects, store: Store) -> None:
        for error in (ConflictError("lost"), AbsentError("lost")):
            store.fails = [error]
            assert cloud.put("a", [b"ours"], over=cloud.version("a")) == cloud.version("a")
        theirs, failures = store.objects["run/a"], list[Exception]()

        def taken(key: str, content: bytes, over: str | None, token: str) -> str:
            store.objects["run/a"] = theirs
            raise failures.pop()

        store._store = taken  # type: ignore[method-assign]
        for failure, over, kind in (
            (ConflictError("x"), None, ConflictError), (ConflictError("x"), "v1", ConflictError),
            (AbsentError("gone"), "*", AbsentError), (AbsentError("gone"), None, AbsentError),
            (AbsentError("gone"), "v1", ConflictError),
        ):  # fmt: skip
            failures.append(failure)
            with pytest.raises(kind) as caught:
                cloud.put("a", [b"ours"], over=over)
            assert type(caught.value) is kind
        store.objects.clear()

        def absent(key: str, content: bytes, over: str | None, token: str) -> str:
            raise AbsentError("gone")

        store._store = absent  # type: ignore[method-assign]
        with pytest.raises(ConflictError, match="az://container/run/a has changed"):
            cloud.put("a", [b"ours"], over="v1")

    def test_ranges_are_read_as_they_were_asked_for(
        self, cloud: CloudObjects, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cloud.put("a", [b"0123456789"])
        for start, stop, expected in (
            (0, None, b"0123456789"),
            (2, 5, b"234"),
            (8, 20, b"89"),
            (3, 3, b""),
            (5, 2, b""),
        ):
            assert cloud.get("a", start, stop) == expected
        with pytest.raises(AbsentError):
            cloud.get("absent", 3, 3)
        store.asked.clear()
        monkeypatch.setattr(objects, "_READ_AT_ONCE", 4)
        monkeypatch.setattr(multipart, "_CHUNK", 1)
        buffers = [bytearray(3), bytearray(6)]
        assert cloud.fill("a", 1, [memoryview(buffer) for buffer in buffers]) == 0
        assert b"".join(buffers) == b"123456789"
        assert sorted(store.asked) == [("read", "run/a", at, min(at + 4, 10)) for at in (1, 5, 9)]
        assert cloud.fill("a", 8, [memoryview(bytearray(5))]) == 3
        store.read = lambda *_: [b"0123", b"4"]  # type: ignore[method-assign]
        assert cloud.get("a", 0, 5) == b"01234"
        with pytest.raises(StorageError, match="sent more bytes than ckpt asked for"):
            cloud.get("a", 0, 4)
        with pytest.raises(StorageError):
            cloud.get("a", 4, 8)

    def test_listings_go_over_all_pages_and_leave_placeholders_out(self, cloud: CloudObjects, store: Store) -> None:
        for key in ("run/a", "run/b/c", "run/b/", "run/d", "run/empty", "running/x"):
            store.objects[key] = (b"" if key == "run/empty" else b"12", "v", "t")
        assert {(entry.key, entry.size, entry.version) for entry in cloud.entries("")} == {
            ("a", 2, "v"), ("b/c", 2, "v"), ("d", 2, "v"), ("empty", 0, "v"),
        }  # fmt: skip
        assert [entry.key for entry in cloud.entries("b/")] == ["b/c"]
        store.page = lambda prefix, marker: ([], f"{marker or ''}x")  # type: ignore[method-assign]
        objects_most, objects._MOST_PAGES = objects._MOST_PAGES, 5
        try:
            with pytest.raises(StorageError, match="sent an endless list: more than 5 pages"):
                list(cloud.entries(""))
        finally:
            objects._MOST_PAGES = objects_most

    def test_copies_and_removals_ask_for_what_they_are_told(self, cloud: CloudObjects, store: Store) -> None:
        cloud.put("a", [b"123"])
        cloud.copy("a", "b")
        assert store.asked[-1] == ("copy", "run/a", "run/b", 3)
        store.asked.clear()
        cloud.remove(list("abcde"))
        assert sorted(store.asked) == [
            ("remove", "run/a", "run/b"), ("remove", "run/c", "run/d"), ("remove", "run/e"),
        ]  # fmt: skip
        assert list(cloud.unfinished("")) == []

    def test_of_several_calls_the_first_error_ends_the_others(self) -> None:
        assert several(lambda item, _: item * 2, range(7), 3, "test") == [0, 2, 4, 6, 8, 10, 12]
        stops: list[bool] = []

        def call(item: int, stopped: threading.Event) -> None:
            if item == 0:
                raise ZeroDivisionError
            stops.append(stopped.wait(60))

        with pytest.raises(ZeroDivisionError):
            several(call, range(2), 2, "test")
        assert stops == [True]


class TestS3:
    def test_an_error_of_the_client_says_what_to_check(self) -> None:
        from botocore import exceptions

        def answer(code: str, status: int) -> Any:
            metadata: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
            return exceptions.ClientError(metadata, "PutObject")

        where = {"endpoint_url": "https://host"}
        cases: list[tuple[Exception, type[Exception], str]] = [
            (answer("RequestTimeTooSkewed", 403), StorageError, "Set this machine's clock"),
            (answer("PermanentRedirect", 301), StorageError, "The bucket is in another region"),
            (answer("AccessDenied", 403), DeniedError, ""),
            (answer("SlowDown", 503), TransientError, ""),
            (exceptions.SSLError(error="x", **where), UnreachedError, "no secure connection"),
            (exceptions.NoCredentialsError(), DeniedError, ""),
            (exceptions.ProfileNotFound(profile="p"), ConfigError, "has no such profile"),
            (ValueError("Invalid endpoint: x"), ConfigError, "no URL"),
            (ValueError("something"), ConfigError, "ValueError. Check storage_options and the URL"),
            (exceptions.EndpointConnectionError(**where), UnreachedError, ""),
            (exceptions.ConnectTimeoutError(**where), UnreachedError, ""),
            (ConnectionRefusedError(), UnreachedError, ""),
            (ConnectionResetError(), TransientError, ""),
            (exceptions.ReadTimeoutError(**where), TransientError, ""),
            (KeyError("ETag"), StorageError, "an answer without 'ETag', which S3 never does"),
            (RuntimeError("x"), StorageError, "could not write s3://bucket/key: RuntimeError."),
        ]
        for error, kind, text in cases:
            wrapped = OSError("as s3fs says it")
            wrapped.__cause__ = error
            found = translate_error(error, "write", "s3://bucket/key", "bucket")
            assert type(found) is kind or (text == "" and isinstance(found, kind)), (error, found)
            assert text in str(found)
            assert "s3://bucket/key" in str(found)
            if isinstance(error, exceptions.SSLError | exceptions.ClientError):
                assert str(translate_error(wrapped, "write", "s3://bucket/key", "bucket")) == str(found)

    def test_tasks_are_ended_and_waited_for(self) -> None:
        ended: list[str] = []

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("cancelled")

        async def main() -> None:
            tasks = [asyncio.ensure_future(work()) for _ in range(2)]
            await asyncio.sleep(0)
            await s3._end(tasks)
            assert all(task.cancelled() for task in tasks)

        asyncio.run(asyncio.wait_for(main(), 30))
        assert ended == ["cancelled", "cancelled"]

    def test_conditions_are_those_of_the_version(self) -> None:
        assert s3._condition("*") == {}
        assert s3._condition(None) == {"IfNoneMatch": "*"}
        assert s3._condition('"v"') == {"IfMatch": '"v"'}


def client(**attributes: Any) -> Any:
    """A client of GCS that has asked nobody for credentials."""
    made: Any = GcsClient.__new__(GcsClient)
    vars(made).update({"_advice": Advice("bucket 'b'", "", ""), "_inside": "/b/b/o", **attributes})
    return made


class TestGcs:
    def test_an_answer_is_a_success_below_300_and_else_an_error_with_its_first_reason(self) -> None:
        for status in (200, 204, 299):
            assert successful(Answer(status, {}, b"x")).body == b"x"
        body = b'{"error": {"errors": [{"reason": "backendError"}, {"reason": "other"}]}}'
        for status, data, code in (
            (300, body, "backendError"), (503, body, "backendError"), (404, b"{}", ""), (404, b"<html>", ""),
            (404, b"", ""),
            (404, b'{"error": {"errors": []}}', ""), (404, b'{"error": null}', ""),
        ):  # fmt: skip
            with pytest.raises(AnswerError) as caught:
                successful(Answer(status, {}, data))
            assert (caught.value.status, caught.value.code) == (status, code)

    def test_a_connection_is_given_back_when_its_answer_was_read(self) -> None:
        left: list[object] = []

        class Response:
            status_code, headers = 200, {"Content-Length": "3"}
            raw = SimpleNamespace(read=lambda _: b"123", version=11)

            def __enter__(self) -> None:
                pass

            def __exit__(self, *_: object) -> None:
                left.append(self)

        assert receive(Response()).body == b"123"
        assert len(left) == 1

    def test_an_error_of_the_network_or_of_an_answer_is_one_of_the_storage(self) -> None:
        from google.auth import exceptions
        from requests import exceptions as network
        from urllib3.exceptions import ProtocolError

        cases: list[tuple[Exception, str, type[Exception] | None]] = [
            (AnswerError(404, ""), "write", StorageError), (AnswerError(404, ""), "list", StorageError),
            (AnswerError(404, ""), "read", AbsentError), (AnswerError(412, "conditionNotMet"), "write", ConflictError),
            (AnswerError(503, ""), "read", TransientError), (AnswerError(403, ""), "read", DeniedError),
            (network.ConnectionError(), "read", UnreachedError), (exceptions.TransportError(), "read", UnreachedError),
            (exceptions.DefaultCredentialsError(), "read", DeniedError),
            (network.ChunkedEncodingError(), "read", TransientError),
            (network.ReadTimeout(), "read", TransientError), (ProtocolError(), "read", TransientError),
            (ConnectionResetError(), "read", TransientError), (KeyError("x"), "read", StorageError),
            (ValueError("x"), "read", StorageError), (ZeroDivisionError(), "read", None),
        ]  # fmt: skip
        for error, what, kind in cases:
            found = client().translate(error, what, "gs://b/key")
            assert (found is None) if kind is None else isinstance(found, kind), (error, found)
            if kind is StorageError:
                assert type(found) is StorageError

    def test_no_request_follows_a_redirect_or_reads_a_body_of_any_length(self) -> None:
        asked: list[tuple[object, ...]] = []

        def request(method: str, address: str, **given: object) -> Any:
            asked.append((method, given["timeout"], given["allow_redirects"], given["stream"]))
            raise ConnectionResetError

        made = client(_session=SimpleNamespace(request=request), _timeout=(3, 4), _objects="o", _common={})
        with pytest.raises(ConnectionResetError):
            made.send("https://server/session", [memoryview(b"x")], "0-0/1")
        with pytest.raises(ConnectionResetError):
            made.read("key", 0, 4, threading.Event())
        assert asked == [("PUT", (3, 4), False, True), ("GET", (3, 4), False, True)]

    def test_a_copy_goes_on_until_it_is_done_and_is_asked_for_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[dict[str, Any]] = []
        answers = [b'{"done": false, "rewriteToken": "t1"}', b'{"rewriteToken": "t2"}', b'{"done": true}']

        def request(method: str, address: str, *, data: bytes, **more: Any) -> Answer:
            asked.append({"method": method, "address": address, **more})
            return Answer(200, {}, answers[min(len(asked), len(answers)) - 1])

        made = client(_request=request, _path=lambda key: f"/path/{key}")
        tries: list[str] = []

        def retried(attempt: Any) -> Any:
            tries.append("tried")
            return attempt()

        made.copy("a", "b c", 3, retried)
        assert tries == ["tried"]
        assert [call.get("rewriteToken") for call in asked] == [None, "t1", "t2"]
        assert {call["address"] for call in asked} == {"/path/a/rewriteTo/b/b/o/b%20c"}
        answers[:] = [b'{"rewriteToken": "t"}']
        monkeypatch.setattr(gcs, "_MOST_REWRITES", 3)
        with pytest.raises(StorageError, match="the server does not finish copying"):
            made.copy("a", "b", 3, retried)

    def test_a_range_is_asked_for_and_must_be_what_is_sent(self) -> None:
        asked: list[tuple[Any, ...]] = []

        def request(method: str, address: str, *, headers: dict[str, str], most: int, alt: str) -> Answer:
            asked.append((method, address, headers.get("Range"), most, alt))
            if isinstance(answer, Exception):
                raise answer
            return answer

        made, answer = client(_request=request, _path=lambda key: f"/path/{key}"), Answer(200, {}, b"0123")
        assert made.read("a", 0, 4, threading.Event()) == [b"0123"]
        assert asked.pop() == ("GET", "/path/a", "bytes=0-3", 4, "media")
        answer = Answer(206, {"Content-Range": "bytes 2-5/9"}, b"2345")
        assert made.read("a", 2, 6, threading.Event()) == [b"2345"]
        assert asked.pop()[2:4] == ("bytes=2-5", 4)
        for told in ({"Content-Range": "bytes 0-3/9"}, {}):
            answer = Answer(206, told, b"0123")
            with pytest.raises(StorageError, match="the endpoint"):
                made.read("a", 2, 6, threading.Event())
        answer = AnswerError(416, "")  # type: ignore[assignment]
        assert made.read("a", 9, 12, threading.Event()) == []
        answer = AnswerError(404, "")  # type: ignore[assignment]
        with pytest.raises(AnswerError):
            made.read("a", 0, 4, threading.Event())

    def test_a_url_names_its_bucket_and_prefix(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[tuple[Any, ...]] = []
        monkeypatch.setattr(gcs, "_client", lambda *given: made.append(given[:2]))
        found = gcs.open_gcs("gs", "bucket/some/prefix/", {"deadline": 7.0})
        assert made == [("gs", "bucket")]
        assert found.url == "gs://bucket/some/prefix"
        assert found._prefix == "some/prefix/"
        assert found._requests.policy.deadline == 7.0
        with pytest.raises(ConfigError, match="names no bucket: write gs://bucket/folder"):
            gcs.open_gcs("gs", "/prefix", {})


@pytest.mark.parametrize(
    ("host", "given", "taken"),
    [
        ("", {}, {}),
        ("", {"account_name": "x"}, {"account_name": "x"}),
        ("me.dfs.core.windows.net", {}, {"account_name": "me"}),
        ("me.blob.core.windows.net", {"account_name": "me"}, {"account_name": "me"}),
        ("me", {}, {"account_name": "me"}),
        ("me.dfs.core.usgov.net", {}, {"account_name": "me", "account_host": "me.blob.core.usgov.net"}),
        ("me.dfs.x", {"account_host": "mine"}, {"account_name": "me", "account_host": "mine"}),
        ("me.dfs.core.windows.net", {"account_name": "you"}, None),
    ],
)
def test_an_account_that_a_url_names_is_taken_and_must_be_that_of_the_options(
    host: str, given: dict[str, str], taken: dict[str, str] | None
) -> None:
    if taken is None:
        with pytest.raises(ConfigError, match=r"'me'.*'you'"):
            azure._take_account("abfs://x", host, given)
    else:
        azure._take_account("abfs://x", host, given)
        assert given == taken


def test_a_folder_of_azure_is_not_listed() -> None:
    class Pages:
        def __init__(self, token: str | None) -> None:
            self.continuation_token = token
            self._pages = iter([[blob("a"), blob("folder", hdi_isfolder="true"), blob("b", other="x")]])

        def __next__(self) -> Any:
            return next(self._pages)

        def __iter__(self) -> Any:
            return self

    def blob(name: str, **metadata: str) -> Any:
        return SimpleNamespace(name=name, size=3, etag='"0x1"' if name == "a" else "0x1", metadata=metadata or None)

    asked: list[Any] = []

    def by_page(marker: str | None) -> Pages:
        asked.append(marker)
        return Pages("next" if marker is None else "")

    def list_blobs(**options: Any) -> Any:
        asked.append(options)
        return SimpleNamespace(by_page=by_page)

    made: Any = AzureClient.__new__(AzureClient)
    made._container = SimpleNamespace(list_blobs=list_blobs)
    entries, following = made.page("run/", None)
    assert [(entry.key, entry.size, entry.version) for entry in entries] == [("a", 3, '"0x1"'), ("b", 3, '"0x1"')]
    assert following == "next"
    assert made.page("run/", "next")[1] is None
    assert asked[:2] == [{"name_starts_with": "run/", "include": ["metadata"]}, None]


@pytest.mark.parametrize(
    ("status", "code", "kind", "said"),
    [
        (412, "", ConflictError, "s3://bucket/key"),
        (412, "Other", StorageError, "Other"),
        (404, "", AbsentError, "does not exist"),
        (404, "Other", StorageError, "Other (404)"),
        (413, "", FullError, "says 413. Free some space"),
        (507, "", FullError, "says 507. Free some space"),
        (508, "", TransientError, "says 508 (508)"),
        (501, "", StorageError, "does not know such a request"),
        (500, "", TransientError, "says 500 (500)"),
        (408, "", TransientError, "says 408 (408)"),
        (429, "", TransientError, "says 429 (429)"),
        (401, "", DeniedError, "401"),
        (403, "", DeniedError, "403"),
        (400, "no code \x1b", StorageError, "says 400 (400)"),
        (499, "", StorageError, "says 499 (499)"),
    ],
)
def test_what_an_answer_means(status: int, code: str, kind: type[StorageError], said: str) -> None:
    error = from_answer(
        status, code, "write", "s3://bucket/key", Advice("the bucket 'bucket'", "the login", "the address")
    )
    assert type(error) is kind
    assert said in str(error)


def test_an_error_that_says_where_is_passed_on_and_one_of_an_answer_is_told_where(cloud: CloudObjects) -> None:
    known = AbsentError("gone")
    assert cloud._problem(known, "read", "k") is known
    told = cloud._problem(StorageError("no"), "read", "k")
    assert str(told) == f"could not read {cloud.url}/k: no"

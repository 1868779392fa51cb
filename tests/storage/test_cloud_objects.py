"""Objects of a cloud case by case, over a client whose store is a dict: keys, ranges, and writes that were lost."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from ckpt.errors import AbsentError, ConfigError, ConflictError, StorageError, TransientError
from ckpt.storage import ANY, Entry
from ckpt.storage.clouds import objects as clouds
from ckpt.storage.clouds.errors import UploadGoneError
from ckpt.storage.clouds.objects import CloudObjects, Head, several
from ckpt.storage.multipart import Body
from ckpt.storage.retry import Requests, RetryPolicy


class Client:
    """A store in a dict: by name the bytes, the version and the token of the write that made them."""

    removed_at_once = 2

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, str, str]] = {}
        self.done: list[Any] = []
        self.error: Exception | None = None  # of the next write, which takes effect if it `counts`
        self.counts = False
        self.pages: list[tuple[list[Entry], Any]] = []

    def head(self, key: str) -> Head:
        self.done.append(("head", key))
        if key not in self.objects:
            raise AbsentError(f"{key} is absent.")
        data, version, token = self.objects[key]
        return Head(len(data), version, token)

    def put(self, key: str, body: Body, over: str | None, token: str) -> str:
        self.done.append(("put", key))
        body.seek(0)
        return self._written(key, body.read(), over, token)

    def put_in_parts(self, key: str, parts: Iterator[Body], over: str | None, token: str, retried: Any) -> str:
        pieces = [part.read() for part in parts]
        self.done.append(("put_in_parts", key, len(pieces)))
        return retried(lambda: self._written(key, b"".join(pieces), over, token))  # type: ignore[no-any-return]

    def _written(self, key: str, data: bytes, over: str | None, token: str) -> str:
        error, self.error = self.error, None
        if error is None or self.counts:
            self.objects[key] = (data, f"v{len(self.done)}", token)
        if error is not None:
            raise error
        return self.objects[key][1]

    def read(self, key: str, start: int, stop: int, stopped: threading.Event) -> list[bytes]:
        self.done.append(("read", key, start, stop))
        if key not in self.objects:
            raise AbsentError(f"{key} is absent.")
        found = self.objects[key][0][start:stop]
        return [found[:2], found[2:]]

    def copy(self, source: str, target: str, size: int, retried: Any) -> None:
        self.done.append(("copy", source, target, size))

    def page(self, prefix: str, marker: Any) -> tuple[list[Entry], Any]:
        self.done.append(("page", prefix, marker))
        return self.pages.pop(0)

    def remove(self, keys: list[str]) -> None:
        self.done.append(("remove", *keys))

    def translate(self, error: Exception, what: str, where: str) -> StorageError | None:
        return StorageError(f"could not {what} {where}.") if isinstance(error, KeyError) else None


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def objects(client: Client) -> CloudObjects:
    return CloudObjects("cloud://bucket/runs", "runs", client, Requests(RetryPolicy(first_pause=0.0, tries=2)))


class TestWriting:
    @pytest.fixture(params=[1, 3], ids=["at once", "in parts"])
    def pieces(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
        own = clouds.split_into_parts  # type: ignore[attr-defined]
        monkeypatch.setattr(clouds, "split_into_parts", lambda pieces, size=4: own(pieces, 4))
        return [b"abcd"] * request.param

    def test_an_object_is_written_below_the_prefix(
        self, client: Client, objects: CloudObjects, pieces: list[bytes]
    ) -> None:
        version = objects.put("a/b", iter(pieces))
        data, written, token = client.objects["runs/a/b"]
        assert (data, written) == (b"".join(pieces), version)
        assert client.done == [("put", "runs/a/b") if len(pieces) == 1 else ("put_in_parts", "runs/a/b", 3)]
        assert objects.put("a/b", iter(pieces)) != version
        assert client.objects["runs/a/b"][2] != token
        assert objects.put("empty", iter([])) is not None
        assert client.objects["runs/empty"][0] == b""

    def test_a_write_whose_answer_was_lost_is_known_by_its_token(
        self, client: Client, objects: CloudObjects, pieces: list[bytes]
    ) -> None:
        for error in (ConflictError("a"), AbsentError("a"), UploadGoneError("a")):
            client.error, client.counts = error, True
            assert objects.put("a", iter(pieces), over=None) == client.objects["runs/a"][1]

    def test_a_write_that_had_no_effect_is_refused_as_what_it_is(
        self, client: Client, objects: CloudObjects, pieces: list[bytes]
    ) -> None:
        for there in (True, False):
            for error, over, kind in (
                (ConflictError("a"), "v0", ConflictError), (AbsentError("a"), "v0", ConflictError),
                (AbsentError("a"), None, AbsentError), (AbsentError("a"), ANY, AbsentError),
                (UploadGoneError("a"), "v0", UploadGoneError), (ConflictError("a"), None, ConflictError),
            ):  # fmt: skip
                client.objects = {"runs/a": (b"another's", "v9", "theirs")} if there else {}
                client.error, client.counts = error, False
                with pytest.raises(kind) as caught:
                    objects.put("a", iter(pieces), over=over)
                assert type(caught.value) is kind
                assert (caught.value is error) == (kind is type(error))
                assert "cloud://bucket/runs/a" in str(caught.value) or caught.value is error

    def test_other_errors_are_raised_and_nothing_more_is_asked(
        self, client: Client, objects: CloudObjects, pieces: list[bytes]
    ) -> None:
        for error, kind, text in (
            (StorageError("no room."), StorageError, r"^could not write cloud://bucket/runs/a: no room\.$"),
            (KeyError("secret"), StorageError, r"^could not write cloud://bucket/runs/a\.$"),
            (ConfigError("no."), ConfigError, r"^no\.$"), (ValueError("a fault"), ValueError, "^a fault$"),
        ):  # fmt: skip
            client.done.clear()
            client.error, client.counts = error, False
            with pytest.raises(kind, match=text) as caught:
                objects.put("a", iter(pieces))
            assert type(caught.value) is kind
            assert caught.value.__context__ is None or kind is ValueError
            assert len(client.done) == 1

    def test_what_may_pass_is_tried_again(self, client: Client, objects: CloudObjects, pieces: list[bytes]) -> None:
        client.error = TransientError("busy.")
        objects.put("a", iter(pieces))
        assert client.objects["runs/a"][0] == b"".join(pieces)


class TestReading:
    def test_ranges_and_versions(self, client: Client, objects: CloudObjects, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(clouds, "LARGEST_DOCUMENT", 10)
        assert objects.version("a") is None
        client.objects["runs/a"] = (b"0123456789", "v1", "t")
        assert objects.version("a") == "v1"
        client.done.clear()
        for start, stop, data, asked in (
            (0, None, b"0123456789", ("read", "runs/a", 0, 11)), (4, None, b"456789", ("read", "runs/a", 4, 15)),
            (2, 5, b"234", ("read", "runs/a", 2, 5)), (5, 5, b"", ("head", "runs/a")), (6, 5, b"", ("head", "runs/a")),
            (5, 6, b"5", ("read", "runs/a", 5, 6)), (0, 10, b"0123456789", ("read", "runs/a", 0, 10)),
        ):  # fmt: skip
            assert objects.get("a", start, stop) == data
            assert client.done.pop() == asked
        for stop in (None, 0, 5):
            with pytest.raises(AbsentError):
                objects.get("none", 0, stop)
        client.objects["runs/a"] = (b"0123456789x", "v1", "t")
        with pytest.raises(StorageError, match=r"runs/a.* the server sent over 0 MB for a document"):
            objects.get("a")
        assert objects.get("a", 0, 11) == b"0123456789x"
        monkeypatch.setattr(Client, "read", lambda *given: [b"0123", b"45"])
        with pytest.raises(StorageError, match="the server sent more bytes than ckpt asked for"):
            objects.get("a", 0, 5)
        assert objects.get("a", 0, 6) == b"012345"

    def test_buffers_are_filled_in_turn_from_several_requests(
        self, client: Client, objects: CloudObjects, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(clouds, "_READ_AT_ONCE", 4)
        data = bytes(range(1, 21))
        client.objects["runs/a"] = (data, "v1", "t")
        for start, sizes in (
            (0, [20]),
            (3, [1, 9, 2]),
            (0, [4]),
            (15, [5]),
            (15, [3, 4]),
            (18, [9]),
            (20, [5]),
            (2, []),
        ):
            buffers = [bytearray(size) for size in sizes]
            missing = objects.fill("a", start, [memoryview(buffer) for buffer in buffers])
            there = data[start : start + sum(sizes)]
            assert missing == sum(sizes) - len(there)
            assert b"".join(buffers)[: len(there)] == there

    def test_a_copy_is_made_inside_the_store_with_the_size_that_it_has(
        self, client: Client, objects: CloudObjects
    ) -> None:
        client.objects["runs/a"] = (b"12345", "v1", "t")
        objects.copy("a", "b/c")
        assert client.done[-1] == ("copy", "runs/a", "runs/b/c", 5)
        with pytest.raises(AbsentError):
            objects.copy("none", "b")


class TestListing:
    def test_pages_follow_each_other_without_the_prefix_and_placeholders(
        self, client: Client, objects: CloudObjects
    ) -> None:
        client.pages = [
            ([Entry("runs/a/1", 1, "v1"), Entry("runs/a/", 0)], "next"), ([], "more"), ([Entry("runs/a/2", 0)], None),
        ]  # fmt: skip
        assert list(objects.entries("a/")) == [Entry("a/1", 1, "v1"), Entry("a/2", 0)]
        assert client.done == [("page", "runs/a/", None), ("page", "runs/a/", "next"), ("page", "runs/a/", "more")]
        alone = CloudObjects("cloud://bucket", "", client, Requests(RetryPolicy()))
        client.pages = [([Entry("runs/a", 1)], None)]
        assert list(alone.entries("")) == [Entry("runs/a", 1)]

    @pytest.mark.parametrize(
        ("pages", "why"),
        [
            ([([Entry("runs/b", 1)], None)], "keys below a prefix that ckpt did not ask for"),
            ([([Entry("other/a/1", 1)], None)], "keys below a prefix that ckpt did not ask for"),
            ([([Entry("runs/a/1", -1)], None)], "a negative size"),
            ([([], "")], "its list continues, but not where"),
            ([([], "x"), ([], "x")], "its list continues, but not where"),
            ([([], "x"), ([], "y"), ([], "z"), ([], None)], "endless list: more than 3 pages"),
        ],
    )
    def test_an_answer_without_sense_is_refused(
        self, client: Client, objects: CloudObjects, monkeypatch: pytest.MonkeyPatch, pages: Any, why: str
    ) -> None:
        monkeypatch.setattr(clouds, "_MOST_PAGES", 3)
        client.pages = pages
        with pytest.raises(StorageError, match=why):
            list(objects.entries("a/"))

    def test_as_many_pages_as_may_be_are_read(
        self, client: Client, objects: CloudObjects, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(clouds, "_MOST_PAGES", 3)
        client.pages = [([], "x"), ([], "y"), ([Entry("runs/a/1", 0)], None)]
        assert list(objects.entries("a/")) == [Entry("a/1", 0)]

    def test_objects_are_removed_some_at_once(self, client: Client, objects: CloudObjects) -> None:
        for count in range(6):
            client.done.clear()
            objects.remove([f"k{number}" for number in range(count)])
            assert sorted(key for done in client.done for key in done[1:]) == [f"runs/k{n}" for n in range(count)]
            assert len(client.done) == -(-count // 2)


class TestSeveralCalls:
    def test_one_is_made_here_and_others_beside_each_other(self) -> None:
        names: list[str] = []

        def call(item: int, stopped: threading.Event) -> int:
            names.append(threading.current_thread().name)
            assert not stopped.is_set()
            return item * item

        assert several(call, [], 2, "beside") == []
        assert several(call, [3], 2, "beside") == [9]
        assert names == [threading.current_thread().name]
        names.clear()
        assert several(call, range(7), 2, "beside") == [number * number for number in range(7)]
        assert threading.current_thread().name not in names
        assert len(names) == 7

    def test_no_more_are_under_way_than_may_be_and_an_error_ends_the_others(self) -> None:
        under_way, most, lock, stops = 0, [0], threading.Lock(), list[bool]()
        together = threading.Barrier(3)

        def call(item: int, stopped: threading.Event) -> int:
            nonlocal under_way
            with lock:
                under_way += 1
                most.append(under_way)
            together.wait(60)
            with lock:
                under_way -= 1
            return item

        assert several(call, range(6), 3, "beside") == [*range(6)]
        assert max(most) == 3

        def fails(item: int, stopped: threading.Event) -> None:
            if item == 0:
                raise ValueError("first")
            stops.append(stopped.wait(60))

        with pytest.raises(ValueError, match="first"):
            several(fails, range(3), 3, "beside")
        assert stops == [True, True]

    def test_items_are_taken_as_they_come(self) -> None:
        taken: list[int] = []

        def items() -> Iterable[int]:
            for number in range(5):
                taken.append(number)
                yield number

        def call(item: int, stopped: threading.Event) -> int:
            return len(taken)

        assert several(call, items(), 1, "beside")[0] <= 3
        assert taken == [*range(5)]

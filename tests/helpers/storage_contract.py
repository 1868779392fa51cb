"""What every storage promises, as tests. A storage's own test module subclasses `StorageContract`."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ckpt.errors import AbsentError, ConfigError, ConflictError, LockedError, StorageError, TruncatedError
from ckpt.storage import Buffer, Storage, open_storage

NOT_KEYS = ["..", "../x", "a/../b", "a/..", "/a", "a//b", "a/", "", ".", "./a", "a/./b", "a\\b", "..\\a", "a\0b"]


def sizes(storage: Storage, prefix: str = "") -> dict[str, int]:
    """Every listed object. A key that is listed twice is an error."""
    entries = list(storage.list(prefix))
    listed = {entry.key: entry.size for entry in entries}
    assert len(listed) == len(entries)
    return listed


class StorageContract:
    """The guarantees of `ckpt.storage.base.Storage`. A subclass overrides the fixture `storage`."""

    @pytest.fixture
    def storage(self) -> Storage:
        raise NotImplementedError

    def test_its_url_leads_to_the_same_objects(self, storage: Storage) -> None:
        storage.write("folder/object", [b"some bytes"])
        again = open_storage(storage.url)
        assert again is not storage
        assert again.read("folder/object") == b"some bytes"
        with (
            storage.lock(".lock", note="the first"),
            pytest.raises(LockedError, match="the first"),
            again.lock(".lock"),
        ):
            pass

    def test_what_is_written_is_read(self, storage: Storage) -> None:
        storage.write("object", [b"some bytes"])
        assert storage.read("object") == b"some bytes"

    def test_an_object_lies_as_deep_as_its_key_says(self, storage: Storage) -> None:
        storage.write("a/b/c/object", [b"deep"])
        storage.write("a/object", [b"shallow"])
        assert storage.read("a/b/c/object") == b"deep"
        assert storage.read("a/object") == b"shallow"

    def test_unusual_names_are_keys(self, storage: Storage) -> None:
        keys = [".hidden", "with space", "…", "a.b", "..a", "a..", "50%41", "#x?y", "step-1/..."]
        for key in keys:
            storage.write(key, [key.encode()])
        assert set(sizes(storage)) == set(keys)
        assert all(storage.read(key) == key.encode() for key in keys)

    def test_an_object_is_all_its_pieces_one_after_the_other(self, storage: Storage) -> None:
        backing = bytearray(b"0123456789")
        pieces: list[Buffer] = [b"ab", b"", bytearray(b"cd"), memoryview(b"ef"), memoryview(backing)[3:6], bytearray()]
        storage.write("object", pieces)
        assert storage.read("object") == b"abcdef345"
        assert sizes(storage) == {"object": 9}

    def test_a_thousand_pieces_come_from_an_iterator(self, storage: Storage) -> None:
        storage.write("object", (bytes([i % 256]) * i for i in range(1000)))
        assert storage.read("object") == b"".join(bytes([i % 256]) * i for i in range(1000))

    def test_the_pieces_of_a_stream_may_all_lie_in_one_buffer(self, storage: Storage) -> None:
        buffer = bytearray(1000)

        def pieces() -> Iterator[memoryview]:
            for number in range(50):
                buffer[:] = bytes([number]) * 1000
                yield memoryview(buffer)

        storage.write("object", pieces())
        assert storage.read("object") == b"".join(bytes([number]) * 1000 for number in range(50))

    def test_pieces_of_wide_items_are_taken_byte_by_byte(self, storage: Storage) -> None:
        wide = memoryview(bytes(range(64))).cast("Q")
        storage.write("object", [wide, b"end"])
        assert storage.read("object") == bytes(range(64)) + b"end"

    def test_an_object_without_pieces_is_empty_and_there(self, storage: Storage) -> None:
        storage.write("none", [])
        storage.write("empty", [b""])
        assert sizes(storage) == {"none": 0, "empty": 0}
        assert storage.read("none") == storage.read("empty") == b""

    def test_an_object_of_several_megabytes(self, storage: Storage) -> None:
        piece = bytes(range(256)) * 4096
        storage.write("large", (piece for _ in range(6)))
        assert sizes(storage) == {"large": 6 << 20}
        buffer = bytearray(5 << 20)
        storage.read_into("large", 1, memoryview(buffer))
        assert buffer == (piece * 6)[1 : 1 + (5 << 20)]
        assert storage.read("large", (6 << 20) - 3) == b"\xfd\xfe\xff"

    @pytest.mark.parametrize(
        ("start", "stop", "expected"),
        [
            (0, None, b"0123456789"),
            (0, 4, b"0123"),
            (3, 6, b"345"),
            (7, None, b"789"),
            (7, 100, b"789"),
            (10, None, b""),
            (50, 60, b""),
            (5, 5, b""),
            (6, 2, b""),
        ],
    )
    def test_a_ranged_read_gives_what_is_there(
        self, storage: Storage, start: int, stop: int | None, expected: bytes
    ) -> None:
        storage.write("object", [b"0123456789"])
        assert storage.read("object", start, stop) == expected

    def test_read_into_fills_the_buffer_and_nothing_else(self, storage: Storage) -> None:
        storage.write("object", [b"0123456789"])
        backing = bytearray(b"........")
        storage.read_into("object", 4, memoryview(backing)[2:5])
        assert backing == b"..456..."

    def test_read_into_fills_several_buffers_one_after_the_other(self, storage: Storage) -> None:
        storage.write("object", [bytes(range(256)) * 40])
        buffers = [bytearray(length) for length in (3, 0, 1, *[2] * 1500, 500)]
        storage.read_into("object", 7, *(memoryview(buffer) for buffer in buffers))
        assert b"".join(buffers) == (bytes(range(256)) * 40)[7 : 7 + 3504]
        with pytest.raises(TruncatedError, match=r"object is 7 bytes too short"):
            storage.read_into("object", 10240 - 3, memoryview(bytearray(2)), memoryview(bytearray(8)))

    def test_a_link_is_the_same_object_under_a_second_key(self, storage: Storage) -> None:
        storage.write("a/object", [b"content"])
        storage.link("a/object", "b/deep/object")
        assert storage.read("b/deep/object") == b"content"
        storage.delete(["a/object"])
        assert storage.read("b/deep/object") == b"content"
        assert sizes(storage) == {"b/deep/object": 7}

    def test_writing_to_one_of_two_linked_keys_leaves_the_other(self, storage: Storage) -> None:
        storage.write("a", [b"old"])
        storage.link("a", "b")
        storage.write("a", [b"new"])
        assert (storage.read("a"), storage.read("b")) == (b"new", b"old")

    def test_a_link_replaces_what_was_there_and_may_be_made_twice(self, storage: Storage) -> None:
        storage.write("a", [b"a"])
        storage.write("b", [b"longer"])
        storage.link("a", "b")
        storage.link("a", "b")
        assert storage.read("b") == b"a"
        assert sizes(storage) == {"a": 1, "b": 1}

    def test_a_link_to_nothing_is_an_absent_error_and_makes_nothing(self, storage: Storage) -> None:
        with pytest.raises(AbsentError, match="absent"):
            storage.link("absent", "b")
        assert sizes(storage) == {}

    def test_read_into_nothing_reads_nothing(self, storage: Storage) -> None:
        storage.write("object", [b"0123456789"])
        storage.read_into("object", 4, memoryview(bytearray()))

    @pytest.mark.parametrize(("start", "length"), [(0, 11), (8, 3), (10, 1), (500, 4)])
    def test_read_into_from_an_object_too_short_is_an_error(self, storage: Storage, start: int, length: int) -> None:
        storage.write("object", [b"0123456789"])
        with pytest.raises(TruncatedError, match=r"object is \d+ bytes too short"):
            storage.read_into("object", start, memoryview(bytearray(length)))

    @pytest.mark.parametrize("key", ["absent", "folder/absent", "folder", "folder/object/below"])
    def test_nothing_under_a_key_is_an_absent_error_that_names_it(self, storage: Storage, key: str) -> None:
        storage.write("folder/object", [b"x"])
        with pytest.raises(AbsentError, match=key):
            storage.read(key)
        with pytest.raises(AbsentError, match=key):
            storage.read_into(key, 0, memoryview(bytearray(1)))

    def test_an_empty_storage_lists_nothing(self, storage: Storage) -> None:
        assert sizes(storage) == {}
        assert sizes(storage, "folder") == {}

    def test_list_goes_to_any_depth_below_a_folder_and_not_beside_it(self, storage: Storage) -> None:
        for key in ("step-1/a", "step-1/b/c", "step-10/a", "step-1.txt", "other/step-1/a"):
            storage.write(key, [key.encode()])
        assert sizes(storage, "step-1") == {"step-1/a": 8, "step-1/b/c": 10}
        assert sizes(storage, "step-1/b") == {"step-1/b/c": 10}
        assert sizes(storage, "step") == {}
        assert sizes(storage, "step-1/a") == {}  # an object is not below itself
        assert len(sizes(storage)) == 5

    def test_list_is_fresh_after_every_write_and_delete(self, storage: Storage) -> None:
        for size in (1, 5, 2):
            storage.write("folder/object", [b"x" * size])
            assert sizes(storage) == sizes(storage, "folder") == {"folder/object": size}
        storage.delete(["folder/object"])
        assert sizes(storage) == sizes(storage, "folder") == {}
        storage.write("folder/object", [b"again"])
        assert sizes(storage) == {"folder/object": 5}

    def test_objects_may_be_deleted_while_they_are_listed(self, storage: Storage) -> None:
        for index in range(5):
            storage.write(f"folder/{index}", [b"x"])
        for entry in storage.list():
            storage.delete([entry.key])
        assert sizes(storage) == {}

    def test_delete_removes_what_it_is_told_and_nothing_else(self, storage: Storage) -> None:
        for key in ("a/1", "a/2", "b/1"):
            storage.write(key, [b"x"])
        storage.delete(iter(["a/1", "b/1"]))
        assert set(sizes(storage)) == {"a/2"}
        with pytest.raises(AbsentError):
            storage.read("a/1")

    def test_deleting_what_is_not_there_is_no_error(self, storage: Storage) -> None:
        storage.write("folder/object", [b"x"])
        storage.delete(["absent", "no/such/folder", "folder", "folder/object/below"])
        storage.delete([])
        assert sizes(storage) == {"folder/object": 1}

    def test_a_write_replaces_the_older_object(self, storage: Storage) -> None:
        storage.write("object", [b"a long older one"])
        storage.write("object", [b"new"])
        assert storage.read("object") == b"new"
        assert sizes(storage) == {"object": 3}

    def test_a_version_is_that_of_the_object_until_it_is_written_again(self, storage: Storage) -> None:
        assert storage.version("folder/object") is None
        storage.write("folder/object", [b"one"])
        first = storage.version("folder/object")
        assert isinstance(first, str)
        assert storage.version("folder/object") == open_storage(storage.url).version("folder/object") == first
        storage.write("folder/object", [b"another"])
        assert storage.version("folder/object") not in (None, first)
        storage.delete(["folder/object"])
        assert storage.version("folder/object") is None
        assert storage.version("folder") is None

    def test_what_must_be_new_is_written_where_nothing_is(self, storage: Storage) -> None:
        storage.write("folder/object", (b"12", b"34"), over=None)
        with pytest.raises(ConflictError, match=r"folder/object has changed: somebody else"):
            storage.write("folder/object", [b"new"], over=None)
        assert storage.read("folder/object") == b"1234"
        assert sizes(storage) == {"folder/object": 4}
        storage.delete(["folder/object"])
        storage.write("folder/object", [b"new"], over=None)

    def test_a_version_is_replaced_once(self, storage: Storage) -> None:
        storage.write("object", [b"old"])
        old = storage.version("object")
        storage.write("object", [b"new"], over=old)
        for over in (old, "of another kind"):
            with pytest.raises(ConflictError):
                storage.write("object", [b"newer"], over=over)
        assert storage.read("object") == b"new"
        storage.write("object", [b"newer"], over=storage.version("object"))
        storage.delete(["object"])
        with pytest.raises(ConflictError):
            storage.write("object", [b"again"], over=old)
        assert sizes(storage) == {}

    def test_of_many_who_write_over_the_same_version_one_succeeds(self, storage: Storage) -> None:
        for begin in (0, 10):
            seen = storage.version("object")
            ready = threading.Barrier(5)
            lost: list[int] = []

            def write(
                number: int, over: str | None = seen, ready: threading.Barrier = ready, lost: list[int] = lost
            ) -> None:
                ready.wait()
                try:
                    storage.write("object", [b"%d" % number], over=over)
                except ConflictError:
                    lost.append(number)

            threads = [threading.Thread(target=write, args=(begin + number,)) for number in range(5)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(lost) == 4
            assert int(storage.read("object")) not in lost

    @pytest.mark.parametrize("failure", [RuntimeError, StorageError, KeyboardInterrupt])
    def test_a_write_that_fails_leaves_the_old_object_and_nothing_else(
        self, storage: Storage, failure: type[BaseException]
    ) -> None:
        storage.write("folder/old", [b"the old one"])
        seen: list[dict[str, int]] = []

        def pieces() -> Iterator[bytes]:
            yield b"x" * 100_000
            seen.append(sizes(storage))
            raise failure("in the middle")

        for key in ("folder/old", "folder/new", "fresh/new"):
            with pytest.raises(failure, match="in the middle"):
                storage.write(key, pieces())
        assert seen == [{"folder/old": 11}] * 3
        assert sizes(storage) == {"folder/old": 11}
        assert storage.read("folder/old") == b"the old one"

    @pytest.mark.slow
    def test_a_reader_sees_the_old_object_or_the_new_one_never_a_part(self, storage: Storage) -> None:
        size = 200_000
        storage.write("object", [b"0" * size])
        done = threading.Event()

        def write() -> None:
            try:
                for index in range(40):
                    storage.write("object", (bytes([48 + index % 10]) * (size // 4) for _ in range(4)))
            finally:
                done.set()

        writer = threading.Thread(target=write)
        writer.start()
        seen = {storage.read("object")}  # a set: many reads of the same bytes are checked once
        while not done.is_set():
            seen.add(storage.read("object"))
            assert sizes(storage) == {"object": size}
        writer.join()
        assert all(len(data) == size and len(set(data)) == 1 for data in seen)

    @pytest.mark.parametrize("key", NOT_KEYS)
    def test_a_key_that_could_leave_the_root_is_refused(self, storage: Storage, key: str) -> None:
        refused = pytest.raises(ConfigError, match="is not a key")
        with refused:
            storage.write(key, [b"x"])
        with refused:
            storage.read(key)
        with refused:
            storage.read_into(key, 0, memoryview(bytearray(1)))
        with refused:
            storage.delete([key])
        with refused, storage.lock(key):
            pass
        if key:  # the empty prefix is the root itself
            with refused:
                list(storage.list(key))
        assert sizes(storage) == {}

    def test_one_holds_a_lock_alone_and_others_are_told_who(self, storage: Storage) -> None:
        with (
            storage.lock("folder/.lock", note="process 17 on some host"),
            pytest.raises(LockedError, match=r"folder/\.lock is held: process 17 on some host"),
            storage.lock("folder/.lock", note="me"),
        ):
            pass
        with storage.lock("folder/.lock", note="me"):
            pass

    def test_one_who_is_refused_changes_nothing(self, storage: Storage) -> None:
        with storage.lock(".lock", note="the first"):
            for _ in range(2):
                with pytest.raises(LockedError, match="the first"), storage.lock(".lock", note="the second"):
                    pass
            with pytest.raises(LockedError, match="the first"), storage.lock(".lock", shared=True):
                pass

    def test_many_hold_a_lock_shared_and_none_alone_beside_them(self, storage: Storage) -> None:
        storage.write("folder/object", [b"x"])
        with storage.lock("folder", shared=True):
            both = storage.lock("folder", shared=True, note="a reader")
            with both, pytest.raises(LockedError, match="folder is held"), storage.lock("folder"):
                pass
            with pytest.raises(LockedError, match="folder is held"), storage.lock("folder"):
                pass
        with (
            storage.lock("folder", note="alone"),
            pytest.raises(LockedError, match="folder is held"),
            storage.lock("folder", shared=True),
        ):
            pass
        assert storage.read("folder/object") == b"x"

    def test_a_note_is_gone_with_its_holder(self, storage: Storage) -> None:
        with storage.lock(".lock", note="the first"):
            pass
        for shared in (True, False):
            with (
                storage.lock(".lock", shared=shared, note="a reader's" if shared else ""),
                pytest.raises(LockedError, match=r"held: (by |a reader's)"),
                storage.lock(".lock"),
            ):
                pass

    def test_locks_of_different_keys_do_not_meet(self, storage: Storage) -> None:
        with storage.lock("a"), storage.lock("b"):
            pass

    def test_a_lock_is_let_go_when_its_context_fails(self, storage: Storage) -> None:
        with pytest.raises(RuntimeError, match="inside"), storage.lock(".lock", note="the first"):
            raise RuntimeError("inside")
        with storage.lock(".lock"):
            pass

    def test_a_locked_folder_can_be_emptied(self, storage: Storage) -> None:
        storage.write("folder/object", [b"x"])
        with storage.lock("folder"):
            storage.delete(["folder/object"])
        assert sizes(storage, "folder") == {}

    def test_sweep_keeps_finished_objects(self, storage: Storage) -> None:
        for key in ("a/object", "a/.hidden", "object", "a/b/object.tmp"):
            storage.write(key, [key.encode()])
        before = sizes(storage)
        storage.sweep("a")
        storage.sweep("absent")
        storage.sweep()
        storage.sweep(age=0.0)
        assert list(storage.unfinished()) == []
        assert sizes(storage) == before
        assert storage.read("a/.hidden") == b"a/.hidden"

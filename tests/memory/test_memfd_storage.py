"""The storage in a keeper's memfds: the contract of every storage, and what becomes of the memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import pytest

from ckpt.errors import AbsentError, FullError, StorageError, TransientError
from ckpt.memory import memfd_server, memfd_storage, memfd_wire
from ckpt.memory.memfd_server import MemfdServer
from ckpt.memory.memfd_storage import MemfdStorage
from ckpt.storage import Storage, urls
from tests.helpers.storage_contract import StorageContract, sizes
from tests.memory.deserted import wait_until


class Serving:
    """A server in a thread of this process."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        directory = os.open(folder, os.O_RDONLY)
        self.server = MemfdServer(memfd_wire.listen(directory), limit)
        os.close(directory)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ended.is_set():
            self.server.serve(0.05)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self.server.close()


Start = Callable[..., Serving]
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextmanager
def as_nobody(folder: Path, do: Callable[[int], None]) -> Iterator[BinaryIO]:
    """A process of another user in a folder that lets everybody in. Yields what it writes to the descriptor it gets."""
    for path in (folder, *folder.iterdir()):
        path.chmod(0o777)
    heard, told = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.chdir(folder)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            do(told)
        finally:
            os._exit(0)
    os.close(told)
    try:
        with open(heard, "rb") as said:
            yield said
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Start]:
    """Starts a server in a folder: that of the test, unless another is given."""
    started: list[Serving] = []

    def start(folder: Path = tmp_path, limit: int | None = None) -> Serving:
        started.append(Serving(folder, limit))
        return started[-1]

    yield start
    for server in started:
        server.end()


@pytest.fixture
def server(serve: Start) -> Serving:
    return serve()


@pytest.mark.slow
class TestMemfdStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path, server: Serving, monkeypatch: pytest.MonkeyPatch) -> Storage:
        monkeypatch.setattr(urls, "_installed", lambda scheme, url: MemfdStorage)
        return MemfdStorage(tmp_path)


def test_a_folder_with_a_long_path_can_be_served(tmp_path: Path, serve: Start) -> None:
    folder = tmp_path / ("long-" * 40)
    folder.mkdir()
    serve(folder)
    MemfdStorage(folder).write("key", [b"value"])
    assert MemfdStorage(folder).read("key") == b"value"


@pytest.mark.slow
def test_the_socket_is_for_this_user_alone(tmp_path: Path, server: Serving) -> None:
    assert (tmp_path / memfd_wire.SOCKET).stat().st_mode & 0o777 == 0o600


def test_an_object_that_is_being_written_when_its_lock_file_goes_gets_no_name(tmp_path: Path, server: Serving) -> None:
    storage = MemfdStorage(tmp_path)

    def pieces() -> Iterator[bytes]:
        yield b"x"
        (tmp_path / memfd_storage.LOCKS / ".lock").unlink()
        yield b"y"

    with (
        storage.lock(".lock", note="me"),
        pytest.raises(StorageError, match=r"\.lock was removed, alone or with all of"),
    ):
        storage.write("key", pieces())
    assert sizes(storage) == {}


@pytest.mark.slow
def test_more_keys_than_a_message_holds_are_listed_and_deleted(tmp_path: Path, server: Serving) -> None:
    storage = MemfdStorage(tmp_path)
    keys = [f"folder/{number}-{'…' * 100}" for number in range(250)]
    for key in keys:
        storage.write(key, [b"x"])
    assert set(sizes(storage)) == set(keys)
    storage.delete(keys)
    assert sizes(storage) == {}


@pytest.mark.slow
def test_a_key_that_no_message_holds_is_refused(tmp_path: Path, server: Serving) -> None:
    with pytest.raises(StorageError, match="at most 400 bytes"):
        MemfdStorage(tmp_path).write("x" * 401, [b""])


def _memfds() -> int:
    """How many descriptors of memory this process has, in which the server runs."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing
            found += "memfd:ckpt" in os.readlink(f"/proc/self/fd/{descriptor}")
    return found


class TestMemory:
    """What is held, spare and free."""

    @pytest.mark.slow
    def test_the_memory_of_a_removed_object_is_used_again_and_freed_when_asked(
        self, tmp_path: Path, server: Serving
    ) -> None:
        storage = MemfdStorage(tmp_path)
        storage.write("a", [b"a" * 10_000])
        storage.delete(["a"])
        assert server.server.size == 10_000
        storage.write("b", [b"b" * 9_000])
        assert (server.server.size, storage.read("b")) == (9_000, b"b" * 9_000)
        storage.delete(["b"])
        storage.trim()
        assert server.server.size == 0

    @pytest.mark.slow
    def test_a_small_object_does_not_take_the_memory_of_a_large_one(self, tmp_path: Path, server: Serving) -> None:
        storage = MemfdStorage(tmp_path)
        storage.write("large", [b"x" * 1_000_000])
        storage.delete(["large"])
        storage.write("small", [b"x"])
        assert server.server.size == 1_000_001

    @pytest.mark.slow
    def test_memory_that_somebody_still_reads_is_not_written_to(self, tmp_path: Path, server: Serving) -> None:
        storage = MemfdStorage(tmp_path)
        storage.write("old", [b"old" * 1000])
        with memfd_storage._Connection(tmp_path, 10.0) as reader:
            reader.ask("get", key="old")
            storage.delete(["old"])
            storage.write("new", [b"new" * 1000])
            assert os.pread(reader.take_descriptor(), 3000, 0) == b"old" * 1000
        assert storage.read("new") == b"new" * 1000
        assert storage.version("new")  # the server has done with the request before
        assert _memfds() == 1

    @pytest.mark.slow
    def test_a_reader_cannot_write(self, tmp_path: Path, server: Serving) -> None:
        MemfdStorage(tmp_path).write("key", [b"value"])
        with memfd_storage._Connection(tmp_path, 10.0) as reader:
            reader.ask("get", key="key")
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(reader.take_descriptor(), b"other", 0)

    def test_more_than_the_limit_is_refused_and_what_is_there_is_kept(self, tmp_path: Path, serve: Start) -> None:
        serve(limit=10_000)
        storage = MemfdStorage(tmp_path)
        storage.write("a", [b"a" * 4_000])
        storage.write("b", [b"b" * 4_000])
        with pytest.raises(FullError, match="as much memory as it may"):
            storage.write("c", [b"c" * 4_000])
        storage.delete(["a"])
        storage.write("c", [b"c" * 6_000])
        assert sizes(storage) == {"b": 4_000, "c": 6_000}

    def test_spare_memory_gives_way_to_the_limit(self, tmp_path: Path, serve: Start) -> None:
        serve(limit=10_000)
        storage = MemfdStorage(tmp_path)
        storage.write("a", [b"a" * 9_000])
        storage.delete(["a"])
        storage.write("b", [b"b" * 4_000])
        assert sizes(storage) == {"b": 4_000}

    @pytest.mark.slow
    def test_a_linked_object_is_held_once(self, tmp_path: Path, server: Serving) -> None:
        storage = MemfdStorage(tmp_path)
        storage.write("a", [b"a" * 1000])
        storage.link("a", "b")
        storage.link("b", "b")
        assert server.server.size == 1000
        storage.delete(["a"])
        assert storage.read("b") == b"a" * 1000


class TestGone:
    """A keeper that has ended."""

    def test_where_nobody_serves_nothing_is_there_and_a_write_is_an_error(self, tmp_path: Path, serve: Start) -> None:
        served = serve()
        storage = MemfdStorage(tmp_path)
        storage.write("folder/object", [b"x"])
        served.end()
        served.end = lambda: None  # type: ignore[method-assign]
        assert sizes(storage) == {}
        assert storage.version("folder/object") is None
        storage.delete(["folder/object"])
        with pytest.raises(AbsentError, match="the keeper process has ended"):
            storage.read("folder/object")
        with pytest.raises(StorageError, match="the keeper process has ended, and what it held is gone") as raised:
            storage.write("folder/object", [b"x"])
        assert not isinstance(raised.value, AbsentError)

    def test_a_folder_that_is_gone_holds_nothing(self, tmp_path: Path) -> None:
        storage = MemfdStorage(tmp_path / "gone")
        assert sizes(storage) == {}
        with pytest.raises(AbsentError):
            storage.read("key")
        with pytest.raises(StorageError, match="has ended"), storage.lock(".lock"):
            pass
        assert not (tmp_path / "gone").exists()


class TestFailures:
    @pytest.mark.slow
    def test_a_system_without_memory_for_another_is_a_storage_error(
        self, tmp_path: Path, server: Serving, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> int:
            raise OSError(24, "Too many open files")

        storage = MemfdStorage(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", refuse)
            with pytest.raises(StorageError, match=r"the keeper refused: .*Too many open files"):
                storage.write("key", [b"value"])
        storage.write("key", [b"value"])

    @pytest.mark.slow
    def test_a_keeper_that_hangs_up_in_the_middle_may_be_asked_again(
        self, tmp_path: Path, server: Serving, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage = MemfdStorage(tmp_path)
        storage.write("key", [b"value"])
        with monkeypatch.context() as patch:
            patch.setattr(memfd_server, "_MOST_CONNECTIONS", 0)
            with pytest.raises(TransientError, match="the keeper hung up"):
                storage.read("key")
        assert storage.read("key") == b"value"

    def test_a_keeper_that_does_not_answer_is_waited_for_once(self, tmp_path: Path) -> None:
        directory = os.open(tmp_path, os.O_RDONLY)
        with memfd_wire.listen(directory) as listener:
            os.close(directory)
            storage = MemfdStorage(tmp_path, patience=0.1)
            for _ in range(3):
                with pytest.raises(TransientError, match=r"did not answer for 0\.1 s"):
                    storage.read("key")
            listener.accept()[0].close()
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):  # nobody else has asked
                listener.accept()


@pytest.mark.slow
class TestOthers:
    """Processes that do not keep to the protocol."""

    def test_nonsense_ends_a_connection_and_nothing_else(self, tmp_path: Path, server: Serving) -> None:
        storage = MemfdStorage(tmp_path)
        storage.write("key", [b"value"])
        for nonsense in (b"no json", b"[]", b"{}", b'{"do": "_set"}', b'{"do": "get"}', b'{"do": "put", "key": 1}'):
            directory = os.open(tmp_path, os.O_RDONLY)
            with memfd_wire.connect(directory, 10.0) as connection:
                os.close(directory)
                connection.send(nonsense)
                assert connection.recv(100) == b""
        assert storage.read("key") == b"value"

    @needs_root
    def test_another_user_is_hung_up_on_though_the_socket_lets_everybody_in(
        self, tmp_path: Path, server: Serving
    ) -> None:
        MemfdStorage(tmp_path).write("key", [b"secret"])

        def ask(told: int) -> None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.connect(memfd_wire.SOCKET)
                os.write(told, b"connected, ")
                with suppress(ConnectionError):
                    memfd_wire.send(connection, {"do": "get", "key": "key"})
                    os.write(told, connection.recv(100))

        with as_nobody(tmp_path, ask) as told:
            assert told.read() == b"connected, "

    @needs_root
    def test_the_keeper_of_another_user_is_sent_nothing(self, tmp_path: Path) -> None:
        def listen(told: int) -> None:
            directory = os.open(".", os.O_RDONLY)
            with memfd_wire.listen(directory) as listener:
                os.write(told, b"ready")
                with listener.accept()[0] as connection, suppress(ConnectionError):
                    os.write(told, connection.recv(100))

        with as_nobody(tmp_path, listen) as told:
            assert told.read(5) == b"ready"
            with pytest.raises(StorageError, match="a process of another user listens there"):
                MemfdStorage(tmp_path).write("key", [b"secret"])
            assert told.read() == b""

    def test_a_connection_that_reads_nothing_does_not_stop_the_keeper(self, tmp_path: Path, server: Serving) -> None:
        directory = os.open(tmp_path, os.O_RDONLY)
        silent = memfd_wire.connect(directory, 10.0)
        os.close(directory)
        silent.setblocking(False)
        for _ in range(2000):
            try:
                silent.send(b'{"do": "list", "prefix": "", "after": ""}')
            except OSError:
                break
        storage = MemfdStorage(tmp_path)
        storage.write("key", [b"value"])
        assert storage.read("key") == b"value"
        silent.close()


@pytest.mark.slow
class TestProcesses:
    def test_a_writer_that_is_killed_leaves_nothing(self, tmp_path: Path, server: Serving) -> None:
        ours, theirs = socket.socketpair()

        def pieces() -> Iterator[bytes]:
            yield b"x" * 1_000_000
            theirs.send(b"!")
            time.sleep(100)

        child = os.fork()
        if not child:
            MemfdStorage(tmp_path).write("key", pieces())
        ours.recv(1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        storage = MemfdStorage(tmp_path)
        assert sizes(storage) == {}
        wait_until(lambda: not server.server._unnamed, "the keeper has noticed")
        storage.trim()
        assert server.server.size == 0

    def test_a_forked_child_keeps_no_memory(self, tmp_path: Path, server: Serving) -> None:
        storage = MemfdStorage(tmp_path)
        forked: list[int] = []

        def pieces() -> Iterator[bytes]:
            yield b"x" * 1_000_000
            forked.append(os.fork())
            if not forked[0]:
                time.sleep(100)
                os._exit(0)

        storage.write("key", pieces())
        try:
            memory, _ = server.server._objects["key"]
            wait_until(memory.is_unshared, "the child has closed it")
        finally:
            os.kill(forked[0], signal.SIGKILL)
            os.waitpid(forked[0], 0)

    def test_many_processes_write_over_the_same_version_and_one_succeeds(self, tmp_path: Path, server: Serving) -> None:
        context = multiprocessing.get_context("fork")
        results = context.Queue()

        def write(number: int) -> None:
            try:
                MemfdStorage(tmp_path).write("key", [b"%d" % number], over=None)
            except StorageError:
                results.put(-1)
            else:
                results.put(number)

        children = [context.Process(target=write, args=(number,)) for number in range(4)]
        for child in children:
            child.start()
        found = [results.get(timeout=30) for _ in children]
        for child in children:
            child.join()
        winners = [number for number in found if number >= 0]
        assert len(winners) == 1
        assert int(MemfdStorage(tmp_path).read("key")) == winners[0]

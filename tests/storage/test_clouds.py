"""Azure and Google Cloud Storage as homes, on their emulators: tests/helpers/clouds.py names their limits."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import nn

import ckpt
from ckpt.errors import ConflictError, UnsupportedError
from ckpt.storage import Storage, leases, open_storage
from tests.guarantees.test_resume_matrix import compare
from tests.helpers import clouds
from tests.helpers.clouds import BUCKET
from tests.helpers.faulty_proxy import EachOnce, FaultyProxy, random_faults
from tests.helpers.seaweed import upload_in_small_parts
from tests.helpers.storage_contract import StorageContract, sizes

MB = 1 << 20
pytestmark = pytest.mark.slow
_numbers = itertools.count()
Tell = Callable[[dict[str, str]], None]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    upload_in_small_parts(monkeypatch)


@pytest.fixture(scope="module")
def azurite() -> Iterator[int]:
    """The port of an Azurite."""
    with clouds.azurite() as port:
        yield port


@pytest.fixture(scope="module")
def gcs() -> Iterator[int]:
    """The port of an emulator of GCS."""
    with clouds.gcs_emulator() as port:
        yield port


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Sets variables of the environment."""

    def set_all(environment: dict[str, str]) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.fixture
def az(azurite: int, tell: Tell) -> str:
    """An empty root on Azurite."""
    tell(clouds.environment("az", azurite))
    return f"az://{BUCKET}/test-{next(_numbers)}"


@pytest.fixture
def gs(gcs: int, tell: Tell) -> str:
    """An empty root on the emulator of GCS."""
    tell(clouds.environment("gs", gcs))
    return f"gs://{BUCKET}/test-{next(_numbers)}"


@pytest.fixture(params=["az", "gs"])
def root(request: pytest.FixtureRequest) -> str:
    """An empty root on either."""
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def proxy(root: str, request: pytest.FixtureRequest, tell: Tell) -> Iterator[FaultyProxy]:
    """Between the root and its emulator."""
    scheme = root.partition(":")[0]
    with FaultyProxy(request.getfixturevalue({"az": "azurite", "gs": "gcs"}[scheme])) as proxy:
        tell(clouds.environment(scheme, int(proxy.url.rpartition(":")[2])))
        yield proxy


class TestAzure(StorageContract):
    @pytest.fixture
    def storage(self, az: str) -> Storage:
        return open_storage(az)


class TestGcs(StorageContract):
    @pytest.fixture
    def storage(self, gs: str) -> Storage:
        return open_storage(gs)


class TestLargeObjects:
    def test_a_large_object_is_written_in_parts_whatever_its_pieces(self, root: str) -> None:
        storage = open_storage(root)
        data = os.urandom(MB) * 22 + b"the end"
        view = memoryview(data)
        storage.write("list", [view[:5], view[5 : 18 * MB], b"", view[18 * MB :]])
        storage.write("iterator", (view[at : at + 3 * MB] for at in range(0, len(data), 3 * MB)))
        assert sizes(storage) == {"list": len(data), "iterator": len(data)}
        assert storage.read("list") == storage.read("iterator") == data
        tail, buffers = len(data) - 20 * MB, [bytearray(9 * MB + 1), bytearray(11 * MB - 1)]
        storage.read_into("list", tail, *(memoryview(buffer) for buffer in buffers))
        assert b"".join(buffers) == data[tail:]

    def test_what_appears_while_a_large_object_is_uploaded_is_kept(self, root: str) -> None:
        storage = open_storage(root)

        def pieces() -> Iterator[bytes]:
            yield bytes(7 * MB)
            open_storage(root).write("object", [b"another's"], over=None)
            yield bytes(7 * MB)

        with pytest.raises(ConflictError):
            storage.write("object", pieces(), over=None)
        assert storage.read("object") == b"another's"

    def test_a_version_that_was_replaced_while_a_large_object_is_uploaded_is_kept(self, root: str) -> None:
        storage = open_storage(root)
        storage.write("object", [b"old"])

        def pieces() -> Iterator[bytes]:
            yield bytes(12 * MB)
            storage.write("object", [b"new"])

        with pytest.raises(ConflictError):
            storage.write("object", pieces(), over=storage.version("object"))
        assert storage.read("object") == b"new"
        storage.write("object", [bytes(7 * MB)], over=storage.version("object"))
        assert sizes(storage) == {"object": 7 * MB}

    def test_the_parts_of_two_writers_of_one_object_are_kept_apart(self, root: str) -> None:
        def others() -> Iterator[bytes]:
            yield b"o" * (12 * MB)
            raise KeyboardInterrupt

        def ours() -> Iterator[bytes]:
            yield b"x" * (12 * MB)
            with pytest.raises(KeyboardInterrupt):
                open_storage(root).write("object", others())
            yield b"y"

        open_storage(root).write("object", ours())
        assert open_storage(root).read("object") == b"x" * (12 * MB) + b"y"

    def test_an_upload_that_fails_leaves_the_old_object(self, root: str) -> None:
        storage = open_storage(root)
        storage.write("object", [b"old"])

        def pieces() -> Iterator[bytes]:
            yield bytes(12 * MB)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            storage.write("object", pieces())
        assert sizes(storage) == {"object": 3}
        assert not [one for one in threading.enumerate() if one.name == "ckpt-upload"]


RACE = """
import sys
from ckpt.errors import ConflictError
from ckpt.storage import open_storage
storage = open_storage(sys.argv[1])
storage.version("object")
print("ready", flush=True)
sys.stdin.readline()
won = 0
for number in range(20):
    try:
        storage.write(f"{number}", [sys.argv[2].encode()], over=None)
        won += 1
    except ConflictError:
        pass
print(won, flush=True)
"""


def test_of_processes_that_create_the_same_object_one_succeeds(root: str) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, root, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for number in range(2)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    won = [int(answer) for answer, _ in (racer.communicate(timeout=60) for racer in _started(racers))]
    assert sum(won) == 20


def _started(racers: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    return racers


class TestFaults:
    @pytest.mark.parametrize("size", [10, 7 * MB], ids=["small", "in parts"])
    def test_a_write_whose_answer_was_lost_is_known_by_its_token(
        self, root: str, proxy: FaultyProxy, size: int
    ) -> None:
        """The request that makes the object appear takes effect, and is sent again."""
        storage = open_storage(root)
        last = {"az10": ("ckpt", 1), "az": ("comp=blocklist", 1), "gs10": ("uploadType=multipart", 1)}
        sign, times = last.get(root[:2] + ("10" if size == 10 else ""), ("upload_id", 2))
        seen: list[str] = []

        def lose_once(method: str, path: str) -> str | None:
            if method not in ("PUT", "POST") or sign not in path:
                return None
            seen.append(path)
            return "answer lost" if len(seen) == times else None

        storage.version("object")
        proxy.plan = lose_once
        version = storage.write("object", [bytes(size)], over=None)
        assert proxy.done["answer lost"] == 1
        assert version == storage.version("object")
        assert sizes(storage) == {"object": size}

    def test_answers_that_are_cut_off_neither_end_a_save_nor_make_a_resume_take_an_older_checkpoint(
        self, root: str, proxy: FaultyProxy
    ) -> None:
        options = {"deadline": 60.0}
        with ckpt.StateManager(root, model=nn.Linear(4, 4), storage_options=options) as manager:
            for name in ("a", "b"):
                proxy.plan = EachOnce(proxy, "cut")
                manager.save_state(name, wait=True)
        proxy.plan = EachOnce(proxy, "cut")
        with ckpt.StateManager(root, model=nn.Linear(4, 4), storage_options=options) as manager:
            restored = manager.load_state()
        assert restored.name == "b"
        assert not restored.passed_over

    def test_random_faults_lose_nothing(self, root: str, proxy: FaultyProxy) -> None:
        storage = open_storage(root, deadline=60.0, stall=2.0)
        storage.version("object")
        faults = random_faults(7, 0.2)

        def plan(method: str, path: str) -> str | None:
            """What no checksum of these stores notices, and what takes long, are left to the tests of S3."""
            fault = faults(method, path)
            return "reset" if fault in ("stall", "altered") else fault

        proxy.plan = plan
        version: str | None = None
        for number in range(25):
            version = storage.write("object", [b"%d" % number], over=version)
            assert storage.read("object") == b"%d" % number
        storage.write("large", [bytes(11 * MB)], over=None)
        assert sizes(storage) == {"object": 2, "large": 11 * MB}
        assert sum(proxy.done.values()) > 5

    def test_a_server_that_is_away_is_waited_for_until_the_deadline(self, root: str, proxy: FaultyProxy) -> None:
        storage = open_storage(root, deadline=0.5)
        storage.version("object")
        proxy.plan = lambda method, path: "reset"
        with pytest.raises(ckpt.TransientError, match=r"could not read .*object.*Tried \d+ times"):
            storage.version("object")


HOLD = """
import sys
from ckpt.storage import open_storage
with open_storage(sys.argv[1]).lock(".lock", note="process 17 on some host."):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_holder_that_is_killed_is_gone_at_once_for_this_machine(root: str) -> None:
    command = [sys.executable, "-c", HOLD, root]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ckpt.LockedError, match="process 17 on some host"), open_storage(root).lock(".lock"):
            pass
        process.kill()
        process.wait()
        with open_storage(root).lock(".lock", note="the next one"):
            pass


def test_who_was_taken_for_gone_writes_no_more(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(root)
    with storage.lock(".lock", note="the first"):
        monkeypatch.setattr(leases, "has_ended", lambda record: True)
        with open_storage(root).lock(".lock", note="the second"):
            monkeypatch.setattr(leases, "EXPIRY", 0.0)
            with pytest.raises(ckpt.LockedError, match=r"another run took over .*\.lock, .*the second"):
                storage.write("object", [b"after"])
    assert sizes(storage) == {}


@pytest.mark.parametrize(
    ("root", "world_size", "data"), [("az", 2, "distributed"), ("gs", 1, "shuffle")], indirect=["root"]
)
def test_killed_and_resumed_equals_uninterrupted(root: str, tmp_path: Path, world_size: int, data: str) -> None:
    compare(root, tmp_path, world_size, data, "fp32")


def test_a_server_that_ignores_conditions_is_refused_at_the_start(tell: Tell) -> None:
    """The emulator as its package has it."""
    with clouds.gcs_emulator(conditions=False) as port:
        tell(clouds.environment("gs", port))
        with pytest.raises(UnsupportedError, match="the server ignores If-None-Match and If-Match"):
            ckpt.StateManager(f"gs://{BUCKET}/run", model=nn.Linear(2, 2))
        assert sizes(open_storage(f"gs://{BUCKET}/run")) == {}
        options = {"allow_unconditional": True}
        with ckpt.StateManager(f"gs://{BUCKET}/run", model=nn.Linear(2, 2), storage_options=options) as manager:
            manager.save_state("a", wait=True)
        assert "a/manifest.json" in sizes(open_storage(f"gs://{BUCKET}/run"))

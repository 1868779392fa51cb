"""Every store, every operation, every fault of a network.

Each request of the operation goes wrong once. It succeeds by asking again: with the right bytes, with one effect,
within its deadline.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.errors import LockedError
from ckpt.storage import HubStorage, Storage, open_storage
from ckpt.storage.hub.download import fetched
from tests.helpers import clouds, hub_server, seaweed
from tests.helpers.faulty_proxy import EachOnce, FaultyProxy, peaceful
from tests.helpers.hub_server import HubServer
from tests.helpers.seaweed import PART, Server
from tests.storage.test_read_only import serving as serving_folder

pytestmark = pytest.mark.slow
FAULTS = {
    "cut": "the answer ends in the middle",
    "reset": "the connection breaks while the request is sent",
    "answer lost": "the server has done it, and its answer does not arrive",
    "repeated": "a proxy sends the request twice, and passes on the second answer",
    "stall": "no byte comes",
}
SMALL = b"a few bytes"
LARGE = os.urandom(PART + 7)
SMALL_PART = 256 << 10  # bytes: what GCS takes multiples of
DEADLINE = 30.0
OPTIONS: dict[str, Any] = {"deadline": DEADLINE, "stall": 0.5}
_numbers = itertools.count()


@dataclass
class Store:
    """A storage that is reached through a proxy, and the same one reached directly."""

    proxied: Storage
    direct: Storage
    proxy: FaultyProxy
    hub: HubServer | None = None
    part: int = PART

    @property
    def large(self) -> bytes:
        """Two parts."""
        return LARGE[: self.part + 7]

    def commits(self) -> int | None:
        """How many times the repository has changed, on the Hub."""
        return len(self.hub.commits("me/runs")) if self.hub else None


@contextmanager
def _s3(request: pytest.FixtureRequest, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Store]:
    server: Server = request.getfixturevalue("server")
    for name, value in seaweed.environment(server.url).items():
        patch.setenv(name, value)
    root = f"s3://{seaweed.BUCKET}/network-{os.getpid()}-{next(_numbers)}"
    with FaultyProxy(server.port) as proxy:
        yield Store(open_storage(root, endpoint_url=proxy.url, **OPTIONS), open_storage(root), proxy)


@contextmanager
def _gs(request: pytest.FixtureRequest, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Store]:
    root = f"gs://{clouds.BUCKET}/network"
    with clouds.gcs_emulator() as port, FaultyProxy(port) as proxy:
        for name, value in clouds.environment("gs", port).items():
            patch.setenv(name, value)
        proxied = open_storage(root, endpoint_url=proxy.url, token="anon", **OPTIONS)
        yield Store(proxied, open_storage(root), proxy, part=SMALL_PART)


@contextmanager
def _az(request: pytest.FixtureRequest, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Store]:
    root = f"az://{clouds.BUCKET}/network"
    with clouds.azurite() as port, FaultyProxy(port) as proxy:
        through = clouds.connection_string(int(proxy.url.rpartition(":")[2]))
        proxied = open_storage(root, connection_string=through, **OPTIONS)
        direct = open_storage(root, connection_string=clouds.connection_string(port))
        yield Store(proxied, direct, proxy, part=SMALL_PART)


@contextmanager
def _hub(request: pytest.FixtureRequest, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Store]:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import _http

    patch.setattr(_http, "time", SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None}))  # it asks again, too
    with FaultyProxy(0) as proxy, hub_server.serving(folder, patch, proxy=proxy) as hub:
        proxied = HubStorage("me/runs", interval=0, **OPTIONS)
        proxied.repo.requests.policy = replace(proxied.repo.requests.policy, first_pause=0.05)
        direct = HubStorage("me/runs", interval=0)
        vars(direct.repo)["api"] = HfApi(endpoint=f"http://127.0.0.1:{hub.port}")
        yield Store(proxied, direct, proxy, hub)


@contextmanager
def _http(request: pytest.FixtureRequest, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Store]:
    (folder / "run").mkdir()
    with serving_folder(folder) as url, FaultyProxy(int(url.rpartition(":")[2])) as proxy:
        yield Store(open_storage(f"{proxy.url}/run", **OPTIONS), open_storage(folder / "run"), proxy)


STORES = {"s3": _s3, "gs": _gs, "az": _az, "hub": _hub, "http": _http}


@pytest.fixture(scope="module", params=STORES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with (
        pytest.MonkeyPatch.context() as patch,
        STORES[request.param](request, tmp_path_factory.mktemp("store"), patch) as opened,
    ):
        seaweed.upload_in_small_parts(patch, opened.part)
        opened.direct.write("there/small", [SMALL])
        opened.direct.write("there/large.bin", [opened.large])
        list(opened.proxied.list())  # it has answered once: a server that never did is given up sooner
        yield opened


def _list(store: Store, key: str) -> None:
    sizes = {entry.key: entry.size for entry in store.proxied.list("there")}
    assert sizes == {"there/small": len(SMALL), "there/large.bin": len(store.large)}


def _read_whole(store: Store, key: str) -> None:
    assert store.proxied.read("there/small") == SMALL
    assert store.proxied.read("there/large.bin") == store.large


def _read_range(store: Store, key: str) -> None:
    buffers = [bytearray(1 << 17), bytearray(5)]
    store.proxied.read_into("there/large.bin", 7, *(memoryview(buffer) for buffer in buffers))
    assert b"".join(buffers) == store.large[7 : 12 + (1 << 17)]
    assert store.proxied.read("there/large.bin", len(store.large) - 5, len(store.large) + 5) == store.large[-5:]


def _version(store: Store, key: str) -> None:
    seen = store.proxied if store.proxied.url.startswith("http") else store.direct  # where its folder has its own
    assert store.proxied.version("there/small") == seen.version("there/small") is not None
    assert store.proxied.version("absent") is None


def _write_small(store: Store, key: str) -> None:
    store.proxied.write(key, [key.encode()])
    assert store.direct.read(key) == key.encode()


def _write_large(store: Store, key: str) -> None:
    store.proxied.write(key, [key.encode(), store.large])
    assert store.direct.read(key) == key.encode() + store.large


def _write_new(store: Store, key: str) -> None:
    store.proxied.write(key, [SMALL], over=None)
    assert store.direct.read(key) == SMALL


def _write_new_large(store: Store, key: str) -> None:
    store.proxied.write(key, [key.encode(), store.large], over=None)
    assert store.direct.read(key) == key.encode() + store.large


def _write_over(store: Store, key: str) -> None:
    store.proxied.write("over", [key.encode()], over=store.direct.version("over"))
    assert store.direct.read("over") == key.encode()


def _delete(store: Store, key: str) -> None:
    store.proxied.delete(["delete/1", "delete/2", "delete/3", "delete/absent"])
    assert not list(store.direct.list("delete"))


def _copy(store: Store, key: str) -> None:
    store.proxied.link("there/large.bin", key)
    assert store.direct.read(key) == store.large


def _lock(store: Store, key: str) -> None:
    for shared in (True, False):
        with store.proxied.lock("there", shared=shared, note="mine"):
            if not isinstance(store.direct, HubStorage):  # whose locks are of one storage
                with pytest.raises(LockedError, match="mine"), store.direct.lock("there"):
                    pass
        with store.direct.lock("there"):
            pass


def _download(store: Store, key: str) -> None:
    """Through the cache of the client, to which nothing was downloaded before."""
    import huggingface_hub.constants as constants

    assert isinstance(store.proxied, HubStorage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", f"{constants.HF_HUB_CACHE}-{next(_numbers)}")
        folder = fetched(store.proxied.repo, ["there/*"], None)
        assert (folder / "there/small").read_bytes() == SMALL
        assert (folder / "there/large.bin").read_bytes() == store.large


READS = {"list": _list, "read whole": _read_whole, "read a range": _read_range, "version": _version}
WRITES = {
    "write": _write_small,
    "write in parts": _write_large,
    "write what is new": _write_new,
    "write what is new in parts": _write_new_large,
    "write over a version": _write_over,
    "delete": _delete,
    "copy": _copy,
    "lock": _lock,
}
ONE_CHANGE = {*WRITES} - {"lock"}
Operation = Callable[[Store, str], None]


def prepare(store: Store, what: str) -> None:
    if what == "delete":
        for number in (1, 2, 3):
            store.direct.write(f"delete/{number}", [b"x"])


def outcome(store: Store, what: str, operation: Operation, fault: str) -> str:
    """What is wrong with an operation whose every request goes wrong once; empty if nothing is."""
    prepare(store, what)
    before, began = store.commits(), time.monotonic()
    store.proxy.plan = plan = EachOnce(store.proxy, fault)
    try:
        operation(store, f"{what.replace(' ', '-')}/{next(_numbers)}")
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]} (asked: {', '.join(plan.met)})"
    finally:
        store.proxy.plan = peaceful
    if time.monotonic() - began > 2 * DEADLINE:
        return f"took {time.monotonic() - began:.0f} s"
    after = store.commits()
    if before is not None and after != before + (what in ONE_CHANGE):
        return f"made {after} commits of {before}"
    return "" if plan.met or (store.hub and what == "lock") else "asked for nothing"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_that_goes_wrong_is_made_again_and_takes_effect_once(store: Store, fault: str) -> None:
    operations = dict(READS if store.proxied.url.startswith("http") else {**READS, **WRITES})
    if store.hub:
        operations["download"] = _download
    outcomes = {what: outcome(store, what, operation, fault) for what, operation in operations.items()}
    assert not {what: found for what, found in outcomes.items() if found}

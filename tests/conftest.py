"""Fixtures that several test modules share.

A test that takes a `root` (or `anywhere`, or makes some with `new_root`) runs in a local folder, with the mark
`also_on_s3` on an S3 server too, and with CKPT_ROOT=s3 there alone. In such a run every test must take one of them, or
say by `not_on_s3(reason)` why it does not.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from ckpt.storage.retry import RetryPolicy
from ckpt.util.console import ConsoleHandler
from tests.helpers import hub_server
from tests.helpers.expected_skips import ExpectedSkips
from tests.helpers.hub_server import HubServer
from tests.helpers.places import Folder, Place, Prefix
from tests.helpers.seaweed import BUCKET, Server, environment, serving
from tests.helpers.second_process import MARKS, single_process

if TYPE_CHECKING:
    from tests.helpers.namespaces import Node

gc.disable()  # until all is collected: what is imported until then stays
# hundreds of processes import ckpt: images of Python that set this would have each compile every module (0.5 s) anew
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("CKPT_MEMORY_KEEPER", "off")  # a process that outlives a test: only tests of it start one
for handler in logging.getLogger("ckpt").handlers:
    if isinstance(handler, ConsoleHandler):
        handler.pid = -1  # tests read standard error: ckpt prints there, though pytest collects the log
if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 4 << 30:
    # a save waits a dozen times for a disk: most of the time of a test in one process. Tests about disks are `on_disk`
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
ON_S3 = os.environ.get("CKPT_ROOT") == "s3"
_ALL_SLOW = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.slow\b", re.MULTILINE)
_numbers = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in random order")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI") == "true" and not ON_S3 and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ExpectedSkips())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where slow tests are left out, do not even import a module that is all slow: its libraries take seconds."""
    left_out = "not slow" in config.getoption("markexpr") and collection_path.name.startswith("test_")
    return True if left_out and _ALL_SLOW.search(collection_path.read_text()) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("also_on_s3")
    if not ON_S3 and mark is not None:
        on_s3 = pytest.param("s3", marks=[pytest.mark.slow, *([pytest.mark.long] if mark.kwargs.get("long") else [])])
        metafunc.parametrize("root", ["folder", on_s3], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--shuffle")) is not None:
        items[:] = _shuffled(items, random.Random(seed))
    if ON_S3:
        for item in items:
            item.add_marker("slow")
        _decide_about_s3(items)


def _shuffled(items: list[pytest.Item], draw: random.Random) -> list[pytest.Item]:
    """The modules, and the tests within each: what a module computes once for its tests is not computed for each."""
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    return [
        item
        for module in draw.sample(list(modules.values()), len(modules))
        for item in draw.sample(module, len(module))
    ]


def pytest_collection_finish() -> None:
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            # pytest attaches its handlers six times a test to each that does not: forty, for a tenth of an empty test
            logger.propagate = True
    gc.freeze()  # what is imported stays: the collections that ckpt asks for would go through it for 0.4 s each
    gc.enable()


def _decide_about_s3(items: list[pytest.Item]) -> None:
    undecided = []
    for item in items:
        mark = item.get_closest_marker("not_on_s3")
        if mark is not None:
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))
        elif not {"anywhere", "new_root", "s3"} & set(getattr(item, "fixturenames", ())):
            undecided.append(item.nodeid)
    if undecided:
        raise pytest.UsageError(f"neither take a root nor are marked not_on_s3(reason): {', '.join(undecided)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with _guarded(item):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _guarded(item):
        yield


def _guarded(item: pytest.Item) -> AbstractContextManager[None]:
    return nullcontext() if any(map(item.get_closest_marker, MARKS)) else single_process(item)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """An S3 server of this test process's own."""
    with serving() as one:
        yield one


@pytest.fixture(scope="session")
def new_root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Place]]:
    """Makes empty roots."""
    if not ON_S3:
        yield lambda: Folder(tmp_path_factory.mktemp("root")) / "root"
        return
    with pytest.MonkeyPatch.context() as patch:
        _tell_where(request.getfixturevalue("server"), patch)
        yield lambda: Prefix(_empty())


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """pytest's, in memory where there is room, unless a test is marked `on_disk`."""
    if request.node.get_closest_marker("on_disk") is None:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder).resolve()


@pytest.fixture
def root(request: pytest.FixtureRequest, new_root: Callable[[], Place]) -> Iterator[Place]:
    """An empty root."""
    if getattr(request, "param", "") == "s3":
        yield Prefix(request.getfixturevalue("s3"))
    elif request.node.get_closest_marker("on_disk"):
        yield Folder(request.getfixturevalue("tmp_path")) / "root"
    else:
        place = new_root()
        yield place
        if isinstance(place, Folder):  # memory is scarcer than a disk
            shutil.rmtree(place.parent, ignore_errors=True)


@pytest.fixture
def anywhere(request: pytest.FixtureRequest) -> str:
    """The URL of an empty root where nothing looks at its files: in memory, unless all is on S3."""
    return str(request.getfixturevalue("s3")) if ON_S3 else f"memory://anywhere-{next(_numbers)}"


@pytest.fixture
def s3(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty root on that server. The environment says how to reach it."""
    _tell_where(server, monkeypatch)
    return _empty()


def _empty() -> str:
    return f"s3://{BUCKET}/test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A stand-in for the Hub, the only one that this process and its children can reach."""
    with hub_server.serving(tmp_path, monkeypatch) as one:
        yield one


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is tried again twice, at once."""
    monkeypatch.setattr(RetryPolicy, "pauses", lambda self: iter((0.0, 0.0)))


@pytest.fixture
def impatient_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's client itself asks again five times: at once."""
    from huggingface_hub.utils import _http

    monkeypatch.setattr(_http, "time", SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None}))


def _tell_where(server: Server, patch: pytest.MonkeyPatch) -> None:
    for name, value in environment(server.url).items():
        patch.setenv(name, value)


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Two hosts, as far as the network is concerned."""
    from tests.helpers.namespaces import cabled_nodes  # torch, which the process that only starts workers needs not

    with cabled_nodes() as found:
        yield found


@pytest.fixture(autouse=True)
def only_warnings_are_captured(caplog: pytest.LogCaptureFixture) -> None:
    """Unless a test asks for more with `caplog.at_level`: a line is said of every save and resume."""
    caplog.handler.setLevel(logging.WARNING)

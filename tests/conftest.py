"""Fixtures that several test modules share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.storage.retries import Patience
from tests import hub_server
from tests.hub_server import HubServer
from tests.seaweed import BUCKET, Server, environment, serving

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """An S3 server of this test process's own."""
    with serving() as one:
        yield one


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty root: a directory, or with CKPT_ROOT=s3 one on that server."""
    if os.environ.get("CKPT_ROOT") == "s3":
        return str(request.getfixturevalue("s3"))
    return str(tmp_path / "root")


@pytest.fixture
def s3(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty root on that server. The environment says how to reach it."""
    for name, value in environment(server.url).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A stand-in for the Hub, the only one that this process and its children can reach."""
    with hub_server.serving(tmp_path, monkeypatch) as one:
        yield one


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is tried again twice, at once."""
    monkeypatch.setattr(Patience, "pauses", lambda self: iter((0.0, 0.0)))

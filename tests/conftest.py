"""Fixtures that several test modules share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

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

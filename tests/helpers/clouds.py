"""Emulators of Azure and of Google Cloud Storage on this machine's loopback.

Azurite, Microsoft's own, is a package of npm: `make test` puts it into build/ where there is npm. It honours all
conditions of a write, but has no hierarchical names and no logins but by key.

`gcp-storage-emulator` is a package of pip. It answers one request at a time and ignores `ifGenerationMatch`, so
`tests/helpers/gcs_emulator.py` adds that: what the tests show of conditions is that ckpt sends the right ones and acts
on the answers, not that Google's server compares them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.seaweed import free_ports

BUCKET = "ckpt"
ACCOUNT = "devstoreaccount1"
# Azurite's own, the same everywhere and in its documentation
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_REPOSITORY = Path(__file__).parents[2]
_DEADLINE = 60.0


def of_npm(name: str) -> str:
    """A program of npm, where `make test` has put it or where it is installed. Skips the test if it is not."""
    placed = _REPOSITORY / "build/npm/node_modules/.bin" / name
    found = str(placed) if placed.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: make test puts it into build/ where there is npm")
    return found


@contextmanager
def azurite() -> Iterator[int]:
    """The port of an Azurite whose account has one empty container."""
    binary = of_npm("azurite-blob")
    [port] = free_ports(1)
    with tempfile.TemporaryDirectory(prefix=".azurite-") as folder:
        command = [binary, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", folder]
        with running([*command, "--silent", "--skipApiVersionCheck", "--disableTelemetry"], folder, port):
            from azure.storage.blob import BlobServiceClient

            BlobServiceClient.from_connection_string(connection_string(port)).create_container(BUCKET)
            yield port


@contextmanager
def gcs_emulator(*, conditions: bool = True) -> Iterator[int]:
    """The port of an emulator with one empty bucket; without `conditions` as its package has it."""
    [port] = free_ports(1)
    arguments = ["-m", "tests.helpers.gcs_emulator", str(port), BUCKET, *(["conditions"] if conditions else [])]
    with tempfile.TemporaryDirectory(prefix=".gcs-") as folder, running([sys.executable, *arguments], folder, port):
        yield port


def environment(scheme: str, port: int) -> dict[str, str]:
    """What tells ckpt where an emulator is. NO_GCE_CHECK: no metadata server is looked for, which takes seconds."""
    if scheme == "gs":
        return {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}", "NO_GCE_CHECK": "true"}
    return {"AZURE_STORAGE_CONNECTION_STRING": connection_string(port)}


def connection_string(port: int, key: str = KEY) -> str:
    return (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={key};"
        f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
    )


@contextmanager
def running(command: list[str], folder: str, port: int) -> Iterator[None]:
    """A server, from when it answers until the context is left."""
    with (Path(folder) / "server.log").open("ab") as log:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), *sys.path])}
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
    try:
        _await_answer(process, port, Path(folder) / "server.log")
        yield
    finally:
        process.kill()
        process.wait()


def _await_answer(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + _DEADLINE
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the emulator did not start")

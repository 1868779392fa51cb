"""S3 by others than SeaweedFS: the same contract, and a server that lacks something is refused at the start.

moto is a package of pip. It compares the conditions of a write, but not at the end of an upload in parts. s3rver, a
package of npm, ignores them, as some servers do that people run at home.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from torch import nn

import ckpt
from ckpt.errors import UnsupportedError
from ckpt.storage import Storage, open_storage
from tests.guarantees.test_resume_matrix import compare
from tests.helpers.clouds import of_npm, running
from tests.helpers.seaweed import BUCKET, KEY, SECRET, environment, free_ports
from tests.helpers.storage_contract import StorageContract, sizes

pytestmark = pytest.mark.slow
S3RVER_KEY, S3RVER_SECRET = "S3RVER", "S3RVER"  # its only ones
_numbers = itertools.count()


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """The URL of a moto with one empty bucket."""
    [port] = free_ports(1)
    command = [str(Path(sys.executable).parent / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with tempfile.TemporaryDirectory(prefix=".moto-") as folder, running(command, folder, port):
        url = f"http://127.0.0.1:{port}"
        client(url).create_bucket(Bucket=BUCKET)
        yield url


def client(url: str) -> Any:
    """A client of AWS's own, to look at what is there."""
    keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
    return boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)


@contextmanager
def s3rver() -> Iterator[str]:
    """The URL of an s3rver with one empty bucket."""
    binary = of_npm("s3rver")
    [port] = free_ports(1)
    with tempfile.TemporaryDirectory(prefix=".s3rver-") as folder:
        command = [binary, "-d", folder, "-a", "127.0.0.1", "-p", str(port), "--silent", "--configure-bucket", BUCKET]
        with running(command, folder, port):
            yield f"http://127.0.0.1:{port}"


@pytest.fixture
def root(moto: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty root on moto."""
    for name, value in environment(moto).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/test-{next(_numbers)}"


@pytest.mark.long  # the contract holds on SeaweedFS: what moto does otherwise is in the tests below
class TestMoto(StorageContract):
    @pytest.fixture
    def storage(self, root: str) -> Storage:
        return open_storage(root)


def test_what_is_written_is_encrypted_with_the_key_that_was_asked_for(root: str, moto: str) -> None:
    """moto keeps what it was told, and tells it of every object; SeaweedFS has no keys."""
    key = "arn:aws:kms:us-east-1:123456789012:key/0e9e0000-0000-4000-8000-000000000000"
    demanded = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": key}
    options = {"s3_additional_kwargs": demanded}
    with ckpt.StateManager(root, model=nn.Linear(40, 30), storage_options=options) as manager:
        manager.save_state("first", wait=True)
    storage = open_storage(root, **options)
    storage.write("large", [bytes(17 << 20)])
    storage.link("large", "linked")
    written = sizes(storage).keys()
    assert {"first/manifest.json", "large", "linked"} <= written
    for name in written:
        found = client(moto).head_object(Bucket=BUCKET, Key=f"{root.removeprefix(f's3://{BUCKET}/')}/{name}")
        assert {field: found.get(field) for field in demanded} == demanded, name
    assert ckpt.verify(root) == {"first": []}


@pytest.mark.long  # as on SeaweedFS: what moto does otherwise is in the test above
def test_on_moto_killed_and_resumed_equals_uninterrupted(root: str, tmp_path: Path) -> None:
    compare(root, tmp_path, 2, "distributed", "fp32")


def test_s3rver_which_ignores_conditions_is_refused_when_the_manager_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3rver() as url:
        keys = {"AWS_ACCESS_KEY_ID": S3RVER_KEY, "AWS_SECRET_ACCESS_KEY": S3RVER_SECRET}
        for name, value in (environment(url) | keys).items():
            monkeypatch.setenv(name, value)
        root = f"s3://{BUCKET}/run"
        with pytest.raises(UnsupportedError, match="the server ignores If-None-Match and If-Match"):
            ckpt.StateManager(root, model=nn.Linear(2, 2))
        assert sizes(open_storage(root)) == {}

"""S3 servers beside SeaweedFS, on this machine's loopback.

moto is a package of pip. It compares the conditions of a write, but not at the end of an upload in parts. s3rver, a
package of npm, ignores them, as some servers do that people run at home.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3

from tests.helpers.clouds import of_npm, running
from tests.helpers.seaweed import BUCKET, KEY, SECRET, free_ports

S3RVER_KEY, S3RVER_SECRET = "S3RVER", "S3RVER"  # its only ones


@contextmanager
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

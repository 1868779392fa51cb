"""A real S3 server for tests: SeaweedFS on this machine's loopback, one for each test process that asks."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from ckpt.storage.multipart import split_into_parts

KEY, SECRET = "test-key", "a-secret-that-must-not-be-shown"
BUCKET = "ckpt"
PART = 5 << 20  # bytes: the least that S3 takes
DOMAIN = "localhost"  # it takes a bucket before this name, too, for that bucket
_ALIVE = {"Bucket": "alive", "Key": "probe"}  # an object of ours that must be read before anybody else asks
_PORTS = ("s3", "master", "volume", "filer", "admin")
_DEADLINE = 60.0
_LOWEST_GIVEN = 32_768  # by Linux, unless it is told otherwise
_turns = itertools.count()
_SOCKETS = Path("/tmp")  # where it puts them, whatever it is told


class Server:
    """A server with a folder of its own, which survives its being killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports = free_ports(3 * len(_PORTS))
        self._process: subprocess.Popen[bytes] | None = None
        self._has_probe = False

    @property
    def port(self) -> int:
        return self._ports[0]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        ports = [f"-{name}.port={port}" for name, port in zip(_PORTS, self._ports, strict=False)]
        ports += [f"-{name}.port.grpc={port}" for name, port in zip(_PORTS, self._ports[len(_PORTS) :], strict=False)]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(_binary()), "mini", f"-dir={self.folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *ports,
                 "-master.telemetry=false", "-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0",
                 "-s3.port.lance=0", f"-s3.domainName={DOMAIN}", f"-bucket={BUCKET}",
                 f"-filer.localSocket={self.folder}/filer.sock", f"-s3.localSocket={self.folder}/s3.sock"],
                env={**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "GOMEMLIMIT": "400MiB",
                     "TMPDIR": str(self.folder)},
                cwd=self.folder, stdout=log, stderr=log,
            )  # fmt: skip
        self._await_answers()

    def kill(self) -> None:
        """SIGKILL. What it has answered for is on the disk."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def clear_away(self) -> None:
        """End it, and remove all that it left."""
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        for port in self._ports:
            for left in _SOCKETS.glob(f"seaweedfs-*-{port}.sock"):
                left.unlink()

    def _await_answers(self) -> None:
        """Until objects can be read and written: after a kill it says 500 until it has found its volumes again."""
        import botocore.config  # not every machine with a GPU has it
        import botocore.exceptions
        import botocore.session

        end = time.monotonic() + _DEADLINE
        client = botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            config=botocore.config.Config(retries={"total_max_attempts": 1}),
        )
        while time.monotonic() < end:
            assert self._process is not None
            assert self._process.poll() is None, (self.folder / "server.log").read_text()[-4000:]
            with suppress(OSError, botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
                if self._has_probe:
                    client.get_object(**_ALIVE)["Body"].read()
                else:
                    with suppress(botocore.exceptions.ClientError):  # made by a round that came no further
                        client.create_bucket(Bucket=_ALIVE["Bucket"])
                client.put_object(**_ALIVE, Body=bytes(4096))
                self._has_probe = True
                client.get_object(**_ALIVE)["Body"].read()
                client.head_bucket(Bucket=BUCKET)
                return
            time.sleep(0.05)
        raise AssertionError("the server did not start")


@contextmanager
def serving(root: Path | None = None) -> Iterator[Server]:
    """A server that is gone, with all it holds, when the context is left."""
    folder = Path(tempfile.mkdtemp(prefix=".seaweed-", dir=root)).resolve()
    server = Server(folder)
    try:
        server.start()
        yield server
    finally:
        server.clear_away()


def environment(url: str) -> dict[str, str]:
    """What tells boto, s3fs and ckpt where the server is, and who asks."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": url,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def upload_in_small_parts(patch: pytest.MonkeyPatch, size: int = PART) -> None:
    """An upload of 6 MB has two parts then, as one of 17 MB has otherwise: the same requests, a third of the bytes."""
    patch.setattr(split_into_parts, "__defaults__", (size,))


def _binary() -> Path:
    return Path(sys.executable).parent / "weed"


def free_ports(count: int) -> list[int]:
    """Below those that the system gives to anybody, who could take them before the server does, or while it is down.

    Each test process looks in another place, so that two do not find the same.
    """
    for turn in range(1000):
        first = 10_000 + (7 * os.getpid() + next(_turns) + turn) * count % (_LOWEST_GIVEN - 10_000 - count)
        ports = list(range(first, first + count))
        with suppress(OSError), ExitStack() as bound:
            for port in ports:
                bound.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return ports
    raise AssertionError("no ports are free")

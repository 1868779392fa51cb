"""A process that has imported torch and pytest once, and forks for every session of tests.

A script, started in a copy of the source tree: it reads orders from its standard input and answers on its standard
output, a line of JSON each. It imports neither `ckpt` nor `tests`; every session does, from the copy as it is then.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

# What tests import sooner or later. Nothing here may start a thread: sessions are forks.
_PRELOADED = (
    "torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel", "torch.distributed._shard.sharded_tensor", "torch.utils.data", "numpy",
    "pytest", "pytest_timeout", "safetensors.torch", "huggingface_hub", "fsspec", "s3fs",
    "aiobotocore.session", "boto3", "yaml", "xxhash", "rich.progress", "rich.table", "click",
    "torchdata.stateful_dataloader", "http.server", "multiprocessing.forkserver", "torch.distributed.pipelining",
    "accelerate", "peft", "transformers.trainer",
)  # fmt: skip
_LINES = 60  # of a session's output that are handed on


def main() -> None:
    sys.path[0] = os.getcwd()  # was the folder of this script
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in _PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    _say(answers, {"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        _say(answers, _session(order["tests"], order["seconds"]))
    os._exit(0)  # without clearing away what was imported, which takes seconds


def _say(answers: Any, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def _session(tests: list[str], seconds: float) -> dict[str, Any]:
    """Run tests in a forked process with a temporary folder of its own. No exit status: they ran out of time."""
    folder = tempfile.mkdtemp(prefix="s")
    began = time.monotonic()
    child = os.fork()
    if not child:
        try:
            _in_child(folder, tests)
        finally:
            os._exit(70)
    ended = _ends(child, seconds)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # whatever it has started, and itself if it has not ended
    status = os.waitpid(child, 0)[1]
    try:
        return {
            "status": os.waitstatus_to_exitcode(status) if ended else None,
            "seconds": time.monotonic() - began,
            **_read_result(folder),
            "output": _tail(os.path.join(folder, "output")),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ends(child: int, seconds: float) -> bool:
    descriptor = os.pidfd_open(child)
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def _read_result(folder: str) -> dict[str, Any]:
    try:
        with open(os.path.join(folder, "result.json")) as file:
            found: dict[str, Any] = json.load(file)
            return found
    except (OSError, ValueError):
        return {"failed": [], "passed": 0, "library": None}


def _tail(path: str) -> list[str]:
    with suppress(OSError), open(path, errors="replace") as file:
        return file.read().splitlines()[-_LINES:]
    return []


def _in_child(folder: str, tests: list[str]) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(os.path.join(folder, "output"), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    _stand_in_for_the_fork_server()
    import pytest

    seen = _Seen()
    quick = ["-x", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist"]  # a diff of megabytes takes minutes
    status = pytest.main([*quick, *tests], plugins=[seen])
    library = getattr(sys.modules.get("ckpt"), "__file__", None)
    with open(os.path.join(folder, "result.json"), "w") as file:
        json.dump({"failed": seen.failed, "passed": seen.passed, "library": library}, file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(status))


class _Seen:
    """A plugin of pytest that notes which tests failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.passed = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed += 1


def _stand_in_for_the_fork_server() -> None:
    """Tests start ranks through multiprocessing's fork server, a new interpreter that would import torch again.

    A fork of this process waits in its place until a test needs it, and imports only what is to be tested.
    """
    from multiprocessing import connection, forkserver, resource_tracker

    if sys.version_info >= (3, 14):
        return  # it asks for a key there; the ordinary one serves
    server: Any = forkserver._forkserver
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    alive_read, alive_write = os.pipe()
    begin_read, begin_write = os.pipe()
    child = os.fork()
    if not child:
        os.close(alive_write)
        os.close(begin_write)
        try:
            preload = os.read(begin_read, 1 << 16)
            if preload:
                forkserver.main(listener.fileno(), alive_read, json.loads(preload))
        finally:
            os._exit(0)
    os.close(alive_read)
    os.close(begin_read)
    listener.close()
    begun: list[bool] = []

    def ensure_running() -> None:
        resource_tracker.ensure_running()
        if not begun:
            begun.append(True)
            os.write(begin_write, json.dumps(server._preload_modules).encode())

    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive_write, child
    server.ensure_running = ensure_running


if __name__ == "__main__":
    main()

"""`make alone`: every fast test in a process of its own, where no other test has run.

One process imports torch and other people's libraries, but neither `ckpt` nor `tests`. It forks for every module, which
collects its tests there, and once more for every test: a new interpreter each would take hours.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest

# Imports that take long, and leave nothing behind that a test could lean on. None may start a thread: tests are forks.
_PRELOADED = (
    "torch", "torch._dynamo", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch.utils.data",
    "torch.distributed.checkpoint", "torch.distributed._shard.sharded_tensor", "torchdata.stateful_dataloader", "numpy",
    "safetensors.torch", "huggingface_hub", "fsspec", "s3fs", "aiobotocore.session", "boto3", "yaml", "xxhash",
    "rich.progress", "rich.table", "click",
)  # fmt: skip


class OneProcessEach:
    """A plugin of pytest: forks for every test that was collected, and counts those that failed."""

    def __init__(self) -> None:
        self.tests = self.failed = 0

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            self.tests += 1
            child = os.fork()
            if not child:
                _run(item)
            self.failed += bool(os.waitpid(child, 0)[1])
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(f"\n{report.nodeid} fails alone, at its {report.when}:\n{report.longreprtext}")
            for title, text in report.sections:
                print(f"{title}:\n{text}")


def _run(item: pytest.Item) -> None:
    status = 70
    try:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        status = 1 if item.session.testsfailed else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _collect(module: str, arguments: list[str], output: int, answer: int) -> None:
    """Run a module's tests; write to a pipe how many there were and how many failed."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    folder = tempfile.mkdtemp(prefix="alone-")
    forks = OneProcessEach()
    try:
        # every test begins with an empty folder: a base that is given is removed first
        options = ["--basetemp", os.path.join(folder, "t"), "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
        status = pytest.main([module, *options], plugins=[forks])
        broken = status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        os.write(answer, f"{forks.tests} {forks.failed + broken}".encode())
    finally:
        sys.stdout.flush()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


class Module:
    """A module whose tests run in forks of this process."""

    def __init__(self, path: str, arguments: list[str]) -> None:
        self.path, self.began = path, time.monotonic()
        self.output: IO[Any] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - open while it runs
        self.answer, answer = os.pipe()
        self.process = os.fork()
        if not self.process:
            _collect(path, arguments, self.output.fileno(), answer)
        os.close(answer)

    def end(self) -> tuple[int, int]:
        """How many tests there were, and how many failed; what was printed, if any did."""
        with open(self.answer) as answer, self.output:
            tests, failed = map(int, (answer.read() or "0 1").split())
            self.output.seek(0)
            print(f"{self.path}: {tests} tests, {failed} failed, {time.monotonic() - self.began:.0f} s", flush=True)
            if failed:
                print(self.output.read(), flush=True)
        return tests, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", default=["tests"])
    parser.add_argument("-n", type=int, default=2, dest="jobs", help="modules at a time")
    parser.add_argument("-m", default="not slow and not gpu", dest="marks")
    options = parser.parse_args()
    sys.path[0] = os.getcwd()  # was the folder of this script
    for name in _PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    found = [
        path
        for given in options.paths
        for path in ([given] if given.endswith(".py") else Path(given).rglob("test_*.py"))
    ]
    waiting = sorted(map(str, found), key=os.path.getsize)  # the largest first, so that the last ones end together
    running: dict[int, Module] = {}
    tests = failed = 0
    while waiting or running:
        while waiting and len(running) < options.jobs:
            module = Module(waiting.pop(), ["-m", options.marks])
            running[module.process] = module
        ran, broke = running.pop(os.wait()[0]).end()
        tests, failed = tests + ran, failed + broke
    print(f"{tests} tests, each in a process of its own: {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

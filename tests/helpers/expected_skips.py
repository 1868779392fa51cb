"""Why a test may be skipped. With CI=true any other skip fails the run: a test that never runs shows nothing.

The second column says where a skip is right: on a machine that lacks what the test needs.
"""

from __future__ import annotations

import os
import re
import shutil
from functools import cache
from importlib.util import find_spec

import pytest


@cache
def _expected() -> list[tuple[str, bool]]:
    import torch  # 2 s, which the process that only starts workers spares, until one of them skips something

    return [
        ("needs a GPU|needs two GPUs|compiles no CUDA|Triton compiles nothing|NVRTC", not torch.cuda.is_available()),
        ("could not import 'triton'", find_spec("triton") is None),
        (r"torchtitan", find_spec("torchtitan") is None),
        (r"could not import 'trl'", find_spec("trl") is None),
        (r"\bray is not installed", find_spec("ray") is None),
        (r"could not import 'gymnasium'", find_spec("gymnasium") is None),
        (r"could not import '(tensorboard|mlflow|wandb)'", True),  # in no extra: CONTRIBUTING.md
        (r"torch_xla", True),  # there is none for this torch
        (r"could not import 'bitsandbytes'", find_spec("bitsandbytes") is None),
        (r"(azurite|s3rver)\S* is not installed", shutil.which("npm") is None),
        (r"needs? root|only root|needs unshare|no tmpfs can be mounted|no network namespaces", os.geteuid() != 0),
        (r"there is no C compiler|torch.compile compiles nothing", shutil.which("cc") is None),
        (r"no control group can be made", True),  # in most containers
        (r"could not mount", True),  # a kernel that lacks the kind of filesystem
        (r"no Chromium is installed", not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))),
        (
            r"cannot be read here \(no git, or not in this clone\)",
            shutil.which("git") is None or not os.path.isdir(".git"),
        ),
        (r"keeps its files in memory, or this kernel does not say", True),
        (r"this version of (torch|Trainer) keeps", True),
    ]


class ExpectedSkips:
    """Fails a run in which a test was skipped for another reason."""

    def __init__(self) -> None:
        self.unexpected: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look_at(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look_at(report)

    def _look_at(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.skipped and not is_expected(str(report.longrepr)):
            self.unexpected[report.nodeid] = str(report.longrepr)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test, reason in self.unexpected.items():
            terminalreporter.write_line(f"{test} must not be skipped here: {reason} (tests/helpers/expected_skips.py)")


def is_expected(reason: str) -> bool:
    return any(here and re.search(pattern, reason) for pattern, here in _expected())

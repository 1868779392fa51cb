"""What each test costs: seconds of CPU, its own and those of all processes below it, and how many it started itself.

`make profile` runs with this plugin: the time on the clock says little on a machine that has other work too. A fixture
that several tests share is charged to the first of them.
"""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Generator, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")
_HEAVIEST = 60
_STARTS: tuple[tuple[Any, str], ...] = ((subprocess.Popen, "__init__"), (BaseProcess, "start"), (os, "fork"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="write a table of the costliest modules and tests there")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Table(config) if config.getoption("--costs") else _Meter(), "costs-of-tests")


def _seconds() -> float:
    """CPU time of this process and all that descend from it, those that have ended too."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(path.parent.name)], ticks[int(path.parent.name)] = int(words[1]), sum(map(int, words[11:15]))
    return sum(ticks[process] for process in _family(os.getpid(), parents)) / _TICKS


def _family(process: int, parents: dict[int, int]) -> Iterator[int]:
    children = defaultdict(list)
    for child, parent in parents.items():
        children[parent].append(child)
    waiting = [process]
    while waiting:
        yield waiting[-1]
        waiting += children[waiting.pop()]


class _Meter:
    """In the process that runs tests: puts the cost of each into its last report."""

    def __init__(self) -> None:
        self.seconds, self.started = 0.0, 0
        for owner, name in _STARTS:
            self._count(owner, name)

    def _count(self, owner: Any, name: str) -> None:
        start = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            self.started += 1
            return start(*args, **options)

        setattr(owner, name, counted)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        self.seconds, self.started = _seconds(), 0
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("cost", (_seconds() - self.seconds, self.started)))
        return report


class _Table(_Meter):
    """In the process that one starts: gathers the costs, whoever ran the test, and writes them down."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__()
        self.path = Path(config.getoption("--costs"))
        self.costs: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, cost in report.user_properties:
            if name == "cost":
                self.costs[report.nodeid] = cost

    def pytest_terminal_summary(self) -> None:
        modules: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for test, cost in self.costs.items():
            modules[test.partition("::")[0]].append(cost)
        summed = {name: (sum(cpu for cpu, _ in costs), sum(n for _, n in costs)) for name, costs in modules.items()}
        total = sum(cpu for cpu, _ in summed.values())
        lines = [f"{len(self.costs)} tests, {total / 60:.1f} minutes of CPU.", ""]
        for title, costs in (("module", summed), ("test", self.costs)):
            lines += [f"| {title} | CPU, s | processes that it starts |", "|---|---|---|"]
            heaviest = sorted(costs.items(), key=lambda item: -item[1][0])[:_HEAVIEST]
            lines += [
                f"| `{name.removeprefix('tests/')}` | {cpu:.1f} | {started} |" for name, (cpu, started) in heaviest
            ]
            lines.append("")
        self.path.write_text("\n".join(lines))

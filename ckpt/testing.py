"""Assert in a test that a training program resumes exactly.

import ckpt.testing

def test_my_loop_resumes_exactly():
    ckpt.testing.assert_exact_resume("train.py", "--epochs", "2", save_every=5)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt.errors import ConfigError
from ckpt.selftest.check import Program, Report, check

__all__ = ["InexactResumeError", "Report", "assert_exact_resume"]


class InexactResumeError(AssertionError):
    """A resumed run differs from a straight one. `report` says where, and the likely cause."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


def assert_exact_resume(
    program: str | Path | Callable[[str], object],
    *arguments: str,
    processes: int = 1,
    kills: int = 3,
    save_every: int | None = None,
    seed: int = 0,
    timeout: float = 600.0,
) -> Report:
    """Run a training program straight, then kill it with SIGKILL and resume it, and compare every optimizer step.

    Args:
        program: A script, which runs in new processes; or a function at the top level of a file, which gets a root for
            its checkpoints. A script's managers save into roots of the test's own.
        *arguments: Arguments of the script; `"{root}"` stands for that root, for scripts that use the folder
            themselves.
        processes: How many processes; more than one run under torchrun.
        kills: How often to kill it.
        save_every: Overrides the program's own setting.
        seed: Chooses the steps after which to kill it.
        timeout: Seconds for each process.

    Returns:
        What was compared.

    Raises:
        InexactResumeError: A batch, loss, gradient, learning rate, parameter or buffer differs; with the first such
            step and the likely cause.
        ConfigError: There is nothing to compare.
    """
    report = check(
        Program(
            **_target(program, arguments),
            processes=processes,
            kills=kills,
            save_every=save_every,
            seed=seed,
            timeout=timeout,
        )
    )
    if not report.exact:
        raise InexactResumeError(report)
    return report


def _target(program: str | Path | Callable[[str], object], arguments: tuple[str, ...]) -> dict[str, Any]:
    if not callable(program):
        return {"target": str(program), "arguments": arguments}
    name = getattr(program, "__qualname__", "")
    if not name.isidentifier():
        raise ConfigError(
            f"{program!r} cannot be started in another process: give a function at the top level of a file, which "
            "takes the root, or the path of a script."
        )
    if arguments:
        raise ConfigError(f"{name}() is called with the root alone; arguments {arguments} are for scripts.")
    return {"target": program.__code__.co_filename, "function": name}

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
from ckpt.selftest import Program, Report, check

__all__ = ["InexactResumeError", "Report", "assert_exact_resume"]


class InexactResumeError(AssertionError):
    """The resumed run differs from the uninterrupted run. `report` says where."""

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
    """Run a training program straight through, then kill it with SIGKILL and resume it, and compare every optimizer
    step.

    Args:
        program: A script, which runs in new processes; or a function at the top level of a file, which gets a root for
            its checkpoints. A script's managers save into temporary roots.
        *arguments: Arguments of the script; `"{root}"` stands for the temporary root, for scripts that use the folder
            themselves.
        processes: The number of processes; if there are several, they run under torchrun.
        kills: How often to kill the program.
        save_every: Steps between saves, instead of the program's own setting.
        seed: The seed that chooses the steps after which to kill the program.
        timeout: The seconds that each process may take.

    Returns:
        The results of the comparison.

    Raises:
        InexactResumeError: A batch, loss, gradient, learning rate or parameter differs, or the final checkpoint; the
            error names the first such step.
        ConfigError: The test found nothing to compare.
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
            f"ckpt can't start {program!r} in another process. Give the path of a script, or a function "
            "that takes the root and is defined at the top level of a file."
        )
    if arguments:
        raise ConfigError(
            f"ckpt passes only the root to {name}(). Only scripts can have arguments: leave out {arguments}."
        )
    return {"target": program.__code__.co_filename, "function": name}

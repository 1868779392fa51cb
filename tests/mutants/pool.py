"""Copies of the source tree, and the processes that run tests in them. The working tree is never written to."""

from __future__ import annotations

import compileall
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from types import TracebackType
from typing import Any

from tests.mutants.operators import ROOT, Mutant

_UNWANTED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", ".*_cache")


@dataclass(frozen=True)
class Session:
    """What came of running tests: pytest's exit status (none: out of time), and the tests that failed."""

    status: int | None
    failed: tuple[str, ...]
    passed: int
    seconds: float
    library: str | None
    output: tuple[str, ...]


def copy_tree(target: Path, root: Path = ROOT) -> None:
    """Copy everything but hidden files, links as links, and compile it.

    The compiled files are checked by hash: by time and size, a mutant and its origin may be taken for each other.
    """
    target.mkdir()
    for one in sorted(root.iterdir()):
        if one.name.startswith(".") or one.name.endswith(".egg-info") or one.name == "build":
            continue
        if one.is_dir():
            shutil.copytree(one, target / one.name, symlinks=True, ignore=_UNWANTED)
        else:
            shutil.copy2(one, target / one.name)
    mode = PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(target, quiet=2, invalidation_mode=mode)


def environment(folder: Path) -> dict[str, str]:
    """For processes that must find the library in a copy, whatever is installed: a path comes before any finder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CKPT_", "PYTEST_"))}
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder.parent)}


class Worker:
    """A copy of the tree, and a warm process in it."""

    def __init__(self, folder: Path, pristine: Path) -> None:
        shutil.copytree(pristine, folder, symlinks=True)
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "tests/mutants/warm.py"],
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()  # that it is ready

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def run(self, tests: Sequence[str], seconds: float) -> Session:
        """Run tests in the copy as it is now, until the first that fails."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"tests": list(tests), "seconds": seconds}) + "\n")
        self._process.stdin.flush()
        told = self._answer()
        library = told["library"]
        if library is not None and Path(library) != self.folder / "ckpt" / "__init__.py":
            raise RuntimeError(f"the tests have imported {library}, and not the copy in {self.folder}")
        return Session(
            told["status"], tuple(told["failed"]), told["passed"], told["seconds"], library, tuple(told["output"])
        )

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """While this lasts, the copy has a bug."""
        path = self.folder / mutant.file
        pristine = path.read_bytes()
        path.write_bytes(mutant.applied(pristine))
        try:
            yield
        finally:
            path.write_bytes(pristine)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that runs tests in {self.folder} has ended ({self._process.wait()})")
        answer: dict[str, Any] = json.loads(line)
        return answer

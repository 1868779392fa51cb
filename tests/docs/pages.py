"""Pages of the documentation: the blocks of code in them, and how they are run.

A page runs from its first block to its last, in a folder of its own:

- `python` is executed in this process, in one namespace for the whole page; with `title="train.py"` it is written to
  that file instead, for the blocks after it;
- `bash` is run by bash, with the `python`, `ckpt` and `torchrun` of this environment;
- `text` after one of them is what it prints, whatever the numbers; `...` stands for what is not shown;
- any other language with a title is written to that file; `pyproject.toml` is installed, as far as its entry points go.

A comment `<!-- not run: reason -->` before a block leaves it out; Python is compiled all the same. With
`<!-- part of examples/train.py -->` it must stand in that file, word for word, which has a test of its own.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
FENCE = re.compile(
    r"(?:^ *<!-- (?:not run: (?P<reason>[^\n]+?)|part of (?P<file>\S+)) -->\n+)?"
    r'^(?P<indent> *)```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^(?P=indent)```$',
    re.MULTILINE | re.DOTALL,
)
ENVIRONMENT = {
    "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]),
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "1",  # what is printed and what is logged comes in the order of a terminal
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "COLUMNS": "100",
}
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_NUMBER = re.compile(r"\d[\d.,:]*")
_UNIT = re.compile(r"# (bytes|kB|MB|GB|ms|s|min|h)\b")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    code: str
    where: str
    title: str | None = None
    reason: str | None = None  # why it is not run
    file: str | None = None  # of which it is a part

    @property
    def is_left_out(self) -> bool:
        return self.reason is not None or self.file is not None

    @property
    def is_run(self) -> bool:
        return self.language in ("python", "bash") and not self.is_left_out and self.title is None


def blocks_of(text: str, name: str) -> list[Block]:
    return [
        Block(
            language=found["language"],
            code=textwrap.dedent(found["code"]),
            where=f"{name}:{text.count(chr(10), 0, found.start('language')) + 1}",
            title=found["title"],
            reason=found["reason"],
            file=found["file"],
        )
        for found in FENCE.finditer(text)
    ]


def page(name: str) -> list[Block]:
    """The blocks of a page, by its path below docs/."""
    return blocks_of((DOCS / name).read_text(), name)


def all_pages() -> list[str]:
    """Every page but the decisions, which are history."""
    names = (str(path.relative_to(DOCS)) for path in sorted(DOCS.rglob("*.md")))
    return [name for name in names if not name.startswith("decisions/")]


def never_run(blocks: list[Block]) -> list[str]:
    """Files of Python that no later block of their page names, though nothing says why."""
    installed = "".join(block.code for block in blocks if block.title == "pyproject.toml")
    return [
        block.where
        for number, block in enumerate(blocks)
        if block.language == "python" and block.title and not block.is_left_out
        if not any(_names(later, block.title or "") for later in blocks[number + 1 :])
        and f'"{_module(block.title)}:' not in installed
    ]


def _names(block: Block, title: str) -> bool:
    imported = re.search(rf"\b(from|import) {_module(title)}\b", block.code)
    return block.is_run and (title in block.code or imported is not None)


def _module(title: str) -> str:
    return title.rpartition("/")[2].removesuffix(".py")


def says(said: str, expected: str) -> bool:
    """Whether a text is what a page shows, but for numbers, which are other ones on every machine."""
    return doctest.OutputChecker().check_output(_without_numbers(expected), _without_numbers(said), _FLAGS)


def _without_numbers(text: str) -> str:
    return _UNIT.sub("#", _NUMBER.sub("#", text))


def is_part(block: Block) -> bool:
    """Whether the lines of a block stand in the file that it is said to be a part of, one after the other."""
    assert block.file is not None
    lines = [line.strip() for line in (ROOT / block.file).read_text().splitlines()]
    wanted = [line.strip() for line in block.code.splitlines()]
    return any(lines[start : start + len(wanted)] == wanted for start in range(len(lines)))


class Runner:
    """Runs the blocks of a page in the working directory."""

    def __init__(self, given: dict[str, Any], environment: dict[str, str] | None = None) -> None:
        self.space: dict[str, Any] = {"__name__": "__main__", **given}
        self._environment = {**os.environ, **ENVIRONMENT, **(environment or {})}
        self._said = ""

    def run(self, blocks: list[Block]) -> None:
        with _own_modules():
            for number, block in enumerate(blocks):
                if block.language == "python" and block.file is None:
                    compile(block.code, block.where, "exec")
                if not block.is_left_out:
                    self._run(block, number and blocks[number - 1].is_run)

    def _run(self, block: Block, follows: bool | int) -> None:
        if block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.code)
            if block.title == "pyproject.toml":
                _install(block.code)
        elif block.language == "python":
            self._said = self._execute(block)
        elif block.language == "bash":
            self._said = self._command(block)
        elif block.language == "text" and follows:
            assert says(self._said, block.code), f"{block.where}: it says\n{self._said}\nnot\n{block.code}"

    def _execute(self, block: Block) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(block.code, block.where, "exec"), self.space)
        return said.getvalue()

    def _command(self, block: Block) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            text=True,
            timeout=250,  # one of them compiles
        )
        assert done.returncode == 0, f"{block.where} ends with {done.returncode}:\n{done.stdout}"
        return done.stdout


def _install(pyproject: str) -> None:
    """Let this process find the entry points of a package in the working directory, as pip would."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    groups = tomllib.loads(pyproject)["project"]["entry-points"]
    information = Path("page-1.0.dist-info")
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: page\nVersion: 1.0\n")
    lines = [
        line for group, points in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))
    ]
    (information / "entry_points.txt").write_text("\n".join(lines))


@contextlib.contextmanager
def _own_modules() -> Iterator[None]:
    """Modules of the working directory can be imported, and are forgotten afterwards."""
    before, here = set(sys.modules), os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(here):
                del sys.modules[name]

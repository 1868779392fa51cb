"""The file format of mutants, and what keeps it true: snippets that are found once, and tests that exist."""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One planted bug: in `file` the text `before`, which occurs there once, becomes `after`.

    `tests` are pytest node ids, at least one of which must fail. With `hangs`, running out of time counts as noticed.
    """

    id: str
    file: str
    breaks: str
    before: str
    after: str
    tests: tuple[str, ...]
    hangs: bool = False
    seconds: float = 120.0

    @classmethod
    def from_yaml(cls, fields_read: dict[str, Any]) -> Mutant:
        unknown = fields_read.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"{fields_read.get('id')}: unknown fields {sorted(unknown)}")
        return cls(**{**fields_read, "tests": tuple(fields_read["tests"])})

    def applied(self, source: str) -> str:
        """The mutated source. Raises `StaleError` unless `before` is found exactly once."""
        found = source.count(self.before)
        if found != 1:
            raise StaleError(f"its snippet occurs {found} times in {self.file}")
        return source.replace(self.before, self.after)


class StaleError(Exception):
    """A mutant no longer matches the code or the tests."""


def load(folder: Path = HERE) -> list[Mutant]:
    """All mutants, subject by subject."""
    return [Mutant.from_yaml(one) for path in sorted(folder.glob("*.yaml")) for one in yaml.safe_load(path.read_text())]


def problem(mutant: Mutant, root: Path = ROOT) -> str | None:
    """Why a mutant is stale, without running anything; None if it is not."""
    path = root / mutant.file
    if not path.is_file():
        return f"there is no {mutant.file}"
    source = path.read_text()
    try:
        mutated = mutant.applied(source)
    except StaleError as error:
        return str(error)
    if mutated == source:
        return "it changes nothing"
    try:
        compile(mutated, mutant.file, "exec")
    except SyntaxError as error:
        return f"the mutated {mutant.file} does not compile: {error}"
    missing = [one for one in mutant.tests if not exists(one, root)]
    return f"no such tests: {', '.join(missing)}" if missing or not mutant.tests else None


def exists(node: str, root: Path = ROOT) -> bool:
    """Whether a test is defined where its node id says; inherited tests count. Parameters are not looked at."""
    file, *names = node.partition("[")[0].split("::")
    path = root / file
    return path.is_file() and bool(names) and _defines(path, names, root)


def _defines(path: Path, names: list[str], root: Path) -> bool:
    tree = ast.parse(path.read_text())
    if len(names) == 1:
        return _function(tree.body, names[0])
    found = next((one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == names[0]), None)
    if found is None:
        return False
    return _function(found.body, names[1]) or any(_inherits(base, tree, names[1], root) for base in found.bases)


def _inherits(base: ast.expr, tree: ast.Module, name: str, root: Path) -> bool:
    """Whether a base class, imported from another module of the tests, defines a test."""
    imports = (one for one in tree.body if isinstance(one, ast.ImportFrom) and (one.module or "").startswith("tests."))
    modules = [one.module or "" for one in imports if any(alias.name == getattr(base, "id", "") for alias in one.names)]
    paths = [root / f"{module.replace('.', '/')}.py" for module in modules]
    return any(_defines(path, [getattr(base, "id", ""), name], root) for path in paths if path.is_file())


def _function(body: list[ast.stmt], name: str) -> bool:
    return any(isinstance(one, ast.FunctionDef) and one.name == name for one in body)

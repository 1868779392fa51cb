"""Who may import whom, what is never imported at all, and what `import ckpt` gives."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

import ckpt
import ckpt.formats
import ckpt.storage
from ckpt import errors

PACKAGE = Path(ckpt.__file__).resolve().parent
FORMATS = Path(ckpt.formats.__file__).resolve().parent
STORAGE = Path(ckpt.storage.__file__).resolve().parent
TESTS = Path(__file__).resolve().parent

PICKLERS = ("pickle", "_pickle", "cPickle", "shelve", "marshal", "dill", "cloudpickle", "joblib", "torch.serialization")
PICKLING = ("torch.save", "torch.load", "torch.jit.save", "torch.jit.load", "torch.package")


def sources(*folders: Path) -> list[Path]:
    """Every module below the folders, once, however many links lead to it."""
    return sorted({path.resolve() for folder in folders for path in folder.rglob("*.py")})


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """The full name of whatever a module imports: `from a import b` is `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{home}.{alias.name}" for alias in node.names)


def below(name: str, *homes: str) -> bool:
    return any(name == home or name.startswith(f"{home}.") for home in homes)


def out_of_bounds(tree: ast.AST, package: str) -> list[str]:
    """What a room imports of ckpt beside its errors, its utilities and the room itself."""
    allowed = ("ckpt.errors", "ckpt.util", package)
    return [name for name in imported(tree, package) if below(name, "ckpt") and not below(name, *allowed)]


def as_top_level(tree: ast.AST, package: str) -> list[str]:
    return [name for name in imported(tree, package) if below(name, "formats", "storage")]


def pickled(tree: ast.AST, package: str) -> list[str]:
    """Whatever in a module could write or execute a pickle."""
    imports = [name for name in imported(tree, package) if below(name, *PICKLERS, *PICKLING)]
    nodes = list(ast.walk(tree))
    used = [text for node in nodes if isinstance(node, ast.Attribute) and (text := ast.unparse(node)) in PICKLING]
    allowed = [node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg == "allow_pickle"]
    return [*imports, *used, *allowed]


Rule = Callable[[ast.AST, str], list[str]]


def offences(rule: Rule, paths: list[Path], package: str) -> dict[str, list[str]]:
    assert paths
    found = {path.name: rule(ast.parse(path.read_text()), package) for path in paths}
    return {name: listed for name, listed in found.items() if listed}


@pytest.mark.parametrize(("folder", "package"), [(FORMATS, "ckpt.formats"), (STORAGE, "ckpt.storage")])
def test_formats_and_storage_know_nothing_but_errors_utilities_and_themselves(folder: Path, package: str) -> None:
    assert offences(out_of_bounds, sources(folder), package) == {}


def test_nothing_is_imported_as_formats_or_storage() -> None:
    assert offences(as_top_level, sources(PACKAGE, FORMATS, STORAGE, TESTS), "ckpt") == {}


def test_nothing_is_pickled_but_for_accelerate_whose_format_asks_for_it() -> None:
    found = offences(pickled, sources(PACKAGE, FORMATS, STORAGE), "ckpt")
    assert found == {"accelerate_write.py": ["torch.save"]}


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (out_of_bounds, "import ckpt"),
        (out_of_bounds, "import ckpt.root.catalog"),
        (out_of_bounds, "from ckpt import catalog"),
        (out_of_bounds, "from ckpt.storage import Storage"),
        (out_of_bounds, "from .. import storage"),
        (out_of_bounds, "from ..storage.base import Storage"),
        (out_of_bounds, "def f():\n    from ckpt.manager import StateManager"),
        (out_of_bounds, "from ckpt.errorsome import X"),
        (as_top_level, "import formats"),
        (as_top_level, "import storage.local as local"),
        (as_top_level, "from formats.native import image"),
        (as_top_level, "from storage import open_storage"),
        (pickled, "import pickle"),
        (pickled, "import os, marshal as m"),
        (pickled, "from dill import loads"),
        (pickled, "if x:\n    import shelve"),
        (pickled, "import torch\ntorch.save({}, 'x')"),
        (pickled, "import torch\nread = torch.load"),
        (pickled, "from torch import load"),
        (pickled, "from torch.serialization import load"),
        (pickled, "np.load('x', allow_pickle=True)"),
    ],
)
def test_the_rules_see_what_they_forbid(rule: Rule, code: str) -> None:
    assert len(rule(ast.parse(code), "ckpt.formats")) == 1


@pytest.mark.parametrize(
    "code", ["from ckpt.errors import X", "from ckpt.formats import dtypes", "from . import dtypes"]
)
def test_the_rules_let_the_rest_pass(code: str) -> None:
    for rule in (out_of_bounds, as_top_level, pickled):
        assert rule(ast.parse(code), "ckpt.formats") == []


class TestPublicNames:
    def test_they_are_sorted_and_there(self) -> None:
        for module in (ckpt, ckpt.storage):
            assert module.__all__ == sorted(set(module.__all__))
            assert all(getattr(module, name) is not None for name in module.__all__)

    def test_a_star_gives_all_of_them(self) -> None:
        namespace: dict[str, object] = {}
        exec("from ckpt import *", namespace)
        assert namespace.keys() - {"__builtins__"} == set(ckpt.__all__)
        assert dir(ckpt) == ckpt.__all__

    def test_type_checkers_see_the_same_names_from_the_same_homes(self) -> None:
        tree = ast.parse((PACKAGE / "__init__.py").read_text())
        (block,) = [node for node in tree.body if isinstance(node, ast.If)]
        homes = dict(name.rpartition(".")[::-2] for name in imported(block, "ckpt"))
        assert homes.keys() | {"__version__"} == set(ckpt.__all__)
        for name, home in homes.items():
            assert getattr(ckpt, name) is getattr(importlib.import_module(home), name)

    def test_every_error_is_exported_and_drawn_in_the_tree(self) -> None:
        raised = {name for name, value in vars(errors).items() if inspect.isclass(value)}
        assert len(raised) > 10
        assert raised <= set(ckpt.__all__)
        drawn = [
            word for line in (errors.__doc__ or "").splitlines() if (word := line.strip("│├└─ ").partition(" ")[0])
        ]
        assert raised <= set(drawn)

    def test_the_tree_of_errors_is_as_drawn(self) -> None:
        parents: list[str] = []
        for line in (errors.__doc__ or "").splitlines():
            name = line.strip("│├└─ ").partition(" ")[0]
            if name not in vars(errors) or name == "Preempted":
                continue
            level = line.index(name) // 4
            parents[level:] = [name]
            if level:
                assert getattr(errors, name).__bases__[0] is getattr(errors, parents[level - 1])
        assert parents

    def test_a_name_that_is_not_there_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
            ckpt.nonsense  # noqa: B018


@pytest.mark.parametrize("module", ["ckpt", "ckpt.root.catalog", "ckpt.storage", "ckpt.formats.native.manifest"])
def test_it_is_imported_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(str([name for name in sys.modules if name == 'torch']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=170, check=False)
    assert done.stderr.strip() == "[]"

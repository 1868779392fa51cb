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
from ckpt.cli.main import _MODULES, COMMANDS
from tests import weight

PACKAGE = Path(ckpt.__file__).resolve().parent
FORMATS = Path(ckpt.formats.__file__).resolve().parent
STORAGE = Path(ckpt.storage.__file__).resolve().parent

PICKLERS = ("pickle", "_pickle", "cPickle", "shelve", "marshal", "dill", "cloudpickle", "joblib", "torch.serialization")
PICKLING = ("torch.save", "torch.load", "torch.jit.save", "torch.jit.load", "torch.package")


# Who may import whom: the picture in docs/architecture.md, lowest first. `*` may import anything.
ARROWS = {
    "shown": "",
    "errors": "shown",
    "version": "",
    "compat": "",
    "util": "shown errors",
    "formats": "shown errors compat util",
    "storage": "shown errors compat util",
    "root": "errors util formats storage",
    "ranks": "shown errors compat util formats storage",
    "state": "errors compat util formats storage root",
    "data": "errors compat util formats state ranks",
    "save": "shown errors version compat util formats storage root ranks state",
    "load": "shown errors compat util formats storage root ranks state data",
    "export": "shown errors compat util formats storage root ranks state load",
    "memory": "errors version compat util formats storage root ranks save load",
    "options": "errors util storage root save",
    "config": "errors util options",
    "session": "errors util formats storage root ranks state data save load export memory options",
    "tools": "shown errors version util formats storage root ranks state data save load export memory",
    "manager": "errors util formats storage root ranks state data save load export options config session",
    "integrations": "*",
    "selftest": "*",
    "testing": "*",
    "cli": "*",
    "__main__": "*",
}


def sources(*folders: Path) -> list[Path]:
    """Every module below the folders, once, however many links lead to it."""
    return sorted({path.resolve() for folder in folders for path in folder.rglob("*.py")})


def imported(nodes: list[ast.AST], package: str) -> Iterator[str]:
    """The full name of whatever a module imports: `from a import b` is `a.b`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{home}.{alias.name}" for alias in node.names)


def parsed(path: Path) -> list[ast.AST]:
    return weight.sources()[str(path.relative_to(weight.HOME))]


def below(name: str, *homes: str) -> bool:
    return any(name == home or name.startswith(f"{home}.") for home in homes)


def room(name: str) -> str:
    """The package below ckpt that a module belongs to, or the module itself where it lies in ckpt."""
    return f"{name}.".split(".")[1]


def arrows(nodes: list[ast.AST], module: str, package: str) -> set[str]:
    """The rooms that a module imports from, its own left out. `ckpt` itself, with all public names, is `ckpt`."""
    found = {room(name) or "ckpt" for name in imported(nodes, package) if below(name, "ckpt")}
    rooms = found & {*ARROWS, "ckpt"}
    return (rooms | ({"ckpt"} if found - rooms else set())) - {room(module)}


def forbidden(nodes: list[ast.AST], module: str, package: str) -> list[str]:
    allowed = ARROWS[room(module)].split()
    return sorted(arrows(nodes, module, package) - set(allowed)) if allowed != ["*"] else []


def as_top_level(nodes: list[ast.AST], package: str) -> list[str]:
    return [name for name in imported(nodes, package) if below(name, "formats", "storage")]


def pickled(nodes: list[ast.AST], package: str) -> list[str]:
    """Whatever in a module could write or execute a pickle."""
    imports = [name for name in imported(nodes, package) if below(name, *PICKLERS, *PICKLING)]
    ends = {name.rpartition(".")[2] for name in PICKLING}  # to unparse every attribute takes a second
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr in ends]
    used = [text for node in attributes if (text := ast.unparse(node)) in PICKLING]
    options = [option.arg for node in nodes if isinstance(node, ast.Call) for option in node.keywords]
    return [*imports, *used, *(name for name in options if name == "allow_pickle")]


Rule = Callable[[list[ast.AST], str], list[str]]


def offences(rule: Rule, paths: list[Path], package: str) -> dict[str, list[str]]:
    assert paths
    found = {path.name: rule(parsed(path), package) for path in paths}
    return {name: listed for name, listed in found.items() if listed}


def modules() -> dict[str, Path]:
    """Every module of the library, by its full name."""
    homes = {PACKAGE: "ckpt", FORMATS: "ckpt.formats", STORAGE: "ckpt.storage"}
    found = {}
    for home, package in homes.items():
        for path in home.rglob("*.py"):
            if home != PACKAGE or not below_link(path):
                parts = path.relative_to(home).with_suffix("").parts
                found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


def below_link(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents)


def package_of(module: str, path: Path) -> str:
    return module if path.stem == "__init__" else module.rpartition(".")[0]


def test_imports_point_downwards_only() -> None:
    found = {name: path for name, path in modules().items() if name != "ckpt"}
    assert len(found) > 150
    assert {room(name) for name in found} == ARROWS.keys()
    wrong = {
        name: rooms for name, path in found.items() if (rooms := forbidden(parsed(path), name, package_of(name, path)))
    }
    assert wrong == {}


def test_the_table_of_rooms_has_no_circle() -> None:
    left = {name: set(allowed.split()) for name, allowed in ARROWS.items() if allowed != "*"}
    while left:
        lowest = {name for name, allowed in left.items() if not allowed & left.keys()}
        assert lowest, f"a circle among {sorted(left)}"
        left = {name: allowed for name, allowed in left.items() if name not in lowest}


def test_no_two_modules_import_each_other() -> None:
    known = modules()
    graph = {}
    for name, path in known.items():
        used = set(imported(parsed(path), package_of(name, path)))
        graph[name] = {found if found in known else found.rpartition(".")[0] for found in used} & known.keys() - {name}
    while graph:
        lowest = {name for name, used in graph.items() if not used & graph.keys()}
        highest = graph.keys() - set().union(*graph.values())
        assert lowest | highest, f"a circle among {sorted(graph)}"
        graph = {name: used for name, used in graph.items() if name not in lowest | highest}


def test_packages_inside_ckpt_are_empty_so_that_the_command_starts_without_torch() -> None:
    inits = [path for path in PACKAGE.rglob("__init__.py") if not below_link(path) and path.parent != PACKAGE]
    assert len(inits) > 10
    assert [path for path in inits if path.read_text().strip()] == []


def test_nothing_is_imported_as_formats_or_storage() -> None:
    """Ruff looks at the tests too: banned-api."""
    assert offences(as_top_level, sources(PACKAGE, FORMATS, STORAGE), "ckpt") == {}


def test_nothing_is_pickled_but_for_other_tools_whose_formats_ask_for_it() -> None:
    found = offences(pickled, sources(PACKAGE, FORMATS, STORAGE), "ckpt")
    assert {name: set(calls) for name, calls in found.items()} == {
        "torch_write.py": {"torch.save", "torch.serialization.skip_data"},
    }


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (as_top_level, "import formats"),
        (as_top_level, "import storage.local as local"),
        (as_top_level, "from formats.native import manifest"),
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
    assert len(rule(weight.nodes(code), "ckpt.formats")) == 1


@pytest.mark.parametrize(
    ("code", "rooms"),
    [
        ("import ckpt", ["ckpt"]),
        ("from ckpt import StateManager", ["ckpt"]),
        ("from ckpt import root", ["root"]),
        ("import ckpt.root.catalog", ["root"]),
        ("from ckpt.root import catalog", ["root"]),
        ("from ckpt.storage import Storage", ["storage"]),
        ("from .. import storage", ["storage"]),
        ("from ..storage.base import Storage", ["storage"]),
        ("def f():\n    from ckpt.manager import StateManager", ["manager"]),
        ("if TYPE_CHECKING:\n    from ckpt.save.saver import Saver", ["save"]),
        ("from ckpt.errors import X", []),
        ("from ckpt.util.console import progress_bar", []),
        ("from ckpt.formats import pieces", []),
        ("from . import pieces", []),
    ],
)
def test_the_table_sees_what_it_forbids(code: str, rooms: list[str]) -> None:
    assert forbidden(weight.nodes(code), "ckpt.formats.layout", "ckpt.formats") == rooms


@pytest.mark.parametrize(
    "code", ["from ckpt.errors import X", "from ckpt.formats import pieces", "from . import pieces"]
)
def test_the_rules_let_the_rest_pass(code: str) -> None:
    for rule in (as_top_level, pickled):
        assert rule(weight.nodes(code), "ckpt.formats") == []


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

    def test_each_is_listed_once_with_the_module_that_defines_it(self) -> None:
        listed = list(imported(weight.nodes((PACKAGE / "__init__.pyi").read_text()), "ckpt"))
        assert sorted(name.rpartition(".")[2] for name in listed) == ckpt.__all__
        for home, _, name in (one.rpartition(".") for one in listed):
            found = getattr(ckpt, name)
            assert found is getattr(importlib.import_module(home), name)
            assert getattr(found, "__module__", home) == home

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
            ckpt.nonsense  # type: ignore[attr-defined]  # noqa: B018


WITHOUT_TORCH = [
    "ckpt",
    "ckpt.root.catalog",
    "ckpt.root.deletion",
    "ckpt.storage",
    "ckpt.formats.native.manifest",
    "ckpt.cli.main",
    *sorted({f"ckpt.cli.{_MODULES.get(name, name)}" for name in COMMANDS}),
    "ckpt.memory.place",
]


@pytest.mark.slow
def test_they_are_imported_without_torch() -> None:
    """One after the other in one process, which stops at the first that brings it."""
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, f"{name} imports torch"
print(name)
"""
    command = [sys.executable, "-c", code, *WITHOUT_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.stdout.split() == WITHOUT_TORCH[-1:], done.stderr


@pytest.mark.slow
def test_a_plain_run_loads_nothing_that_it_does_not_need() -> None:
    """DTensor alone brings 400 modules of sympy, and more than a second."""
    code = """
import sys, torch
before = set(sys.modules)
import ckpt
ckpt.StateManager
print(*(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=170, check=True)
    loaded = set(done.stdout.split())
    assert "ckpt.manager" in loaded
    unwanted = ["sympy", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
    unwanted += ["fsspec", "s3fs", "huggingface_hub", "ckpt.memory.tier", "ckpt.export.push", "ckpt.export.save_model"]
    assert not loaded.intersection(unwanted)


ONLY_SOME_RUNS = [  # what a save and a resume of a plain model in one process do without
    *(f"ckpt.state.{name}" for name in ("deepspeed", "deepspeed_regroup", "fsdp1", "ddp", "joined", "marked_shards")),
    *(f"ckpt.state.{name}" for name in ("zero_redundancy", "accelerator", "model_config")),
    *(f"ckpt.compat.{name}" for name in ("deepspeed", "lightning", "s3fs", "torch_ddp", "transformers")),
]


@pytest.mark.slow
def test_a_plain_save_and_resume_import_nothing_that_only_other_runs_need(tmp_path: Path) -> None:
    code = """
import sys, torch, ckpt
for _ in range(2):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=2, shuffle=True)
    with ckpt.StateManager("run", model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader) as manager:
        restored = manager.resume()
        for (batch,) in loader:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.step()
        manager.save_state(wait=True)
assert restored
print(*sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "ckpt.state.registry" in loaded
    assert set(ONLY_SOME_RUNS) <= modules().keys()
    assert loaded.isdisjoint(ONLY_SOME_RUNS)


@pytest.mark.slow
def test_it_saves_and_resumes_where_numpy_is_not_installed(tmp_path: Path) -> None:
    """PyTorch does without it, and so a clean installation has none."""
    code = """
import sys

from importlib.machinery import PathFinder

found = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *more: None if name.startswith("numpy") else found(name, *more))
import torch, ckpt
trained = []
for _ in range(2):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=2, shuffle=True)
    with ckpt.StateManager("run", model=model, optimizer=optimizer, save_every=3) as manager:
        manager.values["best"] = 0.5
        for epoch in manager.epochs(1):
            for (batch,) in manager.batches(loader):
                model(batch).sum().backward()
                optimizer.step()
                manager.step(metrics={"loss": 1.0})
        assert manager.values["best"] == 0.5
    trained.append(model.state_dict())
assert all(map(torch.equal, trained[0].values(), trained[1].values())), "the second run has not resumed"
verified = ckpt.verify("run")
assert verified and not any(verified.values()), verified
ckpt.convert("run/step-00000004", "last.pt", to="torch")
ckpt.convert("last.pt", "again")
(again,) = ckpt.list_checkpoints("again")
other = torch.nn.Linear(2, 2)
ckpt.load_model(f"again/{again.name}", other)
assert all(map(torch.equal, trained[0].values(), other.state_dict().values()))
print("numpy" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1:] == ["False"]

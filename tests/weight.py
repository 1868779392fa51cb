"""How much the library weighs: `python -m tests.weight` prints the table, `tests/test_weight.py` keeps it from growing.

Lines, modules crossed by a save, a resume and three steps, the import, a step's cost, private names and patched classes
of other libraries, and the arguments of `StateManager`. Seconds are those of this machine; the rest is a property of
the tree.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TypeGuard

from ckpt.compat.private import ALL, Private

HOME = Path(__file__).resolve().parent.parent
PACKAGES = ("ckpt", "formats", "storage")
COMPAT = "ckpt/compat/"
SELFTEST = "ckpt/selftest.py"  # records programs in processes of its own, and there alone it patches
DOCUMENTED = {"_exit", "_replace", "_fields", "_asdict"}  # of the standard library: underscored, and public
IN_FILES = {  # keys in files that others wrote, never attributes of objects
    "_num_yielded", "_snapshot", "_snapshot_step", "_steps_since_snapshot", "_iterator_finished", "_worker_snapshots",
    "_schedulers", "_growth_tracker",
}  # fmt: skip
_LOOKED_AT = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Name, ast.Attribute, ast.Constant, ast.Call, ast.Assign,
    ast.Import, ast.ImportFrom, ast.JoinedStr,
)  # fmt: skip


Sources = dict[str, list[ast.AST]]


@cache
def sources() -> Sources:
    """What every module of the library is made of, by its path in the repository."""
    paths = (path for package in PACKAGES for path in sorted((HOME / package).rglob("*.py")))
    kept = (path for path in paths if not any(parent.is_symlink() for parent in path.parents))
    return {str(path.relative_to(HOME)): nodes(path.read_text()) for path in kept}


def nodes(code: str) -> list[ast.AST]:
    return [node for node in ast.walk(ast.parse(code)) if isinstance(node, _LOOKED_AT)]


# -- lines ------------------------------------------------------------------------------------------------------------


def code_lines(text: str) -> int:
    """Lines that hold code: no blanks, comments or docstrings."""
    lines: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            continue
        if token.type != tokenize.NEWLINE:
            statement.append(token)
            continue
        if [part.type for part in statement] != [tokenize.STRING]:  # a string that is a statement documents
            lines.update(line for part in statement for line in range(part.start[0], part.end[0] + 1))
        statement = []
    return len(lines)


# -- private names and patches of others -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    path: str
    line: int
    name: str


def is_private(name: str) -> bool:
    named = name.strip("_") != "" and not name.endswith("__") and not name.startswith("_ckpt")
    return name.startswith("_") and named and name not in DOCUMENTED


def own_names(trees: Sources) -> set[str]:
    """Every name that the library itself defines: a function, a class, a variable, or an attribute of `self`."""
    found = set()
    for node in (node for tree in trees.values() for node in tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            found.add(node.attr)
        elif _sets_attribute(node) and _is_own(node.args[0]):
            found.add(ast.literal_eval(node.args[1]))  # of a frozen dataclass
    return found


def _sets_attribute(node: ast.AST) -> TypeGuard[ast.Call]:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr == "__setattr__" and ast.unparse(called.value) == "object"


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def foreign_private_names(trees: Sources) -> list[Use]:
    """Where a private name of another library is imported, read, or written down as a string, as `getattr` takes it.

    `ckpt/compat/` is left out, in which they belong: `declared_names` lists those. A name that the library defines too,
    in whatever module, counts as its own, except those in `BOTH`.
    """
    own = own_names(trees) - BOTH
    found = []
    for path, tree in trees.items():
        for node in tree if not path.startswith(COMPAT) else ():
            if isinstance(node, ast.Constant) and path.startswith("formats/foreign/"):
                continue  # keys in files of others
            names = [name for name in _private_names(node) if name not in own]
            found += [Use(path, getattr(node, "lineno", 0), name) for name in names]
    return found


def declared_names() -> dict[str, Private]:
    """The private names that `ckpt/compat/` declares, by their paths."""
    for path in sorted((HOME / COMPAT).glob("*.py")):
        import_module(f"ckpt.compat.{path.stem}" if path.stem != "__init__" else "ckpt.compat")
    return ALL


# Others have these, and ckpt has a name of its own that is spelt alike
BOTH = {"_version", "_models", "_optimizers", "_parameters", "_modules", "_handle", "_values", "_iterator", "_request"}
BOTH |= {"_load_rng_state", "_load_best_model", "_sampler", "_get_session"}


def _private_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and is_private(node.attr) and not _is_own(node.value):
        yield node.attr
    elif isinstance(node, ast.Import | ast.ImportFrom):
        home = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        relative = isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names:
            whole = f"{home}.{alias.name}".strip(".")
            if (
                not relative
                and not whole.startswith(("ckpt.", "__future__"))
                and any(map(is_private, whole.split(".")))
            ):
                yield whole
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        yield from (name for name in (node.value,) if is_private(name) and name not in IN_FILES)


def patched_classes(trees: Sources) -> list[str]:
    """Classes of others that get another attribute, for every user of the process."""
    found = []
    for path, tree in trees.items():
        foreign = set(_foreign_imports(tree))
        for node in tree:
            targets: list[ast.expr] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                targets = node.args[:1]
            elif isinstance(node, ast.Assign):
                targets = [target.value for target in node.targets if isinstance(target, ast.Attribute)]
            names = [ast.unparse(target) for target in targets]
            classes = [name for name in names if name.rpartition(".")[2][:1].isupper()]
            found += [f"{path}: {name}" for name in classes if name.split(".")[0] in foreign]
    return found


def _foreign_imports(tree: list[ast.AST]) -> Iterator[str]:
    for node in tree:
        if isinstance(node, ast.Import):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith("ckpt"):
            yield from (alias.asname or alias.name for alias in node.names)


# -- what runs --------------------------------------------------------------------------------------------------------

_CROSSED = """
import json, sys, threading, torch, ckpt
from torch.utils.data import DataLoader, TensorDataset

home, crossed = sys.argv[1], {}
def begin(name):
    found = crossed.setdefault(name, set())
    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_flags & 1 and code.co_filename.startswith(home):  # no module, no class body
            found.add((code.co_filename, code.co_name))
    threading.setprofile(note)
    sys.setprofile(note)
def end():
    sys.setprofile(None)
    threading.setprofile(None)

def built():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=4, shuffle=True)
    return model, optimizer, loader, ckpt.StateManager("run", model=model, optimizer=optimizer, dataloader=loader)

def train(batch):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    manager.step()

model, optimizer, loader, manager = built()
with manager:
    batches = iter(manager.batches(loader))
    train(next(batches)[0])
    begin("steps")
    for _ in range(3):
        train(next(batches)[0])
    end()
    begin("save")
    manager.save_state(wait=True)
    end()
model, optimizer, loader, manager = built()
with manager:
    begin("resume")
    assert manager.resume()
    end()
print(json.dumps({name: sorted(found) for name, found in crossed.items()}))
"""

_IMPORT = """
import time, torch
begun = time.process_time()
import ckpt
ckpt.StateManager
print(time.process_time() - begun)
"""

_STEP = """
import statistics, sys, time, torch, ckpt
from torch.utils.data import DataLoader, TensorDataset

STEPS = 400
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(STEPS * 4, 8)), batch_size=4)

def seconds(batches, step):
    begun = time.perf_counter()
    for (batch,) in batches:
        until = time.perf_counter() + 0.0003
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        while time.perf_counter() < until:
            pass
        step()
    return (time.perf_counter() - begun) / STEPS

with ckpt.StateManager("run", model=model, optimizer=optimizer) as manager:
    plain, managed = [], []
    for turn in range(9):
        plain.append(seconds(loader, lambda: None))
        managed.append(seconds(manager.batches(loader), manager.step))
print(statistics.median(managed) - statistics.median(plain), statistics.median(plain))
"""


def run(code: str) -> str:
    """What a fresh process prints, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, f"{HOME}/"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=170, check=True)
    return done.stdout.splitlines()[-1]


def crossed() -> dict[str, dict[str, set[str]]]:
    """By what was done (`save`, `resume`, `steps`): the modules whose functions were called, and these."""
    found: dict[str, dict[str, set[str]]] = {}
    for name, calls in json.loads(run(_CROSSED)).items():
        modules = found.setdefault(name, {})
        for path, function in calls:
            if (module := os.path.relpath(os.path.realpath(path), HOME)).startswith(PACKAGES):
                modules.setdefault(module, set()).add(function)
    return found


def arguments() -> list[str]:
    """What `StateManager` takes by name."""
    import ckpt

    parameters = inspect.signature(ckpt.StateManager).parameters.values()
    return [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


def main() -> None:
    trees = sources()
    print(f"{sum(code_lines((HOME / path).read_text()) for path in trees):,} code lines in {len(trees)} modules")
    for name, modules in crossed().items():
        print(f"{name}: {len(modules)} modules crossed, {sum(map(len, modules.values()))} functions")
        if "-v" in sys.argv:
            print(
                *(f"    {module}: {', '.join(sorted(called))}" for module, called in sorted(modules.items())), sep="\n"
            )
    print(f"import ckpt; ckpt.StateManager: {min(float(run(_IMPORT)) for _ in range(3)):.2f} s of CPU beside torch")
    more, plain = map(float, run(_STEP).split())
    print(f"a training step of {plain * 1e3:.2f} ms costs {more * 1e3:.3f} ms more")
    uses = foreign_private_names(trees)
    print(f"{len(declared_names())} private names of others in {COMPAT}")
    print(f"{len({use.name for use in uses})} private names of others in {len({use.path for use in uses})} other files")
    if "-v" in sys.argv:
        print(*(f"    {use.path}:{use.line}: {use.name}" for use in uses), sep="\n")
    patches = patched_classes({path: tree for path, tree in trees.items() if not path.startswith(SELFTEST)})
    print(f"{len(patches)} classes of others patched: {', '.join(patches)}")
    print(f"{len(arguments())} arguments of StateManager")


if __name__ == "__main__":
    main()

"""Small bugs, drawn from the syntax tree of the code: nobody chooses them, and none names a test."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CODE = ("ckpt", "formats", "storage")
# where a bug loses a run or loads something wrong
VITAL = ("ckpt/root/", "ckpt/save/", "ckpt/load/", "ckpt/memory/", "storage/", "formats/native/")
_OPPOSITE: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.FloorDiv: "*", ast.Mod: "//"}
_TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_ORDERLESS = {
    "isinstance",
    "issubclass",
    "min",
    "max",
    "suppress",
}  # swapped arguments change nothing, or raise at once
_LEAVES = (ast.Raise, ast.Return, ast.Continue, ast.Break)
_SAYS = {"debug", "info"}  # what is logged for the curious


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One planted bug: the text from `start` to `end` of a file, in bytes, becomes `after`."""

    file: str
    function: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    @property
    def id(self) -> str:
        """What stays the same while lines above it come and go."""
        return f"{self.file}::{self.function} {self.change}"

    @property
    def change(self) -> str:
        return f"{_short(self.before)} -> {_short(self.after)}"

    @property
    def vital(self) -> bool:
        return self.file.startswith(VITAL)

    def applied(self, source: bytes) -> bytes:
        if source[self.start : self.end] != self.before.encode():
            raise ValueError(f"{self.file} has changed since the mutant was drawn")
        return source[: self.start] + self.after.encode() + source[self.end :]


def draw(count: int, seed: int, root: Path = ROOT) -> list[Mutant]:
    """As many mutants, two of a function at most, half of them where they would do most harm."""
    found = [one for path in sources(root) for one in mutants_of(path, root)]
    found.sort(key=lambda one: hashlib.sha256(f"{seed} {one.id}".encode()).digest())  # most stay when the code changes
    vital = _spread([one for one in found if one.vital], count - count // 2, root)
    others = _spread([one for one in found if not one.vital], count // 2, root)
    return sorted(vital + others, key=lambda one: (one.file, one.start))


def sources(root: Path = ROOT) -> list[Path]:
    return sorted(path for part in CODE for path in (root / part).rglob("*.py") if not _through_a_link(path, root))


def mutants_of(path: Path, root: Path = ROOT) -> list[Mutant]:
    """Every mutant of a module; a few do not compile."""
    return _Finder(path.relative_to(root).as_posix(), path.read_bytes()).found


def _spread(mutants: Sequence[Mutant], count: int, root: Path) -> list[Mutant]:
    of_function: Counter[str] = Counter()
    chosen: list[Mutant] = []
    for one in mutants:
        name = f"{one.file}::{one.function}"
        if len(chosen) < count and of_function[name] < 2 and _compiles(one, (root / one.file).read_bytes()):
            of_function[name] += 1
            chosen.append(one)
    return chosen


def _through_a_link(path: Path, root: Path) -> bool:
    return any(parent.is_symlink() for parent in path.relative_to(root).parents for parent in [root / parent])


def _compiles(one: Mutant, source: bytes) -> bool:
    try:
        mutated = ast.parse(one.applied(source))
    except SyntaxError:
        return False
    return ast.dump(mutated) != ast.dump(ast.parse(source))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:45]} … {line[-12:]}"


class _Finder(ast.NodeVisitor):
    """Walks a module and notes what could be changed, but not annotations, what only types see, and words."""

    def __init__(self, file: str, source: bytes) -> None:
        self.found: list[Mutant] = []
        self._file, self._source = file, source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._names: list[str] = []
        self._functions = 0
        self.visit(ast.parse(source))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in ("__repr__", "__str__") or any("overload" in ast.dump(one) for one in node.decorator_list):
            return
        if self._functions:
            self._names.append("<locals>")
        self._functions += 1
        self._names.append(node.name)
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(part)
        self._names.pop()
        self._functions -= 1
        if self._functions:
            self._names.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any(getattr(base, "id", "") in ("Protocol", "TypedDict") for base in node.bases):
            return
        self._names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and (self._functions or self._names):
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if self._names:  # a constant of a module is a size or a pause that somebody chose
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call):
            if getattr(call.func, "attr", "") in _SAYS:
                return
            self._note(node, "pass", "a call dropped")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        pass  # its words; that it is raised is a mutant of the condition before it

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node.body[-1], _LEAVES):
            self._note(node.test, "False", "a check removed")
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        if len(node.items) == 1 and node.items[0].optional_vars is None:
            item = node.items[0].context_expr
            self._replace(self._start(node), self._end(item), "if True", "a lock or guard removed")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and type(node.ops[0]) in _OPPOSITE:
            left, right = self._end(node.left), self._start(node.comparators[0])
            self._between(left, right, _OPPOSITE[type(node.ops[0])], "a comparison")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for one, other in zip(node.values, node.values[1:], strict=False):
            word = "or" if isinstance(node.op, ast.And) else "and"
            if len(node.values) == 2:
                self._between(self._end(one), self._start(other), word, "a condition")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(self._start(node), self._start(node.operand), "", "a condition")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        words = any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (node.left, node.right))
        if type(node.op) in _ARITHMETIC and not words:
            self._between(self._end(node.left), self._start(node.right), _ARITHMETIC[type(node.op)], "arithmetic")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _TWINS:
            self._note(node.func, _TWINS[node.func.id], "arithmetic")
        names = [one for one in node.args if isinstance(one, ast.Name | ast.Attribute)]
        if len(node.args) >= 2 and names[:2] == node.args[:2] and _called(node) not in _ORDERLESS:
            first, second = node.args[:2]
            swapped = f"{self._text(second)}, {self._text(first)}"
            self._replace(self._start(first), self._end(second), swapped, "arguments swapped")
        for keyword in node.keywords:
            if isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, bool):
                self._note(keyword.value, str(not keyword.value.value), "another option")
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._note(node, str(not node.value), "another constant")
        elif isinstance(node.value, int):
            self._note(node, str(node.value + 1), "off by one")

    def _text(self, node: ast.expr) -> str:
        return self._source[self._start(node) : self._end(node)].decode()

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def _note(self, node: ast.expr | ast.stmt, after: str, kind: str) -> None:
        self._replace(self._start(node), self._end(node), after, kind)

    def _between(self, start: int, end: int, after: str, kind: str) -> None:
        """Change the operator between two operands, which may have brackets and comments of their own."""
        text = self._source[start:end].decode()
        word = text.strip(" ()\n")
        if word.isascii() and "\n" not in word and "(" not in word and ")" not in word and word:
            begin = start + text.index(word)
            self._replace(begin, begin + len(word), after, kind)

    def _replace(self, start: int, end: int, after: str, kind: str) -> None:
        line = self._source.count(b"\n", 0, start) + 1
        before = self._source[start:end].decode()
        self.found.append(
            Mutant(
                file=self._file,
                function=".".join(self._names) or "<module>",
                line=line,
                kind=kind,
                start=start,
                end=end,
                before=before,
                after=after,
            )
        )


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _called(node: ast.Call) -> str:
    return getattr(node.func, "id", getattr(node.func, "attr", ""))

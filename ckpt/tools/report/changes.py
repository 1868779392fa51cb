"""How much each module changed from checkpoint to checkpoint.

Checkpoints are streamed, a slab of two tensors in memory at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ckpt.errors import CkptError, shows_damage
from ckpt.export.source import open_source
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import FileRecord, Manifest
from ckpt.formats.pieces import PiecedTensor
from ckpt.root import catalog
from ckpt.root.catalog import part_of
from ckpt.root.verify import DAMAGED, verify_checkpoint
from ckpt.storage import Storage, open_storage
from ckpt.tools.diff import Squares, squares_between
from ckpt.tools.report.facts import RunFacts, Save
from ckpt.util.console import one_line, progress_bar
from ckpt.util.option_values import settings

MOST_CHECKPOINTS = 30  # that are compared; of more, those in between are left out, evenly
MOST_ROWS, WISHED_ROWS = 160, 48
_MODEL = "model"
_NUMBER = re.compile(r"(\d{1,9})")


@dataclass
class Cell:
    """A module between two checkpoints: of so many tensors in either, so many are in both, with one shape."""

    squares: Squares = field(default_factory=Squares)
    compared: int = 0
    tensors: int = 0

    @property
    def relative(self) -> float | None:
        """RMS of the difference over RMS of the older; None where there is nothing to compare."""
        return self.squares.relative if self.compared else None


@dataclass
class Step:
    """Two checkpoints in a row. `problem`: why they were not compared; else the cells of the modules."""

    older: Save
    newer: Save
    tensors: dict[str, Squares | None] = field(default_factory=dict)
    only_older: int = 0
    only_newer: int = 0
    reshaped: int = 0
    problem: str = ""
    cells: dict[str, Cell] = field(default_factory=dict)


@dataclass
class Changes:
    """All steps, and the modules in the order of their names.

    `left_out`: checkpoints between those that were compared. `hidden`: modules for which there is no row. `damage`: by
    name, what was found to be wrong with a checkpoint when its model was read, though sizes were right.
    """

    steps: list[Step]
    modules: list[str]
    left_out: int = 0
    hidden: int = 0
    damage: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def relatives(self) -> list[float]:
        """Every change that is finite and not zero."""
        found = (cell.relative for step in self.steps for cell in step.cells.values())
        return [value for value in found if value is not None and math.isfinite(value) and value > 0]


def measure_changes(facts: RunFacts, options: Mapping[str, Any] | None = None) -> Changes:
    """Compare the models of the checkpoints that are there, each with the one before. Every file is verified."""
    here = [save for save in facts.present if save.is_sound]
    chosen = _spread(here)
    steps = [Step(older, newer) for older, newer in pairwise(chosen)]
    comparison = _Comparison(facts.url, options)
    comparison.compare(steps)
    modules = _group(steps)
    rows = modules[:MOST_ROWS]
    return Changes(steps, rows, len(here) - len(chosen), len(modules) - len(rows), comparison.damage)


def _spread(saves: Sequence[Save]) -> list[Save]:
    if len(saves) <= MOST_CHECKPOINTS:
        return list(saves)
    last = MOST_CHECKPOINTS - 1
    return [saves[round(index * (len(saves) - 1) / last)] for index in range(MOST_CHECKPOINTS)]


@dataclass
class _Opened:
    """The model of a checkpoint: its tensors, and its files by their keys, each with a number for its bytes."""

    tensors: dict[str, PiecedTensor]
    files: dict[str, int]


class _Comparison:
    """Each checkpoint is opened once, and closed when the one after it has been compared with it."""

    def __init__(self, root: str, options: Mapping[str, Any] | None) -> None:
        self._root, self._options = root, options
        self._storage: Storage = open_storage(root, **settings(options))
        self._contents: dict[tuple[Any, ...], int] = {}  # numbers of files, the same for the same name and hashes
        self._norms: dict[tuple[str, frozenset[int]], Squares] = {}  # of tensors in files that do not change
        self.damage: dict[str, Sequence[str]] = {}
        self._verified: set[str] = set()

    def compare(self, steps: Sequence[Step]) -> None:
        size = sum(step.newer.summary.size for step in steps)
        with progress_bar("comparing checkpoints", size, in_bytes=True) as advance, ExitStack() as held:
            older: _Opened | None = None
            for step in steps:
                with ExitStack() as opened:
                    older = self._compared(step, older, held, opened)
                    held.close()  # the older one
                    held.push(opened.pop_all())
                advance(step.newer.summary.size)

    def _compared(self, step: Step, older: _Opened | None, held: ExitStack, opened: ExitStack) -> _Opened | None:
        """Compare two checkpoints, and return the later one, which `opened` holds; None if that was not possible."""
        try:
            older = older or self._opened(step.older, held)
            newer = self._opened(step.newer, opened)
            self._compare(step, older, newer)
        except CkptError as error:  # the report says it in place of the cells
            step.problem, step.tensors = one_line(str(error)), {}
            if shows_damage(error):
                self._find_damage(step)
            return None
        return newer

    def _find_damage(self, step: Step) -> None:
        """Which of the two is damaged: all of both is read, once."""
        for save in (step.older, step.newer):
            if save.name not in self._verified:
                self._verified.add(save.name)
                found = verify_checkpoint(self._storage, save.name)
                if found.state == DAMAGED:
                    self.damage[save.name] = found.problems

    def _opened(self, save: Save, held: ExitStack) -> _Opened:
        manifest = catalog.read_manifest(self._storage, save.name)
        parts = [part for part in _parts(manifest) if part == _MODEL or part.startswith(f"{_MODEL}.")]
        tensors: dict[str, PiecedTensor] = {}
        for part in parts:
            source = held.enter_context(open_source(f"{self._root}/{save.name}", part, self._options))
            prefix = f"{part.removeprefix(f'{_MODEL}.')}." if len(parts) > 1 else ""
            tensors |= {f"{prefix}{name}": tensor for name, tensor in _without_peft(source.tensors).items()}
        return _Opened(tensors, {f"{save.name}/{file.path}": self._number(file) for file in manifest.files})

    def _number(self, file: FileRecord) -> int:
        contents = (file.name, file.size, file.block_size, file.blocks)
        return self._contents.setdefault(contents, len(self._contents))

    def _compare(self, step: Step, older: _Opened, newer: _Opened) -> None:
        for name in dict.fromkeys([*older.tensors, *newer.tensors]):
            first, second = older.tensors.get(name), newer.tensors.get(name)
            step.tensors[name] = None
            if first is None or second is None:
                step.only_newer += first is None
                step.only_older += second is None
            elif first.shape != second.shape:
                step.reshaped += 1
            else:
                step.tensors[name] = self._unchanged(name, older, newer) or squares_between(first, second)

    def _unchanged(self, name: str, older: _Opened, newer: _Opened) -> Squares | None:
        """For a tensor in files of the same hashes, which is read once, however many checkpoints have them."""
        files = _files_of(older.tensors[name], older)
        if files is None or files != _files_of(newer.tensors[name], newer):
            return None
        if (name, files) not in self._norms:
            tensor = older.tensors[name]
            self._norms[name, files] = squares_between(tensor, tensor)
        return self._norms[name, files]


def _without_peft(tensors: dict[str, PiecedTensor]) -> dict[str, PiecedTensor]:
    """By the names of the model below PEFT's wrapper: the parameters of before are still the same ones."""
    plain = {name.removeprefix("base_model.model.").replace(".base_layer.", "."): name for name in tensors}
    return {new: tensors[old] for new, old in plain.items()} if len(plain) == len(tensors) else tensors


def _parts(manifest: Manifest) -> list[str]:
    return list(dict.fromkeys(part_of(file.name) for file in manifest.files if file.name.endswith(SUFFIX)))


def _files_of(tensor: PiecedTensor, opened: _Opened) -> frozenset[int] | None:
    """The numbers of the files that a tensor lies in; None if one is not known."""
    keys = {piece.region.where for piece in tensor.pieces}
    known = frozenset(opened.files[key] for key in keys if key in opened.files)
    return known if keys and len(known) == len(keys) else None


def _group(steps: Sequence[Step]) -> list[str]:
    """Sum up tensors by modules, as deep as there are rows for; the modules in the order of their names."""
    names = sorted({name for step in steps for name in step.tensors}, key=_natural)
    depth = _depth(names)
    modules = list(dict.fromkeys(_module(name, depth) for name in names))
    for step in steps:
        for name, squares in step.tensors.items():
            cell = step.cells.setdefault(_module(name, depth), Cell())
            cell.tensors += 1
            if squares is not None:
                cell.squares, cell.compared = cell.squares + squares, cell.compared + 1
    return modules


def _depth(names: Sequence[str]) -> int:
    """The deepest at which modules have as many rows as one sees at a glance, or else as many as there may be."""
    rows = {depth: len({_module(name, depth) for name in names}) for depth in range(8, 0, -1)}
    return next((depth for most in (WISHED_ROWS, MOST_ROWS) for depth in rows if 1 < rows[depth] <= most), 1)


def _module(name: str, depth: int) -> str:
    """The module of a tensor, down to a depth; a tensor of no module is its own."""
    *path, last = name.split(".")
    return ".".join(path[:depth]) if path else last


def _natural(name: str) -> list[tuple[int, str]]:
    """`layers.2` comes before `layers.10`."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in _NUMBER.split(name)]


def not_compared(changes: Changes) -> Iterator[tuple[Step, str]]:
    """What the table has no number for, in words."""
    for step in changes.steps:
        counts = {
            "only in the later": step.only_newer,
            "only in the earlier": step.only_older,
            "with another shape": step.reshaped,
        }
        found = [f"{count:,} tensors {what}" for what, count in counts.items() if count]
        if step.problem or found:
            yield step, step.problem or ", ".join(found)


SHADES = 8  # of one colour, in the style sheet: heat-0 is the palest
_LOWEST = 1e-8


class Shades:
    """The scale of all cells: the logarithm of the change, in steps of equal length."""

    def __init__(self, changes: Changes) -> None:
        found = [max(value, _LOWEST) for value in changes.relatives] or [0.01]
        self.low, self.high = math.log10(min(found)), math.log10(max(found))

    def of(self, cell: Cell | None) -> str:
        """The class of a cell in the style sheet; empty where nothing has changed or could be compared."""
        relative = cell.relative if cell is not None else None
        if not relative:
            return ""
        if not math.isfinite(relative):
            return "bad"
        span = self.high - self.low
        place = (math.log10(max(relative, _LOWEST)) - self.low) / span if span else 1.0
        return f"heat-{min(SHADES - 1, max(0, int(place * SHADES)))}"

    @property
    def ends(self) -> tuple[float, float]:
        return 10.0**self.low, 10.0**self.high


def described(cell: Cell | None) -> str:
    """What a cell says, in words."""
    relative = cell.relative if cell is not None else None
    if cell is None or relative is None:
        return "-"
    some = "" if cell.compared == cell.tensors else f", in {cell.compared} of {cell.tensors} tensors: others are in one"
    return f"{'not finite' if math.isnan(relative) else percent(relative)}{some}"


def percent(relative: float) -> str:
    """A relative change as text."""
    if math.isinf(relative):
        return "changed from zero"
    return "no change" if relative == 0 else f"{100 * relative:.3g} %"

"""Inputs: a folder of the corpus that was altered, and the operation before which it is put."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz import reseal, tree
from tests.fuzz.mutate import Files, alter_file, rearrange
from tests.fuzz.operation import NAMES_A_FOLDER
from tests.fuzz.tree import Tree

KINDS = {
    "full": "root",
    "signed": "signed",
    "linked": "root",
    "sharded": "root",
    "together": "root",
    "own-state": "root",
    "accelerate": "accelerate",
    "accelerate-pickles": "accelerate",
    "accelerate-sharded": "accelerate",
    "dcp": "dcp",
    "safetensors": "model",
    "safetensors-sharded": "model",
    "torch-save": "pickle",
    "lightning": "pickle",
    "zero-1": "zero",
    "zero-3": "zero",
    "zero-universal": "zero",
    "memory": "memory",
}


@dataclass
class Case:
    """An input: the seed, what lies in its folder, the operation, and how it came about."""

    seed: str
    target: str
    files: Tree
    how: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"seed": self.seed, "target": self.target, "how": self.how, "files": tree.to_json(self.files)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Case:
        return cls(fields["seed"], fields["target"], tree.from_json(fields["files"]), list(fields["how"]))

    @property
    def kind(self) -> str:
        return KINDS.get(self.seed, self.seed)


def _is_link(path: str, node: object, depths: tuple[int, ...]) -> bool:
    return isinstance(node, tree.Special) and node.kind == "link" and path.count("/") in depths


class Maker:
    """Makes cases from a corpus. The number of a case and the seed of a run decide all of it."""

    def __init__(self, trees: Mapping[str, Tree], targets: Mapping[str, tuple[str, ...]], seed: int) -> None:
        self._trees = trees
        self._targets = targets  # by the kind of folder
        self._seed = seed
        self._files = Files(trees)

    def pristine(self) -> list[Case]:
        """Every seed before every operation, unaltered: what must succeed."""
        return [
            Case(name, target, dict(files))
            for name, files in self._trees.items()
            for target in self._targets[KINDS[name]]
        ]

    def make(self, number: int) -> Case:
        dice = random.Random(f"{self._seed}/{number}")
        name = dice.choice(list(self._trees))
        case = Case(name, dice.choice(self._targets[KINDS[name]]), dict(self._trees[name]))
        chance = dice.random()
        if chance < 0.3 and case.kind in ("root", "signed", "memory"):
            self._alter_manifest(dice, case)
        elif chance < 0.45:
            for _ in range(dice.choice((1, 1, 2))):
                self._rearrange(dice, case)
        else:
            self._alter_content(dice, case)
        return case

    def _alter_manifest(self, dice: random.Random, case: Case) -> None:
        for path in reseal.manifests(case.files):
            data = case.files[path]
            if dice.random() < 0.6 and isinstance(data, bytes):
                case.files[path] = reseal.altered_manifest(dice, data, times=dice.choice((1, 1, 2, 3)))
                case.how.append(f"fields of {path}")

    def _rearrange(self, dice: random.Random, case: Case) -> None:
        case.files = rearrange(dice, case.files) or case.files
        depths = (0, 1) if case.target in NAMES_A_FOLDER else (0,)
        case.files = {path: node for path, node in case.files.items() if not _is_link(path, node, depths)}
        case.how.append("other things at its paths")

    def _alter_content(self, dice: random.Random, case: Case) -> None:
        listed = [path for path, node in case.files.items() if isinstance(node, bytes)]
        chosen = dice.sample(listed, min(len(listed), dice.choice((1, 1, 1, 2, 3))))
        before = dict(case.files)
        for path in chosen:
            case.files[path] = alter_file(dice, path, bytes(before[path]), self._files)  # type: ignore[arg-type]
            case.how.append(f"content of {path}")
        if case.kind in ("root", "signed") and dice.random() < 0.7:
            case.files = reseal.reseal(case.files)
            case.how.append("resealed")

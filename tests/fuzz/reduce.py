"""Makes an input that found something smaller: fewer files, and as few altered ones as show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from tests.fuzz.cases import Case
from tests.fuzz.judge import Finding
from tests.fuzz.pool import Found
from tests.fuzz.tree import Tree

Judged = Callable[[list[Case]], list[Finding | None]]
_ROUNDS = 4


def reduced(found: list[Found], trees: Mapping[str, Tree], judged: Judged) -> list[Found]:
    """Inputs with the same findings, from which no file can be left out and none be as it was. Hangs are left alone."""
    waiting = [number for number, one in enumerate(found) if one.finding.kind != "hang"]
    found = list(found)
    for _ in range(_ROUNDS):
        smaller = [
            (at, case) for at in waiting for case in _smaller(found[at].case, trees.get(found[at].case.seed, {}))
        ]
        better: dict[int, Found] = {}
        for (at, case), finding in zip(smaller, judged([case for _, case in smaller]), strict=True):
            same = finding and (finding.kind, finding.signature) == (
                found[at].finding.kind,
                found[at].finding.signature,
            )
            if finding and same and at not in better:
                better[at] = Found(found[at].number, case, finding)
        waiting = list(better)
        for at, one in better.items():
            found[at] = one
        if not waiting:
            break
    return found


def _smaller(case: Case, pristine: Tree) -> Iterator[Case]:
    """The greatest steps first: whole folders left out, then files, then files as they were."""
    above = sorted({path.rpartition("/")[0] for path in case.files} - {""}, key=len)
    for folder in above:
        yield _with(case, {path: node for path, node in case.files.items() if not path.startswith(f"{folder}/")})
    for left_out in case.files:
        yield _with(case, {path: node for path, node in case.files.items() if path != left_out})
    for path, node in case.files.items():
        if path in pristine and node != pristine[path]:
            yield _with(case, {**case.files, path: pristine[path]})


def _with(case: Case, files: Tree) -> Case:
    return replace(case, files=files)

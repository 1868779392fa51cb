"""The tool that draws mutants: what it draws, which tests it chooses, and that it plants them where the tests look."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.mutants import report
from tests.mutants.__main__ import Judge, workers
from tests.mutants.operators import ROOT, Mutant, draw, mutants_of, sources
from tests.mutants.pool import Worker, environment
from tests.mutants.reach import Reach

SOURCE = '''
"""Words."""
LIMIT = 3

def kept(names, most: int = 2, *, sync=True):
    if not names:
        raise ValueError(f"{most + 1}")
    with lock:
        os.fsync(names)
    while len(names) > most and sync:
        names = copy(names, most)
    return max(names[1:])
'''
HASHER = "formats/native/manifest.py"
TEST = "tests/formats/test_manifest.py::TestBlockHasher::test_it_equals_hashing_block_by_block[5]"


def drawn_from(folder: Path, source: str) -> list[Mutant]:
    (folder / "ckpt").mkdir(exist_ok=True)
    (folder / "ckpt" / "module.py").write_text(source)
    return mutants_of(folder / "ckpt" / "module.py", folder)


def test_every_kind_of_bug_is_drawn_and_neither_words_nor_constants_of_a_module_are_changed(tmp_path: Path) -> None:
    assert {one.change for one in drawn_from(tmp_path, SOURCE)} == {
        "2 -> 3",
        "True -> False",
        "not names -> False",
        "not -> ",
        "with lock -> if True",
        "os.fsync(names) -> pass",
        "> -> >=",
        "and -> or",
        "names, most -> most, names",
        "max -> min",
        "1 -> 2",
    }


def test_a_mutant_changes_its_place_alone_and_belongs_to_its_function(tmp_path: Path) -> None:
    found = {one.change: one for one in drawn_from(tmp_path, SOURCE)}
    assert found["> -> >="].applied(SOURCE.encode()).decode() == SOURCE.replace("> most", ">= most")
    assert found["not -> "].applied(SOURCE.encode()).decode() == SOURCE.replace("not names", "names")
    assert found["2 -> 3"].id == "ckpt/module.py::kept 2 -> 3"
    with pytest.raises(ValueError, match="has changed"):
        found["1 -> 2"].applied(SOURCE.replace("LIMIT", "MOST").encode())


def test_a_seed_draws_the_same_and_most_of_it_when_code_is_added(tmp_path: Path) -> None:
    names = [f"\ndef f{number}(a):\n    return a < {number}\n" for number in range(100)]
    drawn_from(tmp_path, "".join(names[:90]))
    before, again, other = draw(30, 1, tmp_path), draw(30, 1, tmp_path), draw(30, 2, tmp_path)
    drawn_from(tmp_path, "".join(names))
    after = {one.id for one in draw(30, 1, tmp_path)}
    assert [one.id for one in before] == [one.id for one in again] != [one.id for one in other]
    assert len(after & {one.id for one in before}) >= 0.8 * len(before) > 10


def test_what_was_judged_to_change_nothing_is_still_in_the_code() -> None:
    told = yaml.safe_load((ROOT / "tests/mutants/judged.yaml").read_text()) or {}
    files = {name.partition("::")[0] for name in told}
    present = {one.id for path in sources() if path.relative_to(ROOT).as_posix() in files for one in mutants_of(path)}
    assert set(told) - present == set()
    assert [name for name, why in told.items() if not str(why).strip()] == []


def test_tests_of_a_mutant_are_narrow_and_wide_ones_in_turn_and_of_every_module_some(tmp_path: Path) -> None:
    mutant = next(one for one in drawn_from(tmp_path, SOURCE) if one.kind == "arithmetic")
    found = Reach()
    for test, others in (("a.py::one", 0), ("a.py::two", 5), ("b.py::three", 2), ("b.py::four", 9)):
        found.seconds[test] = 0.1
        for name in ["kept", *map(str, range(others))]:
            found._add(test, f"ckpt/module.py::{name}")
    found.seconds["a.py::elsewhere"] = 0.1
    found._add("a.py::elsewhere", "ckpt/other.py::kept")
    assert found.tests_of(mutant) == ["a.py::one", "b.py::four", "b.py::three", "a.py::two"]
    assert found.within(["a.py::one", "a.py::two", "b.py::three"], 0.2) == (["a.py::one", "a.py::two"], ["b.py::three"])
    found.write(tmp_path / "reach.json.gz")
    assert Reach.read(tmp_path / "reach.json.gz") == found


def test_too_many_survivors_fail_a_run_and_what_is_equivalent_does_not_count(tmp_path: Path) -> None:
    one = drawn_from(tmp_path, SOURCE)[0]
    vital = replace(one, file="ckpt/root/write_link_commit.py")
    killed, survived = report.Verdict(one, report.KILLED, "tests/a.py::b"), report.Verdict(one, report.SURVIVED)
    assert report.suffices([killed] * 17 + [survived] * 3)
    assert not report.suffices([killed] * 16 + [survived] * 4)
    assert report.suffices([killed] * 17 + [survived] * 3 + [report.Verdict(one, report.EQUIVALENT, "why")] * 9)
    assert not report.suffices([killed] * 99 + [report.Verdict(vital, report.SURVIVED)])
    text = report.markdown([killed, survived], "make mutants", "two cores")
    assert "1 of 2 noticed (50.0 %): 1 killed, 0 hung, 1 survived, 0 equivalent" in text


def test_a_run_goes_on_with_what_was_not_noticed_before(tmp_path: Path) -> None:
    first, second = drawn_from(tmp_path, SOURCE)[:2]
    report.keep(tmp_path / "kept", report.Verdict(first, report.KILLED, "tests/a.py::b", 1.0))
    report.keep(tmp_path / "kept", report.Verdict(second, report.SURVIVED))
    assert list(report.noticed_before(tmp_path / "kept", [first, second])) == [
        report.Verdict(first, report.KILLED, "tests/a.py::b", 1.0)
    ]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with workers(1) as free:
        yield free.get()


def reached(mutant: Mutant, test: str) -> Judge:
    found = Reach(seconds={test: 0.1})
    found._add(test, f"{mutant.file}::{mutant.function}")
    return Judge(found)


def replaced(file: str, before: str, after: str) -> Mutant:
    source = (ROOT / file).read_bytes()
    assert source.count(before.encode()) == 1
    start = source.index(before.encode())
    return Mutant(
        file=file, function="f", line=1, kind="", start=start, end=start + len(before), before=before, after=after
    )


@pytest.mark.slow
def test_a_mutant_is_noticed_or_survives_and_the_code_is_as_it_was_afterwards(worker: Worker) -> None:
    before = (ROOT / HASHER).read_bytes()
    call = "self._done.append(self._open.hexdigest())"
    mutant = replaced(HASHER, call, "pass")
    assert reached(mutant, TEST).judge(worker, mutant).result == report.KILLED
    assert (worker.folder / HASHER).read_bytes() == (ROOT / HASHER).read_bytes() == before
    harmless = replaced(
        HASHER, "self._done.append(self._open.hexdigest())", "self._done.extend([self._open.hexdigest()])"
    )
    assert reached(harmless, TEST).judge(worker, harmless).result == report.SURVIVED


@pytest.mark.slow
@pytest.mark.long
def test_ranks_and_other_processes_import_the_copy_too(worker: Worker) -> None:
    script = "import ckpt, ckpt.formats.pieces, ckpt.storage.urls as last; print(ckpt.__file__, last.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd="/",
        env=environment(worker.folder),
        check=True,
        capture_output=True,
        text=True,
    )
    assert [str(worker.folder) in path for path in done.stdout.split()] == [True, True]
    in_a_rank = replaced(
        "storage/local/storage.py",
        "status = self._tree.status(key)\n",
        "status = self._tree.status('' if __import__('multiprocessing').parent_process() else key)\n",
    )
    test = "tests/root/test_several_writers.py::test_processes_that_count_by_compare_and_replace_lose_no_count"
    assert reached(in_a_rank, test).judge(worker, in_a_rank).result == report.KILLED


@pytest.mark.slow
def test_a_test_that_is_gone_notices_nothing(worker: Worker) -> None:
    mutant = replaced(HASHER, "self._done.append(self._open.hexdigest())", "pass")
    assert reached(mutant, f"{TEST}gone").judge(worker, mutant).result == report.SURVIVED

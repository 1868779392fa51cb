"""Mutants are kept true: each finds its place in the code, and its tests. `make mutants` plants all, these a few."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.mutants import report
from tests.mutants.__main__ import judge, workers
from tests.mutants.catalogue import ROOT, Mutant, exists, load, problem
from tests.mutants.pool import Worker, environment

MUTANTS = {one.id: one for one in load()}
SLICE = ("sharding-copy-number-on-two-replicated-dimensions", "hash-carried-over-from-block-to-block")


def test_every_mutant_is_found_once_in_the_code_compiles_and_names_tests_that_exist() -> None:
    assert {one.id: why for one in MUTANTS.values() if (why := problem(one))} == {}


def test_there_are_enough_of_them_and_each_has_a_name_of_its_own() -> None:
    assert {name: count for name, count in Counter(one.id for one in load()).items() if count > 1} == {}
    assert len(MUTANTS) >= 80


def test_a_mutant_that_is_out_of_date_is_told_why() -> None:
    one = MUTANTS[SLICE[0]]
    assert "0 times" in (problem(replace(one, before="no such text")) or "")
    assert "times" in (problem(replace(one, before="def ")) or "")
    assert "no formats/gone.py" in (problem(replace(one, file="formats/gone.py")) or "")
    assert "does not compile" in (problem(replace(one, after="number = = 1")) or "")
    assert "no such tests: tests/x.py::test_x" in (problem(replace(one, tests=("tests/x.py::test_x",))) or "")
    assert "changes nothing" in (problem(replace(one, after=one.before)) or "")


def test_tests_are_found_also_where_a_class_inherits_them() -> None:
    assert exists("tests/guarantees/test_mutants.py::test_tests_are_found_also_where_a_class_inherits_them")
    assert exists("tests/storage/test_memory.py::TestMemoryStorage::test_what_is_written_is_read")
    assert not exists("tests/storage/test_memory.py::TestMemoryStorage::test_what_is_nowhere")
    assert not exists("tests/storage/test_memory.py")


def test_stale_ones_fail_a_run_and_so_do_too_many_survivors() -> None:
    one = next(iter(MUTANTS.values()))
    killed, survived = report.Verdict(one, report.KILLED, "tests/a.py::b"), report.Verdict(one, report.SURVIVED)
    assert report.suffices([killed] * 19 + [survived])
    assert not report.suffices([killed] * 18 + [survived])
    assert not report.suffices([killed] * 99 + [report.Verdict(one, report.STALE)])
    text = report.markdown([killed, survived], "make mutants", "two cores")
    assert "1 of 2 mutants killed (50.0 %); 1 survived, by `make mutants` on two cores." in text
    assert f"| {one.id} | {one.file} | {one.breaks} | tests/a.py::b | killed |" in text


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with workers(1) as free:
        yield free.get()


@pytest.mark.slow
@pytest.mark.parametrize("name", SLICE)
def test_a_mutant_is_noticed_and_the_code_is_as_it_was_afterwards(worker: Worker, name: str) -> None:
    mutant = MUTANTS[name]
    before = (ROOT / mutant.file).read_text()
    assert judge(worker, mutant).result == report.KILLED
    assert (worker.folder / mutant.file).read_text() == (ROOT / mutant.file).read_text() == before
    assert worker.run(mutant.tests, 120.0).status == 0


@pytest.mark.slow
def test_a_mutant_that_nobody_notices_survives_and_one_that_hangs_is_out_of_time(worker: Worker) -> None:
    one = MUTANTS[SLICE[0]]
    harmless = replace(one, after=f"{one.before}  # the same")
    assert judge(worker, harmless).result == report.SURVIVED
    hanging: Mutant = replace(one, after="__import__('time').sleep(600)", seconds=3.0)
    assert judge(worker, hanging).result == report.TIMEOUT
    assert judge(worker, replace(hanging, hangs=True)).result == report.KILLED


@pytest.mark.slow
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
    in_a_rank = replace(
        MUTANTS[SLICE[0]],
        file="storage/local/storage.py",
        before="status = os.stat(path)",
        after="status = os.stat('' if __import__('multiprocessing').parent_process() else path)",
        tests=("tests/root/test_several_writers.py::test_processes_that_count_by_compare_and_replace_lose_no_count",),
    )
    assert judge(worker, in_a_rank).result == report.KILLED

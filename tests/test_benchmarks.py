"""How benchmarks keep and compare their figures. What they measure is not tested."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import compare
from benchmarks.__main__ import main, redirected
from benchmarks.compare import Change, changes
from benchmarks.shared.plot import bars
from benchmarks.shared.report import Run, Target, header, settings_of, table, table_of_targets
from benchmarks.shared.results import Results, Row, Samples

RESULTS = Results(
    benchmark="cpu",
    command="python -m benchmarks cpu --megabytes 10",
    date="2026-01-02",
    machine={"processor": "Abacus 1", "cores": 2, "memory, GB": 4, "system": "Linux", "file system": "ext4"},
    versions={"Python": "3.11", "ckpt": "0.1"},
    settings={"megabytes": 10},
    load_average=(0.5, 1.25),
    rows=(Row("ckpt", "save", (2.0, 1.0, 1.5)), Row("ckpt", "memory", (3e6,), "B"), Row("other", "save", (4.0, 5.0))),
)


def kept(folder: Path, name: str, *rows: Row) -> str:
    path = folder / name
    path.write_text(replace(RESULTS, rows=rows or RESULTS.rows).to_json())
    return str(path)


class TestResults:
    def test_json_brings_back_every_sample_and_every_fact(self) -> None:
        assert Results.from_json(RESULTS.to_json()) == RESULTS

    def test_another_format_is_refused_with_the_name_of_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "new.json"
        path.write_text(json.dumps({**json.loads(RESULTS.to_json()), "format": 2}))
        with pytest.raises(ValueError, match=r"new\.json: results of format 2"):
            Results.read(path)

    def test_samples_are_collected_by_subject_and_metric(self) -> None:
        samples = Samples()
        for took in (3.0, 1.0, 2.0):
            samples.add("ckpt", "save", took)
        samples.add("ckpt", "memory", 5.0, "B")
        samples.add("ckpt", "load", None)
        assert samples.rows() == (Row("ckpt", "save", (3.0, 1.0, 2.0)), Row("ckpt", "memory", (5.0,), "B"))
        statistics = (samples.best, samples.median, samples.worst)
        assert [statistic("ckpt", "save") for statistic in statistics] == [1.0, 2.0, 3.0]
        assert [statistic("ckpt", "load") for statistic in statistics] == [None, None, None]


class TestCompare:
    def test_ratios_are_of_new_to_old(self) -> None:
        change = Change(Row("ckpt", "save", (2.0, 4.0)), Row("ckpt", "save", (3.0, 3.0)))
        assert (change.ratio("best"), change.ratio("median")) == (1.5, 1.0)
        assert change.exceeds(49, "best")
        assert not change.exceeds(51, "best")
        assert not change.exceeds(3, "median")

    def test_a_difference_that_noise_made_negative_has_no_ratio(self) -> None:
        change = Change(Row("ckpt", "lost", (-0.1,)), Row("ckpt", "lost", (0.2,)))
        assert change.ratio("best") is None
        assert not change.exceeds(3, "best")

    def test_rows_of_one_run_only_are_listed(self) -> None:
        common, lost, added = Row("ckpt", "save", (1.0,)), Row("ckpt", "load", (1.0,)), Row("dcp", "save", (1.0,))
        found, notes = changes([common, lost], [added, common])
        assert found == [Change(common, common)]
        assert notes == ["only in the old run: ckpt, load", "only in the new run: dcp, save"]

    def test_the_status_is_1_only_if_a_row_is_over_the_threshold(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        old = kept(tmp_path, "old.json")
        slower = kept(tmp_path, "new.json", Row("ckpt", "save", (1.04, 1.2)), Row("other", "save", (4.0, 5.0)))
        assert main(["compare", old, old]) == 0
        assert "0 of 3 rows are worse by more than 3 %" in capsys.readouterr().out
        assert main(["compare", old, slower]) == 1
        out = capsys.readouterr().out
        (marked,) = [line for line in out.splitlines() if "OVER 3 %" in line]
        assert "1.040" in marked
        assert "only in the old run: ckpt, memory" in out
        assert main(["compare", old, slower, "--threshold", "5"]) == 0
        assert main(["compare", old, slower, "--statistic", "median"]) == 0
        assert main(["compare", old, slower, "--subject", "other"]) == 0

    def test_runs_that_cannot_be_compared_are_told_apart(self) -> None:
        other = replace(RESULTS, machine={"processor": "Abacus 2"}, versions={"Python": "3.11", "ckpt": "0.2"})
        (difference,) = compare.differences(RESULTS, other)
        assert difference.startswith("the runs differ in machine: ")


class TestReport:
    def options(self, folder: Path) -> argparse.Namespace:
        return argparse.Namespace(megabytes=10, max_size=3, seconds=math.inf, root=folder, results=folder / "results")

    def test_the_settings_have_no_paths_and_no_limits_that_do_not_limit(self, tmp_path: Path) -> None:
        assert settings_of(self.options(tmp_path)) == {"megabytes": 10, "max-size": 3}

    @pytest.mark.slow  # asks lscpu, df and git
    def test_a_run_is_kept_as_markdown_json_and_a_plot(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = Run("cpu", self.options(tmp_path), "torch", "no-such-package", accelerator="Abacus (R) 1")
        run.samples.add("ckpt", "save", 1.5)
        path = run.keep("A title", "the table", "<svg/>", "a note")
        text = path.read_text()
        assert path.name.startswith("cpu_abacus-r-1_")
        assert text.startswith("# A title\n\n- Command: `python -m benchmarks cpu --megabytes 10 --max-size 3`\n")
        assert "\n- a note\n\nthe table\n" in text
        assert f"![plot]({path.stem}.svg)" in text
        assert path.with_suffix(".svg").read_text() == "<svg/>"
        assert "the table" in capsys.readouterr().out
        results = Results.read(path.with_suffix(".json"))
        assert results.rows == (Row("ckpt", "save", (1.5,)),)
        assert results.machine["accelerator"] == "Abacus (R) 1"
        assert "torch" in results.versions
        assert "no-such-package" not in results.versions
        assert str(tmp_path) not in text + path.with_suffix(".json").read_text()

    def test_the_header_names_machine_versions_and_load(self) -> None:
        text = header(RESULTS)
        assert "- Machine: Abacus 1, 2 cores, 4 GB memory, Linux, ext4\n" in text
        assert "- Versions: Python 3.11, ckpt 0.1\n" in text
        assert "0.5 at the beginning, 1.2 at the end" in text

    def test_columns_are_aligned(self) -> None:
        assert table(["", "b"], [["long", "c"]]) == "|      | b   |\n| ---  | --- |\n| long | c   |"

    def test_a_target_that_was_not_measured_is_not_reached(self) -> None:
        listed = table_of_targets([Target("x", None, 1), Target("y", 0.5, 1, " s"), Target("z", 2.0, 1)])
        assert [line.split("|")[-2].strip() for line in listed.splitlines()[2:]] == ["", "yes", "NO"]

    def test_each_value_is_a_bar(self) -> None:
        plot = ElementTree.fromstring(bars("a < b", {"save": {"ckpt": 1.0, "other": 2.0}}))
        widths = [bar.attrib["width"] for bar in plot.findall("{http://www.w3.org/2000/svg}rect")]
        assert widths == ["100%", "210.0", "420.0"]


class TestCommand:
    def test_against_chooses_the_tasks_of_the_benchmark(self) -> None:
        assert redirected("sharded", ["--against", "../x", "--samples", "2"]) == (
            "against",
            ["../x", "--tasks", "sharded", "--samples", "2"],
        )
        assert redirected("cpu", ["--megabytes", "10"]) == ("cpu", ["--megabytes", "10"])

    def test_a_name_that_is_not_there_is_answered_with_those_that_are(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["nonsense"]) == 2
        assert "cpu|gpu|merge" in capsys.readouterr().err

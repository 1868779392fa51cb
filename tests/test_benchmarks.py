"""How benchmarks keep and compare their figures, and that the one on a GPU runs. What they measure is not tested."""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import compare
from benchmarks.__main__ import main, redirected
from benchmarks.compare import Change, changes
from benchmarks.goodput import CKPT, RATES, Library, auto_of, live, search, simulate
from benchmarks.shared import page_cache
from benchmarks.shared.measure import in_a_new_process, warm
from benchmarks.shared.plot import Line, bars, steps
from benchmarks.shared.reference import REFERENCES, checksum
from benchmarks.shared.report import Run, Target, header, settings_of, table, table_of_targets
from benchmarks.shared.results import Results, Row, Samples, Series
from ckpt.save.cadence import PUBLISHED, SHORTEST

RESULTS = Results(
    benchmark="cpu",
    command="python -m benchmarks cpu --megabytes 10",
    date="2026-01-02",
    machine={"processor": "Abacus 1", "cores": 2, "memory, GB": 4, "system": "Linux", "file system": "ext4"},
    versions={"Python": "3.11", "ckpt": "0.1"},
    settings={"megabytes": 10},
    load_average=(0.5, 1.25),
    rows=(Row("ckpt", "save", (2.0, 1.0, 1.5)), Row("ckpt", "memory", (3e6,), "B"), Row("other", "save", (4.0, 5.0))),
    series=(Series("ckpt", "steps around save 0, later", -1, (0.1, 0.3, 0.1)),),
)
SVG = "{http://www.w3.org/2000/svg}"


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

    def test_results_from_before_there_were_series_can_be_read(self) -> None:
        fields = json.loads(RESULTS.to_json())
        del fields["series"]
        assert Results.from_json(json.dumps(fields)) == replace(RESULTS, series=())

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
        widths = [bar.attrib["width"] for bar in plot.findall(f"{SVG}rect")]
        assert widths == ["100%", "210.0", "420.0"]

    def test_each_library_is_a_line_in_both_charts_of_steps(self) -> None:
        lines = [Line("ckpt", -2, [0.1, 0.1, 0.12, 0.1], 1), Line("other", -1, [0.1, 9.0])]
        plot = ElementTree.fromstring(steps("a < b", lines, 0.1))
        drawn = [line for line in plot.findall(f"{SVG}polyline") if line.attrib.get("fill") == "none"]
        assert sorted(len(line.attrib["points"].split()) for line in drawn) == [2, 2, 4, 4]
        assert len({line.attrib["stroke"] for line in drawn}) == 2
        texts = [element.text for element in plot.findall(f"{SVG}text")]
        assert "ckpt: longest step 0.12 s; written in step 1 (square)" in texts
        assert "10 s" in texts


@pytest.mark.parametrize("compare", REFERENCES)
class TestReference:
    def test_equal_tensors_are_equal_wherever_their_memory_is(self, compare: str) -> None:
        tensors = {
            "a": torch.randn(5, 3),
            "step": torch.tensor(3.0),
            "none": torch.empty(0),
            "odd": torch.ones(3).half(),
        }
        reference = REFERENCES[compare](tensors)
        reference.take(tensors)
        moved = {name: torch.cat([torch.ones(1), tensor.flatten()])[1:] for name, tensor in tensors.items()}
        same = {name: moved[name].to(tensor.dtype).view(tensor.shape) for name, tensor in tensors.items()}
        assert reference.names() == tensors.keys()
        assert reference.unequal(same) == []

    @pytest.mark.parametrize(
        "change",
        [
            lambda tensor: tensor.view(torch.uint8)[0, 5].add_(1),
            lambda tensor: tensor[0].copy_(tensor[1].clone()),
            lambda tensor: tensor.copy_(tensor.flip(0)),
            lambda tensor: tensor.view(torch.int32).bitwise_xor_(-(2**31)),
        ],
        ids=["one byte", "a row twice", "rows in another order", "every sign"],
    )
    def test_a_change_is_noticed(self, compare: str, change: Callable[[torch.Tensor], object]) -> None:
        tensors = {"a": torch.randn(4, 3), "b": torch.randn(2)}
        reference = REFERENCES[compare](tensors)
        reference.take(tensors)
        change(tensors["a"])
        assert reference.unequal(tensors) == ["a"]

    def test_another_type_or_shape_is_noticed(self, compare: str) -> None:
        tensors = {"a": torch.zeros(4, 3), "b": torch.zeros(3)}
        reference = REFERENCES[compare](tensors)
        reference.take(tensors)
        assert reference.unequal({"a": torch.zeros(3, 4), "b": torch.zeros(3, dtype=torch.int32)}) == ["a", "b"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads of a tiny model wait for each other more than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestMeasuring:
    def test_a_checksum_does_not_depend_on_the_size_of_its_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tensor = torch.randn(1001)
        whole = checksum(tensor)
        monkeypatch.setattr("benchmarks.shared.reference.CHUNK", 64)
        assert checksum(tensor) == whole

    def test_files_that_were_read_are_in_the_page_cache(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(3 * mmap.PAGESIZE + 1))
        (tmp_path / "empty").touch()
        warm(tmp_path)
        assert page_cache.resident(tmp_path) == 1.0
        assert page_cache.wait_until_resident(tmp_path, 0)
        with open(tmp_path / "file", "rb") as file:
            assert page_cache._mapped_pages(file.fileno(), 3 * mmap.PAGESIZE + 1) == 4

    def test_an_empty_folder_never_is(self, tmp_path: Path) -> None:
        assert not page_cache.wait_until_resident(tmp_path, 0)

    @pytest.mark.slow
    def test_the_benchmark_on_a_gpu_can_be_tried_on_a_cpu(self, tmp_path: Path, one_thread: None) -> None:
        size = ["--device", "cpu", "--gigabytes", "0.002", "--steps", "4", "--later", "1", "--warm-seconds", "1"]
        places = ["--root", str(tmp_path), "--results", str(tmp_path / "results")]
        assert main(["gpu", *size, *places, "--libraries", "ours,torch", "--compare", "checksums"]) == 0
        (path,) = (tmp_path / "results").glob("*.json")
        results = Results.read(path)
        assert [series.start for series in results.series] == [-1, -1, 0]
        assert all(len(series.values) >= 1 for series in results.series)
        rows = {(row.subject, row.metric): row.samples for row in results.rows}
        assert len(rows["ckpt save_state()", "load, after a save"]) == 2
        assert len(rows["raw direct write", "written"]) == 2
        drawn = ElementTree.parse(path.with_name(f"{path.stem}_steps.svg"))
        assert "torch.save / torch.load (first, at once)" in "".join(drawn.getroot().itertext())
        assert list(tmp_path.iterdir()) == [tmp_path / "results"]

    @pytest.mark.slow
    def test_a_new_process_has_the_environment_of_now(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for value in ("before", "after"):
            monkeypatch.setenv("CKPT_MEMORY_DIR", value)
            assert in_a_new_process(os.getenv, "CKPT_MEMORY_DIR") == value

    @pytest.mark.slow
    @pytest.mark.long
    def test_the_benchmark_of_memory_can_be_tried_on_a_cpu(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path))
        size = ["--device", "cpu", "--gigabytes", "0.002", "--steps", "2", "--loop-steps", "10", "--every", "5"]
        counts = ["--repeats", "2", "--loops", "1", "--loads", "2"]
        places = ["--root", str(tmp_path), "--results", str(tmp_path / "results")]
        assert main(["memory", *size, *counts, *places]) == 0
        (path,) = (tmp_path / "results").glob("*.json")
        rows = {row.metric: len(row.samples) for row in Results.read(path).rows}
        assert (rows["lost, first"], rows["lost, later"], rows["slower"]) == (2, 2, 1)
        assert (rows["load, memory"], rows["load, root, warm"]) == (2, 2)
        assert "load from memory to load from the root" in path.with_suffix(".md").read_text()
        assert list(tmp_path.iterdir()) == [tmp_path / "results"]


class TestCommand:
    def test_against_chooses_the_tasks_of_the_benchmark(self) -> None:
        assert redirected("sharded", ["--against", "../x", "--samples", "2"]) == (
            "against",
            ["../x", "--tasks", "sharded", "--samples", "2"],
        )
        assert redirected("cpu", ["--megabytes", "10"]) == ("cpu", ["--megabytes", "10"])

    def test_a_name_that_is_not_there_is_answered_with_those_that_are(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["nonsense"]) == 2
        assert "cpu|gpu|memory|merge|s3" in capsys.readouterr().err


class TestGoodput:
    """The simulation behind docs/goodput.md."""

    @pytest.mark.parametrize(
        ("until", "waiting", "repeated"),
        [
            (99, 0, 99),
            (250, 2, 48),
            (205, 2, 103),  # the second save is not durable yet
            (200.5, 1, 99.5),
            (201.5, 1.5, 100),  # it fails in the save
        ],
    )
    def test_a_failure_takes_what_is_not_durable(self, until: float, waiting: float, repeated: float) -> None:
        spent, _, lost = live(Library("x", 1, 10), until, False, 100.0)
        assert (spent.waiting, lost) == pytest.approx((waiting, repeated))

    def test_a_lost_machine_takes_what_is_not_synced(self) -> None:
        library = Library("x", 1, 1, synced=False)
        assert [live(library, 225, machine, 100.0)[2] for machine in (False, True)] == [23, 123]

    def test_the_same_seed_gives_the_same_figures(self) -> None:
        first, again, other = (simulate(CKPT, 1024, PUBLISHED, seed, 300.0, 0.02) for seed in (1, 1, 2))
        assert first == again != other
        assert first.waiting + first.repeated + first.restarting < first.all

    @pytest.mark.slow
    @pytest.mark.parametrize("rate", RATES.values(), ids=RATES)
    def test_auto_loses_at_most_a_twentieth_more_than_the_best_fixed_interval(self, rate: float) -> None:
        _, best = search(CKPT, 1024, rate, 2, SHORTEST)
        auto = simulate(CKPT, 1024, rate, 2, auto_of(CKPT, 1024, rate))
        assert auto.by_saving < 1.05 * best.by_saving

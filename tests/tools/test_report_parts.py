"""What a report is made of, each piece with its cases: facts of saves, changes of modules, and the page."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.root.catalog import Summary
from ckpt.tools.diff import Squares
from ckpt.tools.report import changes as of_changes
from ckpt.tools.report.changes import (
    Cell,
    Changes,
    Shades,
    Step,
    _depth,
    _group,
    _natural,
    _spread,
    _without_peft,
    described,
    measure_changes,
    not_compared,
    percent,
)
from ckpt.tools.report.facts import (
    Best,
    Load,
    RunFacts,
    Save,
    Unread,
    _shared,
    attempts,
    best_of,
    gather,
    guessed_mode,
    memory_spent,
    restarts,
    waits,
    went_back,
)
from ckpt.tools.report.page import page, sparkline
from tests.cli.test_main import flip_a_bit


def save(number: int, **changes: Any) -> Save:
    """The save of a step, an hour after the one before."""
    of_summary = {
        "name": f"s{number}", "id": f"id{number}", "sequence": number, "created": f"2026-01-01T{number:02}:00:00+00:00",
        "run": "r", "parent": f"id{number - 1}" if number > 1 else None, "step": number, "size": 1_000_000 * number,
    }  # fmt: skip
    summary = Summary(
        **{key: changes.pop(key, value) for key, value in of_summary.items()}, metrics=changes.pop("metrics", {})
    )
    return Save(**{"summary": summary, "state": "complete", **changes})


def facts(*saves: Save, unread: tuple[Unread, ...] = (), forgotten: int = 0, **newest: Any) -> RunFacts:
    known = {
        "world_size": 1,
        "layout": "full",
        "hardware": "CPU",
        "origin": "",
        "versions": {"torch": "2", "ckpt": "1"},
    }
    manifest: Any = SimpleNamespace(**{**known, **newest})
    return RunFacts("runs/x", saves, unread, manifest, forgotten)


class TestFacts:
    def test_a_save_is_here_and_sound_by_its_state(self) -> None:
        states = {"complete": (True, True), "intact": (True, True), "damaged": (True, False), "removed": (False, False)}
        assert {state: (save(1, state=state).is_here, save(1, state=state).is_sound) for state in states} == states
        known = save(1, seconds={"blocked": 0.5, "total": 2.0})
        assert (known.waited, known.durable, save(1).waited, save(1).durable) == (0.5, 2.0, None, None)
        run = facts(save(1, state="removed"), save(2, state="damaged", problems=("a", "b")), save(3),
                    unread=(Unread("u", "uncommitted", "why"),))  # fmt: skip
        assert ([one.step for one in run.present], [one.step for one in run.removed]) == ([2, 3], [1])
        assert run.problems == [("s2", "damaged", "a; b"), ("u", "uncommitted", "why")]
        worse = run.with_damage({"s1": ["gone"], "s2": ["c"], "s3": ["d"]})
        assert worse.problems == [("s2", "damaged", "a; b; c"), ("s3", "damaged", "d"), ("u", "uncommitted", "why")]
        assert worse.saves[0].state == "removed"

    def test_the_best_is_the_first_with_the_best_value(self) -> None:
        points = [(1, 2.0), (2, 1.0), (3, 1.0), (4, math.nan), (5, math.inf)]
        assert best_of("loss", points, {}) == Best(2, 1.0, "lowest")
        assert best_of("loss", points, {"loss": "max"}) == Best(1, 2.0, "highest")
        assert best_of("x", points, {}) is None
        assert [guessed_mode(name) for name in ("nll_loss", "myloss", "topaccuracy", "eval/WER", "r2", "steps")] == [
            "min", "min", "max", "min", "max", None,
        ]  # fmt: skip

    def test_times_and_snapshots_are_summed_up_where_they_are_known(self) -> None:
        saves = [save(1, seconds={"blocked": 1.0}), save(2, seconds={"total": 3.0}), save(3)]
        assert waits(saves) == ([1.0], [3.0])
        spent = memory_spent(
            [save(1, memory={"snapshots": 2, "waited": 0.5}), save(2, memory={"left_out": 3}), save(3)]
        )
        assert (spent.taken, spent.skipped, spent.waited) == (2, 3, 0.5)

    def test_bytes_are_shared_with_the_checkpoint_before_where_that_is_there(self) -> None:
        def manifest(parent: str | None, *files: tuple[str, int, str]) -> Any:
            listed = [
                SimpleNamespace(name=name, size=size, block_size=9, blocks=(block,)) for name, size, block in files
            ]
            return SimpleNamespace(parent=parent, files=listed)

        first = manifest(None, ("a", 1, "x"), ("b", 2, "y"), ("c", 4, "z"))
        second = manifest("first", ("a", 1, "x"), ("b", 2, "other"), ("c", 8, "z"), ("d", 16, "x"))
        assert _shared(first, {}) == 0
        assert _shared(second, {}) is None
        assert _shared(second, {"first": first}) == 1
        assert _shared(manifest("first", ("c", 4, "z"), ("a", 1, "x")), {"first": first}) == 5

    def test_a_run_is_told_as_its_attempts(self) -> None:
        loaded = {
            "name": "s1",
            "id": "id1",
            "step": 1,
            "found_in": "mirror",
            "passed_over": {"s2": "s2 is bad", "x": "y"},
        }
        saves = [
            save(1), save(2), save(3, resumed={**loaded, "more": 2}), save(4, parent="id2"), save(5),
            save(6, run="other", parent=None), save(7, parent="unknown"), save(8, parent="id9"), save(9),
        ]  # fmt: skip
        found = attempts(saves)
        assert [[one.step for one in attempt.saves] for attempt in found] == [[1, 2], [3], [4, 5], [6], [7, 8, 9]]
        assert found[0].load is None
        assert found[1].load == Load("s1", 1, "mirror", loaded["passed_over"], 2, id="id1")  # type: ignore[arg-type]
        assert found[1].load.reasons == ["s2 is bad", "x: y"]
        assert found[2].load == Load("s2", 2, is_recorded=False, id="id2")
        assert [attempt.is_fallback for attempt in found] == [False, True, False, False, False]
        assert restarts(found) == found[1:3]
        assert attempts([]) == []

    def test_steps_that_were_trained_twice_are_seen_among_those_that_are_there(self) -> None:
        one, two, again = save(1, step=5), save(2, step=7), save(3, step=6)
        assert went_back([one, two, again]) == [(two, again)]
        assert went_back([one, save(2, step=7, state="removed"), again]) == []
        assert went_back([one, save(2, step=5)]) == []


def step(older: int = 1, newer: int = 2, **changes: Any) -> Step:
    return Step(save(older), save(newer), **changes)


class TestChanges:
    def test_a_change_is_relative_to_what_was_before(self) -> None:
        assert Cell(Squares(1.0, 100.0), 1, 1).relative == 0.1
        assert Cell(Squares(1.0, 100.0), 0, 1).relative is None
        assert Squares().relative == 0.0
        assert Squares(1.0, 0.0).relative == math.inf
        assert math.isnan(Squares(math.nan, 1.0).relative)
        assert Squares(1.0, 2.0) + Squares(3.0, 5.0) == Squares(4.0, 7.0)
        cells = {str(index): Cell(Squares(value, 1.0), 1) for index, value in enumerate((0.0, 4.0, math.nan, 0.25))}
        found = Changes([step(cells={**cells, "zero": Cell(Squares(1.0, 0.0), 1), "none": Cell()})], [])
        assert found.relatives == [2.0, 0.5]
        assert (found.left_out, found.hidden, found.damage) == (0, 0, {})

    def test_of_many_checkpoints_the_ends_and_some_between_are_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(of_changes, "MOST_CHECKPOINTS", 4)
        taken = {count: [one.step for one in _spread([*map(save, range(1, count + 1))])] for count in (1, 4, 5, 7, 23)}
        assert taken == {1: [1], 4: [1, 2, 3, 4], 5: [1, 2, 4, 5], 7: [1, 3, 5, 7], 23: [1, 8, 16, 23]}

    def test_tensors_are_summed_up_by_modules_in_the_order_of_numbers(self) -> None:
        tensors = {f"layers.{number}.{name}": Squares(1.0, 4.0) for number in (10, 2) for name in ("w", "b")}
        found = step(tensors={**tensors, "layers.2.new": None, "head": Squares(0.0, 1.0)})
        assert _group([found]) == ["head", "layers.2", "layers.10"]
        assert found.cells["layers.2"] == Cell(Squares(2.0, 8.0), 2, 3)
        assert found.cells["layers.10"] == Cell(Squares(2.0, 8.0), 2, 2)
        assert sorted(["a10b", "a2b", "a2", "a"], key=_natural) == ["a", "a2", "a2b", "a10b"]

    def test_modules_are_as_deep_as_one_sees_at_a_glance(self) -> None:
        few = [f"{a}.{b}.w" for a in range(3) for b in range(4)]
        assert _depth(few) == 8  # 12 rows
        assert _depth([f"{a}.{b}.w" for a in range(3) for b in range(16)]) == 8  # 48
        assert _depth([f"{a}.{b}.w" for a in range(3) for b in range(17)]) == 1  # 51
        assert _depth([f"m.{b}.w" for b in range(160)]) == 8  # one row would say nothing
        assert _depth([f"m.{b}.w" for b in range(161)]) == 1
        assert _depth([]) == 1
        assert _depth(["a.x.w", "b.y.w"]) == 8  # two rows are some

    def test_names_below_pefts_wrapper_are_those_of_the_model_unless_two_would_be_one(self) -> None:
        wrapped: Any = {"base_model.model.up.base_layer.weight": 1, "base_model.model.up.lora_A.weight": 2}
        plain: Any = {"up.weight": 1, "up.lora_A.weight": 2}
        assert _without_peft(wrapped) == plain
        both: Any = {"base_model.model.up": 1, "up": 2}
        assert _without_peft(both) == both

    def test_what_has_no_number_is_said_in_words(self) -> None:
        steps = [
            step(), step(2, 3, problem="broken", only_newer=2), step(3, 4, only_newer=1200, only_older=1, reshaped=2)
        ]  # fmt: skip
        assert [(one.newer.step, why) for one, why in not_compared(Changes(steps, []))] == [
            (3, "broken"),
            (4, "1,200 tensors only in the later, 1 tensors only in the earlier, 2 tensors with another shape"),
        ]

    def test_shades_are_even_steps_of_the_logarithm(self) -> None:
        def cell(relative: float) -> Cell:
            return Cell(Squares(relative**2, 1.0), 1, 1)

        shades = Shades(Changes([step(cells={"a": cell(1e-4), "b": cell(1.0)})], []))
        assert [shades.of(cell(10.0**-exponent)) for exponent in (4, 3.4, 2.1, 1.9, 0.1, 0)] == [
            "heat-0", "heat-1", "heat-3", "heat-4", "heat-7", "heat-7",
        ]  # fmt: skip
        assert shades.ends == pytest.approx((1e-4, 1.0))
        bad = Cell(Squares(math.nan, 1.0), 1, 1)
        assert [shades.of(one) for one in (None, Cell(), cell(0.0), bad)] == ["", "", "", "bad"]
        assert shades.of(cell(1e-9)) == "heat-0"
        alone = Shades(Changes([step(cells={"a": cell(0.5)})], []))
        assert alone.of(cell(0.5)) == "heat-7"
        assert Shades(Changes([], [])).ends == pytest.approx((0.01, 0.01))
        tiny = Shades(Changes([step(cells={"a": cell(1e-12), "b": cell(1.0)})], []))
        assert tiny.ends == pytest.approx((1e-8, 1.0))

    def test_a_cell_is_said_in_words(self) -> None:
        cells = [
            None, Cell(tensors=1), Cell(Squares(), 1, 1), Cell(Squares(1.0, 10000.0), 2, 3),
            Cell(Squares(1.0, 0.0), 1, 1), Cell(Squares(math.nan, 1.0), 1, 1),
        ]  # fmt: skip
        assert [described(one) for one in cells] == [
            "-", "-", "no change", "1 %, in 2 of 3 tensors: others are in one", "changed from zero", "not finite",
        ]  # fmt: skip
        assert percent(0.12345) == "12.3 %"

    def test_checkpoints_are_compared_each_with_the_one_before_and_every_file_once(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        models = {"a": nn.Linear(2, 2), "b": nn.Linear(1, 1)}
        with ckpt.StateManager(tmp_path, model=models) as manager:
            for number in range(4):
                manager.progress.step = number
                nn.init.constant_(models["a"].bias, float(2**number))
                manager.save_state(f"s{number}", wait=True)
        found = measure_changes(gather(tmp_path))
        assert [(one.older.name, one.newer.name) for one in found.steps] == [("s0", "s1"), ("s1", "s2"), ("s2", "s3")]
        assert found.modules == ["a", "b"]
        assert [one.cells["b"].relative for one in found.steps] == [0.0] * 3
        assert all((one.cells["a"].relative or 0) > 0 for one in found.steps)
        assert [one.tensors["a.bias"].relative for one in found.steps] == [1.0] * 3  # type: ignore[union-attr]
        assert (found.left_out, found.hidden) == (0, 0)
        flip_a_bit(tmp_path / "s2" / "model.a.safetensors")
        altered = measure_changes(gather(tmp_path))
        assert [bool(one.problem) for one in altered.steps] == [False, True, True]
        assert [one.cells for one in altered.steps[1:]] == [{}, {}]
        assert {name: len(why) for name, why in altered.damage.items()} == {"s2": 1}
        (tmp_path / "s2" / "model.a.safetensors").unlink()
        damaged = measure_changes(gather(tmp_path))
        assert [(one.older.name, one.newer.name, bool(one.problem)) for one in damaged.steps] == [
            ("s0", "s1", False), ("s1", "s3", False),
        ]  # fmt: skip


def test_tensors_that_one_has_alone_or_in_another_shape_are_counted(tmp_path: Path) -> None:
    models = [nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(1, 1)}), nn.ModuleDict({"a": nn.Linear(2, 3)})]
    for name, model in zip(("s0", "s1"), models, strict=True):
        with ckpt.StateManager(tmp_path, model=model) as manager:
            if name == "s1":
                manager.load_state(strict=False)  # nothing of it fits
            manager.progress.step = int(name[1])
            manager.save_state(name, wait=True)
    (found,) = measure_changes(gather(tmp_path)).steps
    assert (found.only_older, found.only_newer, found.reshaped) == (2, 0, 2)
    assert found.tensors == dict.fromkeys(("a.weight", "a.bias", "b.weight", "b.bias"))


@pytest.mark.parametrize("hidden", [0, 3])
def test_rows_that_do_not_fit_are_counted(hidden: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckpt.StateManager(tmp_path, model=nn.ModuleList(nn.Linear(1, 1) for _ in range(5))) as manager:
        for name in ("a", "b", "c"):
            manager.save_state(name, wait=True)
    monkeypatch.setattr(of_changes, "MOST_ROWS", 5 - hidden)
    monkeypatch.setattr(of_changes, "WISHED_ROWS", 5)
    monkeypatch.setattr(of_changes, "MOST_CHECKPOINTS", 2)
    found = measure_changes(gather(tmp_path))
    assert (len(found.modules), found.hidden, found.left_out) == (5 - hidden, hidden, 1)


PAGE = """\
# runs/x

|  |  |
|---|---|
| runs | r |
| checkpoints | 2, 5.0 MB, 4.0 MB without what is shared; 1 more were removed |
| from | step 1, 2026-01-01T01:00:00+00:00 |
| to | step 3, 2026-01-01T03:00:00+00:00, 2 h later |
| training waited | 3.00 s for these, at most 2.00 s for one |
| durable after | 6.00 s on average, at most 8.00 s |
| memory | 5 snapshots, training waited 0.25 s in all |
| restarts | 1, 1 passed over a checkpoint |
| health | 2 with problems, by the sizes of files |
| saved by | 4 ranks, sharded layout, GPU |
| converted from | dcp |
| versions | torch 2, ckpt 1 |

## Metrics

| metric | by step | first | last | lowest | highest | best |
|---|---|---|---|---|---|---|
| loss | █ ▁ | 4 | 1 | 1 | 4 | 1 at step 3 |

## Restarts

- began: saved s1
- restart 1: from s1 (step 1, found in the mirror), saved s2 to s3
  - passed over: s0 is bad
  - and 2 more

## Health

| checkpoint | state | problem |
|---|---|---|
| s2 | damaged | cut |
| u | uncommitted | why |

- s3: a crash at step 9 cost 1 step instead of 9, thanks to snapshots in memory
- loss is not finite at step 2
- 7 older saves are not known any more

## Checkpoints

| name | state | step | saved (UTC) | size | shared | training waited | durable after | ranks | loss |
|---|---|---|---|---|---|---|---|---|---|
| s3 | complete | 3 | 2026-01-01 03:00 | 3.0 MB | 1.0 MB | 2.00 s | 8.00 s | 1 | 1 |
| s2 | damaged | 2 | 2026-01-01 02:00 | 2.0 MB | - | - | - | 1 | nan |
| s1 | removed | 1 | 2026-01-01 01:00 | 1.0 MB | - | 1.00 s | 4.00 s | 1 | 4 |
| u | uncommitted | - | - | - | - | - | - | - | - |
"""


class TestPage:
    def run(self) -> RunFacts:
        loaded = {
            "name": "s1",
            "id": "id1",
            "step": 1,
            "found_in": "mirror",
            "passed_over": {"s0": "s0 is bad"},
            "more": 2,
        }
        memory = {"snapshots": 5, "waited": 0.25, "crashed_at": 9, "resumed_at": 8, "root_step": 0}
        return facts(
            save(1, state="removed", metrics={"loss": 4.0}, seconds={"blocked": 1.0, "total": 4.0}),
            save(2, state="damaged", problems=("cut",), metrics={"loss": math.nan}, resumed=loaded),
            save(3, metrics={"loss": 1.0}, seconds={"blocked": 2.0, "total": 8.0}, shared=1_000_000, memory=memory),
            unread=(Unread("u", "uncommitted", "why"),), forgotten=7,
            world_size=4, layout="sharded", hardware="GPU", origin="dcp",
        )  # fmt: skip

    def test_it_tells_everything_that_is_known(self) -> None:
        assert page(self.run(), None, {}, as_html=False) == PAGE

    def test_of_a_run_without_events_it_tells_little(self) -> None:
        told = page(facts(save(1)), None, {}, as_html=False)
        for line in (
            "| checkpoints | 1, 1.0 MB |", "| training waited | 0.00 s for these, at most 0.00 s for one |",
            "| restarts | 0 |", "| health | complete, by the sizes of files |", "- began: saved s1",
            "| saved by | one process, full layout, CPU |",
        ):  # fmt: skip
            assert line in told
        for absent in ("## Metrics", "## Health", "memory", "converted from", "removed", "## Change", "metrics"):
            assert absent not in told

    def test_many_metrics_share_a_column_and_much_that_is_not_finite_is_counted(self) -> None:
        many = {f"m{number}": float(number) for number in range(7)}
        told = page(facts(save(1, metrics=many)), None, {}, as_html=False)
        assert "| ranks | metrics |" in told
        assert "| m0 0, m1 1, m2 2, m3 3, m4 4, m5 5, m6 6 |" in told
        few = page(facts(save(1, metrics=dict(list(many.items())[:6]))), None, {}, as_html=False)
        assert "| ranks | m0 | m1 | m2 | m3 | m4 | m5 |" in few
        for count, said in ((8, "1, 2, 3, 4, 5, 6, 7, 8"), (10, "1, 2, 3, 4, 5, 6, 7, 8 and 2 more")):
            run = facts(*(save(number, metrics={"loss": math.nan}) for number in range(1, count + 1)))
            assert f"- loss is not finite at step {said}\n" in page(run, None, {}, as_html=False)

    def test_attempts_are_numbered_and_say_how_they_began(self) -> None:
        loaded = {"name": "s0", "id": "x", "step": 0, "found_in": "root", "passed_over": {}}
        told = page(
            facts(save(1, resumed=loaded), save(2, run="other", parent=None), save(3, parent="id1")),
            None,
            {},
            as_html=False,
        )
        assert "- continued: from s0 (step 0), saved s1\n" in told
        assert "- began anew: saved s2\n" in told
        assert "- restart 2: from s1 (step 1) (as its parent says), saved s3\n" in told
        assert "| runs | r, other |" in told
        assert "| restarts | 2 |" in told

    def test_changes_are_a_table_with_its_notes(self) -> None:
        cells = {"up": Cell(Squares(1.0, 10000.0), 1, 1), "down": Cell(Squares(1.0, 100.0), 1, 1)}
        steps = [step(1, 2, cells=cells), step(2, 3, problem="broken")]
        run = facts(save(1), save(2), save(3))
        found = Changes(steps, ["up", "down"], 4, 5, {"s2": ["altered"]})
        told = page(run, found, {}, as_html=False)
        for line in (
            "| module | to step 2 | to step 3 |", "| up | 1 % | - |", "| down | 10 % | - |",
            "- RMS of the difference over RMS of what was before, on one logarithmic scale from 1 % to 10 %",
            "- s2 to s3: broken", "- 4 checkpoints between these were left out", "- 5 more modules have no row",
            "| health | 1 with problems, by the sizes of files, and by the models that were read |",
            "| s2 | damaged | altered |",
        ):  # fmt: skip
            assert line in told
        html = page(run, found, {}, as_html=True)
        assert '<td class="heat-0">1 %</td>' in html
        assert '<td class="heat-7">10 %</td>' in html
        plain = page(run, Changes(steps, ["up"]), {}, as_html=False)
        assert "left out" not in plain
        assert "have no row" not in plain
        none = page(run, Changes([], []), {}, as_html=False)
        assert "- there are no two checkpoints with a model that could be compared" in none

    def test_in_html_cells_have_their_kinds_and_values_and_curves_their_best(self) -> None:
        html = page(self.run(), None, {"loss": "min"}, as_html=True)
        for said in (
            '<td class="gone">removed</td>', '<td class="bad">damaged</td>', "<td>complete</td>",
            '<td class="bad">uncommitted</td>', '<td class="best"><data value="1.0">1</data></td>',
            '<td class="bad"><data value="nan">nan</data></td>', '<td><data value="4.0">4</data></td>',
            '<td><data value="3000000">3.0 MB</data></td>', "<td>-</td>", '<td class="best">1 at step 3</td>',
            "best (the lowest): 1", 'aria-label="loss by step"', 'aria-label="training waited, in s by step"',
            'aria-label="size, in MB by step"', "<title>x: report of a run</title>", "<h1>x</h1>",
            '<p class="gone">runs/x</p>', "<h2>Metrics</h2>", "<li>began: saved s1</li>",
            "saved s2 to s3<br>passed over: s0 is bad<br>and 2 more</li>", '<th scope="col">metric</th>',
            '<td class="bad">2 with problems, by the sizes of files</td>',
        ):  # fmt: skip
            assert said in html, said
        assert html.count("<svg") == 3
        other = page(self.run(), None, {"loss": "max"}, as_html=True)
        assert "best (the highest): 4" in other
        assert '<td class="best"><data value="4.0">4</data></td>' in other

    def test_a_year_that_no_other_zone_can_express_is_shown_as_it_is(self) -> None:
        odd = "9999-12-31T23:59:59-10:00"
        told = page(facts(save(1, created=odd)), None, {}, as_html=False)
        assert f"| {odd} |" in told


@pytest.mark.parametrize(
    ("count", "length"), [(59, 59), (60, 60), (61, 31), (62, 32), (120, 61), (121, 41), (1000, 60)]
)
def test_a_curve_of_characters_has_about_sixty_and_its_last_value(count: int, length: int) -> None:
    drawn = sparkline([0.0] * (count - 1) + [1.0])
    assert (len(drawn), drawn[-1]) == (length, "█")

"""What a report is made of, each piece with its cases: facts of saves, and the page."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.root.catalog import Summary
from ckpt.tools.report.facts import (
    Best,
    Load,
    RunFacts,
    Save,
    Unread,
    _shared,
    attempts,
    best_of,
    guessed_mode,
    memory_spent,
    restarts,
    waits,
    went_back,
)
from ckpt.tools.report.page import page, sparkline


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
- 7 older saves are no longer known

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
        assert page(self.run(), {}, as_html=False) == PAGE

    def test_of_a_run_without_events_it_tells_little(self) -> None:
        told = page(facts(save(1)), {}, as_html=False)
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
        told = page(facts(save(1, metrics=many)), {}, as_html=False)
        assert "| ranks | metrics |" in told
        assert "| m0 0, m1 1, m2 2, m3 3, m4 4, m5 5, m6 6 |" in told
        few = page(facts(save(1, metrics=dict(list(many.items())[:6]))), {}, as_html=False)
        assert "| ranks | m0 | m1 | m2 | m3 | m4 | m5 |" in few
        for count, said in ((8, "1, 2, 3, 4, 5, 6, 7, 8"), (10, "1, 2, 3, 4, 5, 6, 7, 8 and 2 more")):
            run = facts(*(save(number, metrics={"loss": math.nan}) for number in range(1, count + 1)))
            assert f"- loss is not finite at step {said}\n" in page(run, {}, as_html=False)

    def test_attempts_are_numbered_and_say_how_they_began(self) -> None:
        loaded = {"name": "s0", "id": "x", "step": 0, "found_in": "root", "passed_over": {}}
        told = page(
            facts(save(1, resumed=loaded), save(2, run="other", parent=None), save(3, parent="id1")),
            {},
            as_html=False,
        )
        assert "- continued: from s0 (step 0), saved s1\n" in told
        assert "- began again: saved s2\n" in told
        assert "- restart 2: from s1 (step 1) (as its parent says), saved s3\n" in told
        assert "| runs | r, other |" in told
        assert "| restarts | 2 |" in told

    def test_in_html_cells_have_their_kinds_and_values_and_curves_their_best(self) -> None:
        html = page(self.run(), {"loss": "min"}, as_html=True)
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
        other = page(self.run(), {"loss": "max"}, as_html=True)
        assert "best (the highest): 4" in other
        assert '<td class="best"><data value="4.0">4</data></td>' in other

    def test_a_year_that_no_other_zone_can_express_is_shown_as_it_is(self) -> None:
        odd = "9999-12-31T23:59:59-10:00"
        told = page(facts(save(1, created=odd)), {}, as_html=False)
        assert f"| {odd} |" in told


@pytest.mark.parametrize(
    ("count", "length"), [(59, 59), (60, 60), (61, 31), (62, 32), (120, 61), (121, 41), (1000, 60)]
)
def test_a_curve_of_characters_has_about_sixty_and_its_last_value(count: int, length: int) -> None:
    drawn = sparkline([0.0] * (count - 1) + [1.0])
    assert (len(drawn), drawn[-1]) == (length, "█")

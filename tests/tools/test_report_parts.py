"""What a report is made of, each piece with its cases: facts of saves, and the page."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.root.catalog import Goodput, PastAttempt, Summary, lost_steps
from ckpt.tools.report.facts import (
    Best,
    RunFacts,
    Save,
    Unread,
    _shared,
    best_of,
    by_saves,
    guessed_mode,
    memory_spent,
    to_json,
    verdict,
    waits,
)
from ckpt.tools.report.page import HTML, MARKDOWN, TEXT, page, sparkline


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


def attempt(number: int, first: int, last: int, **changes: Any) -> PastAttempt:
    """A minute after the one before, of half a minute; it tells no end and can't be asked for."""
    known = {"run": "r", "began": f"2026-01-01T01:{number:02}:00+00:00", "seconds": {"total": 30.0}, "writer": ()}
    return PastAttempt(f"a{number}", first=first, last=last, **{**known, **changes})


def facts(
    *saves: Save, unread: tuple[Unread, ...] = (), forgotten: int = 0, past: list[PastAttempt] | None = None,
    **newest: Any,
) -> RunFacts:  # fmt: skip
    known = {
        "world_size": 1,
        "layout": "full",
        "hardware": "CPU",
        "origin": "",
        "versions": {"torch": "2", "ckpt": "1"},
    }
    manifest: Any = SimpleNamespace(**{**known, **newest})
    return RunFacts("runs/x", saves, unread, manifest, forgotten, by_saves(saves) if past is None else past)


COMPLETE = "all 2 checkpoints are complete, by the sizes of files."


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

    def test_without_a_history_the_saves_from_one_load_to_the_next_are_an_attempt(self) -> None:
        skipped = {"s2": "s2 is bad", "x": "y"}
        loaded = {"name": "s1", "id": "id1", "step": 1, "found_in": "mirror", "passed_over": skipped, "more": 2}
        run = facts(save(1), save(2), save(3, resumed=loaded), save(4), save(5, run="other", parent=None))
        assert [(one.past.first, one.past.last, one.began_from, one.end, one.cost) for one in run.told] == [
            (0, 2, "scratch", "not known", "2 steps or more"),
            (1, 4, "s1, found in the mirror", "not known", "3 steps or more"),
            (0, 5, "scratch", "not known", "not known"),
        ]
        assert run.told[1].passed_over == ["s2 is bad", "x: y", "and 2 more"]
        assert run.goodput is None

    def test_an_attempt_says_how_it_ended_and_what_it_cost(self) -> None:
        ends = [
            ("finished", ""),
            ("exited", ""),
            ("stopped", "SIGTERM"),
            ("failed", "ValueError: no."),
            ("", ""),
            ("", ""),
        ]
        past = [attempt(n, 10 * n, 10 * n + 12, ended=ended, reason=why) for n, (ended, why) in enumerate(ends)]
        told = facts(save(1), past=past).told
        assert [(one.end, one.cost) for one in told] == [
            ("finished", "2 steps"), ("exited", "2 steps"), ("stopped by SIGTERM", "2 steps"),
            ("failed: ValueError: no.", "2 steps"), ("killed", "2 steps or more"),
            ("running elsewhere, or killed", "none"),
        ]  # fmt: skip
        here = PastAttempt("me", "r", "2026-01-01T01:00:00+00:00", seconds={"total": 1.0})
        assert facts(save(1), past=[here]).told[0].end == "running"
        gone = replace(here, writer=[*here.writer[:2], 2**22 + 1, "0"])
        assert [(one.end, one.cost) for one in facts(save(1), past=[gone]).told] == [("killed", "not known")]

    def test_metrics_are_those_of_all_steps_and_the_last_attempt_at_a_step_counts(self) -> None:
        past = [
            attempt(0, 0, 4, metrics={"loss": [(step, 1.0) for step in range(1, 5)]}),
            attempt(1, 2, 3, metrics={"loss": [(3, 0.5)]}),
        ]
        run = facts(save(1, metrics={"loss": 9.0, "eval": 7.0}), save(3, metrics={"eval": 6.0}), past=past)
        assert run.curves == {"loss": [(1, 1.0), (2, 1.0), (3, 0.5)], "eval": [(1, 7.0), (3, 6.0)]}

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"ended": "finished"}, f"Healthy: finished, at step 5; {COMPLETE}"),
            ({}, f"Healthy as far as is known: running elsewhere, or killed, at step 5; {COMPLETE}"),
            ({"ended": "failed", "reason": "ValueError: no."},
             "Failed after step 5: ValueError: no; a restart begins at s2, 3 steps earlier."),
            ({"metrics": {"loss": [(2, math.nan), (3, 2.0), (4, math.inf), (5, math.nan)]}, "ended": "finished"},
             "Diverged: loss has been inf since step 4; a restart begins at s2, 3 steps earlier."),
            ({"broken": ("cut.",), "ended": "finished"},
             "Damaged: s2 can't be used (cut); a restart begins at s1, 4 steps earlier."),
        ],
    )  # fmt: skip
    def test_one_sentence_says_whether_the_run_is_healthy_and_why(self, changes: dict[str, Any], said: str) -> None:
        broken = changes.pop("broken", ())
        newest = save(2, state="damaged" if broken else "complete", problems=broken)
        left = Unread("u", "uncommitted", "cut off")  # as every kill in a save leaves one
        run = facts(save(1), newest, unread=(left,), past=[attempt(0, 0, 5, **changes)])
        assert verdict(run) == (said.startswith("Healthy"), said)

    def test_a_run_that_was_killed_or_has_nothing_left_is_not_healthy(self) -> None:
        gone = PastAttempt("a", "r", "2026-01-01T01:00:00+00:00", last=3, seconds={"total": 1.0})
        gone = replace(gone, writer=[*gone.writer[:2], 2**22 + 1, "0"])
        assert verdict(facts(save(3), past=[gone])) == (
            False, "Killed after step 3 or later, without a word; a restart begins at s3.",
        )  # fmt: skip
        lost = [save(number, state="damaged", problems=("cut",)) for number in (1, 2)]
        assert verdict(facts(*lost)) == (
            False, "Damaged: s1 can't be used (cut), and 1 more can't either; no checkpoint is left to restart from.",
        )  # fmt: skip


class TestGoodput:
    def test_time_is_split_into_what_counts_and_what_does_not(self) -> None:
        first = attempt(0, 0, 10, seconds={"total": 40.0, "ready": 10.0, "waited": 5.0})
        killed = attempt(1, 8, 10, seconds={"total": 10.0, "ready": 4.0, "waited": 2.0})
        nothing = attempt(2, 8, 8, ended="failed", seconds={"total": 6.0, "ready": 5.0, "waited": 1.0})
        last = attempt(3, 8, 11, redone=2, seconds={"total": 12.0, "ready": 1.0, "waited": 1.0})
        past = [first, killed, nothing, last]
        assert lost_steps(past) == [2, 2, 0, 2]
        spent = Goodput.of(past)
        assert spent == Goodput(
            training=20.0 + 0 + 6.0, repeated=5.0 + 4.0 + 4.0, saving=9.0, starting=10.0 + 4.0 + 5.0 + 1.0,
            down=20.0 + 50.0 + 54.0, lost_steps=6, attempts=4,
        )  # fmt: skip
        assert spent.seconds == 192.0  # from the first to the last moment
        assert str(spent) == (
            "goodput 13.5% of 3 min: 6.8% steps made again, 4.7% waiting for saves, 10.4% starting and loading, "
            "64.6% down between attempts"
        )

    def test_of_a_run_without_faults_little_is_said(self) -> None:
        assert str(Goodput.of([attempt(0, 0, 9)])) == "goodput 100.0% of 30 s"
        assert Goodput.of([]) is None
        nothing = Goodput.of([attempt(0, 0, 0, seconds={})])
        assert (nothing, str(nothing)) == (Goodput(attempts=1), "goodput 0.0% of 0 s")

    def test_attempts_that_overlap_or_claim_odd_times_take_nothing_away(self) -> None:
        late = [attempt(2, 0, 4, seconds={"total": 9.0, "ready": 20.0}), attempt(1, 0, 2), attempt(3, 4, 2)]
        spent = Goodput.of(late)
        assert spent is not None
        assert min(seconds for _, seconds in spent.parts) >= 0
        assert 0 <= spent.share <= 1

    def test_a_load_that_went_past_a_restart_costs_each_attempt_its_own_steps(self) -> None:
        past = [attempt(0, 0, 10), attempt(1, 8, 14), attempt(2, 12, 13), attempt(3, 5, 6)]
        assert lost_steps(past) == [5, 6, 1, 0]


PAGE = """\
# runs/x

Damaged: s2 can't be used (cut), and 1 more can't either; a restart begins at s3, 1 step earlier.

|  |  |
|---|---|
| runs | r |
| checkpoints | 2, 5.0 MB, 4.0 MB without what is shared; 1 more were removed |
| from | step 1, 2026-01-01T01:00:00+00:00 |
| to | step 3, 2026-01-01T03:00:00+00:00, 2 h later |
| training waited | 3.00 s for these, at most 2.00 s for one |
| durable after | 6.00 s on average, at most 8.00 s |
| memory | 5 snapshots, training waited 0.25 s in all |
| saved by | 4 ranks, sharded layout, GPU |
| converted from | dcp |
| versions | torch 2, ckpt 1 |

## Goodput

At least 66.7% of 1 min went to steps that count.

| time went to | share | time |
|---|---|---|
| training that counts | 66.7% | 1 min |
| steps made again | 0.0% | 0 s |
| waiting for saves | 0.0% | 0 s |
| starting and loading | 0.0% | 0 s |
| down between attempts | 33.3% | 30 s |

## Attempts

| attempt | began (UTC) | from | steps | lasted | ended | cost |
|---|---|---|---|---|---|---|
| 1 | 2026-01-01 01:00 | scratch | 0 to 1 | 30 s or more | killed | not known |
| 2 | 2026-01-01 01:01 | s1, found in the mirror | 1 to 4 | 30 s | finished | none |

- attempt 2 passed over:
  - s0 is bad
  - and 2 more

## Metrics

| metric | by step | first | last | lowest | highest | best |
|---|---|---|---|---|---|---|
| loss | █ ▁ | 4 | 1 | 1 | 4 | 1 at step 3 |

## Health

| checkpoint | state | problem |
|---|---|---|
| s2 | damaged | cut |
| u | damaged | why |

- s3: a crash at step 9 cost 1 step instead of 9, thanks to snapshots in memory
- loss is not finite at step 2
- 7 older saves are no longer known

## Checkpoints

| name | state | step | saved (UTC) | size | shared | training waited | durable after | ranks | loss |
|---|---|---|---|---|---|---|---|---|---|
| s3 | complete | 3 | 2026-01-01 03:00 | 3.0 MB | 1.0 MB | 2.00 s | 8.00 s | 1 | 1 |
| s2 | damaged | 2 | 2026-01-01 02:00 | 2.0 MB | - | - | - | 1 | nan |
| s1 | removed | 1 | 2026-01-01 01:00 | 1.0 MB | - | 1.00 s | 4.00 s | 1 | 4 |
| u | damaged | - | - | - | - | - | - | - | - |
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
            unread=(Unread("u", "damaged", "why"),), forgotten=7,
            past=[attempt(0, 0, 1), attempt(1, 1, 4, resumed=loaded, ended="finished")],
            world_size=4, layout="sharded", hardware="GPU", origin="dcp",
        )  # fmt: skip

    def test_it_tells_everything_that_is_known(self) -> None:
        assert page([self.run()], {}, MARKDOWN) == PAGE

    def test_of_a_run_without_events_it_tells_little(self) -> None:
        told = page([facts(save(1))], {}, MARKDOWN)
        for line in (
            "| checkpoints | 1, 1.0 MB |", "| training waited | 0.00 s for these, at most 0.00 s for one |",
            "| 1 | 2026-01-01 01:00 | scratch | 0 to 1 | - | not known | not known |",
            "Healthy as far as is known: not known, at step 1; its checkpoint is complete, by the sizes of files.",
            "| saved by | one process, full layout, CPU |",
        ):  # fmt: skip
            assert line in told
        for absent in ("## Metrics", "## Health", "memory", "converted from", "removed", "## Change", "metrics"):
            assert absent not in told

    def test_many_metrics_share_a_column_and_much_that_is_not_finite_is_counted(self) -> None:
        many = {f"m{number}": float(number) for number in range(7)}
        told = page([facts(save(1, metrics=many))], {}, MARKDOWN)
        assert "| ranks | metrics |" in told
        assert "| m0 0, m1 1, m2 2, m3 3, m4 4, m5 5, m6 6 |" in told
        few = page([facts(save(1, metrics=dict(list(many.items())[:6])))], {}, MARKDOWN)
        assert "| ranks | m0 | m1 | m2 | m3 | m4 | m5 |" in few
        for count, said in ((8, "1, 2, 3, 4, 5, 6, 7, 8"), (10, "1, 2, 3, 4, 5, 6, 7, 8 and 2 more")):
            run = facts(*(save(number, metrics={"loss": math.nan}) for number in range(1, count + 1)))
            assert f"- loss is not finite at step {said}\n" in page([run], {}, MARKDOWN)

    def test_on_a_terminal_it_is_short_and_for_programs_json(self) -> None:
        assert page([self.run()], {}, TEXT).splitlines() == [
            "Damaged: s2 can't be used (cut), and 1 more can't either; a restart begins at s3, 1 step earlier.",
            "goodput 66.7% of 1 min: 33.3% down between attempts",
            "",
            "attempt  began (UTC)       from                     steps   lasted        ended     cost",
            "1        2026-01-01 01:00  scratch                  0 to 1  30 s or more  killed    not known",
            "2        2026-01-01 01:01  s1, found in the mirror  1 to 4  30 s          finished  none",
            "attempt 2 passed over: s0 is bad; and 2 more",
            "",
            "metric  by step  first  last  lowest  highest  best",
            "loss    █ ▁      4      1     1       4        1 at step 3",
        ]
        told = to_json(self.run(), {})
        json.dumps(told, allow_nan=False)
        assert (told["root"], told["healthy"], told["goodput"]["share"]) == ("runs/x", False, pytest.approx(2 / 3))
        assert [(one["from"], one["ended"], one["lost_steps"]) for one in told["attempts"]] == [
            (None, "killed", 0), ("s1", "finished", 0),
        ]  # fmt: skip
        assert told["metrics"] == {"loss": {"step": 3, "last": 1.0, "best": 1.0, "best_step": 3}}
        endless = facts(save(1, metrics={"loss": math.inf}))
        assert to_json(endless, {})["metrics"] == {"loss": {"step": 1, "last": "inf"}}

    def test_runs_stand_side_by_side_in_one_plot_for_each_metric(self) -> None:
        other = replace(
            facts(save(2, metrics={"loss": 2.0, "lr": 0.1}), past=[attempt(0, 0, 2, ended="finished")]), url="<b>"
        )
        html = page([self.run(), other], {}, HTML)
        assert html.count("<svg") == 2
        for said in (
            '<td class="part0 name">runs/x</td>', '<td class="part1 name">&lt;b&gt;</td>', "<title>&lt;b&gt;</title>",
            "<td>1; best 1 at step 3</td>", "<td>2; best 2 at step 2</td>", "<td>0.1</td>", "<td>100.0%</td>",
            '<td class="bad wide">Damaged: ', '<td class="good wide">Healthy: finished', "<h1>x and &lt;b&gt;</h1>",
        ):  # fmt: skip
            assert said in html, said
        for kind in (MARKDOWN, TEXT):
            assert "2; best 2 at step 2" in page([self.run(), other], {}, kind)

    def test_in_html_cells_have_their_kinds_and_values_and_curves_their_best(self) -> None:
        html = page([self.run()], {"loss": "min"}, HTML)
        for said in (
            '<td class="gone">removed</td>', '<td class="bad">damaged</td>', "<td>complete</td>",
            '<td class="best"><data value="1.0">1</data></td>',
            '<td class="bad"><data value="nan">nan</data></td>', '<td><data value="4.0">4</data></td>',
            '<td><data value="3000000">3.0 MB</data></td>', "<td>-</td>", '<td class="best">1 at step 3</td>',
            "lowest 1", 'aria-label="loss by step"', 'aria-label="training waited, in s by step"',
            'aria-label="size, in MB by step"', "<title>x: report of a run</title>", "<h1>x</h1>",
            '<p class="gone">runs/x</p>', "<h2>Metrics</h2>",
            "<li>attempt 2 passed over:<br>s0 is bad<br>and 2 more</li>", '<td class="bad wide">killed</td>',
            '<td class="part4">down between attempts</td>', '<th scope="col">metric</th>',
            '<p class="bad wide">Damaged: s2 can&#x27;t be used',
        ):  # fmt: skip
            assert said in html, said
        assert html.count("<svg") == 4
        other = page([self.run()], {"loss": "max"}, HTML)
        assert "highest 4" in other
        assert '<td class="best"><data value="4.0">4</data></td>' in other

    def test_a_year_that_no_other_zone_can_express_is_shown_as_it_is(self) -> None:
        odd = "9999-12-31T23:59:59-10:00"
        told = page([facts(save(1, created=odd))], {}, MARKDOWN)
        assert f"| {odd} |" in told


@pytest.mark.parametrize(
    ("count", "length"), [(59, 59), (60, 60), (61, 31), (62, 32), (120, 61), (121, 41), (1000, 60)]
)
def test_a_curve_of_characters_has_about_sixty_and_its_last_value(count: int, length: int) -> None:
    drawn = sparkline([0.0] * (count - 1) + [1.0])
    assert (len(drawn), drawn[-1]) == (length, "█")

"""What differs first between two runs, and its likely cause: from traces that are written down here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.errors import ConfigError
from ckpt.selftest import compare
from ckpt.selftest.check import Program, ProgramError, Run, kill_steps, last_lines
from ckpt.selftest.compare import Difference, Rank, cause, first_difference
from ckpt.selftest.recorder import _digest
from ckpt.selftest.trace import (
    End,
    Plan,
    Record,
    Resumed,
    Saved,
    Step,
    Trace,
    TraceWriter,
    in_order,
    read_trace,
    trace_file,
)

START = {"random numbers": "r", "models": "m", "learning rates": "l"}


def step(number: int, **changes: Any) -> Step:
    """A step that takes the batch of its number."""
    made = Step(
        number, "optimizer", True, [f"b{number}"], [f"i{number}"], [f"{number}.0"], {"w": f"g{number}"}, [0.1],
        {"w": f"p{number}"}, {"n": f"n{number}"},
    )  # fmt: skip
    return replace(made, **changes)


def saved(number: int, **changes: Any) -> Saved:
    made = Saved(number, f"step-{number}", {"step": number}, [], [], [], {"w": f"p{number}"}, START)
    return replace(made, **changes)


def straight(*, last: int = 8, end: End | None = None, **changes: Any) -> Trace:
    """A run with a save at every second step."""
    records: list[Record] = []
    for number in range(1, last + 1):
        records.append(step(number, **changes))
        if number % 2 == 0:
            records.append(saved(number))
    return Trace([*records, end or End(last, {"w": f"p{last}"})])


def resumed_at(number: int, *records: Record, **changes: Any) -> Trace:
    return Trace([replace(Resumed(number, f"step-{number}", {"w": f"p{number}"}), **changes), *records])


def rank(first: Trace | None = None, *later: Trace, of: int = 0, reference: Trace | None = None) -> Rank:
    """The straight run, and one that was killed after step 5 and resumed as given."""
    reference = reference or straight()
    killed = first or Trace(reference.records[:7])
    return Rank.of(of, reference, [killed, *later])


END = End(8, {"w": "p8"})


def test_a_run_that_was_resumed_and_is_the_same_differs_in_nothing() -> None:
    same = rank(None, resumed_at(4, *map(step, (5, 6, 7, 8)), END))
    assert list(same.differences()) == []
    assert first_difference([same, same]) is None
    assert same.saved(0) is None
    assert same.saved(1) == saved(4)


DIFFERENT: dict[str, tuple[list[Record], str, int, str]] = {
    "order": ([step(5, optimizer="other", inputs=["x"])], "order", 5, "other was stepped where the straight run steps"),
    "inputs": ([step(5, inputs=["x", "y"], losses=["9"])], "inputs", 5, "the model was given other inputs (2, 1 str"),
    "losses": ([step(5, losses=["9", "8", "7", "6"], gradients={})], "losses", 5, "loss 9, 8, 7, 5.0 straight"),
    "no losses": ([step(5, losses=[])], "losses", 5, "loss none, 5.0 straight"),
    "gradients": ([step(5, gradients={"v": "g5"}, rates=[1.0])], "gradients", 5, "gradients of w, v"),
    "rates": ([step(5, rates=[0.2], parameters={})], "rates", 5, "learning rates [0.2], [0.1] straight"),
    "parameters": ([step(5, parameters={"w": "x"}, buffers={})], "parameters", 5, "w"),
    "buffers": ([step(5), step(6, buffers={})], "buffers", 6, "n"),
    "extra steps": ([*map(step, range(5, 10))], "extra steps", 9, "the straight run has no such step"),
    "missing steps": ([step(5), End(5, {})], "missing steps", 6, "it ended after step 5; the straight run made 8"),
    "end": ([*map(step, (5, 6, 7, 8)), End(8, {"w": "x"})], "end", 8, "w differ at the end"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_first_difference_is_found_in_the_order_in_which_a_step_computes(name: str) -> None:
    records, what, number, detail = DIFFERENT[name]
    found = first_difference([rank(None, resumed_at(4, *records))])
    assert found is not None
    assert (found.what, found.process, found.step, found.rank) == (what, 1, number, 0)
    assert found.detail.startswith(detail)
    assert found.resumed == Resumed(4, "step-4", {"w": "p4"})


def test_a_model_that_no_manager_has_is_compared_at_the_end_if_it_changed() -> None:
    end = End(8, {"w": "p8"}, {"Average": "a", "Frozen": "f"}, ["Average"])
    reference = straight(end=end)
    for others, what in (
        ({"Average": "a"}, None), ({"Average": "b", "Frozen": "f"}, "forgotten"), ({"Frozen": "f"}, "forgotten"),
    ):  # fmt: skip
        killed = rank(None, resumed_at(4, *map(step, (5, 6, 7, 8)), replace(end, others=others)), reference=reference)
        found = first_difference([killed])
        assert (found and found.what) == what
        if found is not None:
            assert found.names == ("Average",)
            assert cause(found, killed).startswith("Average is not managed")


def test_a_process_that_loads_nothing_or_another_state_is_named_before_its_steps() -> None:
    fresh = first_difference([rank(None, Trace([step(1), END]))])
    assert fresh is not None
    assert (fresh.what, fresh.process, fresh.step, fresh.resumed) == ("fresh start", 1, 0, None)
    altered = first_difference([rank(None, resumed_at(4, step(5, losses=[]), tensors={"w": "x", "v": "y"}))])
    assert altered is not None
    assert (altered.what, altered.step, altered.names) == ("state", 4, ("w", "v"))
    assert altered.detail == "w, v: not as they were when step-4 was saved"
    unknown = first_difference([rank(None, resumed_at(3, step(5), tensors={"w": "x"}))])
    assert unknown is None  # of a save that the traces have not


def test_a_difference_before_any_kill_is_no_matter_of_resuming() -> None:
    found = first_difference([rank(Trace([step(1), step(2, losses=[])]), resumed_at(4, step(5, losses=[])))])
    assert found is not None
    assert (found.what, found.process, found.step) == ("nondeterministic", 0, 2)


def test_of_several_ranks_the_earliest_counts_and_then_the_lowest() -> None:
    late, early = (rank(None, resumed_at(4, *map(step, range(5, n)), step(n, losses=[])), of=n) for n in (7, 6))
    first = rank(Trace([step(8, losses=[])]), resumed_at(4), of=3)
    assert [first_difference(ranks).rank for ranks in ([late, early], [early, late], [late, early, first])] == [6, 6, 3]  # type: ignore[union-attr]
    same = [replace(early, rank=2), replace(early, rank=1)]
    assert first_difference(same).rank == 1  # type: ignore[union-attr]


def test_what_ckpt_has_said_by_then_comes_with_the_difference() -> None:
    warned = rank(None, resumed_at(4, step(5, named=["a"]), step(6, losses=[], named=["a", "b", "a"])))
    assert first_difference([warned]).named == ("a", "b")  # type: ignore[union-attr]
    at_once = rank(None, resumed_at(4, tensors={"w": "x"}, named=["c"]))
    assert first_difference([at_once]).named == ("c",)  # type: ignore[union-attr]
    assert first_difference([rank(None, Trace([]))]).named == ()  # type: ignore[union-attr]


def test_the_save_that_was_resumed_from_is_the_last_of_that_name_and_step() -> None:
    again = replace(saved(4), tensors={"w": "again"})
    killed = rank(Trace([saved(4), again, saved(5, name="step-4")]), resumed_at(4, saved(4, tensors={"w": "later"})))
    assert killed.saved(1) == saved(4, tensors={"w": "later"})
    assert rank(Trace([saved(4), again]), resumed_at(4), resumed_at(4)).saved(1) == again


def likely(*records: Record, reference: Trace | None = None, first: Trace | None = None, resumed: int = 4) -> str:
    """The cause that is named for a run that was resumed after a step."""
    killed = rank(first, resumed_at(resumed, *records), reference=reference)
    found = first_difference([killed])
    assert found is not None
    return cause(found, killed)


def fed(number: int, *batches: str, **changes: Any) -> Step:
    return step(number, batches=[*batches], inputs=[f"i{one}" for one in batches], **changes)


def unfollowed(number: int, *inputs: str) -> Step:
    return step(number, batches=[], inputs=[*inputs])


class TestCauses:
    def test_of_other_data(self) -> None:
        assert likely(step(5, inputs=["x"])) == compare._MADE  # of the same batch
        assert likely(fed(5, "b1")) == compare._AGAIN.format(there=1)
        assert likely(fed(5, "b7")) == compare._LEFT_OUT.format(there=7, count=2)
        assert likely(fed(5, "new")) == compare._NEW
        assert likely(fed(5, "b5", "b6")) == compare._GROUPED
        unused = step(5, batches=["b5", "b6", "b7"], inputs=["ib7"])
        assert likely(unused) == compare._UNUSED.format(count=2)
        assert likely(step(5, batches=["b5", "b6"], inputs=["ib5", "x"])) == compare._GROUPED

    def test_of_other_data_that_ckpt_does_not_follow(self) -> None:
        plain = straight(batches=[])
        assert likely(unfollowed(5, "i1"), reference=plain) == compare._UNANNOUNCED  # from the beginning
        assert likely(unfollowed(5, "i7"), reference=plain) == compare._AHEAD.format(there=7, count=2)
        assert likely(unfollowed(5, "i3"), reference=plain) == compare._AGAIN.format(there=3)
        assert likely(unfollowed(5, "new"), reference=plain) == compare._NEW
        loaders = straight(batches=[], end=replace(END, loaders=True))
        assert likely(unfollowed(5, "new"), reference=loaders) == compare._UNANNOUNCED
        assert likely(unfollowed(5, "i7"), reference=loaders) == compare._AHEAD.format(there=7, count=2)

    def test_of_batches_that_the_straight_run_repeats_from_memory(self) -> None:
        repeated: list[Record] = [*map(step, range(1, 5)), step(5, batches=[], inputs=["i1"]), saved(4), END]
        assert likely(fed(5, "b1"), reference=Trace(repeated), first=Trace([saved(4)])) == compare._CYCLE
        fresh: list[Record] = [*map(step, range(1, 5)), step(5, batches=[], inputs=["i5"]), saved(4), END]
        assert likely(fed(5, "b1"), reference=Trace(fresh), first=Trace([saved(4)])) != compare._CYCLE
        none: list[Record] = [*map(step, range(1, 5)), step(5, batches=[], inputs=[]), saved(4), END]
        assert likely(fed(5, "b1"), reference=Trace(none), first=Trace([saved(4)])) != compare._CYCLE

    def test_of_the_rest_by_what_differs(self) -> None:
        assert likely(step(5, optimizer="x")) == compare._STEPPED
        assert likely(step(5, losses=["x"])) == compare._LOSSES
        assert likely(step(5, gradients={})) == compare._GRADIENTS
        assert likely(step(5, rates=[])) == compare._RATES
        assert likely(step(5, parameters={})) == compare._MANAGED
        assert likely(step(5), step(6, parameters={}, managed=False)) == compare._UNMANAGED
        assert likely(step(5, buffers={})) == compare._BUFFERS
        assert likely(*map(step, range(5, 10))) == compare._EXTRA
        assert likely(step(5), End(5, {})) == compare._MISSING
        assert likely(*map(step, range(5, 9)), End(8, {})) == compare._STATE
        assert likely(step(5), first=Trace([step(1, losses=[])])) == compare._NONDETERMINISTIC
        fresh = rank(None, Trace([]))
        assert cause(first_difference([fresh]), fresh) == compare._FRESH  # type: ignore[arg-type]

    def test_of_what_no_manager_has(self) -> None:
        def with_forgotten(*names: str, changed: tuple[str, ...] = ()) -> Trace:
            end = replace(END, changed=[*changed])
            return Trace([*map(step, range(1, 9)), saved(4, forgotten=[*names]), end])

        both = with_forgotten("StepLR", "GradScaler")
        assert likely(step(5, rates=[]), reference=both).startswith("StepLR is not managed")
        several: list[dict[str, Any]] = [{"losses": []}, {"gradients": {}}, {"parameters": {}}]
        for changes in several:
            assert likely(step(5, **changes), reference=both).startswith("GradScaler is not managed")
        assert likely(step(5, buffers={}), reference=both) == compare._BUFFERS
        assert likely(step(5, rates=[]), reference=with_forgotten("GradScaler")) == compare._RATES
        models = with_forgotten(changed=("Average", "Teacher"))
        assert likely(step(5, losses=[]), reference=models).startswith("Average and Teacher is not managed")
        assert likely(step(5, rates=[]), reference=models) == compare._RATES

    def test_of_what_is_done_after_the_save(self) -> None:
        later = {**START, "models": "averaged", "learning rates": "stepped"}

        def reference(**changes: Any) -> Trace:
            return Trace(
                [*map(step, range(1, 5)), saved(4, **changes), step(5, start=later), *map(step, (6, 7, 8)), END]
            )

        first = Trace([saved(4)])
        lost = step(5, losses=[], start=START)
        told = compare._AFTER_STEP.format(what="models and learning rates")
        assert likely(lost, reference=reference(), first=first) == told
        assert likely(step(5, rates=[], start=START), reference=reference(), first=first) == (
            compare._AFTER_STEP.format(what="learning rates")
        )
        assert likely(step(5, losses=[], start=later), reference=reference(), first=first) == compare._LOSSES
        assert likely(step(5, losses=[]), reference=reference(), first=first) == compare._LOSSES
        half = {**START, "models": "averaged"}
        assert likely(step(5, losses=[], start=half), reference=reference(), first=first) == (
            compare._AFTER_STEP.format(what="learning rates")
        )
        middle = Trace([saved(4, inputs=["i5"])])  # the step had begun
        assert likely(lost, reference=reference(), first=middle) == compare._LOSSES
        stairs = Trace([saved(4, schedulers=True)])
        same = step(5, rates=[], start=later)
        assert likely(same, reference=reference(), first=stairs) == compare._AFTER_STEP.format(what="learning rates")
        assert likely(same, reference=reference(), first=first) == compare._RATES


def test_batches_are_listed_with_the_step_that_used_them() -> None:
    steps = [step(1, batches=["a", "b"]), step(2, batches=[]), step(3, batches=["c"])]
    assert list(in_order(steps, "batches")) == [(1, "a"), (1, "b"), (3, "c")]
    assert compare._common_prefix("abc", "abd") == 2
    assert compare._common_prefix("ab", "abd") == 2
    assert compare._common_prefix("", "a") == 0


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    records = [*straight().records, Resumed(4, "step-4", {"w": "x"}, ["said"]), Resumed(6, "step-6", {})]
    writer = TraceWriter(trace_file(tmp_path, 1, 2))
    for record in records:
        writer.add(record)
    trace = read_trace(tmp_path, 1, 2)
    assert trace.records == records
    assert (len(trace.steps), len(trace.saves), trace.end) == (8, 4, END)
    assert trace.resumed == records[-2]
    assert read_trace(tmp_path, 2, 1) == Trace()
    assert (Trace().end, Trace().resumed) == (None, None)
    plan = Plan(target="a.py", folder="f", process=1, root="r", redirect=True, kill_at=3, arguments=["x"])
    plan.write(tmp_path / "plan")
    assert Plan.read(tmp_path / "plan") == plan


def test_it_is_killed_after_steps_that_follow_different_saves() -> None:
    for seed in range(20):
        kills = kill_steps(straight(), 2, seed)
        assert len(kills) == 2
        assert kills == sorted(kills)
        assert all(2 < kill <= 8 for kill in kills)
        assert kills == kill_steps(straight(), 2, seed)
    assert {kill for seed in range(50) for kill in kill_steps(straight(), 1, seed)} == {3, 4, 5, 6, 7, 8}
    every = kill_steps(straight(), 9, 0)  # a save at the end, or before the first step, is nothing to resume from
    assert [kill in range(first, first + 2) for kill, first in zip(every, (3, 5, 7), strict=True)] == [True] * 3
    assert kill_steps(Trace([saved(0), step(1), saved(1)]), 3, 0) == []
    assert kill_steps(Trace([]), 3, 0) == []


class TestRun:
    def run(self, folder: Path, outcomes: list[tuple[int | None, list[Record]]], **options: Any) -> Run:
        """A program that writes these traces, one after the other, and ends with these statuses."""
        target = folder / "program.py"
        target.touch()
        left = iter(outcomes)

        def start(program: Program, plan: Path, log: Path) -> tuple[int | None, str]:
            status, records = next(left)
            told = Plan.read(plan)
            assert log == folder / f"log-{told.process}"
            for number in range(program.processes):
                writer = TraceWriter(trace_file(Path(told.folder), told.process, number))
                for record in records:
                    writer.add(record)
            self.plans.append(told)
            return status, "output"

        self.plans: list[Plan] = []
        return Run(Program(target=str(target), start=start, **options), folder)

    def test_each_process_has_its_number_and_its_kill(self, tmp_path: Path) -> None:
        killed: list[tuple[int | None, list[Record]]] = [(-9, [step(1), step(2)]), (1, [step(3)]), (0, [step(4), END])]
        run = self.run(tmp_path, killed, processes=2, arguments=("-o", "{root}/x"), save_every=5, seed=7)
        run.killed([2, 3])
        assert [(plan.process, plan.kill_at, plan.seed, plan.save_every) for plan in self.plans] == [
            (0, 2, 7, 5), (1, 3, 7, 5), (2, None, 7, 5),
        ]  # fmt: skip
        assert {tuple(plan.arguments) for plan in self.plans} == {("-o", f"{tmp_path}/root/x")}
        assert {(plan.redirect, plan.root, plan.target) for plan in self.plans} == {
            (False, f"{tmp_path}/root", f"{tmp_path}/program.py")
        }
        assert "" not in self.plans[0].path
        assert [[len(trace.steps) for trace in ranks] for ranks in run.traces] == [[2, 2], [1, 1], [1, 1]]

    @pytest.mark.parametrize(
        ("outcome", "kill", "how"),
        [
            ((0, [step(1)]), None, "ended with status 0"),  # it has not said that it ended
            ((1, [step(1), END]), None, "ended with status 1"),
            ((None, [step(1)]), None, "did not end in time"),
            ((-9, [step(1)]), 2, "ended with status -9"),
            ((-9, []), 2, "ended with status -9"),
        ],
    )
    def test_a_program_that_ends_otherwise_has_failed(
        self, tmp_path: Path, outcome: tuple[int | None, list[Record]], kill: int | None, how: str
    ) -> None:
        for function, hint in (("", True), ("train", False)):
            run = self.run(tmp_path, [outcome], function=function)
            with pytest.raises(ProgramError) as raised:
                run.straight() if kill is None else run.killed([kill])
            assert str(raised.value).startswith(f"the program, run straight, without a kill, {how}:\noutput")
            assert ("{root} in an argument stands for it" in str(raised.value)) == hint
            trace_file(tmp_path, 0, 0).unlink()
        run = self.run(tmp_path, [(0, [END]), outcome])
        run.straight()
        with pytest.raises(ProgramError) as raised:
            run.straight() if kill is None else run.killed([kill])
        assert "resumed after kill 1" in str(raised.value)
        assert "{root}" not in str(raised.value)

    def test_every_wrong_option_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as raised:
            Program(target=str(tmp_path), kills=0, processes=0, save_every=0, timeout=0)
        assert str(raised.value) == (
            f"selftest: {tmp_path} is not a file; kills=0: at least 1 is needed; processes=0: at least 1 is needed; "
            "save_every=0: at least 1 is needed; timeout=0: must be positive."
        )
        (tmp_path / "x").write_text("\n".join(map(str, range(20))))
        Program(target=str(tmp_path / "x"), kills=1, processes=1, save_every=1, timeout=0.1)
        assert last_lines(tmp_path / "x") == "\n".join(f"  {number}" for number in range(5, 20))
        default = Program(target=str(tmp_path / "x"))
        assert (default.kills, default.processes, default.seed, default.timeout) == (3, 1, 0, 600.0)


def test_a_difference_has_no_names_unless_it_is_told() -> None:
    assert Difference("losses", 0, 0, 1, "x") == Difference("losses", 0, 0, 1, "x", None, (), ())


def test_models_without_memory_are_told_apart_by_their_shapes() -> None:
    found = {_digest([torch.empty(size, device="meta")]) for size in (2, 3)}
    assert len(found) == 2

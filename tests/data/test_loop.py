"""What the loop counts, notes and finds to be a boundary, for each shape of a loop: without a manager, files or ranks.

A line of a transcript is the loop after a step: epoch, batch and step of its progress, the samples, whether a boundary
follows, and what a save would have of loaders.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from ckpt.data.loop import Batches, Loop, Pass
from ckpt.data.progress import Progress
from ckpt.data.tracked_loader import UnclaimedPositions
from ckpt.errors import ConfigError
from ckpt.ranks.consensus import SingleProcess

DATA = TensorDataset(torch.arange(6))


class Script:
    """A training script: two loaders of three batches, the first of which has a name, and an optimizer."""

    def __init__(self, *, shuffled: bool = False, ranks: Any = None) -> None:
        self.loader: Any = DataLoader(DATA, 2, sampler=RandomSampler(DATA) if shuffled else None)
        self.other: Any = DataLoader(DATA, 2)
        self.optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        self.loop = Loop(ranks or SingleProcess(), lambda: {"dataloader": self.loader})
        self.loop.watch([self.optimizer])
        self.loop.at_boundary = lambda: self.lines.append("taken")
        self.approximated: dict[str, str] = {}
        self.lines: list[str] = []
        self.loop.start()

    def batches(self, loader: Any = None) -> Batches[Any]:
        return self.loop.batches(self.loader if loader is None else loader, lambda: None)

    def step(self) -> None:
        """`optimizer.step()`, then `manager.step()`."""
        self.optimizer.step()
        self.call_step()

    def call_step(self) -> None:
        follows = self.loop.stepped()
        self.note("" if follows else "now")

    def note(self, word: str = "") -> None:
        found = self.loop.progress
        saved = self.loop.saved_progress()
        positions = {key: position["batches"] for key, position in self.loop.state().items()}
        where = "".join(f" {key.removeprefix('dataloader') or 'at'}:{batches}" for key, batches in positions.items())
        over = f" over:{saved.epoch}" if saved is not found else ""
        text = f"{found.epoch}/{found.batch} step {found.step} samples {found.samples}{where}{over} {word}"
        self.lines.append(text.strip())

    def saved(self) -> tuple[Progress, dict[str, Any], dict[str, Any]]:
        saved = self.loop.saved_progress(), self.loop.state(), self.loop.seen()
        return copy.deepcopy(saved)

    def resume(self, saved: tuple[Progress, dict[str, Any], dict[str, Any]]) -> Script:
        progress, positions, seen = copy.deepcopy(saved)
        self.loop.go_back(progress, UnclaimedPositions(positions, lambda: None, self.approximated), seen)
        return self

    @property
    def lasting(self) -> dict[str, str]:
        return self.loop.caveats.lasting


def _epochs(script: Script) -> None:
    for _ in script.loop.epochs(2):
        for _ in script.batches():
            script.step()


def _plain(script: Script) -> None:
    for _ in range(2):
        for _ in script.loader:
            script.step()


def _accumulating(script: Script) -> None:
    for _ in script.loop.epochs(1):
        for number, _ in enumerate(script.batches()):
            if number % 2:
                script.step()


def _left(script: Script) -> None:
    for _ in range(2):
        for number, _ in enumerate(script.batches()):
            script.step()
            if number == 1:
                break


def _left_in_epochs(script: Script) -> None:
    for _ in script.loop.epochs(2):
        for _ in script.batches():
            script.step()
            break


def _evaluating(script: Script) -> None:
    for _ in script.loader:
        with torch.no_grad():
            list(script.loader)
        list(script.batches(script.other))
        script.step()
    list(script.loader)
    script.note("after evaluation")


def _looking_first(script: Script) -> None:
    next(iter(script.loader))
    for _ in script.loader:
        script.step()


def _side_by_side(script: Script) -> None:
    for _ in zip(script.batches(), script.batches(script.other), strict=True):
        script.step()


def _one_after_the_other(script: Script) -> None:
    for _ in script.loop.epochs(1):
        for loader in (script.loader, script.other):
            for _ in script.batches(loader):
                script.step()


def _in_turn(script: Script) -> None:
    first, second = script.batches(), script.batches(script.other)
    for _ in range(2):
        next(first)
        script.step()
        next(second)
        script.step()


def _counted_by_updates(script: Script) -> None:
    script.loop.counts_updates = True
    for _ in script.batches():
        script.optimizer.step()
        script.note()


def _two_optimizers(script: Script) -> None:
    second = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    script.loop.watch([second])
    script.loop.counts_updates = True
    for _ in script.batches():
        script.optimizer.step()
        second.step()
        script.call_step()


def _without_a_loader(script: Script) -> None:
    for _ in script.loop.epochs(3):
        for _ in range(2):
            script.step()


def _looking_at_another(script: Script) -> None:
    for _ in script.batches():
        next(script.batches(script.other))
        script.step()


def _updating_twice(script: Script) -> None:
    """Once a script has called step(), iterations end there, and not with every update."""
    first, second = script.batches(), script.batches(script.other)
    next(first)
    script.call_step()
    for _ in range(2):
        next(first)
        script.optimizer.step()
        next(second)
        script.optimizer.step()
        script.call_step()


SHAPES: dict[Callable[[Script], None], list[str]] = {
    _epochs: [
        "0/1 step 1 samples 2 at:1",
        "0/2 step 2 samples 4 at:2",
        "0/3 step 3 samples 6 at:3",
        "1/1 step 4 samples 8 at:1",
        "1/2 step 5 samples 10 at:2",
        "1/3 step 6 samples 12 at:3",
        "2/0 step 6 samples 12 end",
    ],
    _plain: [
        "0/1 step 1 samples 2 at:1",
        "0/2 step 2 samples 4 at:2",
        "0/3 step 3 samples 6 at:3",
        "1/1 step 4 samples 8 at:1",
        "1/2 step 5 samples 10 at:2",
        "1/3 step 6 samples 12 at:3",
        "2/0 step 6 samples 12 end",
    ],
    _accumulating: [
        "0/2 step 1 samples 4 at:2",
        "1/0 step 1 samples 6 end",
    ],
    _left: [
        "0/1 step 1 samples 2 at:1",
        "0/2 step 2 samples 4 at:2",
        "1/1 step 3 samples 6 at:1",
        "1/2 step 4 samples 8 at:2",
        "1/2 step 4 samples 8 at:2 end",
    ],
    _left_in_epochs: [
        "0/1 step 1 samples 2 at:1",
        "1/1 step 2 samples 4 at:1",
        "2/0 step 2 samples 4 end",
    ],
    _evaluating: [
        "0/1 step 1 samples 2 at:1",
        "0/2 step 2 samples 4 at:2",
        "0/3 step 3 samples 6 at:3",
        "1/0 step 3 samples 6 after evaluation",
        "1/0 step 3 samples 6 end",
    ],
    _looking_first: [
        "0/1 step 1 samples 2 at:1",
        "0/2 step 2 samples 4 at:2",
        "0/3 step 3 samples 6 at:3",
        "1/0 step 3 samples 6 end",
    ],
    _side_by_side: [
        "0/1 step 1 samples 4 at:1 loader.0:1",
        "0/2 step 2 samples 8 at:2 loader.0:2",
        "0/3 step 3 samples 12 at:3 loader.0:3",
        "1/0 step 3 samples 12 end",
    ],
    _one_after_the_other: [
        "0/1 step 1 samples 2 at:1",
        "0/2 step 2 samples 4 at:2",
        "0/3 step 3 samples 6 at:3",
        "0/1 step 4 samples 8 at:3 loader.0:1",
        "0/2 step 5 samples 10 at:3 loader.0:2",
        "0/3 step 6 samples 12 at:3 loader.0:3",
        "1/0 step 6 samples 12 end",
    ],
    _in_turn: [
        "0/1 step 1 samples 2 at:1",
        "0/1 step 2 samples 4 at:1 loader.0:1",
        "0/2 step 3 samples 6 at:2 loader.0:1",
        "0/2 step 4 samples 8 at:2 loader.0:2",
        "0/2 step 4 samples 8 at:2 loader.0:2 end",
    ],
    _counted_by_updates: [
        "0/1 step 1 samples 2 at:1",
        "0/2 step 2 samples 4 at:2",
        "0/3 step 3 samples 6 at:3",
        "1/0 step 3 samples 6 end",
    ],
    _two_optimizers: [
        "0/1 step 1 samples 2 at:1",
        "0/2 step 2 samples 4 at:2",
        "0/3 step 3 samples 6 at:3",
        "1/0 step 3 samples 6 end",
    ],
    _looking_at_another: [
        "0/1 step 1 samples 4 at:1 loader.0:1",
        "0/2 step 2 samples 6 at:2 loader.0:1",
        "0/3 step 3 samples 8 at:3 loader.0:1",
        "1/0 step 3 samples 8 end",
    ],
    _updating_twice: [
        "0/1 step 1 samples 2 at:1",
        "0/2 step 2 samples 6 at:2 loader.0:1",
        "0/3 step 3 samples 10 at:3 loader.0:2",
        "0/3 step 3 samples 10 at:3 loader.0:2 end",
    ],
    _without_a_loader: [
        "0/0 step 1 samples 0 over:1",
        "0/0 step 2 samples 0 now",
        "1/0 step 3 samples 0",
        "1/0 step 4 samples 0 over:2 now",
        "2/0 step 5 samples 0",
        "2/0 step 6 samples 0 over:3 now",
        "3/0 step 6 samples 0 end",
    ],
}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_each_shape_of_a_loop_is_counted_and_has_its_boundaries(shape: Callable[[Script], None]) -> None:
    script = Script()
    shape(script)
    script.note("end")
    assert script.lines == SHAPES[shape]
    assert list(script.lasting) == (["data"] if shape is _in_turn else [])


def test_what_is_due_is_taken_where_the_next_batch_is_asked_for_and_where_an_epoch_ends() -> None:
    script = Script()
    for _ in script.loop.epochs(1):
        for _ in script.batches():
            script.lines.append("batch")
            script.loop.is_due = False
            script.step()
            script.loop.is_due = True
    assert [line for line in script.lines if line in ("batch", "taken")] == ["batch", "taken"] * 3 + ["taken"]


def test_a_leading_pass_alone_is_a_boundary() -> None:
    script = Script()
    script.loop.is_due = True
    passing, inside = script.batches(), script.batches(script.other)
    next(passing)
    assert script.lines == []  # it leads nothing before a step
    next(inside)
    script.call_step()
    script.lines.clear()
    next(inside)
    assert script.lines == []
    next(passing)
    assert script.lines == ["taken"]


def test_so_many_steps_on_one_batch_are_saved_between_two_of_them() -> None:
    script = Script()
    passing = script.batches()
    for _ in range(2):
        next(passing)
        assert [script.loop.stepped() for _ in range(64)] == [True] * 64
    assert script.lasting == {}
    assert not script.loop.stepped()
    assert "more than 64 steps were made on one batch" in script.lasting["data"]


def test_batches_are_numbered_and_say_how_many_are_left() -> None:
    script = Script()
    begun: list[int] = []
    passing = script.loop.batches(script.loader, lambda: begun.append(1), start=5)
    assert len(passing) == 3
    assert begun == [1]
    assert iter(passing) is passing
    assert [number for number, _ in passing] == [5, 6, 7]
    assert begun == [1, 1]  # by len() and by the first batch
    plain = script.batches()
    assert [batch[0].tolist() for batch in plain] == [[0, 1], [2, 3], [4, 5]]


def test_a_pass_that_is_closed_was_left() -> None:
    script = Script()
    passing = script.batches()
    next(passing)
    script.step()
    passing.close()
    assert script.loop._open == []
    script.note()
    assert script.lines[-1] == "0/1 step 1 samples 2 at:1"
    script.batches().close()  # nobody has read it


def test_a_loop_that_is_not_of_this_thread_or_is_evaluation_is_not_followed() -> None:
    script = Script()
    assert script.loop.takes(script.loader)
    with torch.no_grad():
        assert not script.loop.takes(script.loader)
    found: list[bool] = []
    passing = script.batches()

    def elsewhere() -> None:
        found.append(script.loop.takes(script.loader))
        next(passing)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [False]
    assert "Put the prefetcher inside" in script.lasting["prefetching"]
    script.loop._reads = True
    assert not script.loop.takes(script.loader)
    script.loop._reads = False
    script.loop._process = -1
    assert not script.loop.takes(script.loader)


def test_a_loader_is_followed_until_the_loop_is_released() -> None:
    script = Script()
    kind = type(script.loader)
    assert kind is not DataLoader
    assert isinstance(iter(script.loader), Batches)
    assert script.loop.owns(script.loader)
    assert not script.loop.owns(script.other)
    script.loop.refuse_released("step()")
    own = script.loader.batch_sampler
    list(script.batches())
    assert script.loader.batch_sampler is not own
    script.loop.release()
    assert script.loader.batch_sampler is own
    assert type(script.loader) is DataLoader
    script.loop.follow_named()
    assert type(script.loader) is DataLoader
    script.optimizer.step()
    assert script.loop._updates == 0
    with pytest.raises(ConfigError, match=r"step\(\) on a closed StateManager"):
        script.loop.refuse_released("step()")


def test_what_no_loop_can_go_through_is_refused() -> None:
    loop = Script().loop
    for total in (-1, 1.5, "3", None):
        with pytest.raises(ConfigError, match="the total number of epochs"):
            list(loop.epochs(total))  # type: ignore[arg-type]
    assert list(loop.epochs(0)) == []
    with pytest.raises(ConfigError, match="a int is not iterable"):
        loop.batches(3, lambda: None)  # type: ignore[arg-type]
    for made, words in (
        (enumerate([1]), r"manager.enumerate\(loader\)"),
        (zip([1], strict=True), r"zip\(manager.batches\(a\), manager.batches\(b\)\)"),
        (map(str, [1]), r"map\(function, manager.batches\(loader\)\)"),
        (itertools.cycle([1]), "`while True:` around"),
        (itertools.chain([1]), r"chain\(manager.batches\(loader\), ...\)"),
    ):
        with pytest.raises(ConfigError, match=words):
            loop.batches(made, lambda: None)


def test_before_each_batch_of_a_loader_with_a_name_somebody_is_asked() -> None:
    script = Script()
    fetched: list[str] = []
    script.loop.before_fetch = lambda: fetched.append("")
    list(script.batches(script.other))
    assert fetched == []
    list(script.batches())
    assert len(fetched) == 4  # and once at the end


def test_the_first_step_of_an_epoch_is_told_with_its_number() -> None:
    script = Script()
    epochs: list[int] = []
    script.loop.on_training = epochs.append
    _epochs(script)
    assert epochs == [0, 1]


def test_the_steps_of_an_epoch_are_calls_or_updates_and_those_of_the_last_that_had_any() -> None:
    for act, expected in ((Script.step, 3), (Script.call_step, 3), (lambda script: script.optimizer.step(), 3)):
        script = Script()
        assert script.loop.seen()["steps_per_epoch"] is None
        for _ in script.loop.epochs(2):
            for _ in script.batches():
                if script.loop.progress.epoch == 0:
                    act(script)
        assert script.loop.seen()["steps_per_epoch"] == expected


def test_a_step_without_an_optimizer_is_training_too() -> None:
    script = Script()
    script.loop._hooks[0].remove()
    epochs: list[int] = []
    script.loop.on_training = epochs.append
    for _ in script.batches():
        script.call_step()
    assert epochs == [0]
    script.note("end")
    assert script.lines[-2:] == ["0/3 step 3 samples 6 at:3", "1/0 step 3 samples 6 end"]


def test_samples_are_those_of_all_ranks_and_only_rank_0_warns(caplog: pytest.LogCaptureFixture) -> None:
    class Third(SingleProcess):
        rank, world_size = 2, 4

    script = Script(ranks=Third())
    next(script.batches())
    script.step()
    assert script.lines == ["0/1 step 1 samples 8 at:1"]
    script.loop.caveats.tell("x", "not aloud")
    assert "not aloud" not in caplog.text
    Script().loop.caveats.tell("x", "aloud")
    assert "aloud" in caplog.text


# -- what is noted ----------------------------------------------------------------------------------------------------


def test_steps_without_a_batch_that_ckpt_sees_are_noted() -> None:
    script = Script()
    script.call_step()
    assert script.lines == ["0/0 step 1 samples 0 now"]
    assert "can't see where this loop's batches come from" in script.lasting["data"]
    for quiet, by_script in ((True, False), (False, True)):
        script = Script()
        script.loop.quiet = quiet
        script.loop._by_script = by_script
        script.call_step()
        assert script.lasting == {}
    script = Script()
    script.loop.has_data = lambda: True
    script.call_step()
    assert script.lasting == {}
    unseen = Script()
    unseen.optimizer.step()  # without a call of step()
    assert "data" in unseen.lasting
    seen = Script()
    next(seen.batches())
    seen.optimizer.step()
    assert seen.lasting == {}


def test_an_epoch_of_several_steps_without_a_loader_is_told_where_to_step(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    for _ in script.loop.epochs(1):
        script.step()
        assert caplog.text == ""
        assert script.loop.seen()["remarks"]["epoch"].startswith("counted as finished")
        script.step()
        assert "manager.step() saves at once" in caplog.text
        assert script.loop.seen()["remarks"]["epoch"].startswith("the epoch begins again: 2 of its steps")
        script.loop.quiet = True
        assert script.loop.seen()["remarks"] == {}
        script.loop.quiet = False
    assert script.loop.seen()["remarks"] == {}


def test_training_that_goes_on_without_the_loader_is_noted_as_a_cycle() -> None:
    script = Script()
    for _ in script.batches():
        script.step()
    script.step()
    assert script.lasting == {}  # one step after the end may be of its last batch
    script.step()
    assert "itertools.cycle does that" in script.lasting["data"]
    again = Script().resume(Script().saved())
    for _ in again.batches():
        again.step()
    for _ in range(2):
        again.step()
    assert "itertools.cycle does that" in again.approximated["data"]
    quiet = Script()
    quiet.loop.quiet = True
    for _ in quiet.batches():
        quiet.step()
    for _ in range(3):
        quiet.step()
    assert quiet.lasting == {}


def test_batches_that_are_read_ahead_are_noted_when_the_loader_is_at_its_end() -> None:
    script = Script()
    passing = script.batches()
    next(passing)
    for _ in passing:
        script.step()
    assert script.loop.seen()["ahead"] == 1
    script.step()
    assert "reads batches ahead of the loop" in script.lasting["prefetching"]


def test_a_step_of_batches_of_two_passes_is_no_training_of_one_that_is_left_after_it() -> None:
    """A look at a batch of another loader in the first iteration."""
    script = Script()
    first = script.batches()
    next(first)
    next(script.batches(script.other))
    script.step()
    assert script.lines[-1] == "0/1 step 1 samples 4 at:1 loader.0:1"
    for _ in first:
        script.step()
    script.note("end")
    assert script.lines[-2:] == ["0/3 step 3 samples 8 at:3 loader.0:1", "1/0 step 3 samples 8 end"]


# -- after a resume ---------------------------------------------------------------------------------------------------


def _stopped(steps: int = 2, per_step: int = 1, **options: Any) -> tuple[Script, Any]:
    """A script that was saved after so many steps."""
    script = Script(**options)
    passing = script.batches()
    for _ in range(steps):
        for _ in range(per_step):
            next(passing)
        script.step()
    return script, script.saved()


def _numbers(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def test_a_resumed_pass_goes_on_in_the_middle() -> None:
    _, saved = _stopped(1)
    script = Script().resume(saved)
    assert script.loop.begins_at() == "batch 1 of dataloader"
    assert script.loop.saved_batches(script.loader) == 1
    assert script.loop.length(Pass(script.loader, None)) == 3
    for batch in script.loader:
        script.lines.append(str(batch[0].tolist()))
        script.step()
    script.note("end")
    assert script.lines == [
        "[2, 3]",
        "0/2 step 2 samples 4 at:2",
        "[4, 5]",
        "0/3 step 3 samples 6 at:3",
        "1/0 step 3 samples 6 end",
    ]
    assert script.approximated == {}


def test_a_resume_at_the_end_of_an_epoch_begins_with_the_next() -> None:
    first = Script()
    for _ in first.batches():
        first.step()
    script = Script().resume(first.saved())
    assert script.loop.progress.epoch == 1
    for epoch in script.loop.epochs(2):
        assert epoch == 0  # a loop before this one had counted it
        assert _numbers(script.batches()) == [[0, 1], [2, 3], [4, 5]]
        break


def test_a_checkpoint_that_is_loaded_within_a_pass_takes_it_there() -> None:
    script, saved = _stopped(1)
    seen = []
    for batch in script.batches():
        seen.append(batch[0].tolist())
        script.step()
        if len(seen) == 2:
            script.resume(saved)
    assert seen == [[0, 1], [2, 3], [2, 3], [4, 5]]


def test_batches_skipped_by_hand_after_a_resume_are_named_as_lost() -> None:
    progress, positions, _ = _stopped(1)[1]
    saved = progress, positions, {"per_step": 1}
    script = Script().resume(saved)
    passing = script.batches()
    next(passing)
    next(passing)
    script.step()
    assert "after the resume, 1 batches were read before the first step" in script.approximated["data"]
    for quiet, by_script in ((True, False), (False, True)):
        script = Script().resume(saved)
        passing = script.batches()
        next(passing)
        next(passing)
        script.loop.quiet, script.loop._by_script = quiet, by_script
        script.step()
        assert script.approximated == {}
    script = Script().resume(saved)
    next(script.batches())
    script.step()
    assert script.approximated == {}


def test_a_loop_that_reads_ahead_after_a_resume_as_before_it_is_named() -> None:
    cases = [
        ({"per_step": 1, "ahead": 2}, {"batches": 2, "before": 1}, 3, "reads batches ahead"),
        ({"per_step": 1, "ahead": 1}, {"batches": 2, "before": 1}, 3, ""),
        ({"per_step": 1, "ahead": 1}, {"batches": 3}, 2, "reads batches ahead"),
        ({"per_step": 1}, {"batches": 2}, 3, "2 batches were read before"),
        ({"per_step": 1}, {"batches": 1, "before": 1}, 3, "2 batches were read before"),
        ({"per_step": 1}, {"before": 2}, 3, "2 batches were read before"),
        ({"per_step": 2}, {"batches": 2}, 3, ""),
        ({"per_step": 2}, {"batches": 1}, 3, "1 batches were read before"),
        ({"per_step": 1, "ahead": 0}, {"batches": 0}, 1, ""),
        ({"per_step": 1}, {}, 2, ""),
        ({"per_step": 2, "ahead": 1}, {}, 2, ""),
        ({}, {"batches": 2}, 3, ""),
    ]
    for seen, position, first, words in cases:
        script = Script().resume((Progress(), {}, seen))
        current = Pass(script.loader, None)
        current.saved, current.first = position, first
        script.loop._compare_rhythm(current)
        assert list(script.approximated) == (["data"] if words else []), (seen, position)
        assert words in script.approximated.get("data", "")
        script.loop._compare_rhythm(current)  # it is done once
    script = Script().resume((Progress(), {}, {"per_step": 1}))
    fresh = Pass(script.loader, None)
    fresh.first = 3
    script.loop._compare_rhythm(fresh)
    assert script.approximated == {}
    assert script.loop._saved_rhythm == {"per_step": 1}  # of a pass that was not in the middle: kept for one that is


def test_a_rest_of_the_epoch_that_nobody_trained_on_is_handed_out_again(caplog: pytest.LogCaptureFixture) -> None:
    _, saved = _stopped(1)
    script = Script().resume(saved)
    assert _numbers(script.loader) == [[2, 3], [4, 5]]
    assert _numbers(script.loader) == [[2, 3], [4, 5]]
    assert "trained on none of it. The next loop over it begins at batch 1" in script.approximated["data"]
    script.note()
    assert script.lines == ["0/1 step 1 samples 2 at:1"]


def test_a_position_that_no_loader_claims_is_named_when_training_goes_on_without_it() -> None:
    first = Script()
    next(first.batches(first.other))
    first.step()
    saved = first.saved()
    assert list(saved[1]) == ["loader.0"]
    script = Script().resume(saved)
    script.step()
    assert "saved in the middle of loader.0" in script.approximated["data"]
    assert script.loop.state() == {}
    quiet = Script().resume(saved)
    quiet.loop.quiet = True
    quiet.step()
    assert quiet.approximated == {}
    ended = Script().resume(saved)
    for _ in ended.loop.epochs(1):
        list(ended.batches())
    assert "data" not in ended.approximated  # nothing was trained
    trained = Script().resume(saved)
    for _ in trained.loop.epochs(1):
        for _ in trained.batches():
            trained.step()
    assert "saved in the middle of loader.0" in trained.approximated["data"]


def test_a_script_that_counts_its_epochs_from_0_is_told_once() -> None:
    saved: tuple[Progress, dict[str, Any], dict[str, Any]] = Progress(epoch=2), {}, {}
    for way, told in (("nothing", True), ("asked", False), ("epochs", False), ("quiet", False)):
        script = Script().resume(saved)
        if way == "asked":
            script.loop.note_asked()
        script.loop.quiet = way == "quiet"
        for _ in script.loop.epochs(3) if way == "epochs" else [0]:
            for _ in script.batches():
                script.step()
        assert ("the run is in epoch 2" in script.approximated.get("epoch", "")) is told, way
    first = Script()
    _plain(first)
    assert first.approximated == {}


def test_a_script_that_finds_its_place_gets_the_epoch_from_its_start() -> None:
    _, saved = _stopped(2)
    script = Script().resume(saved)
    script.loop.leave_place_to_script()
    numbers = []
    for number, batch in enumerate(script.loader):
        if number < 2:
            continue
        numbers.append(batch[0].tolist())
        script.step()
    script.note("end")
    assert numbers == [[4, 5]]
    assert script.lines[-1].startswith("1/0 step 3 samples 6")
    assert script.approximated == {}
    careless = Script().resume(saved)
    careless.loop.leave_place_to_script()
    next(iter(careless.loader))
    careless.step()
    assert "training repeats batch 0 of this epoch" in careless.approximated["data"]
    assert "skip_first_batches(loader, 2)" in careless.approximated["data"]


def test_a_script_that_finds_its_place_in_a_shuffled_order_is_told_of_another_one() -> None:
    _, saved = _stopped(2, shuffled=True)
    for shuffled in (True, False):
        script = Script(shuffled=shuffled).resume(saved)
        script.loop.leave_place_to_script()
        script.step()
        assert ("draws a different order" in script.approximated.get("data", "")) is shuffled


def test_a_pass_begins_after_batches_that_are_to_be_skipped() -> None:
    script = Script()
    script.loop.leave_place_to_script()
    script.loop.skip(script.loader, 2)
    assert script.loop.progress.batch == 2
    assert not script.loop._by_script
    assert _numbers(script.batches()) == [[4, 5]]
    other = Script()
    for none in (0, None):
        other.loop.skip(other.loader, none)
    assert other.loop.state() == {}
    _, saved = _stopped(2)
    resumed = Script().resume(saved)
    resumed.loop.forget_positions()
    assert _numbers(resumed.batches()) == [[0, 1], [2, 3], [4, 5]]


def test_an_epoch_that_was_used_up_before_the_checkpoint_hands_out_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ckpt")
    progress, positions, seen = _stopped(3)[1]
    positions["dataloader"].update(exhausted=True, trained=False)
    script = Script().resume((progress, positions, seen))
    assert _numbers(script.loader) == []
    script.loop.saved_progress()
    assert "all batches of epoch 0 were used before the checkpoint" in caplog.text
    again = Script().resume((progress, positions, seen))
    again.loop.leave_place_to_script()
    assert _numbers(again.loader) == [[0, 1], [2, 3], [4, 5]]
    assert again.loop.progress.epoch == 1


def test_the_iteration_of_a_loader_of_accelerate_is_the_epoch_of_the_checkpoint() -> None:
    for sets, resumed, expected in ((True, True, 3), (True, False, 0), (False, True, 0)):
        script = Script()
        script.loop.sets_iteration = sets
        if resumed:
            script.resume((Progress(epoch=3), {}, {}))
        script.other.iteration = 0
        next(script.batches(script.other))
        assert script.other.iteration == expected

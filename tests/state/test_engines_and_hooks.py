"""DeepSpeed's engines and DDP's hooks as parts, ZeRO's partitions cut anew, marks of shards: without other ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from ckpt.errors import ConfigError, MismatchError, StateError
from ckpt.state import ddp, deepspeed, marked_shards
from ckpt.state.ddp import HooksPart
from ckpt.state.deepspeed import EnginePart, PartitionsPart
from ckpt.state.deepspeed_regroup import Move, _Row, cut, is_flat, moved, moves_by_group, moves_by_parameter
from ckpt.state.parts import HOOKS, WHOLE_PART, Notes, SavedTensor, Unmarked, marks_in


@pytest.fixture
def group() -> Iterator[None]:
    """A job of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _read(saved: Any) -> Any:
    """What reads a checkpoint, in which everything is there already."""
    return lambda: lambda: saved


# -- ZeRO's partitions ------------------------------------------------------------------------------------------------


def _groups_over(ranks: int, sizes: list[int]) -> list[list[torch.Tensor]]:
    """Under ZeRO 1 and 2: each group's elements, padded to a multiple of the ranks, by rank."""
    found: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for group, size in enumerate(sizes):
        length = -(-size // ranks)
        padded = torch.zeros(length * ranks)
        padded[:size] = torch.arange(size) + 1 + 1000 * group
        for rank in range(ranks):
            found[rank].append(padded[rank * length : (rank + 1) * length])
    return found


@pytest.mark.parametrize(("before", "now"), list(itertools.product((1, 2, 3, 5), (1, 2, 4))))
def test_groups_that_were_cut_for_other_ranks_are_cut_anew(before: int, now: int) -> None:
    sizes = [7, 1, 12]
    saved, expected = _groups_over(before, sizes), _groups_over(now, sizes)
    for rank in range(now):
        live = [len(part) for part in expected[rank]]
        moves = list(moves_by_group([[len(part) for part in parts] for parts in saved], live, rank))
        found = moved(moves, live, lambda other, group: saved[other][group])
        assert [part.tolist() for part in found] == [part.tolist() for part in expected[rank]]
        assert sum(move.length for move in moves) <= sum(live)


def _parameters_over(ranks: int, counts: list[int]) -> list[torch.Tensor]:
    """Under ZeRO 3: an equal share of every parameter, one behind the other, by rank."""
    shares: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for number, count in enumerate(counts):
        share = -(-count // ranks)
        padded = torch.zeros(share * ranks)
        padded[:count] = torch.arange(count) + 1 + 1000 * number
        for rank in range(ranks):
            shares[rank].append(padded[rank * share : (rank + 1) * share])
    return [torch.cat(parts) for parts in shares]


@pytest.mark.parametrize(("before", "now"), list(itertools.product((1, 2, 3, 5), (1, 2, 4))))
def test_parameters_that_were_cut_for_other_ranks_are_cut_anew(before: int, now: int) -> None:
    counts = [5, 1, 9, 4]
    saved, expected = _parameters_over(before, counts), _parameters_over(now, counts)
    for rank in range(now):
        moves = list(moves_by_parameter(counts, [[len(part)] for part in saved], [len(expected[rank])], rank, now))
        (found,) = moved(moves, [len(expected[rank])], lambda other, group: saved[other])
        assert found.tolist() == expected[rank].tolist()


def test_partitions_of_several_groups_are_taken_one_behind_the_other() -> None:
    row = _Row([4, 3, 2])
    assert [row.take(count) for count in (1, 3, 3, 1, 1, 1)] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    shapes = {"a": (2, 4), "b": (3,), "c": (5,)}
    assert cut([shapes], [4 + 2, 3], 2) == [{"a": (2, 4), "b": (3,)}, {"c": (5,)}]
    counts, lengths = [8, 3, 5], [6, 3]
    saved = _parameters_over(2, counts)
    moves = list(moves_by_parameter(counts, [lengths, lengths], [16], 0, 1))
    (whole,) = moved(moves, [16], lambda rank, group: torch.split(saved[rank], lengths)[group])
    assert whole.tolist() == _parameters_over(1, counts)[0].tolist()
    back = list(moves_by_parameter(counts, [[16]], lengths, 1, 2))
    parts = moved(back, lengths, lambda rank, group: whole)
    assert torch.cat(parts).tolist() == saved[1].tolist()


def test_nothing_to_move_is_zeros_and_flat_is_one_dimension() -> None:
    (nothing,) = moved([], [3], lambda rank, group: torch.ones(1))
    assert (nothing.tolist(), nothing.dtype) == ([0.0, 0.0, 0.0], torch.float32)
    (half,) = moved([Move(1, 0, 1, 0, 2, 1)], [3], lambda rank, group: torch.tensor([5.0, 7.0]).half())
    assert (half.tolist(), half.dtype) == ([0.0, 0.0, 7.0], torch.float16)
    assert [is_flat(value) for value in (torch.ones(2), torch.ones(()), torch.ones(2, 2), 3)] == [
        True,
        False,
        False,
        False,
    ]


# -- engines ----------------------------------------------------------------------------------------------------------


class Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Engine:
    """What a part asks of an engine of DeepSpeed."""

    def __init__(self, micro_steps: int = 4, **more: Any) -> None:
        self.global_steps, self.global_samples, self.skipped_steps, self.micro_steps = 1, 2, 3, micro_steps
        self.inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        self.optimizer: Any = SimpleNamespace(optimizer=self.inner)
        self.lr_scheduler: Any = None
        self._is_gradient_accumulation_boundary = None
        vars(self).update(more)

    def gradient_accumulation_steps(self) -> int:
        return 4


def test_an_engines_counters_scheduler_and_scaler_come_back() -> None:
    saved = EnginePart("deepspeed", Engine(lr_scheduler=Counter(5), torch_autocast_z0_gradscaler=Counter(6))).capture()
    assert saved == {
        "global_steps": 1, "global_samples": 2, "skipped_steps": 3, "micro_steps": 4,
        "lr_scheduler": {"count": 5}, "grad_scaler": {"count": 6}, "in_window": False,
    }  # fmt: skip
    engine: Any = Engine(0, lr_scheduler=Counter(), global_steps=0)
    engine.optimizer.torch_autocast_gradscaler = Counter()
    part, notes = EnginePart("deepspeed", engine), Notes()
    assert part.check(saved) == {}
    read = _read(saved)
    part.restore(saved, read, {}, notes)()
    assert (engine.global_steps, engine.micro_steps, engine.lr_scheduler.count) == (1, 4, 5)
    assert engine.optimizer.torch_autocast_gradscaler.count == 6
    assert (notes.skipped, notes.approximated) == ({}, {})
    bare = EnginePart("deepspeed", Engine())
    assert bare.check(saved) == dict.fromkeys(("lr_scheduler", "grad_scaler"), "unexpected: the engine has none")
    assert part.check(bare.capture()) == dict.fromkeys(("lr_scheduler", "grad_scaler"), "missing in the checkpoint")
    bare.restore({**saved, "in_window": True}, read, {"lr_scheduler": "why"}, notes)()
    assert notes.skipped == {"deepspeed.lr_scheduler": "why"}
    assert "the next update is made without them" in notes.approximated["gradients"]
    assert (bare.kind, bare.same_class, bare.can_be_sharded) == ("Engine", False, False)


def test_an_engine_in_an_accumulation_window_is_not_loaded_into() -> None:
    cases = ((4, None, False), (5, None, True), (5, True, False), (4, False, True))
    for steps, boundary, in_window in cases:
        part = EnginePart("deepspeed", Engine(steps, _is_gradient_accumulation_boundary=boundary))
        assert part.in_window is in_window
        if in_window:
            with pytest.raises(StateError, match="deepspeed: the engine is in the middle of an accumulation window"):
                part.check({})


def test_the_hooks_of_an_engine_are_called_once_for_each_of_its_steps() -> None:
    engine: Any = Engine()
    part, called = EnginePart("deepspeed", engine), list[Any]()
    part.register_step_post_hook(lambda stepped: called.append(("after", stepped)))
    part.register_step_pre_hook(lambda stepped: called.append(("before", stepped)))
    engine.inner.step()
    engine.inner.step()  # of another group, in the same step of the engine
    engine.global_steps += 1
    engine.inner.step()
    assert called == [("before", part), ("after", part), ("before", part), ("before", part), ("after", part)]
    assert part.stepped is engine.inner
    engine.optimizer = None
    assert part.stepped is None
    assert part.own_parts(3) == {}


class DeepSpeedZeroOptimizer:
    """What a part asks of ZeRO's optimizer."""

    def __init__(self) -> None:
        self.value = nn.Parameter(torch.ones(3))
        self.bit16_groups = [[self.value]]
        self.optimizer = torch.optim.SGD([self.value], lr=0.1)
        self.loss_scaler: Any = SimpleNamespace(scale=8)
        self.dp_process_group = None
        self.loaded: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"partition_count": 1, "loss_scaler": self.loss_scaler, "zero_stage": 2}

    def load_state_dict(self, states: Any, **options: bool) -> None:
        self.loaded.append((states, options))

    def checkpoint_event_prologue(self) -> None:
        self.loaded.append("prologue")

    def checkpoint_event_epilogue(self) -> None:
        self.loaded.append("epilogue")


def test_a_ranks_partitions_are_saved_and_loaded_through_deepspeeds_own_calls(group: None) -> None:
    optimizer = DeepSpeedZeroOptimizer()
    engine = Engine(optimizer=optimizer, param_names={optimizer.value: "value"})
    (part,) = EnginePart("deepspeed", engine).own_parts(3).values()
    assert (part.key, part.kind) == ("deepspeed-00003", "DeepSpeedZeroOptimizer of SGD")
    assert (part.same_class, part.can_be_sharded) == (True, False)
    saved = part.capture()
    assert saved["state"] == {"partition_count": 1}
    assert saved["scaler"] == {"class": "SimpleNamespace", "values": {"scale": 8}}
    assert part.check(saved) == {}
    assert "their order are not those" in part.check({**saved, "parameters": "x"})[WHOLE_PART]
    other = {**saved, "scaler": {"class": "Other"}}
    assert part.check(other)[WHOLE_PART] == "a Other in the checkpoint, a SimpleNamespace here"
    optimizer.loss_scaler.scale = 1
    read = _read(saved)
    part.restore(saved, read, {}, Notes())()
    options = {"load_optimizer_states": True, "load_from_fp32_weights": True}
    states = {0: {"partition_count": 1, "loss_scaler": optimizer.loss_scaler}}
    assert optimizer.loaded == ["prologue", (states, options), "epilogue"]
    assert optimizer.loss_scaler.scale == 8
    optimizer.loss_scaler = None
    assert part.capture()["scaler"] == {}
    notes = Notes()
    part.missed("other ranks", notes, strict=False)
    assert list(notes.skipped) == ["deepspeed-00003"]
    with pytest.raises(MismatchError, match="no partitions of DeepSpeed's optimizer for these ranks: other ranks"):
        PartitionsPart("x", engine).missed("other ranks", notes, strict=True)


def test_a_tensor_without_dimensions_is_whole_on_every_rank(group: None) -> None:
    assert deepspeed._sharded(torch.tensor(5.0), torch.device("cpu")).item() == 5.0
    rows = deepspeed._sharded(torch.arange(6.0).reshape(3, 2), torch.device("cpu"))
    assert rows.to_local().tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    empty = deepspeed._sharded(torch.empty(3, 2, device="meta"), torch.device("cpu"))
    assert (tuple(empty.shape), empty.to_local().device.type) == ((3, 2), "cpu")
    one, two = SimpleNamespace(ds_id=1), torch.ones(1)
    made = deepspeed._replaced({"a": one, "b": two, "c": one}, lambda value: [value])
    assert made["a"] is made["c"]
    assert (made["a"], made["b"]) == ([one], two)


# -- DDP's buckets and hooks ------------------------------------------------------------------------------------------


def _wrapped(**options: Any) -> Any:
    return DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), **options)


def test_the_buckets_of_ddp_are_written_and_given_to_another(group: None) -> None:
    first, second = _wrapped(), _wrapped()
    saved = ddp.buckets_of(first).as_json()
    assert ddp.buckets_of(first) is ddp.buckets_of(first)
    assert sorted(itertools.chain.from_iterable(ddp.buckets_of(first).layout)) == [0, 1, 2, 3]
    assert ddp.saved_buckets(second, saved) == ddp.buckets_of(first)
    for wrong in (None, {}, {**saved, "parameters": "x"}, {**saved, "layout": [[[0, 1]]]}, {**saved, "layout": None}):
        assert ddp.saved_buckets(second, wrong) is None
    assert ddp.saved_buckets(_wrapped(gradient_as_bucket_view=True), saved) is not None
    other = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)))
    assert ddp.saved_buckets(other, saved) is None
    apart = ddp.Buckets(((3, 2), (1, 0)), ddp.buckets_of(second).parameters)
    assert ddp.restore_buckets(second, apart)
    assert ddp.buckets_of(second) == apart
    assert ddp.restore_buckets(second, apart)
    assert not ddp.about_to_change(second)


def test_buckets_are_about_to_change_between_the_first_step_and_the_next_forward_pass(group: None) -> None:
    for options, expected in (({}, True), ({"find_unused_parameters": True}, False)):
        model = _wrapped(**options)
        assert not ddp.about_to_change(model)
        model(torch.ones(2, 3)).sum().backward()
        assert ddp.about_to_change(model) is expected
        model(torch.ones(2, 3)).sum().backward()
        assert not ddp.about_to_change(model)


def test_gradients_depend_on_buckets_where_there_are_three_ranks_or_a_hook(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _wrapped()
    assert not ddp.decide_sums(model)
    for ranks, expected in ((2, False), (3, True)):
        monkeypatch.setattr(dist, "get_world_size", lambda *_, ranks=ranks: ranks)
        assert ddp.decide_sums(model) is expected
    monkeypatch.undo()
    assert list(ddp.ddp_wrappers({"model": nn.Sequential(model), "other": nn.Linear(1, 1)})) == ["model/0"]
    assert ddp.saved_hooks({"model": model}, 3) == {}
    assert ddp.lacking_state({"model": model}) == {}
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    assert ddp.decide_sums(model)
    assert list(ddp.saved_hooks({"model": model}, 3)) == [f"{HOOKS}-00003"]
    assert ddp.lacking_state({"model": model}) == {}
    model(torch.ones(2, 3)).sum().backward()
    assert "saved after the first step" in ddp.lacking_state({"model": model})["model.buckets"]


class Remembering(Counter):
    """The state of a hook of the user's own."""


def test_the_state_of_a_hook_comes_back_or_is_named(group: None) -> None:
    model, state = _wrapped(), Remembering(3)
    model.register_comm_hook(state, default_hooks.allreduce_hook)
    part = HooksPart("hooks", {"model/0": model})
    saved = part.capture()
    assert saved["model/0"]["class"] == "Remembering"
    assert saved["model/0"]["state"] == {"count": 3}
    assert (part.same_class, part.can_be_sharded, part.kind) == (False, False, HOOKS)
    state.count, notes = 0, Notes()
    read = _read(saved)
    part.restore(saved, read, {}, notes)()
    assert (state.count, notes.approximated) == (3, {})
    assert part.check(saved) == {}
    for entry in ({}, {"class": "Other", "state": {}}):
        notes, found = Notes(), {"model/0": entry}
        part.restore(found, _read(found), {}, notes)()
        assert "no state of such a hook" in notes.approximated[f"{HOOKS}.model/0"]
    notes = Notes()
    part.missed("another number of ranks", notes, strict=True)
    assert "another number of ranks: communication hooks start over" in notes.approximated[HOOKS]
    plain, notes = HooksPart("hooks", {"model/0": _wrapped()}), Notes()
    plain.missed("why", notes, strict=True)
    assert notes.approximated == {}
    plain.restore(saved, read, {}, notes)()
    assert "there is no such hook here" in notes.approximated[f"{HOOKS}.model/0"]
    wrong, notes = {"model/0": {"buckets": {"parameters": "x"}}}, Notes()
    plain.restore(wrong, _read(wrong), {}, notes)()
    assert "saved with other parameters" in notes.approximated[f"{HOOKS}.model/0.buckets"]


def test_a_hook_whose_state_is_not_saved_is_named(group: None) -> None:
    model = _wrapped()
    model.register_comm_hook(SimpleNamespace(), default_hooks.allreduce_hook)
    assert "SimpleNamespace has no state_dict" in ddp.lacking_state({"model": model})["model.comm_hook"]
    assert list(ddp._captured(model)) == ["buckets"]


def test_the_state_of_powersgd_fits_the_same_options_and_buckets(group: None) -> None:
    options: dict[str, Any] = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
    state = powersgd.PowerSGDState(None, **options)
    hook = powersgd.powerSGD_hook
    state.error_dict[0] = torch.ones(2)
    saved = ddp._captured_power_sgd(state, hook)
    tensor = SavedTensor("x", torch.float32, (2,), lambda one, other: True)
    fitting = {**saved, "error_dict": {"0": tensor}}
    assert ddp._power_sgd_misfit(state, hook, fitting, 1) is None
    cases: list[tuple[Any, int, str]] = [
        (None, 1, "another communication hook"),
        ({**fitting, "hook": "other"}, 1, "another communication hook"),
        ({**fitting, "options": None}, 1, "saved with another matrix_approximation_rank, min_compression_rate"),
        ({**fitting, "options": {**fitting["options"], "warm_start": False}}, 1, "saved with another warm_start"),
        (fitting, 0, "other buckets"),
        ({**fitting, "p_memory_dict": {"1": tensor}}, 1, "other buckets"),
        ({**fitting, "q_memory_dict": None}, 1, "other buckets"),
        (saved, 1, "without its tensors"),
    ]
    for wrong, buckets, words in cases:
        assert words in (ddp._power_sgd_misfit(state, hook, wrong, buckets) or "")
    other = powersgd.PowerSGDState(None, **options)
    other.error_dict[5] = torch.ones(1)
    state.iter = 7
    saved = ddp._captured_power_sgd(state, hook)
    ddp._restore_power_sgd(other, saved, _wrapped(find_unused_parameters=True))
    assert (other.iter, list(other.error_dict)) == (7, [0])
    assert ddp.is_hook_state(other)


def test_powersgd_begins_anew_where_ddp_has_laid_out_other_buckets(
    group: None, caplog: pytest.LogCaptureFixture
) -> None:
    for same in (True, False):
        model, state = _wrapped(), powersgd.PowerSGDState(None, start_powerSGD_iter=2)
        state.error_dict[0] = torch.ones(2)
        buckets = ddp.buckets_of(model)
        model(torch.ones(2, 3)).sum().backward()
        ddp._watch(state, model, ddp.Buckets(((3, 2, 1, 0),), buckets.parameters) if same else ddp.Buckets((), "x"))
        with torch.no_grad():
            model(torch.ones(2, 3))  # evaluation decides nothing
        assert list(state.error_dict) == [0]
        model(torch.ones(2, 3)).sum().backward()
        assert list(state.error_dict) == ([0] if same else [])
        assert ("PowerSGD starts its error feedback over" in caplog.text) is not same
        state.error_dict[0] = torch.ones(2)
        model(torch.ones(2, 3)).sum().backward()
        assert list(state.error_dict) == [0]  # it is looked at once


# -- marks ------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_marked_is_refused_and_alone_nothing_is_marked(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Linear(2, 2)
    marked_shards.mark_sharded(module)
    assert not marks_in([module])
    cases: list[tuple[Any, str]] = [
        ({"dim": 1}, "bias: it has 1 dimensions, but dim=1"),
        ({"dim": -1}, "weight: it has 2 dimensions, but dim=-1"),
        ({"names": ["none"]}, "none: there is no such parameter"),
    ]
    for options, words in cases:
        with pytest.raises(ConfigError, match=words):
            marked_shards.mark_sharded(module, **options)
    with pytest.raises(ConfigError, match="ReLU has no parameters"):
        marked_shards.mark_sharded(nn.ReLU())
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    with pytest.raises(ConfigError, match="the group has only 1 of 2 ranks"):
        marked_shards.mark_sharded(module)
    with pytest.raises(ConfigError, match="one dimension of the mesh, not 2"):
        marked_shards.mark_sharded(module, mesh=SimpleNamespace(get_group=None, ndim=2))
    marked_shards.mark_sharded(module, mesh=SimpleNamespace(get_group=None, ndim=1), names=["weight"])
    marks = marks_in([module])
    assert marks
    assert marks.has(module.weight)
    assert not marks.has(module.bias)
    assert marks.whole(module.bias) is module.bias
    assert marks.like(module.weight, 3) == 3
    small = torch.ones(1)
    assert marks.like(module.weight, small) is small
    assert not marks_in([nn.Linear(1, 1)])


def test_without_marks_everything_is_what_it_is() -> None:
    unmarked, value = Unmarked(), torch.ones(1)
    assert not unmarked
    assert not unmarked.has(value)
    for found in (unmarked.whole(value), unmarked.state_like(value, "x"), unmarked.like(value, value)):
        assert found is value
    assert unmarked.in_state({"a": value}) == {"a": value}

"""What parts of models, optimizers and objects find unfit, tied, frozen or their own: without files or ranks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR
from torch.optim.swa_utils import AveragedModel

from ckpt.errors import MismatchError, StateError
from ckpt.state import model as models
from ckpt.state import optimizer as optimizers
from ckpt.state import parts
from ckpt.state.model import ModelPart
from ckpt.state.optimizer import OptimizerPart
from ckpt.state.parts import Caveats, GradientsPart, Notes, ObjectPart, RankObjectPart, Replication, UnshardedPart


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(1))


# -- remarks ----------------------------------------------------------------------------------------------------------


def test_a_caveat_is_given_once_and_not_where_a_resume_has_named_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="ckpt")
    caveats, approximated = Caveats(aloud=True), {"known": "named by the resume"}
    caveats.note("gone", "gone with the resume")
    caveats.resumed(approximated)
    assert caveats.lasting == {}
    caveats.tell("a", "first")
    caveats.tell("a", "second")
    caveats.tell("b", "third", what="because: ")
    caveats.tell("c", "named by the resume")
    assert caplog.messages == ["first", "because: third"]
    caveats.differs("data", "another order")
    caveats.differs("data", "a later finding")
    assert approximated["data"] == "another order"
    caveats.note("kept", "lasts")
    caveats.note("kept", "is not replaced")
    caveats.tell_lasting()
    caveats.tell_lasting()
    assert caplog.messages[2:] == ["another order", "lasts"]
    assert caveats.lasting == {"kept": "lasts"}


def test_what_is_equal_on_every_rank_is_certain() -> None:
    some = Replication(frozenset({"a"}), frozenset({"b"}))
    assert [some.is_equal(name) for name in "abc"] == [True, False, False]
    assert [some.is_uncertain(name) for name in "abc"] == [False, False, True]
    assert not Replication(of_main=True).is_uncertain("a")
    everything = Replication(all_equal=True)
    assert everything.is_equal("a")
    assert everything.distrusted() == Replication()
    assert some.distrusted() == Replication(broadcast=frozenset({"b"}))
    assert parts.UNKNOWN.is_uncertain("a")


def test_an_object_that_does_not_take_its_state_back_is_named() -> None:
    with (
        pytest.raises(StateError, match="thing could not load its state: ValueError: odd"),
        parts.naming_part("thing"),
    ):
        raise ValueError("odd")
    with pytest.raises(MismatchError, match="ours"), parts.naming_part("thing"):
        raise MismatchError("ours")


# -- objects ----------------------------------------------------------------------------------------------------------


def test_states_that_torchs_schedulers_and_scalers_would_stumble_over_are_known() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    plain, by_lambda = ExponentialLR(optimizer, 0.9), LambdaLR(optimizer, lambda step: 1.0)
    scaler = torch.amp.GradScaler("cpu")

    class Own(ExponentialLR):
        def load_state_dict(self, state: Any) -> None: ...

    cases: list[tuple[Any, Any, str]] = [
        (plain, plain.state_dict(), ""),
        (plain, {}, ""),
        (plain, [1], "no state of a ExponentialLR"),
        (plain, {1: 2}, "no state of a ExponentialLR"),
        (by_lambda, by_lambda.state_dict(), ""),
        (by_lambda, {"last_epoch": 1}, "no state of a LambdaLR: lr_lambdas missing"),
        (by_lambda, {"lr_lambdas": 3}, "no state of a LambdaLR: lr_lambdas missing"),
        (scaler, scaler.state_dict(), ""),
        (scaler, {}, ""),
        (scaler, {"scale": 1.0}, "growth_factor, backoff_factor, growth_interval, _growth_tracker missing"),
        (Own(optimizer, 0.9), [1], ""),
        (object(), [1], ""),
    ]
    for live, saved, words in cases:
        found = parts.problem_with(live, saved)
        assert (words in found) if words else found == "", (live, saved)
        assert list(ObjectPart("x", live).check(saved)) == ([parts.WHOLE_PART] if words else [])


def test_states_that_an_optimizer_cannot_have_are_known() -> None:
    values = [nn.Parameter(torch.ones(1))]
    adam, sgd = torch.optim.Adam(values), torch.optim.SGD(values, lr=0.1)

    class Own(torch.optim.Adam): ...

    assert parts.unusable_states(adam, {"a": {"step": 1}, "b": {}, "c": 3}) == {
        "state.b": "no state of Adam: step is missing",
        "state.c": "no state of Adam",
    }
    assert list(parts.unusable_states(sgd, {"a": {}, "b": 3})) == ["state.b"]
    assert parts.unusable_states(Own(values), {"b": 3}) == {}
    assert parts.unusable_states(object(), {"b": 3}) == {}


def test_an_object_of_each_rank_says_what_becomes_of_it() -> None:
    class Own:
        of_main_rank = True

    part, notes = RankObjectPart("sampler-00003", Own()), Notes()  # type: ignore[arg-type]
    part.missed("no such rank", notes, strict=True)
    assert notes.approximated == {"sampler": "no such rank: this rank is new, and its Own keeps the state that it has"}
    assert part.replication({}, None) == Replication(of_main=True)
    assert ObjectPart("x", nn.Linear(1, 1)).replication({}, None) == Replication()
    assert (part.for_any_ranks, ObjectPart("x", nn.Linear(1, 1)).for_any_ranks) == (True, False)
    assert (part.same_class, part.can_be_sharded) == (False, False)
    plain = UnshardedPart()
    assert (plain.other_kinds, plain.of_other_ranks(2), plain.frozen(), plain.is_sharded()) == (
        (),
        {},
        frozenset(),
        False,
    )
    assert (plain.about({}), plain.names(), plain.share({"a": 1}, ["a"]), plain.tied_to_ranks(["a"])) == (
        {}, None, {"a": 1}, {},
    )  # fmt: skip


def test_gradients_come_back_by_name_and_others_are_cleared() -> None:
    module: Any = nn.Linear(1, 1)
    part, notes = GradientsPart("gradients-00000", {"model": module}), Notes()
    module.weight.grad = torch.full((1, 1), 3.0)
    assert list(part.capture()["model"]) == ["weight"]
    module.bias.grad = torch.ones(1)
    part._load({"model": {"weight": torch.full((1, 1), 5.0)}})
    assert module.weight.grad.item() == 5.0
    assert module.bias.grad is None
    part._load({})
    assert module.weight.grad is None
    part.missed("why", notes, strict=True)
    assert notes.approximated == {"gradients": "why: the accumulation window starts over"}
    assert part.check({}) == {}


# -- models -----------------------------------------------------------------------------------------------------------


def _saved(tensor: torch.Tensor, name: str = "x") -> Any:
    """A tensor of a checkpoint, as far as a comparison needs it."""
    return parts.SavedTensor(name, tensor.dtype, tuple(tensor.shape), lambda other, place: name == other.name)


def test_a_tensor_of_a_checkpoint_fits_by_its_shape_and_dtype() -> None:
    live = torch.zeros(2, 3)
    assert models._compare(live, _saved(live)) is None
    assert models._compare(live, _saved(torch.zeros(3, 2))) == "shape [3, 2] in the checkpoint, [2, 3] here"
    assert "dtype" in (models._compare(live, _saved(live.half())) or "")
    assert models._compare(live, 3) == models._compare(3, _saved(live)) == "a tensor on one side only"
    assert models._compare(3, 4) is None
    lazy = nn.LazyLinear(2).weight
    assert "run one forward pass first" in (models._compare(lazy, _saved(live)) or "")
    assert models._fits_when_cast(live, _saved(live.half()))
    for other in (_saved(live), _saved(torch.zeros(3, 2).half()), 3):
        assert not models._fits_when_cast(live, other)
    assert not models._fits_when_cast(3, _saved(live))
    assert not models._fits_when_cast(lazy, _saved(live))


def test_a_model_finds_what_is_missing_unexpected_or_of_another_shape() -> None:
    module = nn.Linear(2, 1)
    part = ModelPart("model", module)
    whole = {name: _saved(value, name) for name, value in module.state_dict().items()}
    assert part.check(whole) == {}
    assert part.check({**whole, "more": 1}) == {"more": "unexpected: the model has no such key"}
    assert part.check({"weight": whole["weight"]}) == {"bias": "missing in the checkpoint"}
    assert list(part.check({**whole, "bias": _saved(torch.zeros(5))})) == ["bias"]
    assert (part.kind, part.same_class, part.can_be_sharded, part.other_kinds) == ("Linear", False, True, ())
    tied = ModelPart("model", Tied())
    saved = {name: _saved(value, name) for name, value in tied.model.state_dict().items()}
    del saved["last.weight"]
    assert tied.check(saved) == {}  # of a tied tensor, any of its names is enough
    del saved["first.weight"]
    assert sorted(tied.check(saved)) == ["first.weight", "last.weight"]


def test_what_a_model_freezes_and_which_of_its_tensors_fit_other_ranks() -> None:
    module = Tied()
    part = ModelPart("model", module)
    assert part.frozen() == frozenset()
    module.first.weight.requires_grad_(False)
    assert part.frozen() == {"first.weight", "last.weight"}
    assert part.tied_to_ranks(["first.weight", "seen"]) == {"first.weight": "first.weight"}
    assert part.names() == frozenset({"first.weight", "last.weight", "seen"})
    assert part.share({"a": 1, "b": 2}, ["b"]) == {"a": 1}
    assert not part.is_sharded()
    assert part.layouts(None) == frozenset()
    assert part.replication({}, None) is parts.UNKNOWN
    assert ModelPart("model", AveragedModel(nn.Linear(1, 1))).kind == "AveragedModel"


def test_tensors_in_the_same_memory_are_one() -> None:
    one = torch.arange(6.0)
    assert models._memory(one) == models._memory(one.view(6))
    for other in (one[1:], one.view(2, 3), one.clone(), one.view(torch.int32)):
        assert models._memory(one) != models._memory(other)
    for nothing in (torch.zeros(0), torch.zeros(1, device="meta"), 3, nn.LazyLinear(1).weight):
        assert models._memory(nothing) == id(nothing)
    assert list(models.tensors_in({"a": one, "b": 3})) == ["a"]


def test_a_model_without_memory_gets_it_for_what_is_filled_and_no_more() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 1)
        many = nn.ParameterDict({f"p{number:02}": torch.ones(1) for number in range(12)})
    module.bias.requires_grad_(False)
    weight = module.weight
    assert models.any_on_meta([ModelPart("model", module)])
    assert models.is_on_meta(weight)
    with pytest.raises(MismatchError, match=r"model is on the meta device, .* no values for bias. Call"):
        models.materialise("model", module, ["weight"])
    with pytest.raises(MismatchError, match="p09 and 2 more"):
        models.materialise("model", many, [])
    models.materialise("model", module, ["weight", "bias"])
    assert module.weight is weight
    assert (weight.device.type, weight.requires_grad, module.bias.requires_grad) == ("cpu", True, False)
    assert isinstance(module.weight, nn.Parameter)
    assert not models.any_on_meta([ModelPart("model", module), object()])
    assert not models.is_on_meta(3)


# -- optimizers -------------------------------------------------------------------------------------------------------


def _stepped(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1, **options)
    for value in module.parameters():
        value.grad = torch.ones_like(value)
    optimizer.step()
    return optimizer


def test_the_state_of_an_optimizer_is_by_name_and_goes_back_in_any_order() -> None:
    module = nn.Linear(2, 1)
    saved = OptimizerPart("optimizer", _stepped(module), {"": module}).capture()
    assert list(saved["state"]) == ["weight", "bias"]
    assert saved["param_groups"][0]["params"] == ["weight", "bias"]
    turned = torch.optim.Adam([module.bias, module.weight], lr=0.5)
    part = OptimizerPart("optimizer", turned, {"": module})
    part._load({**saved, "state": dict(saved["state"])}, {})
    assert turned.state[module.weight]["exp_avg"].shape == (1, 2)
    assert turned.param_groups[0]["lr"] == 0.1
    partly = torch.optim.Adam(module.parameters(), lr=0.5)
    OptimizerPart("optimizer", partly, {"": module})._load(saved, {"state.bias": "why"})
    assert list(partly.state) == [module.weight]
    assert (part.kind, part.same_class, part.can_be_sharded, part.managed) == ("Adam", True, True, turned)
    assert part.names() == frozenset({"weight", "bias"})
    nameless = OptimizerPart("optimizer", turned, {})
    assert nameless.names() is None
    assert list(nameless._names().values()) == ["@0", "@1"]
    assert part.tied_to_ranks(["weight.exp_avg"]) == {"weight": "weight.exp_avg"}
    assert part.frozen() == frozenset()
    assert not part.is_sharded()


def test_an_optimizer_finds_groups_and_shapes_that_do_not_fit() -> None:
    module = nn.Linear(2, 1)
    part = OptimizerPart("optimizer", _stepped(module), {"": module})
    saved = part.capture()
    assert part.check(saved) == {}
    assert part.check({**saved, "param_groups": saved["param_groups"] * 2}) == {
        "param_groups": "2 in the checkpoint, 1 here"
    }
    other = {**saved["param_groups"][0], "params": ["weight", "more"]}
    assert part.check({**saved, "param_groups": [other]}) == {
        "param_groups[0].bias": "missing in the checkpoint",
        "param_groups[0].more": "unexpected: the optimizer has no such parameter",
    }
    odd = {**saved["state"], "bias": {**saved["state"]["bias"], "exp_avg": torch.zeros(3)}}
    assert part.check({**saved, "state": odd}) == {"state.bias": "exp_avg has shape [3] in the checkpoint, [1] here"}
    fresh = OptimizerPart("optimizer", torch.optim.Adam(module.parameters()), {"": module})
    assert fresh.check({**saved, "state": odd}) == {}  # there is nothing to compare with


def test_moments_keep_their_dtype() -> None:
    module = nn.Linear(1, 1).bfloat16()
    optimizer = _stepped(module)
    part = OptimizerPart("optimizer", optimizer, {"": module})
    saved = part.capture()
    for entry in saved["state"].values():
        entry["exp_avg"] = entry["exp_avg"].float() + 1e-6
    part._load(saved, {})
    assert optimizer.state[module.weight]["exp_avg"].dtype == torch.float32
    assert optimizer.state[module.weight]["exp_avg_sq"].dtype == torch.bfloat16


def test_other_learning_rates_than_the_run_began_with_are_said() -> None:
    module = nn.Linear(1, 1)
    part = OptimizerPart("optimizer", torch.optim.SGD(module.parameters(), lr=0.2), {"": module})
    assert part.about({}) == {"first_lr": [0.2]}
    for there in (None, [0.2], [0.2, 0.3], "0.2"):
        assert part.adopt_rates({"first_lr": there}) is None
    said = part.adopt_rates({"first_lr": [0.1]})
    assert said is not None
    assert "the run began with 0.1, and you give 0.2" in said
    assert part.adopt_rates({"first_lr": [0.1]}) is None  # said once: the rates are those of the run now
    assert part.about({}) == {"first_lr": [0.1]}
    rates: list[dict[str, Any]] = [
        {"lr": 1},
        {"lr": 1.0, "initial_lr": 2.0},
        {"lr": torch.tensor(3.0)},
        {"lr": torch.ones(2)},
    ]
    rates += [{"lr": float("inf")}, {}, {"lr": "fast"}]
    assert [optimizers._rate(group) for group in rates] == [1.0, 2.0, 3.0, None, None, None, None]


def test_names_and_numbers_of_parameters_are_exchanged() -> None:
    state = {"state": {0: "a", 2: "c"}, "param_groups": [{"lr": 1, "params": [0, 1]}, {"lr": 2, "params": [2]}], "x": 1}
    named = optimizers.by_name(state)
    assert named["state"] == {"@0": "a", "@2": "c"}
    assert [group["params"] for group in named["param_groups"]] == [["@0", "@1"], ["@2"]]
    assert (named["x"], named["param_groups"][1]["lr"]) == (1, 2)
    texts = {"state": {"w": 1}, "param_groups": [{"params": ["w", "b", "w"]}]}
    assert optimizers.by_name(texts, "m.")["state"] == {"m.w": 1}
    assert optimizers.by_number(texts)["param_groups"] == [{"params": [0, 1, 0]}]
    assert optimizers.by_number(named)["state"] == {0: "a", 2: "c"}
    assert optimizers.renamed(texts, {"w": "v"})["param_groups"] == [{"params": ["v", "b", "v"]}]


def test_tied_parameters_are_known_under_all_their_names() -> None:
    module = Tied()
    part = OptimizerPart("optimizer", _stepped(module), {"": module})
    assert part._other_names() == {"last.weight": "first.weight"}
    assert part.names() == frozenset({"first.weight", "last.weight"})
    saved = part.capture()
    assert list(saved["state"]) == ["first.weight"]
    under_the_other = optimizers.renamed(saved, {"first.weight": "last.weight"})
    assert part.check(under_the_other) == {}
    both = {**saved, "state": {**saved["state"], "last.weight": {"step": 9}}}
    both["param_groups"] = [{**saved["param_groups"][0], "params": ["first.weight", "last.weight"]}]
    assert "its state in the checkpoint differs from that of first.weight" in part.check(both)["state.last.weight"]
    both["state"]["last.weight"] = both["state"]["first.weight"] = {"step": 9}
    assert "state.last.weight" not in part.check(both)
    several = OptimizerPart("optimizer", torch.optim.SGD(module.parameters(), lr=0.1), {"a": module})
    assert several._other_names() == {"a.last.weight": "a.first.weight"}


def test_the_optimizer_that_makes_the_steps_is_the_innermost() -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    class Around:
        optimizer = inner

    class Odd:
        optimizer = 3

    odd = Odd()
    assert optimizers.stepping(Around()) is inner
    assert optimizers.stepping(inner) is inner
    assert optimizers.stepping(odd) is odd
    assert optimizers.class_of(inner) == "SGD"

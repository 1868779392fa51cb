"""What a registry makes of the objects that it is given, without ranks, files or wrappers."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from ckpt.errors import ConfigError
from ckpt.state.model import ModelPart
from ckpt.state.objects import GivenObjects, ManagedObjects, is_part_name, named
from ckpt.state.optimizer import OptimizerPart
from ckpt.state.parts import GradientsPart, ObjectPart, RankObjectPart
from ckpt.state.registry import (
    PlainValues,
    StateRegistry,
    Windows,
    _found_parts,
    _is_non_zero,
    are_plain,
    find_source,
    holds_unsharded,
    is_plain,
    obstacle,
    refuse_unnamed,
)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def _model() -> nn.Module:
    return nn.Linear(2, 1)


def _sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def _registry(gradients: bool | None = None, **objects: Any) -> tuple[StateRegistry, list[Any]]:
    """A registry of these objects, and the optimizers that its watcher was told of."""
    told: list[Any] = []
    kinds = dict.fromkeys(("model", "optimizer", "scheduler", "scaler", "dataloader"))
    source = GivenObjects(**(kinds | objects))
    registry = StateRegistry(source.find, [told.extend], gradients=gradients)
    registry.refresh()
    return registry, told


# -- accumulation windows ---------------------------------------------------------------------------------------------


def test_a_window_is_open_from_the_first_gradient_that_no_step_has_used() -> None:
    model = _model()
    optimizer, windows = _sgd(model), Windows()
    windows.watch([optimizer])
    assert windows.open([optimizer]) == []
    model(torch.ones(1, 2)).sum().backward()
    assert windows.open([optimizer]) == [optimizer]
    optimizer.step()
    assert windows.open([optimizer]) == []
    model(torch.ones(1, 2)).sum().backward()  # added to those that the step has used
    assert windows.open([optimizer]) == [optimizer]
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert windows.open([optimizer]) == []  # zeros are no gradients
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert windows.open([optimizer]) == [optimizer]
    optimizer.zero_grad()
    windows.release()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert windows.open([optimizer]) == [optimizer]  # nobody marks them any more
    assert windows._hooks == []


@pytest.mark.parametrize(("number", "sampled"), [(0, 0), (1, 1), (64, 64), (65, 33), (128, 64), (1000, 63)])
def test_of_many_parameters_a_few_are_looked_at(number: int, sampled: int) -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(number)]
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = torch.optim.SGD([*parameters, frozen], lr=0.1)
    windows = Windows()
    found = windows._sample(optimizer)
    assert len(found) == sampled
    assert all(value is not frozen for value in found)
    assert windows._sample(optimizer) is found
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert windows._sample(optimizer) is not found


def test_sparse_gradients_are_looked_into_and_are_an_obstacle() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    optimizer = _sgd(table)
    table(torch.tensor([1])).sum().backward()
    assert _is_non_zero(optimizer)
    assert obstacle({"model": table}, [optimizer]) == "some sparse"
    assert obstacle({"model": table}) is None
    plain = _model()
    plain(torch.ones(1, 2)).sum().backward()
    assert obstacle({"model": plain}, [_sgd(plain)]) is None
    assert obstacle({"model": plain}, [_sgd(plain), optimizer]) == "some sparse"
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.grad = torch.zeros_like(parameter)
    assert not _is_non_zero(_sgd(plain))
    parameter = nn.Parameter(torch.ones(2))

    class Own(torch.Tensor): ...

    parameter.grad = torch.ones(2).as_subclass(Own)
    assert obstacle({}, [torch.optim.SGD([parameter], lr=0.1)]) == "some sparse"


@pytest.mark.parametrize(("gradients", "in_window", "own", "lacks"), [
    (None, False, [], False),
    (None, True, ["gradients-00002"], False),
    (True, False, ["gradients-00002"], False),
    (True, True, ["gradients-00002"], False),
    (False, True, [], True),
    (False, False, [], False),
])  # fmt: skip
def test_gradients_are_saved_where_they_are_asked_for_or_waiting(
    gradients: bool | None, in_window: bool, own: list[str], lacks: bool
) -> None:
    model, other = _model(), _model()
    optimizer = _sgd(model)
    registry, _ = _registry(gradients, model={"a": model, "b": other}, optimizer=optimizer)
    if in_window:
        model(torch.ones(1, 2)).sum().backward()
        other(torch.ones(1, 2)).sum().backward()  # of no managed optimizer
    parts, lacking = registry.own_parts_to_save(2)
    assert list(parts) == own
    assert list(lacking) == (["gradients"] if lacks else [])
    if gradients is None and in_window:
        saved = parts["gradients-00002"].capture()
        assert (len(saved["model.a"]), len(saved["model.b"])) == (2, 0)
    if lacks:
        assert "with saving=ckpt.SaveOptions(gradients=False)" in lacking["gradients"]
    to_load = registry.own_parts_to_load(2, ["gradients-00002"])
    assert [type(part) for part in to_load.values()] == ([] if gradients is False else [GradientsPart])
    assert list(registry.own_parts_to_load(2, [])) == (["gradients-00002"] if gradients else [])
    registry.leave_windows()
    cleared = all(value.grad is None for value in model.parameters())
    assert cleared is (gradients is None or not in_window)


# -- plain values -----------------------------------------------------------------------------------------------------


def test_values_are_a_dict_of_plain_ones() -> None:
    values = PlainValues()
    assert values.to_save() == {}
    values["a"] = [1, (2.0, None), {"x": True, 3: "y"}]
    values["b"] = torch.tensor(4)
    values["c"] = np.float64(0.5)
    assert dict(values) == {"a": [1, (2.0, None), {"x": True, 3: "y"}], "b": 4, "c": 0.5}
    assert (type(values["b"]), type(values["c"]), len(values), list(values)) == (int, float, 3, ["a", "b", "c"])
    assert "a" in values
    assert "z" not in values
    del values["c"]
    with pytest.raises(KeyError, match=r"this run has no value 'c'\. It has: 'a', 'b'"):
        values["c"]
    with pytest.raises(KeyError, match="It has: none"):
        PlainValues()["c"]
    with pytest.raises(ConfigError, match="must be a string, not 3"):
        values[3] = 1  # type: ignore[index]
    saved = values.to_save()
    values["a"].append(5)
    assert saved == {"values": {"a": [1, (2.0, None), {"x": True, 3: "y"}], "b": 4}}
    for unfit in (object(), torch.ones(2), np.ones(1), {1.5: 2}, [{"a": set()}], {None: 1}):
        with pytest.raises(ConfigError, match="Values can be numbers, strings, None"):
            values["d"] = unfit
    nested: Any = 1
    for _ in range(50):
        nested = [nested]
    values["deep"] = nested
    with pytest.raises(ConfigError, match="contains a list"):
        values["deeper"] = [nested]
    nested = 1
    for _ in range(50):
        nested = {"a": nested}
    values["deep"] = nested
    with pytest.raises(ConfigError, match="contains a dict"):
        values["deeper"] = {"a": nested}


def test_what_a_checkpoint_brings_is_not_undone_by_what_a_script_begins_with() -> None:
    values = PlainValues()
    values.begin_with({"a": 1, "b": 1})
    values.begin_with({"a": 2})
    assert dict(values) == {"a": 2, "b": 1}  # nothing was loaded yet
    assert values.restore({"a": 7, "c": 8}) == ["b"]
    values.begin_with({"a": 3, "d": 4})
    assert dict(values) == {"a": 7, "b": 1, "c": 8, "d": 4}


def test_plain_is_a_single_number_text_or_none() -> None:
    cases: dict[bool, tuple[list[Any], list[Any]]] = {
        True: ([1, 1.5, True, "x", None, np.int64(1)], [{}, {"a": 1}, {"a": [1]}]),
        False: ([[], {}, torch.tensor(1), object(), np.ones(1)], [[], {1: 1}, {"a": object()}, None]),
    }
    for expected, (single, several) in cases.items():
        assert {is_plain(value) for value in single} == {expected}
        assert {are_plain(value) for value in several} == {expected}


# -- parts ------------------------------------------------------------------------------------------------------------


def test_every_object_has_its_part_and_only_schedulers_need_the_same_class() -> None:
    model = _model()
    optimizer = _sgd(model)
    scheduler, custom, module = ExponentialLR(optimizer, 0.9), Counter(), _model()
    objects = ManagedObjects(
        {"model": model}, {"optimizer": optimizer}, {"scheduler": scheduler}, {"custom.0": custom, "custom.1": module}
    )
    parts = _found_parts(objects)
    assert {key: (type(part), part.same_class) for key, part in parts.items()} == {
        "model": (ModelPart, False),
        "optimizer": (OptimizerPart, True),
        "scheduler": (ObjectPart, True),
        "custom.0": (ObjectPart, False),
        "custom.1": (ModelPart, False),
    }
    part: Any = parts["optimizer"]
    assert list(part.models) == [""]
    several = _found_parts(ManagedObjects({"model.a": model, "model.b": module}, {"optimizer": optimizer}))
    part = several["optimizer"]
    assert list(part.models) == ["a", "b"]
    assert sorted(part.names()) == ["a.bias", "a.weight"]


def test_a_registry_tells_of_new_optimizers_once_and_leaves_out_what_it_shall() -> None:
    model = _model()
    first, second = _sgd(model), _sgd(model)
    objects = [ManagedObjects({"model": model}, {"optimizer": first})]
    told: list[Any] = []
    registry = StateRegistry(lambda: objects[-1], [told.append], gradients=None)
    registry.refresh()
    parts = registry.parts
    assert told == [[first]]
    objects.append(ManagedObjects({"model": model}, {"optimizer": first}))
    registry.refresh()
    assert registry.parts is parts  # the same objects
    objects.append(ManagedObjects({"model": model}, {"optimizer": first, "optimizer.1": second}))
    registry.refresh()
    assert told == [[first], [second]]
    assert registry.optimizers == registry.steppers() == [first, second]
    assert registry.optimizers_by_key() == {"optimizer": first, "optimizer.1": second}
    left_out = frozenset({"optimizer"})
    objects.append(ManagedObjects({"model": model}, {"optimizer": first}, left_out=left_out))
    registry.refresh()
    assert list(registry.parts) == ["model"]


def test_a_released_registry_marks_gradients_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    optimizer = _sgd(model)
    registry, _ = _registry(model=model, optimizer=optimizer)
    for released, own in ((False, []), (True, ["gradients-00000"])):
        if released:
            registry.release()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert list(registry.own_parts_to_save(0)[0]) == own
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp", raising=False)
    assert not holds_unsharded({"model": model})  # nobody has imported what would


def test_the_tensors_of_a_registry_are_parameters_buffers_and_optimizer_state() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    optimizer = torch.optim.Adam(model.parameters())
    registry, _ = _registry(model=model, optimizer=optimizer)
    assert len(list(registry.tensors())) == 4 + 3
    model(torch.ones(2, 1)).sum().backward()
    optimizer.step()
    assert len(list(registry.tensors())) == 4 + 3 + 4 * 3


def test_registered_objects_are_kept_by_what_they_are() -> None:
    registry, _ = _registry(model=_model())
    counter, own, generator, module = Counter(), Counter(), torch.Generator(), _model()
    registry.register({"counter": counter, "generator": generator, "best": 1.5, "ema": module})
    registry.register({"own": own}, per_rank=True)
    assert {key: type(part) for key, part in registry.parts.items()} == {
        "model": ModelPart,
        "counter": ObjectPart,
        "ema": ModelPart,
    }
    assert registry.generators == {"generator": generator}
    assert dict(registry.values) == {"best": 1.5}
    assert registry.registered() == [counter, own]
    assert {key: type(part) for key, part in registry.own(3).items()} == {"own-00003": RankObjectPart}
    part: Any = registry.own(3)["own-00003"]
    assert (part.name, part.for_any_ranks, part.value) == ("own", True, own)
    assert registry.model_part("ema").model is module
    for wrong in ("counter", "z", None):
        with pytest.raises(ConfigError, match=r"It has: model, ema"):
            registry.model_part(wrong)  # type: ignore[arg-type]
    registry.register({"best": 2})  # a value may be given again
    assert dict(registry.values) == {"best": 2}


def test_what_cannot_be_registered_is_named_and_nothing_else_is() -> None:
    registry, _ = _registry(model=_model())
    registry.register({"counter": Counter(), "generator": random.Random(), "best": 1.5})
    registry.register({"own": Counter()}, per_rank=True)
    cases: list[tuple[dict[str, Any], bool, str]] = [
        ({"model": Counter()}, False, "model: a part of that name already exists"),
        ({"counter": Counter()}, False, "counter: a part of that name already exists"),
        ({"generator": Counter()}, False, "generator: a part of that name already exists"),
        ({"own": Counter()}, False, "own: a part of that name already exists"),
        ({"rng": Counter()}, False, "rng: a part of that name already exists"),
        ({"best": Counter()}, False, "a value of that name already exists"),
        ({"new": Counter}, False, "Counter is a class"),
        ({"a b": Counter()}, False, "is not a valid part name"),
        ({"a..b": Counter()}, False, "is not a valid part name"),
        ({"new": [1]}, False, r"a list is kept by manager.values\['new'\]"),
        ({"new": object()}, False, "a object has no state_dict and load_state_dict"),
        ({"new": 3}, True, "a int has no state_dict"),
        ({"fine": Counter(), "new": object()}, False, "cannot register new"),
    ]
    for objects, per_rank, words in cases:
        with pytest.raises(ConfigError, match=words):
            registry.register(objects, per_rank=per_rank)
    assert sorted(registry.parts) == ["counter", "model"]
    with pytest.raises(ConfigError, match="needs a name for each object"):
        registry.register({}, [Counter()])
    with pytest.raises(ConfigError, match="must be True or False"):
        registry.register({}, per_rank=Counter())  # type: ignore[arg-type]
    registry.register({"a.b": Counter(), "odd name": 3})


def test_objects_that_cannot_be_managed_are_named_all_at_once() -> None:
    model = _model()
    optimizer = _sgd(model)
    with pytest.raises(ConfigError) as raised:
        _registry(
            model={"a": Counter()},
            optimizer={"b": model, "c": ExponentialLR(optimizer, 0.9), "d": object()},
            scheduler={"e": optimizer},
        )
    for words in (
        "model.a is a Counter, not a torch.nn.Module",
        "optimizer.b is a Linear, a torch.nn.Module: give it as model=",
        "optimizer.c is a ExponentialLR, which is not a valid optimizer",
        "scheduler.e is a SGD, which is not a valid scheduler",
        "optimizer.d is a object, which has no state_dict",
    ):
        assert words in str(raised.value)


# -- given objects ----------------------------------------------------------------------------------------------------


def test_objects_have_keys_by_their_kind_and_name() -> None:
    one, two = _model(), _model()
    assert named("model", None) == {}
    assert named("model", one) == {"model": one}
    assert named("model", [one, two]) == {"model.0": one, "model.1": two}
    assert named("model", {"a": one, "b-2_x": two}) == {"model.a": one, "model.b-2_x": two}
    first, second = _sgd(one), torch.optim.AdamW(two.parameters())
    assert named("optimizer", {"a": first}) == {"optimizer.a": first}
    by_parameter = named("optimizer", {"layer.weight": first, "layer.bias": _sgd(two)})
    assert list(by_parameter) == ["optimizer"]
    assert type(by_parameter["optimizer"]).__name__ == "JoinedOptimizer"
    first.optimizers = [first, second]  # type: ignore[attr-defined]  # a container, as torchtitan has one
    assert list(named("optimizer", first)) == ["optimizer.SGD", "optimizer.AdamW"]
    assert list(named("optimizer", {"a": first})) == ["optimizer.a-SGD", "optimizer.a-AdamW"]
    first.optimizers = (first,)  # type: ignore[attr-defined]
    assert list(named("optimizer", first)) == ["optimizer"]
    for name in ("a b", "", 3, "a/b"):
        with pytest.raises(ConfigError, match="is not a valid part name"):
            named("model", {name: one})
    assert [is_part_name(name) for name in ("a", "A-1_b", "", "a.b", "a b", None)] == [True, True] + [False] * 4


def test_a_state_dict_in_place_of_its_object_is_refused() -> None:
    model = _model()
    for state in (model.state_dict(), _sgd(model).state_dict()):
        with pytest.raises(ConfigError, match=r"got a state_dict as model=\. Pass the object"):
            named("model", state)
    assert named("model", {}) == {}


def test_what_gives_no_batches_is_no_loader() -> None:
    class ByIndex:
        def __getitem__(self, index: int) -> int:
            return index

    _registry(dataloader={"a": [1], "b": ByIndex()})
    with pytest.raises(ConfigError, match=r"dataloader.a \(str\), dataloader.b \(int\), dataloader.c \(bytes\)"):
        _registry(dataloader={"a": "text", "b": 3, "c": b"", "d": [1]})


def test_the_same_objects_under_the_same_keys_are_the_same() -> None:
    one, two = _model(), _model()
    same = ManagedObjects({"model": one}).identities()
    assert same == ManagedObjects({"model": one}).identities()
    for other in (
        ManagedObjects({"model": two}),
        ManagedObjects({"model.a": one}),
        ManagedObjects({"model": one}, custom={"a": Counter()}),
        ManagedObjects({"model": one}, left_out=frozenset({"model"})),
    ):
        assert other.identities() != same


def test_what_is_given_without_a_keyword_is_refused() -> None:
    refuse_unnamed("runs/x", [])
    refuse_unnamed(None, [])
    model = _model()
    for root, others, words in ((model, [], "Linear"), ("runs/x", [model], "Linear"), (_sgd(model), [3], "SGD, int")):
        with pytest.raises(TypeError, match=f"but you also passed {words} by position"):
            refuse_unnamed(root, others)


def test_an_accelerator_has_all_that_it_prepared() -> None:
    none = dict.fromkeys(("model", "optimizer", "scheduler", "scaler", "dataloader"))
    assert isinstance(find_source(None, **none), GivenObjects)
    with pytest.raises(ConfigError, match="either accelerator= or model, scaler"):
        find_source(SimpleNamespace(), **(none | {"model": _model(), "scaler": Counter()}))

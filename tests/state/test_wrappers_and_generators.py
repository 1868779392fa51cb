"""Names of wrapped models, generators, joined objects, and what DeepSpeed and DDP are asked: without ranks or files."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from ckpt.errors import CkptError, ConfigError, UnsupportedError
from ckpt.state import ddp, deepspeed, rng, samplers, unwrap
from ckpt.state.joined import Joined, JoinedOptimizer, StateOfAll, contained_optimizers
from ckpt.state.objects import ManagedObjects
from ckpt.state.optimizer import OptimizerPart
from ckpt.state.unwrap import JoinedModel, clean_name, clean_names, gradients, parameter_names


@pytest.fixture
def group() -> Iterator[None]:
    """A job of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.last.weight = self.first.weight


# -- names ------------------------------------------------------------------------------------------------------------


def test_names_are_those_of_the_model_without_its_wrappers() -> None:
    inner = nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1)), DataParallel(nn.Linear(1, 1)))
    expected = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(clean_names(inner, inner.state_dict()).values()) == expected
    named = [name for name, _ in inner.named_parameters()]
    assert [clean_name(inner, name) for name in named] == expected
    assert list(parameter_names(inner).values()) == expected
    compiled: Any = torch.compile(inner)
    assert unwrap.unwrap(DataParallel(compiled)) is inner
    plain = nn.Sequential(nn.Linear(1, 1))
    assert clean_names(plain, ["0.weight", "x"]) == {"0.weight": "0.weight", "x": "x"}
    assert clean_names(inner, []) == {}
    assert unwrap.unwrap(plain) is plain
    assert unwrap.without_checkpointing("a._checkpoint_wrapped_module.weight") == "a.weight"


def test_parts_of_a_model_have_their_prefixes() -> None:
    one, two = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    joined = JoinedModel([("stages.3", one), ("", two)])
    assert list(clean_names(joined, joined.state_dict()).values()) == ["stages.3.weight", "weight"]
    assert list(parameter_names(joined).values()) == ["stages.3.weight", "weight"]
    assert joined.parts == unwrap.parts_of(joined) == [one, two]
    assert unwrap.parts_of(one) == [one]


def test_a_tied_parameter_has_its_first_name_and_is_met_several_times() -> None:
    model = Tied()
    assert list(parameter_names(model).values()) == ["first.weight"]
    assert len(list(unwrap.parameters_in(model))) == 2
    assert len(list(unwrap.modules_in(model))) == 3
    assert len(list(unwrap.kinds_in(model))) == 2
    shared = nn.Sequential(model.first, model.first)
    assert len(list(unwrap.modules_in(shared))) == 2  # one module under two names


def test_a_model_is_walked_once_while_that_is_remembered() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    with unwrap.walked_once():
        first = unwrap.modules_in(model)
        model.append(nn.Linear(1, 1))
        assert unwrap.modules_in(model) is first
    assert len(list(unwrap.modules_in(model))) == 3


def test_the_names_of_parameters_are_remembered_as_long_as_what_was_walked() -> None:
    model = Tied()
    with unwrap.walked_once():
        names = [parameter_names(model), unwrap.all_names(model)]
        model.last = nn.Linear(1, 1)
        assert [parameter_names(model), unwrap.all_names(model)] == names
        assert parameter_names(Tied()) != names[0]
    shared = id(model.first.weight)
    assert names == [{shared: "first.weight"}, [("first.weight", shared), ("last.weight", shared)]]
    assert len(parameter_names(model)) == 3
    assert [name for name, _ in unwrap.all_names(model)] == ["first.weight", "last.weight", "last.bias"]


def test_gradients_are_found_by_name() -> None:
    model: Any = nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1)), nn.Linear(1, 1))
    assert gradients(model) == {}
    for parameter in (*model[0].parameters(), model[1].weight):
        parameter.grad = torch.ones_like(parameter)
    assert list(gradients(model)) == ["0.weight", "0.bias", "1.weight"]
    assert list(gradients(model, frozenset({id(model[1].weight)}))) == ["1.weight"]


def test_a_class_is_known_by_its_path_where_it_was_imported() -> None:
    assert unwrap.is_instance(nn.Linear(1, 1), "torch.nn.modules.linear.Linear")
    assert not unwrap.is_instance(nn.ReLU(), "torch.nn.modules.linear.Linear")
    assert not unwrap.is_instance(3, "never.imported.Linear")
    assert not unwrap.is_instance(3, "torch.nn.NoSuchClass")


def test_who_keeps_parameters_equal_is_ddp_or_deepspeed(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class DeepSpeedEngine(nn.Module): ...

    plain, wrapped, engine = nn.Linear(1, 1), DistributedDataParallel(nn.Linear(1, 1)), DeepSpeedEngine()
    assert not unwrap.has_replicas([plain])
    assert unwrap.has_replicas([plain, nn.Sequential(wrapped)])
    assert unwrap.has_ddp([plain, wrapped])
    assert not unwrap.has_ddp([plain, engine])
    assert not unwrap.has_replicas([engine])
    module = SimpleNamespace(DeepSpeedEngine=DeepSpeedEngine)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", module)
    assert unwrap.has_replicas([engine])
    assert unwrap.is_engine(engine)
    assert not unwrap.is_fsdp1(plain)


# -- DDP --------------------------------------------------------------------------------------------------------------


def test_ddp_over_all_ranks_keeps_parameters_and_broadcast_buffers_equal(group: None) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    all_of_them = frozenset(map(id, model.parameters()))
    buffers = frozenset(map(id, model.buffers()))
    for members in (None, (0,)):
        assert ddp.equal_parameters([model, nn.Linear(1, 1)], members) == all_of_them
        assert ddp.broadcast_buffers(model, members) == buffers
    assert ddp.equal_parameters([model], (0, 1)) == frozenset()  # other ranks have it too
    values, apart = list(model.parameters()), nn.Parameter(torch.ones(1))
    cases: list[tuple[list[Any], Any, bool]] = [
        (values, None, True),
        ([*values, apart], None, False),
        (values, (0, 1), False),
    ]
    for trained, ranks, equal in cases:
        part = OptimizerPart("optimizer", torch.optim.SGD(trained, lr=0.1), {"": model})
        assert part.replication({}, ranks).all_equal is equal
    model.parameters_to_ignore = {"0.weight", "1.running_mean"}
    inner: Any = model.module
    assert ddp.equal_parameters([model]) == all_of_them - {id(inner[0].weight)}
    assert ddp.broadcast_buffers(model) == buffers - {id(inner[1].running_mean)}
    model.broadcast_buffers = False
    assert ddp.broadcast_buffers(model) == frozenset()
    model.register_comm_hook(None, lambda state, bucket: bucket)  # may do anything
    assert ddp.equal_parameters([model]) == frozenset()


def test_runs_of_numbers_are_written_as_pairs_and_read_back() -> None:
    cases = [
        ([], []),
        ([3], [[3, 3]]),
        ([0, 1, 2], [[0, 2]]),
        ([2, 1, 0], [[2, 0]]),
        ([0, 1, 0], [[0, 1], [0, 0]]),
        ([0, 2, 3, 5], [[0, 0], [2, 3], [5, 5]]),
        ([5, 4, 4], [[5, 4], [4, 4]]),
    ]
    assert [ddp._runs(numbers) for numbers, _ in cases] == [runs for _, runs in cases]
    assert ddp._layout([[[2, 3]], [[1, 0]]], 4) == ((2, 3), (1, 0))
    assert ddp._layout([[[0, 0], [2, 2]], [[1, 1]]], 3) == ((0, 2), (1,))
    unfit: tuple[Any, ...] = (
        None, [], [[]], [[[0, 1]]], [[[0, 3]]], [[[0, 2]], []], [[[0, 2]], [[2, 2]]], [[[0]]], [[[0, 1, 2]]], ["ab"],
        [[[0, 2.0]]], [[[False, 2]]], [[[-1, 1]]], [[[0, 2], [0, 2], [0, 2], [0, 2]]],
    )  # fmt: skip
    for wrong in unfit:
        assert ddp._layout(wrong, 3) is None, wrong


def test_a_hook_that_holds_nothing_lacks_nothing() -> None:
    assert ddp._has_none(None)
    assert not ddp._has_none(SimpleNamespace())
    assert ddp._is_kept(nn.Linear(1, 1))
    assert not ddp._is_kept(SimpleNamespace())
    assert not ddp.is_hook_state(SimpleNamespace())
    assert ddp.has_hook_state({"model/0": {"class": "X"}})
    assert [ddp.has_hook_state(saved) for saved in ({"model/0": {"buckets": 1}}, {"a": 3}, {}, None)] == [False] * 4


# -- DeepSpeed --------------------------------------------------------------------------------------------------------


def _engine(**more: Any) -> Any:
    """What an engine of DeepSpeed answers, with an optimizer of torch."""
    given: dict[str, Any] = {
        "optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
        "lr_scheduler": None,
        "pipeline_parallelism": False,
        "has_moe_layers": False,
        "mp_world_size": 1,
        "sequence_parallel_size": 1,
    }
    asked: dict[str, Any] = {
        "autotp_size": 1,
        "zero_offload_optimizer": None,
        "zero_offload_param": None,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_nontrainable_weights": False,
        "zero_elastic_checkpoint": False,
        "data_efficiency_enabled": False,
    }
    kept = {name: more.get(name, value) for name, value in given.items()}
    answers = {name: partial(more.get, name, value) for name, value in asked.items()}
    return SimpleNamespace(**kept, **answers)


def test_what_ckpt_does_not_keep_of_deepspeed_is_refused_by_name() -> None:
    class Odd: ...

    class DeepSpeedZeroOptimizer: ...

    nvme, cpu = SimpleNamespace(device="nvme"), SimpleNamespace(device="cpu")
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, ""),
        ({"optimizer": DeepSpeedZeroOptimizer()}, ""),
        ({"optimizer": None}, ""),
        ({"optimizer": Odd()}, "the optimizer Odd"),
        ({"pipeline_parallelism": True}, "pipeline parallelism"),
        ({"has_moe_layers": True}, "mixtures of experts"),
        ({"mp_world_size": 2}, "tensor parallelism"),
        ({"autotp_size": 2}, "tensor parallelism"),
        ({"sequence_parallel_size": 2}, "sequence parallelism"),
        ({"zero_offload_optimizer": nvme}, "offload to NVMe"),
        ({"zero_offload_param": nvme, "zero_offload_optimizer": cpu}, "offload to NVMe"),
        ({"zero_offload_param": cpu, "zero_offload_optimizer": cpu}, ""),
        ({"zero_hpz_partition_size": 2}, "a secondary partition (zero_hpz_partition_size)"),
        ({"zero_quantized_weights": True}, "quantized weights"),
        ({"zero_quantized_nontrainable_weights": True}, "quantized weights"),
        ({"zero_elastic_checkpoint": True}, "elastic_checkpoint"),
        ({"data_efficiency_enabled": True}, "data efficiency and curricula"),
    ]
    for options, words in cases:
        assert list(deepspeed._obstacles(_engine(**options))) == ([words] if words else []), options
    engines = {"model": _engine(pipeline_parallelism=True, has_moe_layers=True)}
    with pytest.raises(
        UnsupportedError, match=r"model: .* can't save DeepSpeed with pipeline parallelism or mixtures of experts"
    ):
        deepspeed.with_engines(ManagedObjects(), engines)


def test_what_engines_have_of_their_own_is_left_to_their_parts() -> None:
    class DeepSpeedZeroOptimizer:
        def state_dict(self) -> dict[str, Any]:
            return {}

        load_state_dict = state_dict

    scheduler, other = SimpleNamespace(), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    whole, partitioned = _engine(lr_scheduler=scheduler), _engine(optimizer=DeepSpeedZeroOptimizer())
    objects = ManagedObjects(
        {},
        {"optimizer.a": whole.optimizer, "optimizer.b": partitioned.optimizer, "optimizer.c": other},
        {"scheduler": scheduler, "scheduler.1": other},
    )
    found = deepspeed.with_engines(objects, {"model.a": whole, "model.b": partitioned})
    assert found.optimizers == {"optimizer.c": other, "optimizer.a": whole.optimizer}
    assert found.others == {"scheduler.1": other}
    deepspeed.refuse_some_ranks([], (0, 1))
    with pytest.raises(UnsupportedError, match=r"a, b: DeepSpeed divides its state .* this manager has only 2 of them"):
        deepspeed.refuse_some_ranks(["b", "a"], (0, 1))


def test_the_model_of_an_engine_is_loaded_but_for_what_is_left_and_its_masters_are_made_anew() -> None:
    made: list[str] = []
    engine: Any = DataParallel(nn.Linear(1, 1))
    engine.optimizer = SimpleNamespace(
        refresh_fp32_params=lambda: made.append("masters"), checkpoint_event_epilogue=lambda: made.append("caches")
    )
    part = deepspeed.EngineModelPart("model", engine)
    part.load({"weight": torch.full((1, 1), 3.0), "bias": torch.full((1,), 4.0), "more": torch.ones(1)})
    assert [value.item() for value in engine.parameters()] == [3.0, 4.0]
    assert made == ["masters", "caches"]
    engine.module.bias.ds_id = 1  # ZeRO 3 has partitioned it
    part.load({"weight": torch.full((1, 1), 5.0), "bias": torch.zeros(1)}, left=["bias"])
    assert [value.item() for value in engine.parameters()] == [5.0, 4.0]
    deepspeed._fill({"a": torch.ones(1)}, {"a": torch.zeros(1)})  # nothing is partitioned: DeepSpeed is not asked
    assert not deepspeed.is_partitioned(torch.ones(1))
    assert deepspeed.is_partitioned(SimpleNamespace(ds_id=1))
    deepspeed._refresh(SimpleNamespace(optimizer=None))


def test_a_model_without_the_engine_that_trains_it_is_refused() -> None:
    model = nn.Linear(1, 1)
    deepspeed.refuse_bare("model", model)
    model.bias.get_full_hp_param = 1  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="a DeepSpeed engine trains model"):
        deepspeed.refuse_bare("model", model)
    model = nn.Linear(1, 1)
    model.bias.ds_id = 1  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="a DeepSpeed engine trains model"):
        deepspeed.refuse_bare("model", model)


# -- generators and samplers ------------------------------------------------------------------------------------------


def test_the_global_generators_come_back_and_their_difference_is_seen() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = rng.capture()
    assert rng.is_state(before)

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]

    drawn = draw()
    for one in (random.random, np.random.rand, lambda: torch.rand(1)):
        rng.restore(before)
        assert not rng.differ(before, rng.capture())
        one()
        assert rng.differ(before, rng.capture())
    rng.restore(before)
    assert draw() == drawn
    without = {key: value for key, value in before.items() if key != "numpy"}
    np.random.rand()
    rng.restore(without)
    assert not rng.differ(without, before)


class Device:
    """What ckpt asks of torch.cuda, or, with less, of torch.mps."""

    def __init__(self, devices: int, **more: Any) -> None:
        self.states: list[Any] = list(range(devices))
        vars(self).update(more)

    def device_count(self) -> int:
        return len(self.states)

    def set_rng_state(self, state: Any, index: int = 0) -> None:
        self.states[index] = state

    def get_rng_state(self) -> Any:
        return self.states[0]


class Devices(Device):
    def get_rng_state_all(self) -> list[Any]:
        return list(self.states)


def test_generators_of_devices_come_back_where_there_are_such(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, mps = Devices(3, is_initialized=lambda: True), Device(1)
    monkeypatch.setattr(rng, "_accelerators", lambda: {"cuda": cuda, "mps": mps})
    saved = rng.capture()
    assert (saved["cuda"], saved["mps"]) == ([0, 1, 2], [0])
    cuda.states, mps.states = ["x", "y"], ["z"]
    rng.restore(saved)
    assert (cuda.states, mps.states) == ([0, 1], [0])  # one device less than before
    rng.restore({key: value for key, value in saved.items() if key not in ("cuda", "mps")})
    cuda.is_initialized = lambda: False  # type: ignore[attr-defined]
    assert "cuda" not in rng.capture()


def test_a_state_that_no_generator_takes_is_known_before_it_is_restored() -> None:
    good = rng.capture()
    numpy = good["numpy"]
    beyond = {**numpy, "state": {**numpy["state"], "pos": 625}}
    last = {**numpy, "state": {**numpy["state"], "pos": 624}}
    below = {**numpy, "state": {**numpy["state"], "pos": -1}}
    assert rng.is_state({**good, "numpy": last})
    assert rng.is_state({**good, "cuda": [torch.zeros(3, dtype=torch.uint8)]})
    for wrong in (
        {},
        None,
        {**good, "python": (1, 2)},
        {**good, "torch": torch.zeros(3)},
        {**good, "numpy": beyond},
        {**good, "numpy": below},
        {**good, "numpy": {**numpy, "state": {**numpy["state"], "key": [1]}}},
        {**good, "cuda": [torch.zeros(3)]},
        {**good, "cuda": [torch.zeros(3, dtype=torch.uint8), 3]},
        {key: value for key, value in good.items() if key != "torch"},
    ):
        assert not rng.is_state(wrong)


def test_each_kind_of_generator_is_captured_checked_and_restored() -> None:
    made: list[Any] = [
        torch.Generator(),
        random.Random(1),
        np.random.default_rng(1),
        np.random.RandomState(1),
        np.random.Generator(np.random.Philox(1)),
    ]

    def draw(generator: Any) -> float:
        return float(
            torch.rand(1, generator=generator) if isinstance(generator, torch.Generator) else generator.random()
        )

    for generator in made:
        assert rng.is_generator(generator)
        state = copy.deepcopy(rng.capture_one(generator))
        drawn = draw(generator)
        rng.check_one(generator, state)
        assert draw(generator) != drawn  # it was not changed
        rng.restore_one(generator, state)
        assert draw(generator) == drawn
        with pytest.raises(CkptError, match="generator"):
            rng.restore_one(generator, {"no": "state"})
    philox = rng.capture_one(made[-1])
    rng.check_one(made[-1], {**philox, "buffer_pos": 4})
    for wrong in (5, -1):
        with pytest.raises(ValueError, match="buffer_pos"):
            rng.check_one(made[-1], {**philox, "buffer_pos": wrong})
    assert [rng.is_generator(value) for value in (None, 1, np.random, torch)] == [False] * 4


def test_numbers_derived_from_a_state_differ_by_every_further_number() -> None:
    state = torch.get_rng_state()
    numbers = [
        rng.number(state),
        rng.number(state, 0),
        rng.number(state, 1),
        rng.number(state, 1, 2),
        rng.number(state, -1),
    ]
    assert len(set(numbers)) == 5
    assert all(0 <= number < 1 << 63 for number in numbers)
    drawn = []
    for rank in (1, 1, 2):
        rng.derive({"torch": state}, rank)
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(1))))
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))


def test_samplers_and_generators_of_a_loader_are_found_once_each() -> None:
    data: Any = list(range(4))
    generator = torch.Generator()
    sampler = RandomSampler(data, generator=generator)
    loader = DataLoader(data, 2, sampler=sampler, generator=generator)
    assert samplers.samplers(loader) == [loader.batch_sampler, sampler]
    assert samplers.generators(loader) == [generator]
    assert samplers.reader(SimpleNamespace(base_dataloader=loader)) is loader
    assert samplers.samplers(SimpleNamespace(base_dataloader=loader)) == samplers.samplers(loader)
    own = BatchSampler(SequentialSampler(data), 2, False)
    assert samplers.samplers(DataLoader(data, batch_sampler=own))[:2] == [own, own.sampler]
    assert samplers.samplers([1]) == samplers.generators([1]) == []
    other = DataLoader(data, generator=torch.Generator(), sampler=sampler)
    assert samplers.generators(other) == [other.generator, generator]


# -- several objects that are one -------------------------------------------------------------------------------------


def _adam(*sizes: int, lr: float = 0.1, groups: bool = False) -> torch.optim.Optimizer:
    values = [nn.Parameter(torch.ones(size)) for size in sizes]
    given: Any = [{"params": [value]} for value in values] if groups else values
    optimizer = torch.optim.Adam(given, lr=lr)
    for value in values:
        value.grad = torch.full_like(value, float(value.numel()))
    optimizer.step()
    return optimizer


def test_optimizers_that_are_one_have_one_state_and_take_it_back() -> None:
    one, two = _adam(1, 2), _adam(3)
    joined = JoinedOptimizer([one, two])
    saved = copy.deepcopy(joined.state_dict())
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1, 2]]
    assert [len(entry["exp_avg"]) for entry in saved["state"].values()] == [1, 2, 3]
    assert joined.kind == "Adam"
    fresh = JoinedOptimizer([_adam(1, 2, lr=0.5), _adam(3, lr=0.5)])
    for optimizer in fresh.optimizers:
        optimizer.step()
    fresh.load_state_dict(saved)
    assert repr(fresh.state_dict()) == repr(saved)
    assert all(group["lr"] == 0.1 for optimizer in fresh.optimizers for group in optimizer.param_groups)


def test_groups_are_one_by_position_or_by_their_options() -> None:
    def sizes(*optimizers: torch.optim.Optimizer) -> list[list[int]]:
        return [[len(value) for value in group["params"]] for group in JoinedOptimizer([*optimizers]).param_groups]

    assert sizes(_adam(1, 2, groups=True), _adam(3, 4, groups=True)) == [[1, 3], [2, 4]]
    assert sizes(_adam(1), _adam(2, lr=0.2)) == [[1], [2]]
    assert sizes(_adam(1, 2, groups=True), _adam(3)) == [[1, 2, 3]]
    assert sizes(_adam(1, lr=0.2), _adam(2, 3, groups=True), _adam(4, lr=0.2)) == [[1, 4], [2, 3]]
    tensors = [_adam(1), _adam(2), _adam(3)]
    for optimizer, rate in zip(tensors, (1.0, 1.0, 2.0), strict=True):
        optimizer.param_groups[0]["lr"] = torch.tensor(rate)
    assert sizes(*tensors) == [[1, 2], [3]]
    assert sizes(tensors[0], _adam(4, lr=1.0)) == [[1], [4]]


def test_a_lookup_in_the_state_of_all_adds_nothing() -> None:
    optimizer = _adam(1)
    fresh = torch.optim.Adam([nn.Parameter(torch.ones(1))])
    state = JoinedOptimizer([optimizer, fresh]).state
    assert isinstance(state, StateOfAll)
    (parameter,) = optimizer.param_groups[0]["params"]
    (unstepped,) = fresh.param_groups[0]["params"]
    assert state[parameter] is optimizer.state[parameter]
    for missing in (unstepped, torch.ones(1)):
        with pytest.raises(KeyError):
            state[missing]
    assert (len(state), len(list(state)), len(fresh.state)) == (1, 1, 0)


def test_what_cannot_be_one_is_refused() -> None:
    linear = nn.Linear(1, 1)
    sgd = torch.optim.SGD(linear.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="got no objects"):
        Joined([])
    with pytest.raises(ConfigError, match=r"takes torch optimizers of one class, not Adam, SGD"):
        JoinedOptimizer([sgd, _adam(1)])
    with pytest.raises(ConfigError, match="of one class, not object"):
        JoinedOptimizer([object()])
    with pytest.raises(ConfigError, match=r"dataloader=ckpt.Joined\(...\): .* joins only models"):
        Joined([1]).as_one("dataloader")
    with pytest.raises(ConfigError, match="takes modules, not int"):
        Joined([linear, 3]).as_one("model")
    with pytest.raises(ConfigError, match="several parts have parameters named weight, bias"):
        Joined([linear, nn.Linear(1, 1)]).as_one("model")
    many = [nn.ParameterDict({f"p{number}": torch.ones(1) for number in range(7)}) for _ in range(2)]
    with pytest.raises(ConfigError, match="p0, p1, p2, p3, p4 and 2 more"):
        Joined(many).as_one("model")
    staged = Joined({"a": SimpleNamespace(submod=linear), "b": nn.Linear(1, 1)}).as_one("model")
    assert list(parameter_names(staged).values()) == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_a_container_has_its_optimizers_by_their_class() -> None:
    container: Any = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert contained_optimizers(container) == {}
    for inner in ([], "none", [object()], [_adam(1), 3]):
        container.optimizers = inner
        assert contained_optimizers(container) == {}
    adam, sgd, other = _adam(1), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), _adam(2)
    container.optimizers = [adam, sgd, other]
    found = contained_optimizers(container)
    assert {kind: joined.optimizers for kind, joined in found.items()} == {"Adam": [adam, other], "SGD": [sgd]}
    assert contained_optimizers(SimpleNamespace(optimizers=[adam])) == {}

"""What is captured comes back: models, optimizers, schedulers, scalers, generators and the user's own objects."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim import lr_scheduler

import ckpt
from tests.helpers import places
from tests.helpers.places import Place
from tests.helpers.training import exact

RoundTrip = Callable[[dict[str, Any], dict[str, Any]], ckpt.Restored]


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    device = next(model.parameters()).device  # DataParallel moves a model to the GPU where there is one
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4, device=device)).pow(2).sum().backward()
        optimizer.step()


@pytest.fixture
def round_trip(anywhere: str) -> RoundTrip:
    """Saves some objects, and loads them into others."""

    def save_and_load(saved: dict[str, Any], fresh: dict[str, Any]) -> ckpt.Restored:
        with ckpt.StateManager(anywhere, **saved) as manager:
            manager.save_state()
        with ckpt.StateManager(anywhere, **fresh) as manager:
            return manager.load_state()

    return save_and_load


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        nn.DataParallel,
        functools.partial(torch.compile, backend="eager"),
        lambda model: nn.DataParallel(torch.compile(model, backend="eager")),  # type: ignore[type-var]
    ],
    ids=["plain", "DataParallel", "compiled", "both"],
)
def test_no_wrapper_leaves_a_prefix_in_any_name(root: Place, wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, other = _net(), _net()
    wrapped = wrap(model)
    optimizer = torch.optim.Adam(wrapped.parameters())
    _train(model, optimizer)
    with ckpt.StateManager(root, model=wrapped, optimizer=optimizer) as manager:
        manager.save_state("x")
        assert manager.unwrap() is model
    assert safetensors.torch.load((root / "x" / "model.safetensors").read_bytes()).keys() == model.state_dict().keys()
    resumed = torch.optim.Adam(other.parameters())
    with ckpt.StateManager(root, model=other, optimizer=resumed) as manager:
        manager.load_state()
    assert exact(other.state_dict()) == exact(model.state_dict())
    assert exact(resumed.state_dict()) == exact(optimizer.state_dict())


def test_a_wrapper_further_down_leaves_no_prefix_either(anywhere: str) -> None:
    model, other = nn.Sequential(_net(), nn.Linear(2, 2)), nn.Sequential(_net(), nn.Linear(2, 2))
    model[0] = torch.compile(model[0], backend="eager")  # type: ignore[assignment]
    with ckpt.StateManager(anywhere, model=model) as manager:
        manager.save_state()
    with ckpt.StateManager(anywhere, model=other) as manager:
        manager.load_state()
    assert torch.equal(other[1].weight, model[1].weight)  # type: ignore[arg-type]


def test_an_optimizer_comes_back_by_name_though_its_parameters_are_in_another_order(round_trip: RoundTrip) -> None:
    model, other = _net(), _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    _train(model, optimizer)
    reordered = torch.optim.AdamW(reversed(list(other.parameters())))
    round_trip({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": reordered})
    for live, saved in zip(other.parameters(), model.parameters(), strict=True):
        assert exact(reordered.state[live]) == exact(optimizer.state[saved])
    assert reordered.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
        lambda p: torch.optim.AdamW(p, amsgrad=True, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.RMSprop(p, momentum=0.1, centered=True),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.Adamax(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.RAdam(p),
        lambda p: torch.optim.ASGD(p),
        lambda p: torch.optim.Rprop(p),
        lambda p: torch.optim.LBFGS(p, history_size=2),
    ],
)
def test_every_optimizer_comes_back(round_trip: RoundTrip, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        inputs = torch.linspace(-1, 1, 12).reshape(3, 4)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(inputs).pow(2).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        for _ in range(3):
            optimizer.step(closure)  # type: ignore[arg-type]

    model = _net()
    other = copy.deepcopy(model)
    optimizer, resumed = make(model.parameters()), make(other.parameters())
    train(model, optimizer)
    round_trip({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": resumed})
    assert exact(resumed.state_dict()) == exact(optimizer.state_dict())
    train(model, optimizer)
    train(other, resumed)
    assert exact(other.state_dict()) == exact(model.state_dict())


def test_what_an_optimizer_has_is_read_in_place_and_needs_no_memory_twice(tmp_path: Path) -> None:
    model = _net()
    optimizer = torch.optim.Adam(model.parameters())
    with ckpt.StateManager(tmp_path, model=model, optimizer=optimizer) as manager:
        model(torch.rand(3, 4)).sum().backward()
        optimizer.step()
        manager.save_state("a", wait=True)
        moments = [entry["exp_avg"] for entry in optimizer.state.values()]
        saved = [moment.clone() for moment in moments]
        optimizer.step()
        manager.load_state("a")
    for entry, before, value in zip(optimizer.state.values(), moments, saved, strict=True):
        assert entry["exp_avg"] is before
        assert torch.equal(before, value)


class _Compared(int):
    """An index that counts how often it is compared."""

    times = 0

    def __eq__(self, other: object) -> bool:
        _Compared.times += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_an_optimizer_finds_the_parameter_of_a_tensor_without_a_search(tmp_path: Path) -> None:
    def adam() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(50)])
        optimizer = torch.optim.Adam([{"params": model[:20].parameters()}, {"params": model[20:].parameters()}])
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return model, optimizer

    seen: list[Any] = []

    def look(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            assert isinstance(group["params"], list)
            seen.append(list(group["params"]))
            _Compared.times = 0
            assert all(index in group["params"] for index in map(_Compared, group["params"]))
            assert _Compared(50) not in group["params"]
            seen.append(_Compared.times / len(group["params"]))

    model, optimizer = adam()
    with ckpt.StateManager(tmp_path, model=model, optimizer=optimizer) as manager:
        manager.save_state("a")
    model, optimizer = adam()
    optimizer.register_load_state_dict_pre_hook(look)
    with ckpt.StateManager(tmp_path, model=model, optimizer=optimizer) as manager:
        manager.load_state("a")
    (first, compared, second, more) = seen
    assert (first, second) == ([*range(20)], [*range(20, 50)])
    assert max(compared, more) < 3  # a search compares with half of them
    assert [type(group["params"]) for group in optimizer.param_groups] == [list, list]


def test_moments_in_float32_of_weights_in_bfloat16_keep_their_digits(round_trip: RoundTrip) -> None:
    model, other = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).bfloat16()
    optimizer, resumed = torch.optim.SGD(model.parameters()), torch.optim.SGD(other.parameters())
    optimizer.state[model.weight]["moment"] = torch.rand(4, 4)
    round_trip({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": resumed})
    assert torch.equal(resumed.state[other.weight]["moment"], optimizer.state[model.weight]["moment"])


def test_a_parameter_that_no_model_has_is_kept_by_its_number(round_trip: RoundTrip) -> None:
    def make() -> tuple[nn.Module, nn.Parameter, torch.optim.Optimizer]:
        model, temperature = nn.Linear(2, 2), nn.Parameter(torch.ones(3))
        return model, temperature, torch.optim.Adam([*model.parameters(), temperature])

    model, temperature, optimizer = make()
    temperature.grad = torch.ones(3)
    optimizer.step()
    other, warm, resumed = make()
    round_trip({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": resumed})
    assert exact(resumed.state[warm]) == exact(optimizer.state[temperature])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 20),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, mode="triangular2"),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 40),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 10)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=4),
}


@pytest.mark.not_on_s3("nothing is stored")
def test_the_list_of_schedulers_is_complete() -> None:
    there = {name for name in lr_scheduler.__all__ if name != "LRScheduler"}
    assert there <= SCHEDULERS.keys() | {"_LRScheduler"}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_comes_back(round_trip: RoundTrip, name: str) -> None:
    def step(scheduler: Any, times: int) -> None:
        for turn in range(times):
            optimizers[id(scheduler)].step()
            scheduler.step(1.0 + turn % 3) if name == "ReduceLROnPlateau" else scheduler.step()

    optimizers: dict[int, torch.optim.Optimizer] = {}

    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        scheduler = SCHEDULERS[name](optimizer)
        optimizers[id(scheduler)] = optimizer
        return model, optimizer, scheduler

    model, optimizer, scheduler = make()
    if any(map(callable, scheduler.state_dict().values())):
        pytest.skip("this version of torch keeps a function in its state, which is refused by name")
    step(scheduler, 5)
    other, resumed, later = make()
    round_trip(
        {"model": model, "optimizer": optimizer, "scheduler": scheduler},
        {"model": other, "optimizer": resumed, "scheduler": later},
    )
    for _ in range(8):
        step(scheduler, 1)
        step(later, 1)
        assert [group["lr"] for group in resumed.param_groups] == [group["lr"] for group in optimizer.param_groups]


def test_a_gan_with_two_models_and_two_optimizers_comes_back(root: Place) -> None:
    def make() -> dict[str, Any]:
        models = {"generator": _net(), "critic": _net()}
        optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in models.items()}
        return {"model": models, "optimizer": optimizers}

    saved, fresh = make(), make()
    for name in ("generator", "critic"):
        _train(saved["model"][name], saved["optimizer"][name])
    with ckpt.StateManager(root, **saved) as manager:
        manager.save_state("gan")
    with ckpt.StateManager(root, **fresh) as manager:
        restored = manager.load_state()
    assert (root / "gan" / "model.generator.safetensors").exists()
    assert {"model.critic", "optimizer.generator"} <= set(restored.restored)
    for name in ("generator", "critic"):
        assert exact(fresh["model"][name].state_dict()) == exact(saved["model"][name].state_dict())
        assert exact(fresh["optimizer"][name].state_dict()) == exact(saved["optimizer"][name].state_dict())


def test_one_optimizer_over_two_models_knows_whose_parameter_is_whose(round_trip: RoundTrip) -> None:
    def make() -> dict[str, Any]:
        models = [nn.Linear(4, 4), nn.Linear(4, 4)]
        return {"model": models, "optimizer": torch.optim.Adam([p for model in models for p in model.parameters()])}

    saved, fresh = make(), make()
    saved["model"][1].weight.grad = torch.ones(4, 4)
    saved["optimizer"].step()
    round_trip(saved, fresh)
    assert list(fresh["optimizer"].state) == [fresh["model"][1].weight]


def test_tied_weights_are_stored_once_and_stay_tied(root: Place) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 8)
            self.head = nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight

    model, other = Tied(), Tied()
    with ckpt.StateManager(root, model=model) as manager:
        manager.save_state("tied")
    assert (root / "tied").files()["model.safetensors"] == 4096 + 50 * 8 * 4
    with ckpt.StateManager(root, model=other) as manager:
        manager.load_state()
    assert torch.equal(other.head.weight, model.embed.weight)
    assert other.head.weight is other.embed.weight


def test_extra_state_of_a_module_comes_back(round_trip: RoundTrip) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Any = {}

        def get_extra_state(self) -> Any:
            return self.seen

        def set_extra_state(self, state: Any) -> None:
            self.seen = state

    model, other = Counting(), Counting()
    model.seen = {3: (1, {2}), "history": [torch.arange(3)]}
    round_trip({"model": model}, {"model": other})
    assert exact(other.seen) == exact(model.seen)


def test_the_scaler_comes_back(round_trip: RoundTrip) -> None:
    scaler, other = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))  # it wakes up with the first loss
    scaler._growth_tracker.fill_(17)  # type: ignore[union-attr]
    round_trip({"scaler": scaler}, {"scaler": other})
    assert other.state_dict() == scaler.state_dict()


class Ema:
    """An object of the user's own, with a bit of everything in its state."""

    def __init__(self, fill: float) -> None:
        self.state: Any = {"shadow": torch.full((3,), fill), 7: ("a", {1, 2}), "best": float("-inf"), "none": None}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_registered_objects_and_generators_come_back(anywhere: str) -> None:
    def make(seed: int) -> dict[str, Any]:
        return {
            "ema": Ema(float(seed)),
            "average": torch.optim.swa_utils.AveragedModel(_net()),
            "dice": torch.Generator().manual_seed(seed),
            "numpy_dice": np.random.default_rng(seed),
            "old_dice": np.random.RandomState(seed),
            "python_dice": random.Random(seed),
        }

    saved, fresh = make(1), make(2)
    with ckpt.StateManager(anywhere, model=_net()) as manager:
        manager.register(**saved)
        manager.save_state()
    with ckpt.StateManager(anywhere, model=_net()) as manager:
        manager.register(**fresh)
        manager.load_state()
    assert exact(fresh["ema"].state) == exact(saved["ema"].state)
    assert exact(fresh["average"].state_dict()) == exact(saved["average"].state_dict())
    assert torch.equal(torch.rand(3, generator=fresh["dice"]), torch.rand(3, generator=saved["dice"]))
    assert fresh["numpy_dice"].random() == saved["numpy_dice"].random()
    assert fresh["old_dice"].rand() == saved["old_dice"].rand()
    assert fresh["python_dice"].random() == saved["python_dice"].random()


def test_the_global_generators_come_back(anywhere: str) -> None:
    def draw() -> Any:
        return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()

    random.gauss(0, 1)  # leaves a second number behind, which is state too
    with ckpt.StateManager(anywhere, model=_net()) as manager:
        manager.save_state()
        drawn = draw()
        draw()
        manager.load_state()
    assert draw() == drawn


def test_gradients_are_saved_when_asked_for(round_trip: RoundTrip) -> None:
    def make() -> nn.Linear:
        model = nn.Linear(3, 3)
        model(torch.ones(1, 3)).sum().backward()
        return model

    model, other = make(), make()
    assert model.weight.grad is not None
    model.weight.grad.mul_(5)
    model.bias.grad = None
    saving = ckpt.SaveOptions(gradients=True)
    round_trip({"model": model, "saving": saving}, {"model": other, "saving": saving})
    assert exact(other.weight.grad) == exact(model.weight.grad)
    assert other.bias.grad is None


def test_a_checkpoint_of_another_name_and_of_the_same_name_again(anywhere: str) -> None:
    model = nn.Linear(2, 2)
    with ckpt.StateManager(anywhere, model=model) as manager:
        for value in (1.0, 2.0, 3.0):
            nn.init.constant_(model.weight, value)
            assert manager.save_state("latest") == "latest"
            nn.init.zeros_(model.weight)
            manager.load_state("latest")
            assert torch.equal(model.weight, torch.full((2, 2), value))
    assert [found.name for found in ckpt.list_checkpoints(anywhere)] == ["latest"]
    assert ckpt.verify(anywhere) == {"latest": []}


def test_going_back_by_name_says_that_it_lasts_from_the_next_save_on(
    anywhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ckpt")
    with ckpt.StateManager(anywhere, model=nn.Linear(1, 1)) as manager:
        for name in ("first", "second"):
            manager.save_state(name, wait=True)
        manager.load_state("second")
        assert "is newer than" not in caplog.text
    for saves, newest in ((False, "second"), (True, "first")):
        with ckpt.StateManager(anywhere, model=nn.Linear(1, 1)) as manager:
            manager.load_state("first")
            assert "second is newer than first, which you loaded by name" in caplog.text
            if saves:
                manager.save_state("first")
        with ckpt.StateManager(anywhere, model=nn.Linear(1, 1)) as manager:
            restored = manager.resume()
            assert restored is not None
            assert restored.name == newest


def test_replacing_a_checkpoint_leaves_no_file_of_the_old_one_and_touches_no_other(root: Place) -> None:
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
        manager.save_state("latest", wait=True)
        before = set((root / "latest").files())
        (root / "latest" / "notes.txt").write_bytes(b"mine")
        manager.save_state("latest")
    after = set((root / "latest").files())
    assert len(after) == len(before) + 1
    assert (root / "latest" / "notes.txt").read_bytes() == b"mine"


def test_the_newest_is_the_one_saved_last_not_the_one_with_the_highest_step(anywhere: str) -> None:
    with ckpt.StateManager(anywhere, model=nn.Linear(1, 1)) as manager:
        manager.resume()
        for _ in range(3):
            manager.step()
            manager.save_state()
        manager.load_state("step-00000001")
        manager.save_state("from-one")
        assert manager.load_state().name == "from-one"
    newest, *_ = ckpt.list_checkpoints(anywhere)
    first = ckpt.list_checkpoints(anywhere)[-1]
    assert newest.manifest is not None
    assert first.manifest is not None
    assert newest.manifest.parent == first.manifest.id  # lineage
    assert newest.manifest.run == first.manifest.run


def test_a_moved_or_copied_checkpoint_loads_under_its_new_name(root: Place) -> None:
    model = nn.Linear(2, 2)
    with ckpt.StateManager(root, model=model) as manager:
        manager.save_state("old", wait=True)
        places.copy(root / "old", root / "new")
        (root / "old").remove()
        assert manager.load_state("new").name == "new"
    assert ckpt.verify(root) == {"new": []}


def test_a_part_that_is_not_managed_here_is_skipped_by_name(round_trip: RoundTrip) -> None:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    restored = round_trip({"model": model, "optimizer": optimizer}, {"model": _net()})
    assert restored.skipped == {"optimizer": "in the checkpoint, but not managed here"}


def test_strict_lists_everything_that_does_not_fit_and_changes_nothing(anywhere: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with ckpt.StateManager(anywhere, model=model) as manager:
        manager.save_state()
    other = nn.Sequential(nn.Linear(4, 5), nn.Linear(4, 4).double(), nn.Identity(), nn.Linear(2, 2))
    before = exact(other.state_dict())
    scheduler = lr_scheduler.StepLR(torch.optim.SGD(other.parameters()), 1)
    with (
        ckpt.StateManager(anywhere, model=other, scheduler=scheduler) as manager,
        pytest.raises(ckpt.MismatchError, match="nothing was changed") as caught,
    ):
        manager.load_state()
    assert caught.value.problems == (
        "model: 0.bias: shape [4] in the checkpoint, [5] here",
        "model: 0.weight: shape [4, 4] in the checkpoint, [5, 4] here",
        "model: 1.bias: dtype float32 in the checkpoint, float64 here",
        "model: 1.weight: dtype float32 in the checkpoint, float64 here",
        "model: 2.bias: unexpected: the model has no such key",
        "model: 2.weight: unexpected: the model has no such key",
        "model: 3.bias: missing in the checkpoint",
        "model: 3.weight: missing in the checkpoint",
        "scheduler: missing: the checkpoint has no such part",
    )
    assert "strict=False" in str(caught.value)
    assert exact(other.state_dict()) == before


def test_without_strict_what_fits_is_restored_and_the_rest_is_listed(anywhere: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with ckpt.StateManager(anywhere, model=model) as manager:
        manager.save_state()
    other = nn.Sequential(nn.Linear(4, 4).double(), nn.Linear(4, 5))
    kept = exact(other[1].state_dict())
    with ckpt.StateManager(anywhere, model=other) as manager:
        restored = manager.load_state(strict=False)
    assert exact(other[0].state_dict()) == exact(model[0].double().state_dict())
    assert exact(other[1].state_dict()) == kept
    assert restored.skipped.keys() == {"model.1.weight", "model.1.bias"}
    assert restored.approximated.keys() == {"model.0.weight", "model.0.bias"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: torch.optim.SGD(m.parameters()), "optimizer: a Adam in the checkpoint, a SGD here"),
        (
            lambda m: torch.optim.Adam([{"params": m[0].parameters()}, {"params": m[3].parameters()}]),
            "param_groups: 1 in",
        ),
        (lambda m: torch.optim.Adam(m[0].parameters()), "unexpected: the optimizer has no such parameter"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused(
    round_trip: RoundTrip, change: Callable[[Any], torch.optim.Optimizer], message: str
) -> None:
    model, other = _net(), _net()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ckpt.MismatchError, match=message):
        round_trip({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": change(other)})


def test_a_load_says_one_line_and_restored_prints_as_a_short_table(
    round_trip: RoundTrip, anywhere: str, capsys: pytest.CaptureFixture[str]
) -> None:
    restored = round_trip({"model": _net()}, {"model": _net()})
    _, resumed, lines = capsys.readouterr().err.partition("resumed")  # the save has said a line too
    where = f"resumed from {anywhere}/step-00000000: step 0, epoch 0, batch 0"
    assert resumed + lines == f"{where}\n"
    assert str(restored) == f"{where}\n  restored      model, rng, progress"


def test_options_come_from_yaml(root: Place, tmp_path: Path) -> None:
    config = tmp_path / "ckpt.yaml"
    config.write_text(f"root: {root}\nsave_every: 2\nkeep: {{last: 2, best: 1, metric: loss}}\n")
    with ckpt.StateManager.from_config(config, model=nn.Linear(1, 1)) as manager:
        manager.resume()
        for loss in (1.0, 0.5, 3.0, 0.1, 2.0, 4.0, 5.0, 6.0):
            manager.step(metrics={"loss": loss})
    assert {found.name for found in ckpt.list_checkpoints(root)} == {
        "step-00000004",
        "step-00000006",
        "step-00000008",
    }


def test_the_final_state_is_saved_when_the_epochs_are_done(anywhere: str) -> None:
    for _ in range(2):  # the second run finds that all is done
        with ckpt.StateManager(anywhere, model=nn.Linear(1, 1), save_every=1000) as manager:
            for _ in manager.epochs(2):
                for _ in manager.batches(range(3)):
                    manager.step()
    assert [found.name for found in ckpt.list_checkpoints(anywhere)] == ["step-00000006"]

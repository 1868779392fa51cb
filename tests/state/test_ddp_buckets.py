"""DDP's gradient buckets and communication hooks: a resumed run sums and compresses gradients as before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.compat import torch_ddp
from ckpt.state.ddp import Buckets, _captured_power_sgd, _power_sgd_misfit, buckets_of, saved_buckets
from tests.helpers.processes import run_ranks
from tests.helpers.renamed import renamed
from tests.helpers.training import exact

SAVED, END = 4, 8  # steps


def _model(*, bucket_cap_mb: float = 0.002, **options: Any) -> DistributedDataParallel:
    layers = nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 12))
    return DistributedDataParallel(layers, bucket_cap_mb=bucket_cap_mb, **options)


def _power(hook: Any = powersgd.powerSGD_hook, start: int = 2, **options: Any) -> Callable[[], DistributedDataParallel]:
    def built() -> DistributedDataParallel:
        model = _model(bucket_cap_mb=25)  # gloo's ranks begin the collectives of several buckets in different orders
        state = powersgd.PowerSGDState(None, start_powerSGD_iter=start, min_compression_rate=1, **options)
        model.register_comm_hook(state, hook)
        return model

    return built


Cases = dict[str, Callable[[], DistributedDataParallel]]

PLAIN: Cases = {
    "plain": _model,
    "views": lambda: _model(gradient_as_bucket_view=True),
    "static graph": lambda: _model(static_graph=True),
}
POWER: Cases = {
    "warm": _power(),
    "cold": _power(warm_start=False),
    "rank 2, shapes batched": _power(matrix_approximation_rank=2, batch_tensors_with_same_shape=True),
    "begins after the save": _power(start=SAVED),
    "fp16": _power(default_hooks.fp16_compress_wrapper(powersgd.powerSGD_hook)),
}


def _train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        numbers = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=numbers)).pow(2).mean().backward()
        optimizer.step()


def _state(model: DistributedDataParallel) -> str:
    states: list[Any] = [state for _, state in model._comm_hooks]
    hooks = [(state.iter, state.error_dict, state.q_memory_dict) for state in states]
    return exact([model.module.state_dict(), hooks])


def _manager(root: str, model: nn.Module, optimizer: Any) -> ckpt.StateManager:
    ranks = ckpt.RankOptions(timeout=60)
    return ckpt.StateManager(root, model=model, optimizer=optimizer, ranks=ranks)


def _straight(rank: int, folder: str, cases: Cases) -> None:
    for case, build in cases.items():
        torch.manual_seed(1)
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with _manager(f"{folder}/{case}", model, optimizer) as manager:
            _train(model, optimizer, range(SAVED))
            manager.save_state("middle")
            _train(model, optimizer, range(SAVED, END))
        Path(folder, f"{case}-{rank}").write_text(_state(model))


def _resumed(rank: int, folder: str, cases: Cases) -> None:
    for case, build in cases.items():
        torch.manual_seed(2)
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with _manager(f"{folder}/{case}", model, optimizer) as manager:
            restored = manager.load_state("middle")
            assert not restored.approximated, (case, restored)
            _train(model, optimizer, range(SAVED, END))
        assert _state(model) == Path(folder, f"{case}-{rank}").read_text(), case


def _straight_plain(rank: int, folder: str) -> None:
    _straight(rank, folder, PLAIN)


def _resumed_plain(rank: int, folder: str) -> None:
    _resumed(rank, folder, PLAIN)


def _straight_power(rank: int, folder: str) -> None:
    _straight(rank, folder, POWER)


def _resumed_power(rank: int, folder: str) -> None:
    _resumed(rank, folder, POWER)


@pytest.mark.slow
def test_three_ranks_under_ddp_sum_gradients_after_a_resume_as_before_bit_for_bit(tmp_path: Path) -> None:
    assert run_ranks(3, _straight_plain, str(tmp_path)) == [0] * 3
    assert run_ranks(3, _resumed_plain, str(tmp_path)) == [0] * 3


@pytest.mark.slow
def test_power_sgd_goes_on_bit_for_bit_with_each_ranks_own_error_feedback(tmp_path: Path) -> None:
    assert run_ranks(2, _straight_power, str(tmp_path)) == [0, 0]
    ends = [Path(tmp_path, f"warm-{rank}").read_text() for rank in range(2)]
    assert ends[0] != ends[1], "the ranks have the same error feedback: this test could not tell them apart"
    assert run_ranks(2, _resumed_power, str(tmp_path)) == [0, 0]


def _messages() -> list[str]:
    said: list[str] = []
    logging.getLogger("ckpt").addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    handler.setLevel(logging.WARNING)
    return said


def _load_warm(rank: int, folder: str, build: Callable[[], DistributedDataParallel], named: str) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with _manager(f"{folder}/warm", model, optimizer) as manager:
        restored = manager.load_state("middle")
        hooks = {key: why for key, why in restored.approximated.items() if key.startswith("comm_hooks")}
        assert named in str(hooks), hooks
        assert len(hooks) == 1, hooks
        _train(model, optimizer, range(SAVED, END))


def _load_elsewhere(rank: int, folder: str) -> None:
    plain = nn.Sequential(*_model().module)
    for case, skipped in (("warm", {"comm_hooks (each rank's own)"}), ("plain", set())):
        with _manager(f"{folder}/{case}", plain, torch.optim.SGD(plain.parameters(), momentum=0.9)) as manager:
            assert manager.load_state("middle").skipped.keys() == skipped
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with _manager(f"{folder}/warm", model, optimizer) as manager:
        named = manager.load_state("middle").approximated
    assert "no such hook here: the state of the saved run's PowerSGDState is not used" in named["comm_hooks.model/0"]


def _save_warm_and_plain(rank: int, folder: str) -> None:
    _straight(rank, folder, {"warm": POWER["warm"], "plain": _model})


@pytest.mark.slow
def test_what_is_saved_of_hooks_and_nobody_uses_is_named_and_buckets_alone_are_not(tmp_path: Path) -> None:
    assert run_ranks(3, _save_warm_and_plain, str(tmp_path)) == [0, 0, 0]
    assert run_ranks(3, _load_elsewhere, str(tmp_path)) == [0, 0, 0]


def _save_warm(rank: int, folder: str) -> None:
    _straight(rank, folder, {"warm": POWER["warm"]})


OTHERS: dict[str, tuple[Callable[[], DistributedDataParallel], str]] = {
    "another rank": (
        _power(matrix_approximation_rank=2),
        "saved with another matrix_approximation_rank: it starts over",
    ),
    "another hook": (POWER["fp16"], "saved with another communication hook: it starts over"),
}


def _load_others(rank: int, folder: str) -> None:
    for build, named in OTHERS.values():
        _load_warm(rank, folder, build, named)


def _load_by_more(rank: int, folder: str) -> None:
    _load_warm(rank, folder, POWER["warm"], "saved by a different number of ranks (2, and there are 3 here)")


@pytest.mark.slow
def test_power_sgds_state_for_another_hook_or_other_ranks_begins_anew_and_is_named(tmp_path: Path) -> None:
    assert run_ranks(2, _save_warm, str(tmp_path)) == [0, 0]
    assert run_ranks(2, _load_others, str(tmp_path)) == [0, 0]
    assert run_ranks(3, _load_by_more, str(tmp_path)) == [0, 0, 0]


class _Memory:
    """The state of a hook of the user's own."""

    seen = 0


def _summed(state: Any, bucket: Any) -> Any:
    state.seen += 1
    return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]


_summed.__annotations__.clear()  # DDP compares annotations with its own, and these are text


class _KeptMemory(_Memory):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def _own_hooks(rank: int, folder: str) -> None:
    said = _messages()
    for state in (_Memory(), _KeptMemory()):
        model, root = _model(), f"{folder}/{type(state).__name__}"
        model.register_comm_hook(state, _summed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with _manager(root, model, optimizer) as manager:
            manager.save_state("before")
            _train(model, optimizer, range(1))
            manager.save_state("after-one-step")
            _train(model, optimizer, range(1, 2))
            manager.save_state("a")
            seen, state.seen = state.seen, 0
            restored = manager.load_state("a")
            named = manager.load_state("after-one-step").approximated
        assert state.seen == (0 if type(state) is _Memory else 1)
        assert seen >= 2
        assert ("model.comm_hook" in restored.approximated) == (type(state) is _Memory)
        assert "saved after the first step" in named["model.buckets"]
        assert "model.buckets" not in restored.approximated
    lines = [text for text in said if text.startswith("checkpoints lack") and "_Memory has no state_dict" in text]
    assert len(lines) == (rank == 0), said


@pytest.mark.slow
def test_the_state_of_a_hook_of_the_users_own_is_kept_or_named(tmp_path: Path) -> None:
    assert run_ranks(2, _own_hooks, str(tmp_path)) == [0, 0]


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 20, bias=False), nn.Linear(20, 20, bias=False)
        self.swapped = False

    def forward(self, x: torch.Tensor) -> Any:
        layers = [self.first, self.second]
        for layer in reversed(layers) if self.swapped else layers:
            x = layer(x).tanh()
        return x


def _with_branches(rank: int, folder: str, swapped: bool) -> None:
    said = _messages()
    torch.manual_seed(1)
    model = DistributedDataParallel(_Branches())
    state = powersgd.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powersgd.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.module.swapped = swapped
    with _manager(f"{folder}/runs", model, optimizer) as manager:
        if swapped:
            manager.load_state("a")
        _train(model, optimizer, range(SAVED))
        manager.save_state("b" if swapped else "a", wait=True)
    assert len([text for text in said if "gradients arrived in a different order" in text]) == swapped
    assert state.error_dict


@pytest.mark.slow
def test_error_feedback_is_never_added_to_other_gradients_where_ddp_lays_out_other_buckets(tmp_path: Path) -> None:
    assert run_ranks(2, _with_branches, str(tmp_path), False) == [0, 0]
    assert run_ranks(2, _with_branches, str(tmp_path), True) == [0, 0]


WRONG: list[Any] = [
    *(None, 3, [], [[]], [[[0, 4]]], [[[0, 5], [5, 5]]], [[[0, 6]]], [[[-1, 5]]], [[[0, 5]], []], [[[0.0, 5]]])
]


def _hostile_layouts(rank: int) -> None:
    model = _model()
    digest = buckets_of(model).parameters
    assert saved_buckets(model, {"layout": [[[5, 0]]], "parameters": digest}) == Buckets(((5, 4, 3, 2, 1, 0),), digest)
    mixed = Buckets(((0, 2, 1), (5, 4, 3)), digest)
    assert saved_buckets(model, mixed.as_json()) == mixed
    for layout in WRONG:
        assert saved_buckets(model, {"layout": layout, "parameters": digest}) is None, layout
    assert saved_buckets(model, {"layout": [[[5, 0]]], "parameters": "another"}) is None
    assert saved_buckets(model, "nonsense") is None


@pytest.mark.slow
def test_a_layout_that_does_not_have_every_parameter_once_is_not_used() -> None:
    assert run_ranks(2, _hostile_layouts) == [0, 0]


def test_hooks_are_not_registered_by_hand(tmp_path: Path) -> None:
    state: Any = powersgd.PowerSGDState(None)
    with ckpt.StateManager(tmp_path, model=nn.Linear(2, 2)) as manager:
        with pytest.raises(ckpt.ConfigError, match="is saved with the DistributedDataParallel model that has the hook"):
            manager.register(power=state)
        with pytest.raises(ckpt.ConfigError, match="is saved with the DistributedDataParallel model that has the hook"):
            manager.register(power=state, per_rank=True)


def _without_private_side(rank: int, folder: str) -> None:
    said = _messages()
    model = POWER["warm"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _manager(folder, model, optimizer) as manager:
        _train(model, optimizer, range(3))
        with renamed(torch_ddp.REBUILT):
            manager.save_state("a", wait=True)
        restored = manager.load_state("a")
    assert "this DDP has no _has_rebuilt_buckets" in restored.approximated["model.buckets"]
    assert "PowerSGD's error feedback is not saved, and starts over" in restored.approximated["model.powerSGD"]
    assert len([text for text in said if "model.powerSGD" in text and "checkpoints lack" in text]) == (rank == 0)


@pytest.mark.slow
def test_a_save_does_not_fail_where_ddp_does_not_tell_its_buckets(tmp_path: Path) -> None:
    assert run_ranks(2, _without_private_side, str(tmp_path)) == [0, 0]


def test_error_feedback_of_buckets_that_are_not_there_does_not_fit() -> None:
    state, hook = powersgd.PowerSGDState(None), powersgd.powerSGD_hook
    saved = _captured_power_sgd(state, hook)
    assert _power_sgd_misfit(state, hook, saved, 1) is None
    assert _power_sgd_misfit(state, hook, {**saved, "error_dict": {"1": None}}, 1) == "saved with other buckets"

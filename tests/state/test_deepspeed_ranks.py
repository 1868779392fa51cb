"""ZeRO's partitions are cut anew for another number of ranks: master weights and moments, bit for bit."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.helpers.processes import run_alone, run_ranks
from tests.helpers.training import exact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]
STAGES = (3, 2, 1)


def _engine(rank: int, stage: int) -> Any:
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from tests.helpers.engines import build
    from tests.helpers.zero_folders import start

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 10, "sub_group_size": 8}
    return start(build(), stage, rank, zero_optimization=zero)


def _gathered(engine: Any) -> str:
    """The master weights and moments of every parameter, and the rate of every group."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() < 3:
        return exact(_joined(engine))
    found: dict[str, Any] = {"rates": [group["lr"] for group in engine.optimizer.param_groups]}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            moments = [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
            found[name] = [safe_get_full_fp32_param(parameter), *moments]
    return exact(found)


def _joined(engine: Any) -> list[Any]:
    """Of ZeRO 1 and 2: the partitions of all ranks one behind the other, without padding."""
    import torch.distributed as dist

    state = engine.optimizer.state_dict()
    moments = state["base_optimizer_state"]["state"]
    mine = [
        [master, moments[group]["exp_avg"], moments[group]["exp_avg_sq"]]
        for group, master in enumerate(state["single_partition_of_fp32_groups"])
    ]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    counts = [sum(map(torch.Size.numel, group.values())) for group in engine._get_zero_param_shapes()]
    return [
        [torch.cat([partitions[group][kind] for partitions in ranks])[:count] for kind in range(3)]
        for group, count in enumerate(counts)
    ] + [entry["step"] for entry in moments.values()]


def _train(engine: Any) -> None:
    from tests.helpers.engines import WORDS

    engine.backward(engine(torch.arange(4) % WORDS, torch.ones(4)))
    engine.step()


def _trained(rank: int, folder: str) -> None:
    for stage in STAGES:
        engine = _engine(rank, stage)
        for _ in range(2):
            _train(engine)
        with ckpt.StateManager(f"{folder}/{stage}", model=engine) as manager:
            manager.save_state("first", wait=True)
        found = _gathered(engine)
        if rank == 0:
            Path(folder, f"{stage}.txt").write_text(found)
        engine.destroy()


def _resumed(rank: int, folder: str, name: str) -> None:
    for stage in STAGES:
        engine = _engine(rank, stage)
        with ckpt.StateManager(f"{folder}/{stage}", model=engine) as manager:
            restored = manager.resume()
            assert restored is not None
            assert "deepspeed-00000" in restored.resharded, restored
            assert not any("deepspeed" in key for key in restored.skipped), restored
            assert _gathered(engine) == Path(folder, f"{stage}.txt").read_text(), stage
            manager.save_state(name, wait=True)
        _train(engine)
        assert _gathered(engine) != Path(folder, f"{stage}.txt").read_text()
        engine.destroy()


def test_partitions_of_four_ranks_are_resumed_by_two_by_one_and_by_four_again(tmp_path: Path) -> None:
    assert run_ranks(4, _trained, str(tmp_path)) == [0] * 4
    assert run_ranks(2, _resumed, str(tmp_path), "by-two") == [0, 0]
    assert run_alone(_resumed, str(tmp_path), "by-one") == 0
    assert run_ranks(4, _resumed, str(tmp_path), "by-four") == [0] * 4


class WithMatrix(torch.optim.AdamW):
    """Keeps a matrix beside each partition, as preconditioners do."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            state["preconditioner"] = torch.eye(2)
        return loss


CASES: dict[str, dict[str, Any]] = {"preconditioned": {}, "aligned": {"parameter_alignment": True}, "separate": {}}


def _case(rank: int, case: str, **zero: Any) -> Any:
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from tests.helpers.engines import build
    from tests.helpers.zero_folders import start

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    kind = WithMatrix if case == "preconditioned" else torch.optim.AdamW
    return start(build(), 2, rank, kind, zero_optimization={"stage": 2, **zero}, zero_allow_untested_optimizer=True)


def _saved_cases(rank: int, folder: str) -> None:
    for case, zero in CASES.items():
        engine = _case(rank, case, **zero)
        _train(engine)
        of_host = f"-{rank}" if case == "separate" else ""
        with ckpt.StateManager(
            f"{folder}/{case}{of_host}", model=engine, ranks=ckpt.RankOptions(shared=not of_host)
        ) as manager:
            manager.save_state("first", wait=True)
        engine.destroy()


def _refused_cases(rank: int, folder: str) -> None:
    reasons = {
        "preconditioned": "its preconditioner is not stored per element, so it fits only the same number of ranks",
        "aligned": "another parameter_alignment than here",
        "separate-0": r"saved by a different number of ranks \(2, and there are 1 here\) with separate roots",
    }
    for root, why in reasons.items():
        engine = _case(rank, root)
        before = _gathered_weights(engine)
        with ckpt.StateManager(f"{folder}/{root}", model=engine) as manager:
            with pytest.raises(ckpt.MismatchError, match=why) as caught:
                manager.resume()
            assert len(str(caught.value).splitlines()) <= 4, str(caught.value)
            assert _gathered_weights(engine) == before
            restored = manager.load_state("first", strict=False)
            assert any("deepspeed-00000" in key for key in restored.skipped), restored
            assert _gathered_weights(engine) != before  # the model's weights, from which the optimizer begins anew
        engine.destroy()


def _gathered_weights(engine: Any) -> str:
    return exact(engine.module.state_dict())


def test_what_cannot_be_cut_anew_is_refused_with_the_reason_and_then_begins_anew(tmp_path: Path) -> None:
    assert run_ranks(2, _saved_cases, str(tmp_path)) == [0, 0]
    # brought together by hand, as the error about missing files says
    shutil.copytree(tmp_path / "separate-1" / "first", tmp_path / "separate-0" / "first", dirs_exist_ok=True)
    assert run_alone(_refused_cases, str(tmp_path)) == 0

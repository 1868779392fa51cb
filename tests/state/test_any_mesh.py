"""Models on meshes of every origin: what counts is which ranks a mesh has, not what it is called or was made from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import ckpt
from ckpt.formats.layout import Layout, over_all_ranks
from tests.helpers.processes import run_ranks
from tests.helpers.sharded import MODELS, parallelized, plain, state, step

RANKS = ckpt.RankOptions(timeout=60)


def _unflattened() -> Any:
    """As torchtitan makes its meshes: all names are of a mesh that was made from another, of one dimension."""
    return init_device_mesh("cpu", (4,), mesh_dim_names=("world",))._unflatten(0, (2, 2), ("dp", "tp"))


def _on(mesh: Callable[[], Any], seed: int) -> nn.Module:
    model = plain(seed)
    fully_shard(model, mesh=mesh())
    return model


def _over_tensor_parallel(seed: int) -> nn.Module:
    mesh = _unflattened()
    model = parallelized(plain(seed), mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def _flattened() -> Any:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "cp"))
    return mesh["shard", "cp"]._flatten("fsdp")


def _apart() -> Any:
    """Ranks 0 and 2, and 1 and 3: a dimension of a mesh whose ranks are not in their order."""
    return DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b"))["b"]


def _hybrid_fsdp1(seed: int) -> nn.Module:
    rank = dist.get_rank()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    return FullyShardedDataParallel(
        plain(seed),
        process_group=(inside, between),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


WAYS: dict[str, Callable[[int], nn.Module]] = {
    "a dimension of an unflattened mesh": partial(_on, lambda: _unflattened()["dp"]),
    "the inner dimension of an unflattened mesh": partial(_on, lambda: _unflattened()["tp"]),
    "FSDP over TP on an unflattened mesh": _over_tensor_parallel,
    "flattened dimensions": partial(_on, _flattened),
    "a dimension of a mesh in another order": partial(_on, _apart),
    "FSDP 1 with two process groups": _hybrid_fsdp1,
}


def _save(rank: int, root: str) -> None:
    for number, build in enumerate(WAYS.values()):
        model = build(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with ckpt.StateManager(f"{root}/{number}", model=model, optimizer=optimizer, ranks=RANKS) as manager:
            step(model, optimizer, 0)
            manager.save_state("saved")
            saved = state(model, optimizer)
            step(model, optimizer, 1)
            later = state(model, optimizer)
        if rank == 0:
            Path(root, f"{number}.txt").write_text(saved)
            Path(root, f"{number}-later.txt").write_text(later)


def _load(rank: int, root: str, way: str | None) -> None:
    for number, (name, build) in enumerate(WAYS.items()):
        model = build(2) if way is None else MODELS[way](2)
        optimizer = torch.optim.AdamW(model.parameters())
        with ckpt.StateManager(f"{root}/{number}", model=model, optimizer=optimizer, ranks=RANKS) as manager:
            manager.load_state("saved")
            assert state(model, optimizer) == Path(root, f"{number}.txt").read_text(), name
            if way is None:
                step(model, optimizer, 1)
                assert state(model, optimizer) == Path(root, f"{number}-later.txt").read_text(), name


def _save_whole(rank: int, root: str) -> None:
    model = _hybrid_fsdp1(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, 0)
    whole = ckpt.SaveOptions(layout="full")
    with ckpt.StateManager(f"{root}/run", model=model, optimizer=optimizer, saving=whole, ranks=RANKS) as manager:
        manager.save_state("saved")
    if rank == 0:
        Path(root, "saved.txt").write_text(state(model, optimizer))
    else:
        state(model, optimizer)


@pytest.mark.slow
def test_a_model_over_two_process_groups_is_gathered_into_whole_files(tmp_path: Path) -> None:
    run_ranks(4, _save_whole, str(tmp_path))
    model = plain(2)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.StateManager(tmp_path / "run", model=model, optimizer=optimizer) as manager:
        manager.load_state("saved")
    assert state(model, optimizer) == (tmp_path / "saved.txt").read_text()


@pytest.mark.slow
def test_a_model_on_any_mesh_is_loaded_by_any_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(4, _save, str(tmp_path))
    for number in range(len(WAYS)):
        assert not list(tmp_path.glob(f"{number}/saved/*own*")), "kept per rank, as if the ranks differed"
    run_ranks(4, _load, str(tmp_path), None)
    run_ranks(2, _load, str(tmp_path), "fsdp2")
    _load(0, str(tmp_path), "ddp")


@pytest.mark.parametrize(
    ("ranks", "world_size", "parts"),
    [
        ((0, 1), 4, ((0, 1), (2, 3))),
        ((1, 3), 4, ((0, 2), (1, 3))),
        ((0, 1, 4, 5), 8, ((0, 1, 4, 5), (2, 3, 6, 7))),
        ((3, 2), 4, ((1, 0), (3, 2))),
        ((0, 1, 2, 3), 4, ((0, 1, 2, 3),)),
        ((1, 2), 4, ((1, 2),)),  # no pattern that makes up all ranks
        ((0, 1, 3), 6, ((0, 1, 3),)),
        ((0, 1), 5, ((0, 1),)),
    ],
)
def test_the_layout_over_all_ranks_repeats_the_pattern_of_some(
    ranks: tuple[int, ...], world_size: int, parts: tuple[tuple[int, ...], ...]
) -> None:
    found = over_all_ranks(Layout((len(ranks),), ranks, ("S0",)), tuple(range(world_size)))
    assert found.ranks == tuple(rank for part in parts for rank in part)
    assert found.mesh == ((len(parts), len(ranks)) if len(parts) > 1 else (len(ranks),))
    assert found.placements == (("R", "S0") if len(parts) > 1 else ("S0",))

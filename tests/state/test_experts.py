"""Expert parallelism: every rank has its own experts, and any number of ranks loads what they saved."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ckpt
from tests.helpers.experts import EXPERTS, WAYS, WIDTH, ranks
from tests.helpers.pipelines import Job, digest, missing, read, write
from tests.helpers.processes import run_ranks

pytestmark = pytest.mark.slow

RANKS = ckpt.RankOptions(timeout=100)
SAVED = ("plain", "plain copies", "DTensors", "unflattened", "named")


def _manager(root: str, job: Job) -> ckpt.StateManager:
    return ckpt.StateManager(root, model=job.parts[0], optimizer=job.optimizers[0], ranks=RANKS)


def _save(rank: int, folder: str, ways: tuple[str, ...]) -> None:
    for way in ways:
        job = WAYS[way](1)
        with _manager(f"{folder}/{way}", job) as manager:
            job.step(0)
            manager.save_state("saved", wait=False)
            write(folder, way, job.digests())
            job.step(1)
            write(folder, f"{way}-later", job.digests())


def _load(rank: int, folder: str, ways: dict[str, str], stepped: bool = False) -> None:
    """`ways`: into what every checkpoint is loaded. `stepped`: into state that is there already."""
    for saved, way in ways.items():
        job = WAYS[way](2)
        if stepped:
            job.step(5)
        with _manager(f"{folder}/{saved}", job) as manager:
            restored = manager.load_state("saved")
            assert set(restored.approximated) <= {"rng"}, (saved, restored.approximated)
            assert not restored.skipped, (saved, restored.skipped)
            assert not missing(job.digests(), read(folder, saved)), (saved, way)
            if saved == way and ranks() == 4:
                job.step(1)
                assert not missing(job.digests(), read(folder, f"{saved}-later")), saved


def test_experts_are_loaded_by_any_number_of_ranks_and_straight_equals_interrupted(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_ranks(4, _save, folder, SAVED)
    names = read(folder, "plain")
    assert {"experts.up", "experts.down", "experts.up/exp_avg", "experts.down/exp_avg_sq"} <= names.keys()
    run_ranks(4, _load, folder, {way: way for way in SAVED})
    around = {"plain": "unflattened", "plain copies": "DTensors", "DTensors": "plain", "unflattened": "plain copies"}
    run_ranks(2, _load, folder, {**around, "named": "named"}, True)
    run_ranks(8, _load, folder, {**around, "named": "named"})
    _load(0, folder, {**dict.fromkeys(around, "whole"), "named": "named"})
    ckpt.merge(tmp_path / "plain" / "saved", tmp_path / "merged.safetensors")
    merged = load_file(tmp_path / "merged.safetensors")
    assert merged["experts.up"].shape == (EXPERTS, WIDTH, WIDTH)
    assert not missing({name: digest(tensor) for name, tensor in merged.items()}, names)


def _save_whole_and_uneven(rank: int, folder: str) -> None:
    job = WAYS["plain"](1)
    with ckpt.StateManager(
        f"{folder}/full", model=job.parts[0], saving=ckpt.SaveOptions(layout="full"), ranks=RANKS
    ) as manager:
        manager.save_state("saved")
    write(folder, "full", job.digests())
    with torch.device("meta"):
        job = WAYS["plain"](1)
    with ckpt.StateManager(f"{folder}/full", model=job.parts[0], ranks=RANKS) as manager:
        manager.load_state("saved")
    assert not missing(job.digests(), read(folder, "full"))
    job = WAYS["plain"](1)
    experts = job.parts[0].get_submodule("experts")
    if rank == 1:
        experts.register_parameter("up", nn.Parameter(torch.zeros(1, WIDTH, WIDTH)))
    with ckpt.StateManager(f"{folder}/uneven", model=job.parts[0], ranks=RANKS) as manager:
        with pytest.raises(ckpt.RanksError, match=r"experts\.up") as caught:
            manager.save_state("saved", wait=True)
        assert len(str(caught.value).splitlines()) <= 10


def test_experts_are_gathered_into_one_file_loaded_on_meta_and_uneven_ones_are_refused(tmp_path: Path) -> None:
    run_ranks(2, _save_whole_and_uneven, str(tmp_path))
    held = load_file(tmp_path / "full" / "saved" / "model.safetensors")
    assert not missing({name: digest(tensor) for name, tensor in held.items()}, read(str(tmp_path), "full"))


def _load_unmarked(rank: int, folder: str) -> None:
    job = WAYS["unmarked"](2)
    with _manager(f"{folder}/unmarked", job) as manager:
        manager.load_state("saved")
        experts = job.parts[0].get_submodule("experts")
        ckpt.mark_sharded(experts, names=["up"])
        ckpt.mark_sharded(experts, 1, names=["down"])
        manager.save_state("marked")
        write(folder, "marked", job.digests())


def _refused(rank: int, folder: str, way: str) -> None:
    job = WAYS[way](2)
    before = job.digests()
    with _manager(f"{folder}/unmarked", job) as manager:
        with pytest.raises(ckpt.MismatchError, match=r"experts\.up: each of the 2 ranks") as caught:
            manager.load_state("saved")
        assert "ckpt.mark_sharded says so at the save" in str(caught.value)
        assert len(str(caught.value).splitlines()) <= 10
    assert job.digests() == before


def test_experts_of_which_nothing_is_known_are_for_as_many_ranks_and_else_refused_with_the_way_out(
    tmp_path: Path,
) -> None:
    run_ranks(2, _save, str(tmp_path), ("unmarked",))
    run_ranks(2, _load_unmarked, str(tmp_path))
    run_ranks(4, _refused, str(tmp_path), "unmarked")
    _refused(0, str(tmp_path), "whole")
    job = WAYS["whole"](3)
    with _manager(str(tmp_path / "unmarked"), job) as manager:
        manager.load_state("marked")
    assert not missing(job.digests(), read(str(tmp_path), "marked"))


def _refuse_to_mark(rank: int) -> None:
    experts = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    for wrong, said in (
        ({"mesh": mesh}, "one dimension of the mesh, not 2"),
        ({"mesh": dist.new_group([0])}, "the group has only 1 of 2 ranks"),
        ({"dim": 1}, "bias: it has 1 dimensions, but dim=1"),
        ({"names": ["scale"]}, "scale: there is no such parameter"),
    ):
        if rank == 0:
            with pytest.raises(ckpt.ConfigError, match=said):
                ckpt.mark_sharded(experts, **wrong)
    with pytest.raises(ckpt.ConfigError, match="Tanh has no parameters"):
        ckpt.mark_sharded(nn.Tanh())
    ckpt.mark_sharded(experts, mesh=mesh["ep"])
    assert "_ckpt_shards" in vars(copy.deepcopy(experts))
    assert pickle.loads(pickle.dumps(experts)).weight.shape == (2, 2)


def test_what_cannot_be_marked_is_refused_and_what_is_marked_can_be_copied(tmp_path: Path) -> None:
    run_ranks(2, _refuse_to_mark)
    alone = nn.Linear(2, 2)
    ckpt.mark_sharded(alone)  # one process has all experts
    assert "_ckpt_shards" not in vars(alone)


class Bank(nn.Module):
    """This rank's part of experts that are marked along their first dimension, and of a table along its second."""

    def __init__(self, rank: int, *, table: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up = nn.Parameter(torch.randn(EXPERTS, 4, 6).chunk(ranks())[rank].clone())
        self.table = nn.Parameter(torch.randn(3, EXPERTS).chunk(ranks(), 1)[rank].clone()) if table else None
        ckpt.mark_sharded(self, names=["up"])
        if table:
            ckpt.mark_sharded(self, 1, names=["table"])

    def trained(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = torch.optim.Adafactor(self.parameters())
        for _ in range(2):
            for parameter in self.parameters():
                parameter.grad = parameter.detach().sin()
            optimizer.step()
        return optimizer


def _save_factored(rank: int, folder: str) -> None:
    for table in (False, True):
        bank = Bank(rank, table=table)
        optimizer = bank.trained()
        with ckpt.StateManager(f"{folder}/{table}", model=bank, optimizer=optimizer) as manager:
            manager.save_state("saved")
            before = copy.deepcopy(optimizer.state[bank.up])
            optimizer.step()
            manager.load_state("saved")  # by as many ranks everything comes back
            assert all(torch.equal(optimizer.state[bank.up][key], before[key]) for key in ("row_var", "col_var"))
    torch.save(dict(optimizer.state[bank.up]), f"{folder}/{rank}.pt")


def _load_factored(rank: int, folder: str) -> None:
    bank = Bank(rank, table=False)
    optimizer = torch.optim.Adafactor(bank.parameters())
    with ckpt.StateManager(f"{folder}/False", model=bank, optimizer=optimizer) as manager:
        manager.load_state("saved")
    for key in ("row_var", "col_var"):
        there = torch.cat([torch.load(f"{folder}/{saver}.pt")[key] for saver in range(2)])
        assert torch.equal(optimizer.state[bank.up][key], there.chunk(ranks())[rank])
    bank = Bank(rank, table=True)
    with (
        ckpt.StateManager(f"{folder}/True", model=bank, optimizer=torch.optim.Adafactor(bank.parameters())) as manager,
        pytest.raises(ckpt.MismatchError, match=r"state\.table: each of the 2 ranks .*row_var") as refused,
    ):
        manager.load_state("saved")
    assert "a mean over one rank's shard" in str(refused.value)
    assert "state.up" not in str(refused.value)


def test_factored_state_of_experts_is_for_any_number_of_ranks_or_refused_by_name(tmp_path: Path) -> None:
    run_ranks(2, _save_factored, str(tmp_path))
    _load_factored(0, str(tmp_path))
    run_ranks(4, _load_factored, str(tmp_path))

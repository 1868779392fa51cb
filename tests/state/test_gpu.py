"""State on an accelerator comes back, and its generators do. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
from tests.helpers.processes import run_ranks
from tests.helpers.training import exact

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def _objects(compiled: bool) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, Any]:
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.2), nn.GELU(), nn.Linear(256, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=4)
    wrapped: Any = torch.compile(model) if compiled else model
    return model, optimizer, scaler, wrapped


def _run(root: str, compiled: bool, stop: int | None) -> tuple[list[str], str]:
    """Train with dropout and augmentation drawn on the device; the losses, and all state at the end."""
    model, optimizer, scaler, wrapped = _objects(compiled)
    data: Any = torch.arange(40.0).reshape(40, 1)
    loader: Any = torch.utils.data.DataLoader(data, 4, shuffle=True)
    losses = []
    with ckpt.StateManager(root, model=wrapped, optimizer=optimizer, scaler=scaler, save_every=3) as manager:
        for _ in manager.epochs(2):
            for batch in manager.batches(loader):
                inputs = batch.cuda() * torch.rand(64, device="cuda")
                with torch.autocast("cuda", torch.float16):
                    loss = wrapped(inputs).float().pow(2).mean()
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                losses.append(float(loss).hex())
                manager.step(metrics={"loss": loss})
                if manager.progress.step == stop:
                    return losses, ""
    return losses, exact(
        [model.state_dict(), optimizer.state_dict(), scaler.state_dict(), torch.rand(3, device="cuda")]
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_interrupted_equals_uninterrupted(tmp_path: Path, compiled: bool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.cuda.manual_seed_all(1)
    straight, final = _run(str(tmp_path / "straight"), compiled, None)
    torch.cuda.manual_seed_all(1)
    before, _ = _run(str(tmp_path / "run"), compiled, 10)
    torch.cuda.manual_seed_all(77)
    after, again = _run(str(tmp_path / "run"), compiled, None)
    assert before == straight[:10]
    assert after == straight[9:]
    assert again == final


class _Two:
    """A model with buffers, two optimizers and a scaler, large enough for a copy to take a while."""

    def __init__(self, seed: int, compiled: bool = False) -> None:
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(
            nn.Linear(64, 4096), nn.BatchNorm1d(4096), nn.GELU(), nn.Linear(4096, 4096), nn.Linear(4096, 8)
        ).cuda()
        first, *others = self.model
        self.optimizers = {
            "first": torch.optim.AdamW(first.parameters(), lr=1e-3, fused=True),
            "others": torch.optim.AdamW((p for other in others for p in other.parameters()), lr=1e-3, foreach=True),
        }
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.wrapped: Any = torch.compile(self.model) if compiled else self.model

    def manager(self, root: Path, **options: Any) -> ckpt.StateManager:
        manager = ckpt.StateManager(root, model=self.wrapped, optimizer=self.optimizers, scaler=self.scaler, **options)
        manager.register(average=self.average)
        return manager

    def step(self) -> None:
        with torch.autocast("cuda", torch.float16):
            loss = self.wrapped(torch.randn(32, 64, device="cuda")).float().pow(2).mean()
        self.scaler.scale(loss).backward()
        for optimizer in self.optimizers.values():
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        self.average.update_parameters(self.model)

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of every tensor."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        found |= {f"average.{name}": tensor for name, tensor in self.average.state_dict().items()}
        for key, optimizer in self.optimizers.items():
            for index, state in optimizer.state_dict()["state"].items():
                found |= {f"{key}.{index}.{name}": tensor for name, tensor in state.items()}
        return {name: tensor.clone() for name, tensor in found.items()} | {
            "scale": torch.tensor(self.scaler.get_scale())
        }


@pytest.mark.parametrize("compiled", [False, True])
def test_every_overlapped_save_is_the_state_at_its_step(tmp_path: Path, compiled: bool) -> None:
    run = _Two(1, compiled)
    states: dict[str, Any] = {}
    with run.manager(tmp_path) as manager:
        manager.resume()
        for step in range(12):
            run.step()
            manager.step()
            if step % 2:  # in the other steps nothing but the next step itself waits for the copies
                states[f"step-{step}"] = run.state()
            manager.save_state(f"step-{step}")
    for name, state in states.items():
        other = _Two(2)
        for optimizer in other.optimizers.values():
            assert not optimizer.state
        with other.manager(tmp_path) as manager:
            manager.load_state(name)
        found = other.state()
        assert found.keys() == state.keys()
        assert [key for key in state if not torch.equal(state[key].cpu(), found[key].cpu())] == []


def test_what_is_changed_in_place_while_it_is_copied_is_saved_as_it_was_at_the_call(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Linear(10000, 10000, bias=False, device="cuda")
    optimizer = torch.optim.SGD(model.parameters())
    with ckpt.StateManager(tmp_path, model=model, optimizer=optimizer) as manager:
        manager.save_state("before", wait=True)
        expected = model.weight.detach().clone()
        manager.save_state("at-the-call")
        with torch.no_grad():
            model.weight.add_(1)
        manager.wait()
        changed = model.weight.detach().clone()
        manager.save_state("after", wait=True)
        for name, weight in (("at-the-call", expected), ("after", changed), ("before", expected)):
            manager.load_state(name)
            assert torch.equal(model.weight, weight), name
    assert ckpt.verify(tmp_path) == {"after": [], "at-the-call": [], "before": []}


def test_what_is_not_wanted_beside_what_goes_to_the_gpu_is_verified_too(tmp_path: Path) -> None:
    """The file has 24 MB that the model which is loaded does not have."""
    torch.manual_seed(1)
    saved = nn.ModuleDict({"wanted": nn.Linear(8, 8), "extra": nn.Linear(1000, 6000)}).cuda()
    with ckpt.StateManager(tmp_path, model=saved) as manager:
        manager.save_state("x")
    loaded = nn.ModuleDict({"wanted": nn.Linear(8, 8)}).cuda()
    with ckpt.StateManager(tmp_path, model=loaded) as manager:
        manager.load_state("x", strict=False)
    assert torch.equal(loaded["wanted"].weight, saved["wanted"].weight)  # type: ignore[arg-type]


def test_offloaded_parameters_come_back(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        models = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
            for layer in model:
                fully_shard(layer, offload_policy=CPUOffloadPolicy())
            fully_shard(model, offload_policy=CPUOffloadPolicy())
            models.append((model, torch.optim.AdamW(model.parameters(), lr=0.1)))
        (model, optimizer), (other, again) = models
        for number in range(2):
            model(torch.full((2, 16), float(number), device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with ckpt.StateManager(tmp_path / "run", model=model, optimizer=optimizer) as manager:
            manager.save_state("x")
        with ckpt.StateManager(tmp_path / "run", model=other, optimizer=again) as manager:
            manager.load_state("x")
        for mine, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine.to_local(), two.to_local())  # type: ignore[attr-defined]
            assert two.to_local().device.type == "cpu"  # type: ignore[attr-defined]
            for key, value in optimizer.state[mine].items():
                there = again.state[two][key]
                assert exact(getattr(value, "_local_tensor", value)) == exact(getattr(there, "_local_tensor", there))
    finally:
        dist.destroy_process_group()


def _one_bit_on_one_rank(rank: int, root: str) -> None:
    torch.manual_seed(1)
    bare = nn.Linear(512, 2048, device="cuda")
    with ckpt.StateManager(root, model=DistributedDataParallel(bare), ranks=ckpt.RankOptions(timeout=60)) as manager:
        manager.save_state("first")
        manager.wait()
        if rank == 1:
            bare.weight.data.view(torch.int32)[40, 3] ^= 1 << 31
        manager.save_state("second")
        with pytest.raises(ckpt.RanksError, match=r"model\.weight.*rank 1"):
            manager.wait()


def test_two_ranks_on_one_gpu_name_a_sign_that_flipped_on_one_at_the_next_save(tmp_path: Path) -> None:
    assert run_ranks(2, _one_bit_on_one_rank, str(tmp_path / "run")) == [0, 0]

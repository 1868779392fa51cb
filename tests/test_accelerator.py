"""State on an accelerator comes back, and its generators do. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.training import exact

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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

"""Accelerate's FSDP plugins and mixed precision on one GPU. Skipped where there is none.

Each case runs in a process of its own, as a launcher would start it: Accelerate keeps much of its state globally.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.processes import run_alone

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def _launched() -> None:
    """The environment of the only process of a job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    workspace = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **ranks, **workspace})


def _accelerator(fsdp: int | None, precision: str) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, GradScalerKwargs

    plugin = None
    if fsdp is not None:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=fsdp,
            auto_wrap_policy="size_based_wrap",
            min_num_params=1000,
            use_orig_params=True,
            cpu_ram_efficient_loading=False,
        )
    scaling = GradScalerKwargs(init_scale=2.0**10, growth_interval=4)  # so that it grows within the run
    return Accelerator(mixed_precision=precision, fsdp_plugin=plugin, kwargs_handlers=[scaling])


def _train(rank: int, root: str, fsdp: int | None, precision: str, run: int, stop: int | None) -> None:
    """Train, and leave a record: each step's loss and scale, and what was restored."""
    from ckpt.integrations.accelerate import attach

    _launched()
    torch.use_deterministic_algorithms(True, warn_only=True)
    accelerator = _accelerator(fsdp, precision)
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.Dropout(0.2), torch.nn.GELU(), torch.nn.Linear(128, 8)
    )
    torch.manual_seed(run)
    data: Any = torch.arange(64.0).reshape(64, 1)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    record: dict[str, Any] = {"kind": accelerator.distributed_type.value, "steps": {}}
    manager = attach(accelerator, root)
    restored = manager.resume()
    record["restored"] = [*restored.restored] if restored else []
    record["approximated"] = dict(restored.approximated) if restored else {}
    record["scale"] = accelerator.scaler.get_scale() if accelerator.scaler else None
    for batch in loader:
        loss = model(batch * torch.rand(64, device="cuda") / 64).float().pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scale = accelerator.scaler.get_scale() if accelerator.scaler else None
        record["steps"][manager.progress.step] = [loss.item().hex(), scale]
        if manager.progress.step == stop:
            break
    accelerator.save_state("stopped" if stop else "done")
    accelerator.end_training()
    Path(root, f"record-{run}.json").write_text(json.dumps(record))


def _record(root: Path, run: int) -> Any:
    return json.loads((root / f"record-{run}.json").read_text())


def _tensors(root: Path) -> dict[str, bytes]:
    folder = root / "done"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def _interrupted_equals_straight(folder: Path, fsdp: int | None, precision: str) -> None:
    straight, run = folder / f"straight-{fsdp}-{precision}", folder / f"run-{fsdp}-{precision}"
    assert run_alone(_train, str(straight), fsdp, precision, 0, None) == 0
    assert run_alone(_train, str(run), fsdp, precision, 0, 6) == 0
    assert run_alone(_train, str(run), fsdp, precision, 1, None) == 0
    whole, first, rest = _record(straight, 0), _record(run, 0), _record(run, 1)
    assert whole["kind"] == ("FSDP" if fsdp else "MULTI_GPU")
    assert {**first["steps"], **rest["steps"]} == whole["steps"]
    assert set(rest["steps"]).isdisjoint(first["steps"])
    assert rest["approximated"] == {}
    assert ("scaler" in rest["restored"]) == (precision == "fp16")
    if precision == "fp16":
        assert rest["scale"] == first["steps"]["6"][1] != 2.0**10
    assert _tensors(run) == _tensors(straight) != {}


def test_fsdp_1_in_fp16_goes_on_exactly_and_keeps_its_scaler(tmp_path: Path) -> None:
    _interrupted_equals_straight(tmp_path, 1, "fp16")


def test_fsdp_2_in_fp16_goes_on_exactly_and_keeps_its_scaler(tmp_path: Path) -> None:
    _interrupted_equals_straight(tmp_path, 2, "fp16")


def test_fsdp_1_and_2_in_bf16_go_on_exactly(tmp_path: Path) -> None:
    _interrupted_equals_straight(tmp_path, 1, "bf16")
    _interrupted_equals_straight(tmp_path, 2, "bf16")


def test_without_a_plugin_in_fp16_it_goes_on_exactly_and_keeps_its_scaler(tmp_path: Path) -> None:
    _interrupted_equals_straight(tmp_path, None, "fp16")

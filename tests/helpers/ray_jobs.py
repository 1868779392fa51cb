"""Runs of Ray Train, in a cluster of this machine that is gone afterwards: `python -m tests.helpers.ray_jobs JSON`.

The JSON is a list of runs, one after the other: see `Run`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ckpt
from ckpt.integrations.ray import reporting, root
from tests.helpers.processes import seed_everything

SAMPLES, EPOCHS, EVERY = 64, 3, 3


@dataclass
class Run:
    """`out`: a folder for what every worker saw. `kills`: after which steps a rank kills itself, once each."""

    out: str
    storage: str
    workers: int = 2
    kills: dict[str, list[int]] = field(default_factory=dict)
    failures: int = 0
    pause: float = 0.0  # seconds that a step takes
    prepared: bool = False  # the loader, by Ray
    folders: int | None = None  # that Ray keeps
    error: str = ""  # that ended it


def train(config: dict[str, Any]) -> None:
    import ray.train.torch

    run = Run(**config)
    rank = ray.train.get_context().get_world_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 8))
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    sampler: DistributedSampler[Any] | None = None if run.prepared else DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler, shuffle=run.prepared)
    if run.prepared:
        loader = ray.train.torch.prepare_data_loader(loader)
    seed_everything(rank)
    managed = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    keep = ckpt.Keep(last=2)
    with (
        ckpt.StateManager(root(), **managed, save_every=EVERY, keep=keep) as manager,
        reporting(manager) as report,
        Path(run.out, f"rank-{rank}").open("a") as file,
    ):
        resumed = manager.resume()
        note(file, attempt=0 if resumed is None else resumed.step, approximated=resumed and resumed.approximated)
        for epoch in manager.epochs(EPOCHS):
            for numbers, inputs in manager.batches(loader):
                loss = model(inputs).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                manager.step(metrics={"loss": loss})
                report()
                step = manager.progress.step
                note(file, step=step, epoch=epoch, loss=loss.item().hex(), samples=numbers.tolist())
                time.sleep(run.pause)
                if step in run.kills.get(str(rank), []):
                    _die_once(Path(run.out, f"killed-{rank}-{step}"))
        note(file, end=manager.fingerprint())


def note(file: Any, **what: Any) -> None:
    print(json.dumps(what), file=file, flush=True)


def _die_once(marker: Path) -> None:
    deadline = time.monotonic() + 60
    while not ckpt.list_checkpoints(root()) and time.monotonic() < deadline:
        time.sleep(0.05)  # a run that starts over is exact too, and shows nothing
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def fit(run: Run) -> None:
    import ray.train.torch
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

    Path(run.out).mkdir(parents=True, exist_ok=True)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=asdict(run),
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=run.workers),
        run_config=RunConfig(
            name="run",
            storage_path=run.storage,
            failure_config=FailureConfig(max_failures=run.failures),
            checkpoint_config=CheckpointConfig(num_to_keep=run.folders),
        ),
    )
    try:
        result = trainer.fit()
    except ray.train.WorkerGroupError as error:
        if not run.error or run.error not in str(error):
            raise
        return
    reported = [(metrics["step"], checkpoint.get_metadata()) for checkpoint, metrics in result.best_checkpoints or ()]
    last = result.checkpoint.get_metadata() if result.checkpoint is not None else None
    Path(run.out, "result.json").write_text(json.dumps({"reported": reported, "last": last, **(result.metrics or {})}))


def main(runs: list[dict[str, Any]]) -> None:
    import ray

    ray.init(
        address="local",  # not another cluster of this machine
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80_000_000,
        _node_ip_address="127.0.0.1",
    )
    try:
        for run in runs:
            fit(Run(**run))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""A log of metrics that continues with the run: no step is missing, and none is there twice.

    python examples/tracked.py

Kill it at any moment and start it again. What was logged after the last checkpoint belongs to steps that will be made
again, so it is dropped; what is logged from there on goes to the same run. Trackers have words for both:

    wandb.init(id=manager.run, resume="allow")
    SummaryWriter(f"tensorboard/{manager.run}", purge_step=manager.progress.step + 1)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import ckpt


class Log:
    """Metrics of one run as lines of JSON."""

    def __init__(self, folder: Path, run: str, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{run}.jsonl"
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # the last may have been cut off
        self._path.write_text("".join(line for line in whole if json.loads(line)["step"] <= step))

    def add(self, step: int, **metrics: float) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="runs/tracked", help="where the checkpoints are kept")
    parser.add_argument("--log", default="runs/tracked-log", help="where metrics are logged")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=16, shuffle=True)

    with ckpt.StateManager(options.root, model=model, optimizer=optimizer, save_every=50) as manager:
        manager.resume()
        log = Log(Path(options.log), manager.run, manager.progress.step)
        for _ in manager.epochs(options.epochs):
            for batch, targets in manager.batches(loader):
                loss = mse_loss(model(batch), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                # before the step may be saved: what is logged too much is dropped, what is missing would stay so
                log.add(manager.progress.step + 1, loss=loss.item())
                manager.step(metrics={"loss": loss})
    print(f"done: {manager.progress.step} steps of run {manager.run}")


if __name__ == "__main__":
    main()

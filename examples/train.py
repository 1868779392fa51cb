"""A training loop that can be killed at any moment: started again, it continues bit for bit as if nothing had happened.

A small transformer learns to sort numbers. One process or several, CPU or GPU:

    python examples/train.py
    torchrun --nproc_per_node 2 examples/train.py

Stop it with Ctrl-C, `kill` or `kill -9`, and start it again with the same command. `--losses FILE` notes every step's
loss, so that an interrupted run can be compared with one that was not.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ckpt

NUMBERS, LENGTH, WIDTH, SAMPLES = 16, 8, 32, 1024
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets them


class Sorter(nn.Module):
    """Reads numbers, and says for each place which of them belongs there."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Embedding(NUMBERS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(WIDTH, NUMBERS)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.layers(self.numbers(numbers) + self.places))
        return scores


def make_data() -> TensorDataset:
    """The same numbers on every rank and in every run, whatever else is random."""
    numbers = torch.randint(NUMBERS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    return TensorDataset(numbers, numbers.sort(dim=1).values)


def train(options: argparse.Namespace, device: torch.device) -> None:
    data = make_data()
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, num_replicas=WORLD_SIZE, rank=RANK))
    model: nn.Module = Sorter().to(device)
    model = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs * len(loader))
    keep = ckpt.Keep(last=3, best=1, metric="loss")
    losses = options.losses.open("a") if options.losses and RANK == 0 else None

    with ckpt.StateManager(
        options.root, model=model, optimizer=optimizer, scheduler=scheduler, save_every=options.save_every, keep=keep
    ) as manager:
        for epoch in manager.epochs(options.epochs):
            for numbers, ordered in manager.batches(loader):
                scores = model(numbers.to(device))
                loss = functional.cross_entropy(scores.flatten(0, 1), ordered.to(device).flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                if losses:  # before the save: whatever step a checkpoint holds, its loss has been noted
                    print(manager.progress.step + 1, loss.item().hex(), file=losses, flush=True)
                manager.step(metrics={"loss": loss})
                if RANK == 0 and manager.progress.step % 20 == 0:
                    print(f"epoch {epoch + 1}, step {manager.progress.step}: loss {loss.item():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="runs/train", help="where the checkpoints are kept")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="append a line `step loss` for every step")
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if WORLD_SIZE > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(RANK)  # every rank its own dropout; DistributedDataParallel gives all of them the same weights
    train(options, device)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

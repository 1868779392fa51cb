"""A sharded model (FSDP 2) that can be killed at any moment, and go on with another number of ranks.

    torchrun --nproc_per_node 4 examples/train_fsdp.py
    torchrun --nproc_per_node 2 examples/train_fsdp.py     # continues from there

Every rank writes its own pieces. To make one file of them for other tools:

    ckpt merge runs/fsdp/step-00000060 model.safetensors --dtype bfloat16
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ckpt


def build_model() -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on every rank, before they are divided
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(64, 1))
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def make_loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    inputs = torch.randn(960, 64, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.square().mean(dim=1, keepdim=True))
    return DataLoader(data, batch_size=8, sampler=DistributedSampler(data))


def train(options: argparse.Namespace) -> None:
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    loader = make_loader()
    with ckpt.StateManager(
        options.root,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        save_every=options.save_every,
        keep=ckpt.Keep(last=3),
    ) as manager:
        for _ in manager.epochs(options.epochs):
            for inputs, targets in manager.batches(loader):
                loss = nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                manager.step(metrics={"loss": loss})
        if dist.get_rank() == 0:
            print(f"done: {manager.progress.samples} samples in {manager.progress.step} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="runs/fsdp")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

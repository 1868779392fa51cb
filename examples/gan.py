"""Two models with an optimizer each, kept together: a GAN that learns to place points on a ring.

    python examples/gan.py

Give the manager dicts, and every object is saved under its name: `model.generator`, `optimizer.critic`, and so on.
A GAN is where half a checkpoint hurts most: a generator of one step beside a critic of another is no longer a game.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

import ckpt

NOISE, WIDTH, SAMPLES = 4, 64, 2048


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, outputs))


def ring() -> TensorDataset:
    angles = torch.rand(SAMPLES, generator=torch.Generator().manual_seed(1)) * 2 * math.pi
    return TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1))


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="runs/gan", help="where the checkpoints are kept")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(1)
    generator, critic = network(NOISE, 2), network(2, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    loader = DataLoader(ring(), batch_size=64, shuffle=True)

    with ckpt.StateManager(
        options.root,
        model={"generator": generator, "critic": critic},
        optimizer={"generator": generator_optimizer, "critic": critic_optimizer},
        save_every=50,
        keep=ckpt.Keep(last=2),
    ) as manager:
        for epoch in manager.epochs(options.epochs):
            for (real,) in manager.batches(loader):
                fake = generator(torch.randn(len(real), NOISE))
                update(critic_optimizer, softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean())
                update(generator_optimizer, softplus(-critic(fake)).mean())
                manager.step()
            print(f"epoch {epoch + 1}: step {manager.progress.step}")
        off = (generator(torch.randn(SAMPLES, NOISE)).norm(dim=1) - 1).abs().mean()
        print(f"the points are {off:.3f} off the ring on average")


if __name__ == "__main__":
    main()

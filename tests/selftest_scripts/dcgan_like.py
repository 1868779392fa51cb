"""A loop in the manner of PyTorch's DCGAN example: two models, two optimizers, a count that decides whose turn it is.

`--trap` plants one of the mistakes that make such a loop resume inexactly.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as criterion
from torch.utils.data import DataLoader, TensorDataset

import ckpt

TRAPS = ("enumerate", "epochs", "noise", "generator")
EPOCHS, NOISE = 2, 4


def numbered(manager: ckpt.StateManager, loader: DataLoader[Any], trap: str | None) -> Iterable[tuple[int, Any]]:
    return enumerate(manager.batches(loader)) if trap == "enumerate" else manager.enumerate(loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trap", choices=TRAPS)
    trap = parser.parse_args().trap
    noise = torch.Generator()
    if trap == "noise":
        noise.seed()  # by the operating system's entropy
    torch.manual_seed(999)
    loader = DataLoader(TensorDataset(torch.randn(44, 8)), batch_size=4, shuffle=True)
    generator = nn.Sequential(nn.Linear(NOISE, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_c = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    models = {"generator": generator, "critic": critic}
    if trap == "generator":
        del models["generator"]
    with ckpt.StateManager(
        "out", model=models, optimizer={"generator": optimizer_g, "critic": optimizer_c}, save_every=5
    ) as manager:
        manager.resume()
        epochs = range(EPOCHS) if trap == "epochs" else manager.epochs(EPOCHS)
        for _ in epochs:
            for index, (real,) in numbered(manager, loader, trap):
                drawn = torch.randn(len(real), NOISE, generator=noise if trap == "noise" else None)
                fake = generator(drawn)
                critic.zero_grad()
                loss = criterion(critic(real), torch.ones(len(real), 1))
                loss = loss + criterion(critic(fake.detach()), torch.zeros(len(real), 1))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer_c.step()
                if index % 3 == 0:  # the critic is ahead
                    generator.zero_grad()
                    criterion(critic(fake), torch.ones(len(real), 1)).backward()  # type: ignore[no-untyped-call]
                    optimizer_g.step()
                manager.step()


if __name__ == "__main__":
    main()

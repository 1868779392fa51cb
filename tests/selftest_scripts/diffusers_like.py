"""A loop in the manner of diffusers' examples: Accelerate, the newest folder by its name, batches skipped by hand.

`--trap` plants one of the mistakes that make such a loop resume inexactly.
"""

from __future__ import annotations

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ckpt.integrations.accelerate import attach

TRAPS = ("repeat", "average")
EPOCHS, EVERY = 2, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--trap", choices=TRAPS)
    options = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(11)
    data = TensorDataset(torch.randn(48, 6))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Dropout(0.1), nn.Linear(16, 6))
    teacher = nn.Linear(6, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if options.trap != "average":
        accelerator.register_for_checkpointing(teacher)
    attach(accelerator, options.output_dir)
    per_epoch, step, first_epoch, resume_step = len(loader), 0, 0, 0
    folders = os.listdir(options.output_dir) if os.path.isdir(options.output_dir) else []
    newest = sorted((one for one in folders if one.startswith("checkpoint-")), key=lambda one: int(one.split("-")[1]))
    if newest:
        accelerator.load_state(os.path.join(options.output_dir, newest[-1]))
        step = int(newest[-1].split("-")[1])
        first_epoch, resume_step = step // per_epoch, step % per_epoch
    for epoch in range(first_epoch, EPOCHS):
        for index, (clean,) in enumerate(loader):
            if options.trap != "repeat" and newest and epoch == first_epoch and index < resume_step:
                continue
            noise = torch.randn_like(clean)
            predicted = model(clean + noise)
            loss = mse_loss(predicted, teacher(noise).detach())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for kept, live in zip(teacher.parameters(), model[-1].weight[:6, :6].split(6), strict=False):
                    kept.lerp_(live.mean(), 0.1)
            step += 1
            if step % EVERY == 0:
                accelerator.save_state(os.path.join(options.output_dir, f"checkpoint-{step}"))


if __name__ == "__main__":
    main()

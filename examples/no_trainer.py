"""The training loop of the Hugging Face course, without Trainer, that can be killed at any moment.

    python examples/no_trainer.py

Stop it with Ctrl-C, `kill` or `kill -9`, and start it again with the same command. `accelerate_loop.py` is the same
loop with Accelerate.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from reviews import build_model, make_data
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import get_scheduler

import ckpt


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    right = 0
    for batch in loader:
        answers = model(input_ids=batch["input_ids"].to(device)).logits.argmax(dim=-1)
        right += (answers == batch["labels"].to(device)).sum().item()
    return right / len(loader.dataset)


def train(options: argparse.Namespace) -> None:
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    train_loader = DataLoader(make_data(512, seed=1), shuffle=True, batch_size=16)
    eval_loader = DataLoader(make_data(128, seed=2), batch_size=16)
    model = build_model().to(device)
    optimizer = AdamW(model.parameters(), lr=2e-3)
    steps = options.epochs * len(train_loader)
    scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=20, num_training_steps=steps)
    losses = options.losses.open("a") if options.losses else None

    with ckpt.StateManager(
        options.root, model=model, optimizer=optimizer, scheduler=scheduler, save_every=options.save_every
    ) as manager:
        for epoch in manager.epochs(options.epochs):
            model.train()
            for batch in manager.batches(train_loader):
                loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if losses:  # before the save: whatever step a checkpoint holds, its loss has been noted
                    print(manager.progress.step + 1, loss.item().hex(), file=losses, flush=True)
                manager.step(metrics={"loss": loss})
            print(f"epoch {epoch}: accuracy {evaluate(model, eval_loader, device):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="runs/no_trainer", help="where the checkpoints are kept")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="append a line `step loss` for every step")
    torch.manual_seed(0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()

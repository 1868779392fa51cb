"""The training loop of the Hugging Face course with Accelerate, made resumable by one line: `attach`.

One process or several, CPU or GPU:

    accelerate launch examples/accelerate_loop.py
    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py    # no GPU

Stop it with Ctrl-C, `kill` or `kill -9`, and start it again with the same command: `accelerator.save_state()` goes
through ckpt, and the `for` over the prepared loader continues in the middle of the epoch. `no_trainer.py` is the same
loop without Accelerate.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from reviews import build_model, make_data
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import get_scheduler

import ckpt
from ckpt.integrations.accelerate import attach


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = total = 0
    for batch in loader:
        answers = model(input_ids=batch["input_ids"]).logits.argmax(dim=-1)
        answers, labels = accelerator.gather_for_metrics((answers, batch["labels"]))
        right += (answers == labels).sum().item()
        total += len(labels)
    return right / total


def train(options: argparse.Namespace) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate)
    set_seed(0, device_specific=True)
    train_loader = DataLoader(make_data(512, seed=1), shuffle=True, batch_size=16)
    eval_loader = DataLoader(make_data(128, seed=2), batch_size=16)
    model = build_model()
    optimizer = AdamW(model.parameters(), lr=2e-3)
    train_loader, eval_loader, model, optimizer = accelerator.prepare(train_loader, eval_loader, model, optimizer)
    steps = options.epochs * len(train_loader) * accelerator.num_processes
    scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=20, num_training_steps=steps)
    scheduler = accelerator.prepare(scheduler)
    losses = options.losses.open("a") if options.losses and accelerator.is_main_process else None

    manager = attach(accelerator, options.root, keep=ckpt.Keep(last=3))
    restored = manager.resume()
    for epoch in range(restored.epoch if restored else 0, options.epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            done = epoch * len(train_loader) + manager.progress.batch
            if losses:  # before the save: whatever batch a checkpoint holds, its loss has been noted
                print(done, loss.item().hex(), file=losses, flush=True)
            if done % options.save_every == 0:
                accelerator.save_state()
        accelerator.print(f"epoch {epoch}: accuracy {evaluate(accelerator, model, eval_loader):.3f}")
        accelerator.save_state(os.path.join(options.root, f"epoch_{epoch}"))
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="runs/accelerate", help="where the checkpoints are kept")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1, metavar="BATCHES", help="for each step of the optimizer")
    parser.add_argument("--save-every", type=int, default=20, metavar="BATCHES")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="append a line `batch loss` for every batch")
    train(parser.parse_args())


if __name__ == "__main__":
    main()

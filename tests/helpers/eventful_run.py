"""A run with a history: two restarts, one of them past a damaged checkpoint, then a phase of LoRA, and retention."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader

import ckpt
from tests.cli.test_main import flip_a_bit

DAMAGED = "step-00000010"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + hidden


class Tiny(nn.Module):
    """A language model of a megabyte, so that what is frozen is in a file of its own."""

    def __init__(self, words: int = 4000, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def eventful_run(root: Path) -> None:
    """Train until step 10, damage the last checkpoint, go on in two more processes' worth of managers, then LoRA."""
    _train(root, Tiny(), 10)
    flip_a_bit(root / DAMAGED / "model.safetensors")
    _train(root, Tiny(), 14)
    _train(root, Tiny(), 16)
    model = Tiny()
    ckpt.load_model(root / "step-00000016", model)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["up", "down"]))
    _train(root, adapted, 22, strict=False, keep=ckpt.Keep(last=8))


def _train(root: Path, model: nn.Module, until: int, *, strict: bool = True, keep: ckpt.Keep | None = None) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    words = torch.randint(0, 100, (64, 9), generator=torch.Generator().manual_seed(1))
    loader: DataLoader[torch.Tensor] = DataLoader(words, batch_size=8, shuffle=True)  # type: ignore[arg-type]
    with ckpt.StateManager(root, model=model, optimizer=optimizer, save_every=2, keep=keep) as manager:
        manager.resume(strict=strict)
        for _ in manager.epochs(100):
            for batch in manager.batches(loader):
                logits, target = model(batch[:, :-1]), batch[:, 1:]
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                hits = (logits.argmax(-1) == target).float().mean()
                manager.step(metrics={"loss": loss, "accuracy": hits})
                if manager.progress.step >= until:
                    manager.wait()
                    return

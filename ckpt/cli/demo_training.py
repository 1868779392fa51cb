"""The training that `ckpt demo` runs three times, each time in a process of its own.

A character model on the CPU with everything that makes an exact resume hard: dropout, shuffled data, an optimizer with
moments, a learning rate that changes at every step. It reads as any training script does; only `DoomedStorage` is
there for the demo.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterable, Iterator
from importlib.resources import files

import click
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.storage import ANY, Buffer, LocalStorage

EPOCHS = 3
_BATCH = 8
_CONTEXT = 64
_WIDTH = 64
_HEADS = 4
_LAYERS = 2
_DROPOUT = 0.1
_LEARNING_RATE = 1e-2


class CharacterModel(nn.Module):
    """For every character of a text, the scores of each character to come next."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, _WIDTH)
        self.places = nn.Embedding(_CONTEXT, _WIDTH)
        layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 4 * _WIDTH, _DROPOUT, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, _LAYERS, nn.LayerNorm(_WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(_CONTEXT)
        hidden = self.layers(self.characters(text) + self.places.weight, mask, is_causal=True)
        scores: torch.Tensor = self.head(hidden)
        return scores


class DoomedStorage(LocalStorage):
    """A directory whose writer is killed when half of the file `victim` is written."""

    def __init__(self, root: str, victim: str) -> None:
        super().__init__(root)
        self._victim = victim

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        super().write(key, _half_then_die(pieces) if key == self._victim else pieces)


def _half_then_die(pieces: Iterable[Buffer]) -> Iterator[bytes]:
    data = b"".join(pieces)
    yield data[: len(data) // 2]
    os.kill(os.getpid(), signal.SIGKILL)


def train(root: str | LocalStorage, steps: int, save_every: int) -> None:
    """Train from the start, or resume from the newest checkpoint in `root`."""
    seed(1)
    text = files("ckpt.cli").joinpath("demo.txt").read_text(encoding="utf-8")
    loader = DataLoader(windows(text, steps // EPOCHS * _BATCH), batch_size=_BATCH, shuffle=True)
    model = CharacterModel(len(set(text)))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = OneCycleLR(optimizer, _LEARNING_RATE, total_steps=EPOCHS * len(loader))
    keep = ckpt.Keep(last=3, best=1, metric="loss")
    with ckpt.StateManager(
        root, model=model, optimizer=optimizer, scheduler=scheduler, save_every=save_every, keep=keep
    ) as manager:
        for _ in manager.epochs(EPOCHS):
            for (batch,) in manager.batches(loader):
                loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                scheduler.step()
                print(manager.progress.step + 1, loss.item(), flush=True)  # before the save that may kill this process
                manager.step(metrics={"loss": loss})


def seed(number: int) -> None:
    """Seed every generator, also those that nothing here draws from: a checkpoint holds them all."""
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:  # torch has imported it where it is installed
        sys.modules["numpy"].random.seed(number)


def windows(text: str, count: int) -> TensorDataset:
    """Windows of the text at even distances, each a character longer than the context of the model."""
    alphabet = {character: code for code, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[character] for character in text])
    pieces = codes.unfold(0, _CONTEXT + 1, 1)
    return TensorDataset(pieces[torch.linspace(0, len(pieces) - 1, count).long()])


@click.command()
@click.argument("root")
@click.option("--steps", type=int, required=True)
@click.option("--save-every", type=int, required=True)
@click.option("--die-writing", metavar="KEY", help="Kill the training once half of the file KEY has been written.")
def main(root: str, steps: int, save_every: int, die_writing: str | None) -> None:
    """Train in ROOT, and print every step with its loss."""
    torch.set_num_threads(1)  # sums in the same order on every machine, and fast enough for so small a model
    train(DoomedStorage(root, die_writing) if die_writing else root, steps, save_every)


if __name__ == "__main__":
    main()

"""LoRA: adapters over a frozen model. The frozen weights are written once, and linked from then on.

    python examples/lora.py

Kill it at any moment and start it again. The model is tiny and random, the data is made on the spot: nothing is
downloaded. At the end the adapters are folded into the base, and written for `from_pretrained`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import ckpt
from ckpt.integrations.peft import export_merged

WORDS, LENGTH = 512, 16


def adapted(seed: int) -> Any:
    """A language model whose weights stay as they are, with adapters to train."""
    torch.manual_seed(seed)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=2))
    return get_peft_model(base, LoraConfig(r=8, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM"))


def sentences(count: int) -> list[torch.Tensor]:
    """Counting in steps, from anywhere."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, WORDS, (count,), generator=generator)
    strides = torch.randint(1, 5, (count,), generator=generator)
    return [(start + stride * torch.arange(LENGTH)) % WORDS for start, stride in zip(starts, strides, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="runs/lora", help="where the checkpoints are kept")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--merged", help="where to write the merged model")
    options = parser.parse_args()

    model = adapted(seed=1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    loader = DataLoader(sentences(256), batch_size=8, shuffle=True)  # type: ignore[arg-type]

    with ckpt.StateManager(options.root, model=model, optimizer=optimizer, save_every=options.save_every) as manager:
        for epoch in manager.epochs(options.epochs):
            for batch in manager.batches(loader):
                loss = model(input_ids=batch, labels=batch).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                manager.step(metrics={"loss": loss})
            print(f"epoch {epoch}: loss {loss.item():.4f}")

    if options.merged:
        export_merged(options.root, adapted(seed=2), options.merged)
        print(f"merged: {options.merged}")


if __name__ == "__main__":
    main()

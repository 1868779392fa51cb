"""What `no_trainer.py` and `accelerate_loop.py` train: a tiny BERT tells good reviews from bad ones.

Made here, from nothing: no model and no data is downloaded.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

WORDS, LENGTH = 32, 9


def make_data(samples: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Reviews as `input_ids`, each good (1) if most of its words are. The same in every run."""
    reviews = torch.randint(WORDS, (samples, LENGTH), generator=torch.Generator().manual_seed(seed))
    good = (reviews % 2).sum(dim=1) > LENGTH / 2
    return [{"input_ids": review, "labels": label} for review, label in zip(reviews, good.long(), strict=True)]


def build_model() -> nn.Module:
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    return BertForSequenceClassification(config)

"""The state that all benchmarks save and load: a transformer and its AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from xxhash import xxh3_128_hexdigest


class Transformer(nn.Module):
    """Large matrices and small vectors, tied to a vocabulary: at 1.5 GB about GPT-2, at 14.9 GB 1.24 B parameters."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.embedding = nn.Embedding(32 * width, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, **options) for _ in range(layers)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.linear(hidden, self.embedding.weight)

    @classmethod
    def of(cls, size: float) -> Transformer:
        """About 22 layers, wide enough for `size` bytes of weights and two moments in fp32. It takes no memory yet."""
        in_a_square = 22 * 12 + 32  # weights of the layers and of the vocabulary, in squares of the width
        width = 64 * max(1, round(math.sqrt(size / 12 / in_a_square) / 64))
        with torch.device("meta"):
            none, one = (sum(p.numel() for p in cls(width, layers).parameters()) for layers in (0, 1))
            return cls(width, max(1, round((size / 12 - none) / (one - none))))


@dataclass
class State:
    """What is saved, or what a save is loaded into."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def blank(cls, size: float, device: str = "cpu") -> State:
        """Weights of no value, a third of the size. Their two moments come with the first step, or with a load."""
        model = Transformer.of(size).to_empty(device=device)
        return cls(model, torch.optim.AdamW(model.parameters(), fused=device != "cpu"))

    @classmethod
    def trained(cls, size: float, device: str = "cpu") -> State:
        state = cls.blank(size, device)
        for parameter in state.model.parameters():
            nn.init.normal_(parameter, std=0.02)
            parameter.grad = torch.randn_like(parameter)
        state.optimizer.step()
        state.optimizer.zero_grad()
        return state

    @classmethod
    def to_load_into(cls, size: float, device: str = "cpu", *, moments: bool = False) -> State:
        """As a resumed run builds it: an optimizer that has no moments yet. Nothing is equal before it is loaded."""
        state = (cls.trained if moments else cls.blank)(size, device)
        for tensor in state.tensors().values():
            tensor.fill_(-1.0)
        return state

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it under flat names."""
        moments = self.optimizer.state_dict()["state"]
        return {
            **{f"model.{name}": tensor for name, tensor in self.model.state_dict().items()},
            **{f"optimizer.{index}.{key}": one for index, entry in moments.items() for key, one in entry.items()},
        }

    def take(self, tensors: Mapping[str, torch.Tensor], groups: Any) -> None:
        """Take back what `tensors` gave."""
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".")
                moments.setdefault(int(index), {})[key] = tensor
        self.model.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})

    @property
    def groups(self) -> Any:
        return self.optimizer.state_dict()["param_groups"]

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def on_cpu(self) -> bool:
        return next(self.model.parameters()).device.type == "cpu"


def assert_equal(saved: Mapping[str, torch.Tensor], groups: Any, loaded: State, way: str) -> None:
    """Every bit of every tensor, and every option of every group."""
    found = loaded.tensors()
    assert saved.keys() == found.keys(), f"{way}: other tensors came back"
    unequal = [name for name in saved if not same_bits(saved[name], found[name])]
    assert not unequal, f"{way}: {len(unequal)} came back with other values, {', '.join(unequal[:3])} among them"
    assert groups == loaded.groups, f"{way}: the parameter groups came back with other options"


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """What tells every tensor's dtype, shape and bits from others, to be compared in another process."""
    return {
        name: f"{one.dtype} {list(one.shape)} {xxh3_128_hexdigest(one.detach().reshape(-1).view(torch.uint8).numpy())}"
        for name, one in tensors.items()
    }


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))

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
        self.embedding = nn.Embedding(32 * width, width)
        self.layers = nn.ModuleList(encoder_layer(width) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.linear(hidden, self.embedding.weight)

    @classmethod
    def of(cls, size: float) -> Transformer:
        """About 22 layers, wide enough for `size` bytes of weights and two moments in fp32. It takes no memory yet."""
        squares = 22 * 12 + 32  # weights of the layers and of the vocabulary, in squares of the width
        width = 64 * max(1, round(math.sqrt(size / 12 / squares) / 64))
        with torch.device("meta"):
            none, one = (sum(p.numel() for p in cls(width, layers).parameters()) for layers in (0, 1))
            return cls(width, max(1, round((size / 12 - none) / (one - none))))


def encoder_layer(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(
        width, max(1, width // 64), 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


@dataclass
class State:
    """The live objects that are saved, or that a checkpoint is loaded into."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def blank(cls, size: float, device: str = "cpu") -> State:
        """Uninitialized weights, a third of the size. The two moments are created by the first step, or by a load."""
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
        """As a resumed run builds it, without moments unless asked for. No value is equal to a trained one."""
        state = (cls.trained if moments else cls.blank)(size, device)
        for tensor in state.tensors().values():
            tensor.fill_(-1.0)
        return state

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor under a flat name."""
        moments = self.optimizer.state_dict()["state"]
        return {
            **{f"model.{name}": tensor for name, tensor in self.model.state_dict().items()},
            **{f"optimizer.{index}.{key}": value for index, entry in moments.items() for key, value in entry.items()},
        }

    def take(self, tensors: Mapping[str, torch.Tensor], groups: Any) -> None:
        """Load what `tensors` returned."""
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


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The dtype, shape and hash of every tensor, to be compared in another process."""
    return {
        name: f"{tensor.dtype} {list(tensor.shape)} {xxh3_128_hexdigest(bytes_of(tensor).numpy().data)}"
        for name, tensor in tensors.items()
    }


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    alike = (left.dtype, left.shape) == (right.dtype, right.shape)
    return alike and torch.equal(bytes_of(left), bytes_of(right))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)

"""The small training state that every file of the corpus holds, and that loads are made into."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

UNTOUCHED = 1234.5678  # in no file of the corpus: an element that still has it after a load was not loaded


class Net(nn.Module):
    """Tied weights, an integer buffer, a scalar, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.rate = nn.Buffer(torch.tensor(0.5))
        self.count = nn.Buffer(torch.arange(3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(self.embed(words))) * self.scale
        return found


class Untied(Net):
    """The same with a head of its own, as sharding wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5, bias=False)


class Seen:
    """An object of the user's own, with values of many kinds."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def see(self) -> None:
        self.state = {
            "words": Counter(["a", "b", "a"]),
            "pair": (1, 2.5),
            "set": {3, 4},
            "bytes": b"\x00\xff",
            "mean": torch.linspace(0, 1, 5),
            "transposed": torch.linspace(0, 1, 6).reshape(2, 3).t(),
            "half": torch.ones(2, dtype=torch.bfloat16),
            "long": 1 << 80,
            "dtype": torch.float32,
            "nested": {"list": [None, True, {"deep": [1.5]}]},
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Live:
    """A model, an optimizer with its moments, a schedule and an object: what a manager is given."""

    def __init__(self, *, tied: bool = True, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = Net() if tied else Untied()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.seen = Seen()

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, model: Any = None) -> None:
        (model or self.model)(torch.arange(4)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.seen.see()

    def marked(self) -> Live:
        """With a value in every element that no file has."""
        with torch.no_grad():
            for tensor in self._tensors():
                tensor.fill_(UNTOUCHED if tensor.is_floating_point() else int(UNTOUCHED))
        return self

    def snapshot(self) -> list[bytes]:
        """The bytes of every live tensor, with its dtype and shape."""
        return [
            f"{tensor.dtype}{list(tensor.shape)}".encode()
            + bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy())
            for tensor in self._tensors()
        ]

    def left_out(self) -> list[str]:
        """The tensors of the model that have elements which were not loaded."""
        named = self.model.state_dict().items()
        return [
            name
            for name, value in named
            if bool((value == (UNTOUCHED if value.is_floating_point() else int(UNTOUCHED))).any())
        ]

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self.model.state_dict().values()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

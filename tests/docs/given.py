"""What pages take as given: the names that a reader's own script has already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt


def given_to(name: str) -> dict[str, Any]:
    """The names that a page of the documentation uses without defining them."""
    return _GIVEN.get(name, dict)()


def _script() -> dict[str, Any]:
    """A model, its optimizer and its data, as any script has them."""
    model = nn.Linear(4, 1)
    return {
        "ckpt": ckpt,
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loader": DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8),
    }


def _lightning_too() -> dict[str, Any]:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: Any) -> Any:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    return {**_script(), "module": Module()}


_GIVEN: dict[str, Callable[[], dict[str, Any]]] = {"memory.md": _lightning_too, "options.md": _script}

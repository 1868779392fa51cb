"""Images of noise that are the same in every process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class FakeData(torch.utils.data.Dataset[Any]):
    def __init__(
        self, size: int = 48, image_size: tuple[int, ...] = (3, 64, 64), transform: Callable[..., Any] | None = None
    ):
        noise = torch.Generator().manual_seed(0)
        self._images = torch.rand(size, *image_size, generator=noise)
        self._transform = transform

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self._images[index]
        return (self._transform(image) if self._transform else image), index % 10


class MNIST(FakeData):
    def __init__(
        self, root: str, train: bool = True, transform: Callable[..., Any] | None = None, download: bool = False
    ):
        super().__init__(size=64 if train else 16, image_size=(1, 28, 28), transform=transform)

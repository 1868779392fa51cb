"""Functions of tensors, and of images of Pillow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch


class InterpolationMode(Enum):
    BILINEAR = "bilinear"


class Compose:
    def __init__(self, transforms: Sequence[Callable[..., Any]]) -> None:
        self._transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self._transforms:
            image = transform(image)
        return image


class Lambda:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, image: Any) -> Any:
        return self._function(image)


class ToTensor:
    def __call__(self, image: Any) -> torch.Tensor:
        if isinstance(image, torch.Tensor):
            return image
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self._mean) / self._std


class RandomHorizontalFlip:
    """Draws from torch's generator, as torchvision's does."""

    def __call__(self, image: Any) -> Any:
        if torch.rand(1) >= 0.5:
            return image
        return image.flip(-1) if isinstance(image, torch.Tensor) else image.transpose(0)  # 0: left to right


class _AsItIs:
    """The images that are written for the scripts have the size that they ask for."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __call__(self, image: Any) -> Any:
        return image


Resize = CenterCrop = RandomCrop = PILToTensor = ConvertImageDtype = _AsItIs

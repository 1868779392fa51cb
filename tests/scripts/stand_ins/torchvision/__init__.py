"""In place of torchvision, which has no build for every torch, and whose datasets are downloads: what the scripts use.

Images are tensors here from the beginning; a transform is a function of a tensor.
"""

from __future__ import annotations

from . import datasets, transforms, utils

__all__ = ["datasets", "transforms", "utils"]

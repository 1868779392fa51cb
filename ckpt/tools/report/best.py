"""Which value of a metric is the best one: as the user says, or as the metric's name does."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt.util.line_chart import Points

_WORD = re.compile(r"[a-z]+\d?")
_LOWER = {"loss", "error", "err", "perplexity", "ppl", "wer", "cer", "mse", "mae", "rmse", "nll", "bpb", "ece", "fid"}
_HIGHER = {
    "accuracy", "acc", "f1", "auc", "auroc", "precision", "recall", "bleu", "rouge", "reward", "score", "map", "iou",
    "psnr", "ssim", "mcc", "r2",
}  # fmt: skip


@dataclass(frozen=True)
class Best:
    """The best value of a metric, and its step. `how`: "lowest" or "highest"."""

    step: int
    value: float
    how: str


def best_of(name: str, points: Points, modes: Mapping[str, str]) -> Best | None:
    """The first point with the best value; None if nothing says which values are good. `modes`: "min" or "max"."""
    mode = modes.get(name) or guessed_mode(name)
    finite = [point for point in points if math.isfinite(point[1])]
    if mode is None or not finite:
        return None
    step, value = (min if mode == "min" else max)(finite, key=lambda point: point[1])
    return Best(step, value, "lowest" if mode == "min" else "highest")


def guessed_mode(name: str) -> str | None:
    """What the words in a metric's name say, from the last to the first: `eval/loss` is best where it is lowest."""
    for word in reversed(_WORD.findall(name.lower())):
        if word in _LOWER or word.endswith("loss"):
            return "min"
        if word in _HIGHER or word.endswith("accuracy"):
            return "max"
    return None

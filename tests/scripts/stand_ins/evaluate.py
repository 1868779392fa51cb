"""In place of Hugging Face's `evaluate`, whose metrics are downloads: counts what was right."""

from __future__ import annotations

from typing import Any


class _Accuracy:
    def __init__(self) -> None:
        self._seen: list[bool] = []

    def add_batch(self, predictions: Any, references: Any) -> None:
        self._seen += (predictions == references).tolist()

    def compute(self) -> dict[str, float]:
        seen, self._seen = self._seen, []
        return {"accuracy": sum(seen) / len(seen)}


def load(*name: str, **options: Any) -> _Accuracy:
    return _Accuracy()

"""PEFT: adapters over a frozen base."""

from __future__ import annotations

import os
from typing import Any

from ckpt.errors import ConfigError
from ckpt.integrations.weights import load_weights
from ckpt.root.catalog import locate


def export_merged(url: str | os.PathLike[str], model: Any, folder: str | os.PathLike[str]) -> None:
    """Write a model with its adapters folded into the base, for `from_pretrained`.

        export_merged("runs/lora/step-00001000", get_peft_model(base, config), "merged")

    `url` is a checkpoint, or a root, of which the newest intact one is taken. `model` is a `PeftModel`, built as it was
    for training: it takes the checkpoint's weights, and is used up.
    """
    if not hasattr(model, "merge_and_unload"):
        raise ConfigError(
            f"a {type(model).__name__} has no adapters to merge: give the PeftModel that get_peft_model returned."
        )
    storage, names = locate(url)
    load_weights(storage, names[0] if len(names) == 1 else None, model)
    model.merge_and_unload().save_pretrained(folder)

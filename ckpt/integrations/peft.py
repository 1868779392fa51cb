"""PEFT: adapters over a frozen base."""

from __future__ import annotations

import os
from typing import Any

from ckpt.errors import ConfigError
from ckpt.export.load_model import load_checkpoint_model
from ckpt.root.catalog import resolve


def export_merged(url: str | os.PathLike[str], model: Any, folder: str | os.PathLike[str]) -> None:
    """Merge a model's adapters into the base model, and write the result for `from_pretrained`.

        export_merged("runs/lora/step-00001000", get_peft_model(base, config), "merged")

    Args:
        url: A checkpoint; or a root, to take its newest intact checkpoint.
        model: A `PeftModel`, built as for training. ckpt loads the checkpoint's weights into it; the merge then removes
            its adapters.
        folder: The folder to write.

    Raises:
        ConfigError: The model has no adapters.
    """
    if not hasattr(model, "merge_and_unload"):
        raise ConfigError(
            f"a {type(model).__name__} has no adapters to merge. Give the PeftModel that get_peft_model returned."
        )
    storage, names, _ = resolve(url)
    load_checkpoint_model(storage, names[0] if len(names) == 1 else None, model)
    model.merge_and_unload().save_pretrained(folder)

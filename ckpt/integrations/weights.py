"""The model of a checkpoint, without everything else that it holds."""

from __future__ import annotations

from typing import Any

from ckpt.load.restored import Restored
from ckpt.manager import StateManager
from ckpt.options import RankOptions
from ckpt.state import rng
from ckpt.storage import Storage


def load_weights(storage: Storage, name: str | None, model: Any) -> Restored:
    """Load the model of a checkpoint; of the newest intact one, if none is named.

    Nothing is changed before all of it is verified, and no generator is touched.
    """
    before = rng.capture()
    with StateManager(storage, model=model, ranks=RankOptions(handle_sigterm=False)) as reader:
        reader.progress.step = 1  # the model may have been trained
        restored = reader.load_state(name)
    rng.restore(before)
    return restored

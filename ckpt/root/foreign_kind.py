"""Which other tool wrote a folder, by the names of its files alone. Imports no torch, for the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpt.storage import Storage

_MERGE = "ckpt merge, ckpt diff and ckpt.load_model read it"
_KINDS = (  # a pattern of a file's name, who writes such files, what reads them; the first that fits counts
    (r"(?:[^/]+/)?(?:common\.pt|metadata\.json)", "Megatron-Core", f"ckpt convert, {_MERGE}"),
    (r"(?:[^/]+/)?(?:zero_pp_rank_\d+_)?mp_rank_\d\d_model_states\.pt", "DeepSpeed", f"ckpt convert, {_MERGE}"),
    (r"(?:[^/]+/)?random_states_\d+\.pkl", "Accelerate", "ckpt convert and StateManager.load_state read it"),
    (r"\.metadata", "torch.distributed.checkpoint", _MERGE),
    (r"[^/]+\.safetensors", "something else than ckpt", _MERGE),
)


def reads_instead(storage: Storage) -> str:
    """A sentence, behind a space, about what is in a root without checkpoints: who wrote it, and what reads it."""
    return sentence(entry.key for entry in storage.list())


def sentence(files: Iterable[str]) -> str:
    listed = list(files)
    for pattern, tool, readers in _KINDS:
        found = {path.rpartition("/")[2] for path in listed if re.fullmatch(pattern, path)}
        if found and found != {"common.pt"} and found != {"metadata.json"}:  # of these two, Megatron writes both
            return f" It was written by {tool}: {readers}."
    return ""

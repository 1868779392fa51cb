"""What an operation before an altered folder is: where the folder lies, and how a wrong result is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ckpt
from tests.fuzz.live import Live

NAMES_A_FOLDER = {  # of a root. A link that a user names is followed, wherever it leads, as one to the root or a file
    "load_model", "load_model, signed", "merge", "merge the optimizer", "merge, signed", "convert to accelerate",
    "convert to DCP", "convert to torch", "convert to Lightning", "convert to safetensors", "convert to ckpt", "diff",
    "ckpt ls of one", "ckpt show", "ckpt show --tensors", "ckpt diff", "ckpt merge", "ckpt convert", "pull one",
    "load_model of Accelerate", "merge of Accelerate", "convert from accelerate", "ckpt convert from accelerate",
    "ckpt show of Accelerate", "ckpt diff of Accelerate",
}  # fmt: skip


class WrongError(Exception):
    """An operation succeeded, but its result is wrong; or failed after it had changed live tensors."""


@dataclass(frozen=True)
class Place:
    """Where an input lies: `top` holds the seed's folders, `out` may be written to."""

    top: str
    out: str
    tied: bool

    def at(self, path: str) -> str:
        return f"{self.top}/{path}"


Operation = Callable[[Place], Any]


def manager_of(place: Place, live: Live, **options: Any) -> ckpt.StateManager:
    return ckpt.StateManager(place.at("root"), **live.parts(), saving=ckpt.SaveOptions(background=False), **options)

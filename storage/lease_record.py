"""The object by which a lease is known: what it says, where it lies, and whether its holder has ended."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from ckpt.util.process_identity import process_identity, start_time

FOLDER = ".locks"

held_here: set[str] = set()  # holders in this process


@dataclass
class Held:
    """What this process holds."""

    key: str
    path: str
    note: str
    alone: bool
    version: str | None = None
    renewed: float = field(default_factory=time.monotonic)
    lost: bool = False
    holder: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: int = field(default_factory=os.getpid)
    turn: threading.Lock = field(default_factory=threading.Lock)

    def text(self) -> bytes:
        sign = {
            "note": self.note,
            "process": process_identity(os.getpid()),
            "holder": self.holder,
            "sign": uuid.uuid4().hex,
        }
        return json.dumps(sign).encode()


def quoted(key: str) -> str:
    return quote(key, safe="")


def is_gone(sign: dict[str, Any]) -> bool | None:
    """Whether a holder has ended. None if that cannot be known here."""
    mine = process_identity(os.getpid())
    if sign["process"] == mine:
        return sign["holder"] not in held_here
    if sign["process"][:2] != mine[:2]:
        return None
    return bool(start_time(int(sign["process"][2])) != sign["process"][3])

"""Where bytes go. Knows nothing of formats or of training."""

from ckpt.storage.base import ANY, Buffer, Entry, Storage
from ckpt.storage.local import LocalStorage
from ckpt.storage.memory import MemoryStorage
from ckpt.storage.objects import ObjectStorage
from ckpt.storage.tiers import Tiers
from ckpt.storage.urls import open_storage

__all__ = [
    "ANY",
    "Buffer",
    "Entry",
    "LocalStorage",
    "MemoryStorage",
    "ObjectStorage",
    "Storage",
    "Tiers",
    "open_storage",
]

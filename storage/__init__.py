"""Storages: where bytes are written and read. Independent of formats and of training."""

from ckpt.storage.base import ANY, Buffer, Entry, Grouping, Reserving, StablePieces, Staging, Storage, Unfinished
from ckpt.storage.hub.storage import HubStorage
from ckpt.storage.local.storage import LocalStorage
from ckpt.storage.memory import MemoryStorage
from ckpt.storage.object_storage import ObjectStorage
from ckpt.storage.overlay import Patched, Place, Tiers
from ckpt.storage.urls import disk_path, open_storage, place_of

__all__ = [
    "ANY",
    "Buffer",
    "Entry",
    "Grouping",
    "HubStorage",
    "LocalStorage",
    "MemoryStorage",
    "ObjectStorage",
    "Patched",
    "Place",
    "Reserving",
    "StablePieces",
    "Staging",
    "Storage",
    "Tiers",
    "Unfinished",
    "disk_path",
    "open_storage",
    "place_of",
]

"""One object of a storage, for a format that knows no storage."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.storage import Storage


@dataclass(frozen=True)
class StoredFile:
    """The bytes under a key."""

    storage: Storage
    key: str

    def read(self, start: int, stop: int) -> bytes:
        return self.storage.read(self.key, start, stop)

    def read_into(self, start: int, buffer: memoryview) -> None:
        self.storage.read_into(self.key, start, buffer)
